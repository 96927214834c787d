"""Kernels of E3M0, whose units have a median as their scale, and how it is found.

Imported only when a codec that needs it is built, since numba takes a second.  All arrays are contiguous; `x` is fp32
[n], `bits` the same as int32, and `out` uint8.  A kernel works unit by unit: the last one may be shorter.  How they are
compiled, and why what they call is in this file: `compiled`.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from ray_diloco.outer.compiled import compiled

_LARGEST = np.float32(3.4028234663852886e38)
_LEAST = np.float32(2.0**-149)
# Below this a unit is scaled up while it is encoded, so that the bits of its elements grow with their exponents.
_SMALL = np.float32(2.0**-64)
_UP = np.float32(2.0**64)
_ZERO = np.float32(0.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)
# At most about this many elements of a unit are looked at to guess where its median lies.
SAMPLE = 4096
# Elements that lie together in memory, of which a read of one brings the others.
LINE = 16
# So few candidates are searched instead of narrowed further.
FEW = 1024
# Elements of a row; eight rows are sifted together.
ROW = 512


@compiled()
def put_int32(out, at, bits):
    """Writes 32 bits at a place that need not be aligned, least significant byte first."""
    for j in range(4):
        out[at + j] = np.uint8((bits >> (8 * j)) & 0xFF)


@compiled()
def get_int32(data, at):
    """Reads what `put_int32` wrote."""
    bits = np.uint32(0)
    for j in range(4):
        bits = np.uint32(bits | (np.uint32(data[at + j]) << np.uint32(8 * j)))
    return np.int32(bits)


@compiled()
def get_float(data, at):
    """Reads an fp32 number."""
    return np.int32(get_int32(data, at)).view(np.float32)


@compiled()
def counts_below(bits, first, second):
    """Numbers of magnitude bits below one limit and below another, in one pass."""
    below_first, below_second = np.int32(0), np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & _MAGNITUDE)
        below_first = np.int32(below_first + np.int32(magnitude < first))
        below_second = np.int32(below_second + np.int32(magnitude < second))
    return below_first, below_second


@compiled()
def kth_smallest(keys, k):
    """The k-th smallest (from 0) of int32 keys, by bisection: a step counts, and that is done for many at a time."""
    low, high = np.int64(keys.min()), np.int64(keys.max())
    while low < high:
        middle = (low + high) >> 1
        limit = np.int32(middle)
        count = np.int32(0)
        for i in range(keys.size):
            count = np.int32(count + np.int32(keys[i] <= limit))
        if count > k:
            high = middle
        else:
            low = middle + 1
    return np.int32(low)


@compiled()
def spread_median(bits):
    """Median of the non-zero magnitude bits of every n // SAMPLE | 1-th element; 0 if all of those are zero."""
    stride = bits.size // SAMPLE | 1
    sample = np.empty((bits.size + stride - 1) // stride, np.int32)
    m = 0
    for j in range(sample.size):
        sample[m] = bits[j * stride] & _MAGNITUDE
        m += 1 if sample[m] > 0 else 0
    return kth_smallest(sample[:m], (m - 1) // 2) if m > 0 else np.int32(0)


@compiled()
def roughly_kth_smallest(keys, k, slack):
    """A number that k of the keys, `slack` more or less, do not exceed; the k-th smallest where there is none.

    Not `kth_smallest` with one more argument: that is the copy of another family's function, which has no use for it.
    """
    low, high = np.int64(keys.min()), np.int64(keys.max())
    while low < high:
        middle = (low + high) >> 1
        limit = np.int32(middle)
        count = np.int32(0)
        for i in range(keys.size):
            count = np.int32(count + np.int32(keys[i] <= limit))
        if abs(count - k) <= slack:
            return np.int32(middle)
        if count > k:
            high = middle
        else:
            low = middle + 1
    return np.int32(low)


@compiled()
def guess(bits):
    """Two magnitude bits between which the median of those that are not zero is likely to be.

    From a sample of whole lines, as reading single elements far apart would wait for memory at each of them.
    """
    stride = max(bits.size // SAMPLE, 1) * LINE
    sample = np.empty((bits.size // stride + 1) * LINE, np.int32)
    m = 0
    for start in range(0, bits.size - LINE + 1, stride):
        line = bits[start : start + LINE]
        for j in range(LINE):
            sample[m] = line[j] & _MAGNITUDE
            m += 1 if sample[m] > 0 else 0
    # Three and a half standard deviations of the rank of the median in a sample of m, or up to a tenth less or more.
    margin = int(1.75 * np.sqrt(m))
    if m <= 4 * margin:
        return np.int64(1), np.int64(2**31 - 1)
    low = roughly_kth_smallest(sample[:m], m // 2 - margin, margin // 10)
    high = roughly_kth_smallest(sample[:m], m // 2 + margin, margin // 10)
    return np.int64(low), np.int64(high) + 1


@compiled()
def count_three(bits, first, second):
    """Numbers of zeros, of magnitude bits below one limit and of those below another, in one pass."""
    others, below_first, below_second = np.int32(0), np.int32(0), np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & _MAGNITUDE)
        others = np.int32(others + np.int32(magnitude > np.int32(0)))
        below_first = np.int32(below_first + np.int32(magnitude < first))
        below_second = np.int32(below_second + np.int32(magnitude < second))
    return bits.size - others, below_first, below_second


@compiled(inline=True)
def _below(b, low):
    return np.int32(np.int32(b & _MAGNITUDE) < low)


@compiled(inline=True)
def _flag(b, low, width, flag):
    return np.int32(flag) if np.uint32((b & _MAGNITUDE) - low) < width else np.int32(0)


@compiled()
def flag_rows(group, low, width, flags):
    """Says in bit r of byte i whether element i of row r has magnitude bits from `low` on, fewer than `width` beyond.

    Returns:
      Number of magnitude bits below `low`.
    """
    r0, r1, r2, r3 = group[:ROW], group[ROW : 2 * ROW], group[2 * ROW : 3 * ROW], group[3 * ROW : 4 * ROW]
    r4, r5, r6, r7 = group[4 * ROW : 5 * ROW], group[5 * ROW : 6 * ROW], group[6 * ROW : 7 * ROW], group[7 * ROW :]
    below = np.int32(0)
    for i in range(ROW):
        a, b, c, d, e, f, g, h = r0[i], r1[i], r2[i], r3[i], r4[i], r5[i], r6[i], r7[i]
        below += _below(a, low) + _below(b, low) + _below(c, low) + _below(d, low)
        below += _below(e, low) + _below(f, low) + _below(g, low) + _below(h, low)
        flags[i] = np.uint8(
            (_flag(a, low, width, 1) | _flag(b, low, width, 2) | _flag(c, low, width, 4) | _flag(d, low, width, 8))
            | (_flag(e, low, width, 16) | _flag(f, low, width, 32) | _flag(g, low, width, 64))
            | _flag(h, low, width, 128)
        )
    return below


@compiled()
def sift(bits, low, high, found):
    """Puts the magnitude bits from `low` to `high` (exclusive) into `found`, which has room for one more than they are.

    They are few: 64 elements without any are passed over at once.

    Returns:
      Number of magnitude bits below `low`, and number of those found.
    """
    flags = np.empty(ROW, np.uint8)
    eights = flags.view(np.uint64)
    below, m = 0, 0
    whole = bits.size // (8 * ROW) * (8 * ROW)
    for start in range(0, whole, 8 * ROW):
        group = bits[start : start + 8 * ROW]
        below += flag_rows(group, low, np.uint32(high - low), flags)
        for w in range(eights.size):
            if eights[w] != np.uint64(0):
                for i in range(8 * w, 8 * w + 8):
                    flag, at = int(flags[i]), i
                    while flag != 0:
                        found[m] = group[at] & _MAGNITUDE
                        m += flag & 1
                        flag >>= 1
                        at += ROW
    for i in range(whole, bits.size):
        found[m] = bits[i] & _MAGNITUDE
        below += 1 if found[m] < low else 0
        m += 1 if low <= found[m] < high else 0
    return below, m


@compiled()
def median_magnitude(bits):
    """Bits of the median of the non-zero |x|, the lower of the two middle ones; 0 if all are zero.

    A sample says between which two values the median is likely to be, and counting says whether it is.  Interpolation
    narrows them, and what is left between them is sifted out and searched.  Where the first interpolation misses the
    median, others follow.
    """
    n = bits.size
    low, high = guess(bits)
    zeros, below_low, below_high = count_three(bits, np.int32(low), np.int32(high))
    if zeros == n:
        return np.int32(0)
    k = zeros + (n - zeros - 1) // 2
    guessed = below_low <= k < below_high
    if not guessed:
        low, high, below_low, below_high = np.int64(1), np.int64(2**31 - 1), zeros, n
    shrunk = True
    while below_high - below_low > FEW and high - low > 1:
        inside = below_high - below_low
        # In the middle where interpolation did not help.
        at, around = (0.5, 0.0)
        if shrunk:
            at, around = (k - below_low) / inside, 2.5 / np.sqrt(inside)
        first = low + max(np.int64(1), np.int64((high - low) * (at - around)))
        second = min(low + max(np.int64(1), np.int64((high - low) * (at + around))), high - 1)
        first = min(first, second)
        if guessed:
            guessed = False
            found = np.empty(inside + 1, np.int32)
            below_first, m = sift(bits, np.int32(first), np.int32(second), found)
            below_second = below_first + m
            if below_first <= k < below_second:
                return kth_smallest(found[:m], k - below_first)
        else:
            below_first, below_second = counts_below(bits, np.int32(first), np.int32(second))
        if below_first > k:
            high, below_high = first, below_first
        elif below_second > k:
            low, below_low, high, below_high = first, below_first, second, below_second
        else:
            low, below_low = second, below_second
        shrunk = 2 * (below_high - below_low) < inside
    if high - low == 1:
        return np.int32(low)
    found = np.empty(below_high - below_low + 1, np.int32)
    below, m = sift(bits, np.int32(low), np.int32(high), found)
    return kth_smallest(found[:m], k - below)


@compiled(inline=True)
def _e3m0(b, least, border):
    """Code of the element with bits b: a sign (8) and e.  Bits of magnitudes grow by 2^23 from each 2^e to the next."""
    m = np.int32(b & _MAGNITUDE)
    e = np.int32(np.int32(np.int32(m - border) >> np.int32(23)) + np.int32(2))
    e = max(min(e, np.int32(7)), np.int32(m >= least))
    sign = np.int32(np.int32(b >> np.int32(31)) & np.int32(8))
    return np.int32(e | sign) if e > np.int32(0) else np.int32(0)


@compiled()
def e3m0_encode(x, unit, out, exact):
    """Unit: s as fp32, then bytes of two codes, elements i and i + ⌈n/2⌉; a code is a sign and e = 0 … 7."""
    at = 0
    for start in range(0, x.size, unit):
        block = x[start : min(start + unit, x.size)]
        bits = block.view(np.int32)
        half = (bits.size + 1) // 2
        scale_bits = np.int32(0) if exact else spread_median(bits)
        if scale_bits == 0:
            scale_bits = median_magnitude(bits)
        put_int32(out, at, scale_bits)
        s = np.int32(scale_bits).view(np.float32)
        codes = out[at + 4 : at + 4 + half]
        if s < _SMALL:
            # The bits of numbers below 2^-126 do not grow in steps of 2^23.
            block, s = block * _UP, s * _UP
            bits = block.view(np.int32)
        low, high = bits[:half], bits[half:]
        # The middle between 0 and s/4, and that between s/4 and s/2.  Zero stays zero, also where s is.
        least = np.float32(max(s * np.float32(0.125), _LEAST)).view(np.int32)
        border = np.float32(s * np.float32(0.375) if s > _ZERO else _LARGEST).view(np.int32)
        for i in range(high.size):
            codes[i] = np.uint8(_e3m0(low[i], least, border) | (_e3m0(high[i], least, border) << np.int32(4)))
        if high.size < half:
            codes[half - 1] = np.uint8(_e3m0(low[half - 1], least, border))
        at += 4 + half


@compiled(inline=True)
def _e3m0_value(code, s):
    e = np.int32(code & 7)
    power = np.int32((e + np.int32(124)) << 23).view(np.float32)
    level = min(s * power, _LARGEST)
    level = level if e > np.int32(0) else _ZERO
    return -level if (code & 8) != 0 else level


@compiled()
def e3m0_decode(data, unit, y, subtract):
    """y = ± 2^(e−3) · s, zero for e = 0; or y ← y − that."""
    at = 0
    for start in range(0, y.size, unit):
        block = y[start : min(start + unit, y.size)]
        half = (block.size + 1) // 2
        low, high = block[:half], block[half:]
        s = get_float(data, at)
        codes = data[at + 4 : at + 4 + half]
        if subtract:
            for i in range(half):
                low[i] -= _e3m0_value(np.int32(codes[i]), s)
            for i in range(high.size):
                high[i] -= _e3m0_value(np.int32(codes[i] >> 4), s)
        else:
            for i in range(half):
                low[i] = _e3m0_value(np.int32(codes[i]), s)
            for i in range(high.size):
                high[i] = _e3m0_value(np.int32(codes[i] >> 4), s)
        at += 4 + half
