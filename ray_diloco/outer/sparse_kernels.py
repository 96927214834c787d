"""Kernels of the codecs that send some elements: which are the largest, where they were, and random places.

Imported only when a codec that needs it is built, since numba takes a second.  All arrays are contiguous.  How they are
compiled, and why what they call is in this file: `compiled`.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from ray_diloco.outer.compiled import compiled

_MAGNITUDE = np.int32(0x7FFFFFFF)


@compiled()
def largest_magnitude(bits):
    """Bits of the largest |x|; `bits` are the elements as int32.  What is not finite counts as largest."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return np.int32(largest)


@compiled()
def count_below(bits, limit):
    """Number of elements with magnitude bits below a limit."""
    count = np.int32(0)
    for i in range(bits.size):
        count = np.int32(count + np.int32(np.int32(bits[i] & _MAGNITUDE) < limit))
    return count


@compiled()
def top_k(x, block, k, bits_of_index, out, values):
    """Selects the k largest |x| of each block, among equals the first ones, in ascending order of their index.

    Args:
      x: fp32 [rows · block].
      block: elements per row.
      k: kept per row, 1 … block.
      bits_of_index: of each index.
      out: uint8 [rows, ≥ ⌈k · bits_of_index / 8⌉], gets the indices, packed from the least significant bit on.
      values: fp32 [rows · k], gets the kept elements.
    """
    width = np.uint64(bits_of_index)
    # Which elements reach the limit, a byte each; most eights of them are zero and passed over.
    flags = np.zeros((block + 7) // 8 * 8, np.uint8)
    eights = flags.view(np.uint64)
    chosen = np.empty(flags.size + 1, np.int32)
    guess = np.int64(0)
    for row in range(x.size // block):
        chunk = x[row * block : (row + 1) * block]
        kept = values[row * k : (row + 1) * k]
        bits = chunk.view(np.int32)
        # A limit that exactly k magnitudes reach, or else the largest one that more of them reach.  The search begins
        # at the limit of the block before, walks until it has one on each side, and interpolates and bisects in turn.
        high = np.int64(largest_magnitude(bits)) + 1
        top, low = high, np.int64(0)
        reached, reached_high = block, 0
        # Where there is none, at a quarter of the largest magnitude.
        middle = guess if guess > 0 else high - (np.int64(2) << 23)
        middle, stride = min(max(middle, np.int64(1)), high - 1), np.int64(1) << 20
        bisect = False
        while high - low > 1 and reached > k:
            count = block - count_below(bits, np.int32(middle))
            if count >= k:
                low, reached = middle, count
            else:
                high, reached_high = middle, count
            if low == 0 and high - stride > 0:
                middle, stride = high - stride, 4 * stride
            elif high == top and low + stride < top:
                middle, stride = low + stride, 4 * stride
            else:
                at = 0.5 if bisect else (reached - k) / (reached - reached_high)
                middle = min(max(low + np.int64((high - low) * at), low + 1), high - 1)
                bisect = not bisect
        guess = low
        limit = np.int32(low)
        # Of those that equal the limit only the first ones are taken.
        ties = k
        if reached > k:
            ties -= block - count_below(bits, np.int32(min(low + 1, np.int64(0x7FFFFFFF))))
        for i in range(block):
            flags[i] = np.uint8(np.int32(bits[i] & _MAGNITUDE) >= limit)
        m = 0
        for w in range(eights.size):
            if eights[w] != np.uint64(0):
                for i in range(8 * w, 8 * w + 8):
                    chosen[m] = np.int32(i)
                    m += flags[i]
        line = out[row]
        taken, held, filled, byte = 0, np.uint64(0), np.uint64(0), 0
        for j in range(m):
            index = chosen[j]
            if reached > k and np.int32(bits[index] & _MAGNITUDE) == limit:
                if ties == 0:
                    continue
                ties -= 1
            kept[taken] = chunk[index]
            taken += 1
            held |= np.uint64(index) << filled
            filled += width
            while filled >= np.uint64(8):
                line[byte] = np.uint8(held & np.uint64(0xFF))
                held >>= np.uint64(8)
                filled -= np.uint64(8)
                byte += 1
        if filled > np.uint64(0):
            line[byte] = np.uint8(held & np.uint64(0xFF))


@compiled()
def scatter(data, block, k, width, values, y, subtract):
    """Puts kept values where their indices say (or subtracts them there); y must hold zeros elsewhere.

    Returns:
      Number of indices that lie outside their block; those are left out.
    """
    outside = 0
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for row in range(y.size // block):
        chunk = y[row * block : (row + 1) * block]
        kept = values[row * k : (row + 1) * k]
        line = data[row]
        held, filled, byte = np.uint64(0), 0, 0
        for j in range(k):
            while filled < width:
                held |= np.uint64(line[byte]) << np.uint64(filled)
                filled += 8
                byte += 1
            index = np.int64(held & mask)
            held >>= np.uint64(width)
            filled -= width
            if index >= block:
                outside += 1
            elif subtract:
                chunk[index] -= kept[j]
            else:
                chunk[index] = kept[j]
    return outside


@compiled()
def positions(n, key, out):
    """The first places of a random permutation of 0 … n − 1: the same for the same key (four 64-bit words).

    A bijection of the least power of two ≥ n, in four rounds of multiplication and shift; what falls beyond n goes
    through it again (cycle walking).
    """
    width = 1
    while (np.int64(1) << width) < n:
        width += 1
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    shift = np.uint64((width + 1) // 2)
    for j in range(out.size):
        v = np.uint64(j)
        while True:
            for r in range(4):
                v = (v + (key[r] >> np.uint64(20))) & mask
                v = (v * (key[r] | np.uint64(1))) & mask
                v ^= v >> shift
            if v < np.uint64(n):
                break
        out[j] = np.int64(v)
