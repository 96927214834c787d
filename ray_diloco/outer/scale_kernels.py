"""Kernels of the codecs whose units have a scale: int8, int4 and e3m0.

Imported only when a codec that needs it is built, since numba takes a second.  All arrays are contiguous; `x` is fp32
[n] and `out` uint8.  A kernel works unit by unit: the last one may be shorter.  How they are compiled, and why what
they call is in this file: `compiled`.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from ray_diloco.outer.compiled import compiled

# Adding 1.5 · 2^23 to a small fp32 number leaves it, rounded to nearest even, in the low bits of the sum.
_ROUND = np.float32(12582912.0)
_ROUND_INT4 = np.float32(12582912.0 + 8.0)
_ONE_127TH = np.float32(1.0 / 127.0)
_ONE_7TH = np.float32(1.0 / 7.0)
_LARGEST = np.float32(3.4028234663852886e38)
_LEAST = np.float32(2.0**-149)
# Below this a block is scaled up while it is encoded, so that 127 / absmax stays finite.
_SMALL = np.float32(2.0**-64)
_UP = np.float32(2.0**64)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)
# At most about this many elements of a unit are looked at to guess where a quantile lies.
SAMPLE = 4096
# So few candidates are searched instead of narrowed further, and so many elements are passed over together.
FEW = 1024
GROUP = 64


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
def largest_magnitude(bits):
    """Bits of the largest |x|; `bits` are the elements as int32.  What is not finite counts as largest."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return np.int32(largest)


@compiled()
def key_of_unit(seed, nonce, bits):
    """32 random bits for one unit, from the seed, the nonce and 32 bits of its content (splitmix64)."""
    z = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(nonce)
    for word in (np.uint64(0x9E3779B97F4A7C15), np.uint64(np.uint32(bits)) + np.uint64(0xD1B54A32D192ED03)):
        z += word
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.uint32(z >> np.uint64(32))


@compiled()
def fraction(key, i):
    """Uniform fp32 number in [0, 1) for element i of a unit: a multiple of 2^-24."""
    h = np.uint32(np.uint32(i) * np.uint32(0x9E3779B9)) ^ key
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return np.float32(np.int32(h >> np.uint32(8))) * np.float32(2.0**-24)


@compiled()
def _stochastic(v, u):
    """`v` rounded up with the probability of its fraction, as an integer in the low bits."""
    low = np.floor(v)
    return np.int32(np.float32(low + _ROUND).view(np.int32) + np.int32(u < v - low))


@compiled()
def int8_encode(x, unit, out, stochastic, seed, nonce):
    """Unit: absmax a as fp32, then a byte an element, q = round(127 x / a) in −127 … 127."""
    at = 0
    for start in range(0, x.size, unit):
        block = x[start : min(start + unit, x.size)]
        largest = largest_magnitude(block.view(np.int32))
        put_int32(out, at, largest)
        a = np.int32(largest).view(np.float32)
        codes = out[at + 4 : at + 4 + block.size]
        up = _UP if a < _SMALL else _ONE
        inverse = np.float32(127.0) / (a * up) if a > _ZERO else _ZERO
        if stochastic:
            key = key_of_unit(seed, nonce, largest)
            for i in range(block.size):
                codes[i] = np.uint8(_stochastic(block[i] * up * inverse, fraction(key, i)))
        else:
            for i in range(block.size):
                codes[i] = np.uint8(np.float32(block[i] * up * inverse + _ROUND).view(np.int32))
        at += 4 + block.size


@compiled()
def int8_decode(data, unit, y, subtract):
    """y = a · (q / 127), which gives the largest element back exactly; or y ← y − that."""
    at = 0
    for start in range(0, y.size, unit):
        block = y[start : min(start + unit, y.size)]
        a = get_float(data, at)
        codes = data[at + 4 : at + 4 + block.size].view(np.int8)
        if subtract:
            for i in range(block.size):
                block[i] -= a * (np.float32(codes[i]) * _ONE_127TH)
        else:
            for i in range(block.size):
                block[i] = a * (np.float32(codes[i]) * _ONE_127TH)
        at += 4 + block.size


@compiled(inline=True)
def _int4(v):
    return np.float32(v + _ROUND_INT4).view(np.int32) & 15


@compiled(inline=True)
def _int4_value(nibble, a):
    return a * (np.float32(np.int32(nibble) - np.int32(8)) * _ONE_7TH)


@compiled()
def int4_encode(x, unit, out, stochastic, seed, nonce):
    """Unit: absmax a as fp32, then bytes of q_i + 8 and, above it, q_{i+h} + 8; q = round(7 x / a), h = ⌈n/2⌉."""
    at = 0
    for start in range(0, x.size, unit):
        block = x[start : min(start + unit, x.size)]
        half = (block.size + 1) // 2
        low, high = block[:half], block[half:]
        largest = largest_magnitude(block.view(np.int32))
        put_int32(out, at, largest)
        a = np.int32(largest).view(np.float32)
        codes = out[at + 4 : at + 4 + half]
        up = _UP if a < _SMALL else _ONE
        inverse = np.float32(7.0) / (a * up) if a > _ZERO else _ZERO
        if stochastic:
            key = key_of_unit(seed, nonce, largest)
            for i in range(half):
                codes[i] = np.uint8((_stochastic(low[i] * up * inverse, fraction(key, i)) + 8) & 15)
            for i in range(high.size):
                code = (_stochastic(high[i] * up * inverse, fraction(key, half + i)) + 8) & 15
                codes[i] |= np.uint8(code << 4)
        else:
            for i in range(high.size):
                codes[i] = np.uint8(_int4(low[i] * up * inverse) | (_int4(high[i] * up * inverse) << 4))
            if high.size < half:
                codes[half - 1] = np.uint8(_int4(low[half - 1] * up * inverse))
        if high.size < half:
            codes[half - 1] |= np.uint8(8 << 4)
        at += 4 + half


@compiled()
def int4_decode(data, unit, y, subtract):
    """y = a · (q / 7); or y ← y − that."""
    at = 0
    for start in range(0, y.size, unit):
        block = y[start : min(start + unit, y.size)]
        half = (block.size + 1) // 2
        low, high = block[:half], block[half:]
        a = get_float(data, at)
        codes = data[at + 4 : at + 4 + half]
        if subtract:
            for i in range(half):
                low[i] -= _int4_value(codes[i] & 15, a)
            for i in range(high.size):
                high[i] -= _int4_value(codes[i] >> 4, a)
        else:
            for i in range(half):
                low[i] = _int4_value(codes[i] & 15, a)
            for i in range(high.size):
                high[i] = _int4_value(codes[i] >> 4, a)
        at += 4 + half


@compiled()
def count_below(bits, limit):
    """Number of elements with magnitude bits below a limit."""
    count = np.int32(0)
    for i in range(bits.size):
        count = np.int32(count + np.int32(np.int32(bits[i] & _MAGNITUDE) < limit))
    return count


@compiled()
def counts_below(bits, first, second):
    """As `count_below`, for two limits in one pass."""
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
def collect(bits, low, high, found):
    """Puts the magnitude bits from `low` to `high` (exclusive) into `found`; returns their number.

    They are few: a group without any is passed over at the speed of counting.
    """
    m = 0
    for start in range(0, bits.size, GROUP):
        group = bits[start : min(start + GROUP, bits.size)]
        inside = np.int32(0)
        for i in range(group.size):
            magnitude = np.int32(group[i] & _MAGNITUDE)
            inside = np.int32(inside + (np.int32(magnitude >= low) & np.int32(magnitude < high)))
        if inside > 0:
            for i in range(group.size):
                magnitude = np.int32(group[i] & _MAGNITUDE)
                if (magnitude >= low) & (magnitude < high):
                    found[m] = magnitude
                    m += 1
    return m


@compiled()
def median_magnitude(bits, exact):
    """Bits of the median of the non-zero |x|, the lower of the two middle ones; 0 if all are zero.

    A sample says between which two values the median is likely to be, counting says whether it is and narrows them by
    interpolation, and what is left between them is collected and searched.  If not `exact`, the sample's median.
    """
    n = bits.size
    low, high = np.int64(1), np.int64(2**31 - 1)
    # First, as it reads in order: the sample's jumps would wait for memory.
    zeros = count_below(bits, np.int32(1)) if exact else 0
    if n > SAMPLE:
        stride = n // SAMPLE | 1
        sample = np.empty((n + stride - 1) // stride, np.int32)
        m = 0
        for j in range(sample.size):
            sample[m] = bits[j * stride] & _MAGNITUDE
            m += 1 if sample[m] > 0 else 0
        if m > 0 and not exact:
            return kth_smallest(sample[:m], (m - 1) // 2)
        # Five standard deviations of the rank of the median in a sample of m.
        margin = int(2.5 * np.sqrt(m))
        if m > 4 * margin:
            low = np.int64(kth_smallest(sample[:m], m // 2 - margin))
            high = np.int64(kth_smallest(sample[:m], m // 2 + margin)) + 1
    if not exact:
        zeros = count_below(bits, np.int32(1))
    if zeros == n:
        return np.int32(0)
    below_low, below_high = counts_below(bits, np.int32(low), np.int32(high))
    k = zeros + (n - zeros - 1) // 2
    if below_low > k or below_high <= k:
        low, high, below_low, below_high = np.int64(1), np.int64(2**31 - 1), zeros, n
    shrunk = True
    while below_high - below_low > FEW and high - low > 1:
        inside = below_high - below_low
        # In the middle where interpolation did not help.
        at, around = (0.5, 0.0)
        if shrunk:
            at, around = (k - below_low) / inside, 2.0 / np.sqrt(inside)
        first = low + max(np.int64(1), np.int64((high - low) * (at - around)))
        second = min(low + max(np.int64(1), np.int64((high - low) * (at + around))), high - 1)
        first = min(first, second)
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
    found = np.empty(below_high - below_low, np.int32)
    m = collect(bits, np.int32(low), np.int32(high), found)
    return kth_smallest(found[:m], k - below_low)


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
        scale_bits = median_magnitude(bits, exact)
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
