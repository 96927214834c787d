"""Loops over elements that torch cannot fuse, compiled by numba: quantise, pack, select, and their way back.

One pass each over memory that stays in the cache, no temporaries of the tensor's size.  What made them fast
(../shared/numbers.md, "Codecs"): magnitudes are compared as integers, every block is a slice of its own, rounding is an
addition, and a byte's parts come from parts of the unit that lie far apart, not from neighbours.  No `fastmath`: the
same input gives the same bytes on every machine, and equals the plain numpy of `tests/outer/test_quantise.py`.

Imported only when a codec that needs it is built, since numba takes a second.  One file, as numba's cache on disk does
not notice that a function of another file has changed.  All arrays are contiguous; `x` is fp32 [n] and `out` uint8.  A
kernel works unit by unit: the last one may be shorter.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

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
_ZERO, _ONE, _HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Sums run in this many lanes, element i in lane i mod LANES, and the lanes are added in order.
LANES = 64
# At most about this many elements of a unit are looked at to guess where a quantile lies.
SAMPLE = 4096
# The same for the borders of a codebook, which need not be exact: the means that they lead to are.
BORDER_SAMPLE = 2048
# So few candidates are searched instead of narrowed further, and so many elements are passed over together.
FEW = 1024
GROUP = 64


def _compile(inline: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """numba's decorator; without the cache on disk where there is no place for it."""

    def decorate(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"nogil": True, "inline": "always" if inline else "never"}
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            return numba.njit(**options)(function)

    return decorate


@_compile()
def put_int32(out, at, bits):
    """Writes 32 bits at a place that need not be aligned, least significant byte first."""
    for j in range(4):
        out[at + j] = np.uint8((bits >> (8 * j)) & 0xFF)


@_compile()
def get_int32(data, at):
    """Reads what `put_int32` wrote."""
    bits = np.uint32(0)
    for j in range(4):
        bits = np.uint32(bits | (np.uint32(data[at + j]) << np.uint32(8 * j)))
    return np.int32(bits)


@_compile()
def put_float(out, at, value):
    """Writes an fp32 number."""
    put_int32(out, at, np.float32(value).view(np.int32))


@_compile()
def get_float(data, at):
    """Reads an fp32 number."""
    return np.int32(get_int32(data, at)).view(np.float32)


@_compile()
def largest_magnitude(bits):
    """Bits of the largest |x|; `bits` are the elements as int32.  What is not finite counts as largest."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return np.int32(largest)


@_compile()
def key_of_unit(seed, nonce, bits):
    """32 random bits for one unit, from the seed, the nonce and 32 bits of its content (splitmix64)."""
    z = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(nonce)
    for word in (np.uint64(0x9E3779B97F4A7C15), np.uint64(np.uint32(bits)) + np.uint64(0xD1B54A32D192ED03)):
        z += word
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.uint32(z >> np.uint64(32))


@_compile()
def fraction(key, i):
    """Uniform fp32 number in [0, 1) for element i of a unit: a multiple of 2^-24."""
    h = np.uint32(np.uint32(i) * np.uint32(0x9E3779B9)) ^ key
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return np.float32(np.int32(h >> np.uint32(8))) * np.float32(2.0**-24)


@_compile()
def _stochastic(v, u):
    """`v` rounded up with the probability of its fraction, as an integer in the low bits."""
    low = np.floor(v)
    return np.int32(np.float32(low + _ROUND).view(np.int32) + np.int32(u < v - low))


@_compile()
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


@_compile()
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


@_compile(inline=True)
def _int4(v):
    return np.float32(v + _ROUND_INT4).view(np.int32) & 15


@_compile(inline=True)
def _int4_value(nibble, a):
    return a * (np.float32(np.int32(nibble) - np.int32(8)) * _ONE_7TH)


@_compile()
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


@_compile()
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


@_compile()
def count_below(bits, limit):
    """Number of elements with magnitude bits below a limit."""
    count = np.int32(0)
    for i in range(bits.size):
        count = np.int32(count + np.int32(np.int32(bits[i] & _MAGNITUDE) < limit))
    return count


@_compile()
def counts_below(bits, first, second):
    """As `count_below`, for two limits in one pass."""
    below_first, below_second = np.int32(0), np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & _MAGNITUDE)
        below_first = np.int32(below_first + np.int32(magnitude < first))
        below_second = np.int32(below_second + np.int32(magnitude < second))
    return below_first, below_second


@_compile()
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


@_compile()
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


@_compile()
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


@_compile(inline=True)
def _e3m0(b, least, border):
    """Code of the element with bits b: a sign (8) and e.  Bits of magnitudes grow by 2^23 from each 2^e to the next."""
    m = np.int32(b & _MAGNITUDE)
    e = np.int32(np.int32(np.int32(m - border) >> np.int32(23)) + np.int32(2))
    e = max(min(e, np.int32(7)), np.int32(m >= least))
    sign = np.int32(np.int32(b >> np.int32(31)) & np.int32(8))
    return np.int32(e | sign) if e > np.int32(0) else np.int32(0)


@_compile()
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


@_compile(inline=True)
def _e3m0_value(code, s):
    e = np.int32(code & 7)
    power = np.int32((e + np.int32(124)) << 23).view(np.float32)
    level = min(s * power, _LARGEST)
    level = level if e > np.int32(0) else _ZERO
    return -level if (code & 8) != 0 else level


@_compile()
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


@_compile(inline=True)
def _rows(x, i):
    return (
        x[i : i + LANES],
        x[i + LANES : i + 2 * LANES],
        x[i + 2 * LANES : i + 3 * LANES],
        x[i + 3 * LANES : i + 4 * LANES],
    )


@_compile()
def _total(lanes, n):
    total = 0.0
    for j in range(min(LANES, n)):
        total += lanes[j]
    return total


@_compile()
def mean_and_sigma(x):
    """Mean and standard deviation (over n) in float64, from sums in `LANES` lanes of what exceeds the first element."""
    first = np.float64(x[0])
    sums, squares = np.zeros(LANES), np.zeros(LANES)
    whole = x.size // (4 * LANES) * (4 * LANES)
    for i in range(0, whole, 4 * LANES):
        r0, r1, r2, r3 = _rows(x, i)
        for j in range(LANES):
            d0, d1 = np.float64(r0[j]) - first, np.float64(r1[j]) - first
            d2, d3 = np.float64(r2[j]) - first, np.float64(r3[j]) - first
            sums[j] += (d0 + d1) + (d2 + d3)
            squares[j] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
    for i in range(whole, x.size):
        d = np.float64(x[i]) - first
        sums[i % LANES] += d
        squares[i % LANES] += d * d
    mean = _total(sums, x.size) / x.size
    variance = _total(squares, x.size) / x.size - mean * mean
    return first + mean, np.sqrt(variance) if variance > 0.0 else 0.0


@_compile()
def bin_mean8_encode(x, unit, out):
    """Unit: codebook of 256 fp32, then a byte an element: its bin of 256 between mean − 3σ and mean + 3σ."""
    sums, counts = np.empty(256), np.empty(256, np.int64)
    at = 0
    for start in range(0, x.size, unit):
        block = x[start : min(start + unit, x.size)]
        mean, sigma = mean_and_sigma(block)
        low = mean - 3.0 * sigma
        inverse = 256.0 / (6.0 * sigma) if sigma > 0.0 else 0.0
        codes = out[at + 1024 : at + 1024 + block.size]
        for i in range(block.size):
            v = (np.float64(block[i]) - low) * inverse
            v = v if v > 0.0 else 0.0
            v = v if v < 255.0 else 255.0
            codes[i] = np.uint8(np.int32(v))
        sums[:] = 0.0
        counts[:] = 0
        for i in range(block.size):
            sums[codes[i]] += block[i]
            counts[codes[i]] += 1
        for c in range(256):
            put_float(out, at + 4 * c, np.float32(sums[c] / counts[c]) if counts[c] > 0 else _ZERO)
        at += 1024 + block.size


@_compile()
def bin_mean8_decode(data, unit, y, subtract):
    """y = codebook entry; or y ← y − that."""
    book = np.empty(256, np.float32)
    at = 0
    for start in range(0, y.size, unit):
        block = y[start : min(start + unit, y.size)]
        codes = data[at + 1024 : at + 1024 + block.size]
        for c in range(256):
            book[c] = get_float(data, at + 4 * c)
        if subtract:
            for i in range(block.size):
                block[i] -= book[codes[i]]
        else:
            for i in range(block.size):
                block[i] = book[codes[i]]
        at += 1024 + block.size


@_compile()
def quantile_borders(x, parts, borders):
    """Puts `parts` − 1 values between which the parts of x are about equally full.

    Exact order statistics, of rank ⌊m j / parts⌋, of every `stride`-th element; of all up to `BORDER_SAMPLE`.
    """
    stride = x.size // BORDER_SAMPLE | 1
    keys = np.empty((x.size + stride - 1) // stride, np.int32)
    bits = x.view(np.int32)
    for j in range(keys.size):
        b = bits[j * stride]
        keys[j] = b ^ ((b >> 31) & _MAGNITUDE)
    for part in range(1, parts):
        key = np.int32(kth_smallest(keys, keys.size * part // parts))
        borders[part - 1] = np.int32(key ^ ((key >> 31) & _MAGNITUDE)).view(np.float32)


@_compile()
def sigma_borders(x, parts, borders):
    """Puts the inner borders of `parts` equal bins between mean − 3σ and mean + 3σ."""
    mean, sigma = mean_and_sigma(x)
    for part in range(1, parts):
        borders[part - 1] = np.float32(mean + sigma * (6.0 * part / parts - 3.0))


@_compile(inline=True)
def _code2(v, b0, b1, b2):
    return np.int32(np.int32(np.int32(v >= b0) + np.int32(v >= b1)) + np.int32(v >= b2))


@_compile(inline=True)
def _if(condition, value):
    return value if condition else _ZERO


@_compile()
def _sum_huge(x, borders, sums):
    """Adds up again, in float64 throughout, where adding four numbers in fp32 first has left its range."""
    if not np.isfinite(sums.sum()):
        sums[:] = 0.0
        for i in range(x.size):
            code = 0
            for border in borders:
                code += 1 if x[i] >= border else 0
            sums[code, 0] += np.float64(x[i])


@_compile()
def _pack2(x, b0, b1, b2, codes, sums):
    """Packs the codes of a unit, and adds up in `sums`, float64 [4, LANES], what lies between the borders.

    Of the four elements of a byte those between the same borders are added in fp32 first.

    Returns:
      Numbers of elements from each border on.
    """
    quarter = codes.size
    s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3]
    n0, n1, n2 = np.int32(0), np.int32(0), np.int32(0)
    whole = max(x.size - 3 * quarter, 0) // LANES * LANES
    for i in range(0, whole, LANES):
        r0, r1 = x[i : i + LANES], x[quarter + i : quarter + i + LANES]
        r2, r3 = x[2 * quarter + i : 2 * quarter + i + LANES], x[3 * quarter + i : 3 * quarter + i + LANES]
        packed = codes[i : i + LANES]
        for j in range(LANES):
            u, v, w, z = r0[j], r1[j], r2[j], r3[j]
            u0, v0, w0, z0 = u >= b0, v >= b0, w >= b0, z >= b0
            u1, v1, w1, z1 = u >= b1, v >= b1, w >= b1, z >= b1
            u2, v2, w2, z2 = u >= b2, v >= b2, w >= b2, z >= b2
            s0[j] += np.float64((_if(not u0, u) + _if(not v0, v)) + (_if(not w0, w) + _if(not z0, z)))
            s1[j] += np.float64((_if(u0 ^ u1, u) + _if(v0 ^ v1, v)) + (_if(w0 ^ w1, w) + _if(z0 ^ z1, z)))
            s2[j] += np.float64((_if(u1 ^ u2, u) + _if(v1 ^ v2, v)) + (_if(w1 ^ w2, w) + _if(z1 ^ z2, z)))
            s3[j] += np.float64((_if(u2, u) + _if(v2, v)) + (_if(w2, w) + _if(z2, z)))
        for j in range(LANES):
            u, v, w, z = r0[j], r1[j], r2[j], r3[j]
            low = _code2(u, b0, b1, b2) | (_code2(v, b0, b1, b2) << 2)
            packed[j] = np.uint8(low | (_code2(w, b0, b1, b2) << 4) | (_code2(z, b0, b1, b2) << 6))
    codes[whole:] = 0
    for part in range(4):
        for i in range(part * quarter + whole, min((part + 1) * quarter, x.size)):
            code = _code2(x[i], b0, b1, b2)
            codes[i - part * quarter] |= np.uint8(code << (2 * part))
            sums[code, (i - part * quarter) % LANES] += np.float64(x[i])
    for i in range(x.size):
        n0 = np.int32(n0 + np.int32(x[i] >= b0))
        n1 = np.int32(n1 + np.int32(x[i] >= b1))
        n2 = np.int32(n2 + np.int32(x[i] >= b2))
    return n0, n1, n2


@_compile()
def _mean(lanes, count, n):
    return np.float32(_total(lanes, n) / count) if count > 0 else _ZERO


@_compile()
def two_bit_encode(x, unit, out, quantile):
    """Unit: codebook of 4 fp32, then bytes of four codes, elements i, i + q, i + 2q, i + 3q; q = ⌈n/4⌉."""
    borders, sums = np.empty(3, np.float32), np.empty((4, LANES))
    at = 0
    for start in range(0, x.size, unit):
        block = x[start : min(start + unit, x.size)]
        if quantile:
            quantile_borders(block, 4, borders)
        else:
            sigma_borders(block, 4, borders)
        b0, b1, b2 = borders[0], borders[1], borders[2]
        quarter = (block.size + 3) // 4
        codes = out[at + 16 : at + 16 + quarter]
        sums[:] = 0.0
        n0, n1, n2 = _pack2(block, b0, b1, b2, codes, sums)
        _sum_huge(block, borders, sums)
        put_float(out, at, _mean(sums[0], block.size - n0, block.size))
        put_float(out, at + 4, _mean(sums[1], n0 - n1, block.size))
        put_float(out, at + 8, _mean(sums[2], n1 - n2, block.size))
        put_float(out, at + 12, _mean(sums[3], n2, block.size))
        at += 16 + quarter


@_compile()
def two_bit_decode(data, unit, y, subtract):
    """y = codebook entry; or y ← y − that."""
    at = 0
    for start in range(0, y.size, unit):
        block = y[start : min(start + unit, y.size)]
        c0, c1, c2, c3 = get_float(data, at), get_float(data, at + 4), get_float(data, at + 8), get_float(data, at + 12)
        quarter = (block.size + 3) // 4
        codes = data[at + 16 : at + 16 + quarter]
        for part in range(4):
            values = block[part * quarter : min((part + 1) * quarter, block.size)]
            for i in range(values.size):
                code = codes[i] >> (2 * part)
                below = c1 if code & 1 else c0
                above = c3 if code & 1 else c2
                value = above if code & 2 else below
                values[i] = values[i] - value if subtract else value
        at += 16 + quarter


@_compile()
def _sums1(x, border):
    """Sums of what lies below a border and of the rest, float64 [2, LANES]; four rows are added in fp32 first."""
    sums = np.zeros((2, LANES))
    s0, s1 = sums[0], sums[1]
    whole = x.size // (4 * LANES) * (4 * LANES)
    for i in range(0, whole, 4 * LANES):
        r0, r1, r2, r3 = _rows(x, i)
        for j in range(LANES):
            u, v, w, z = r0[j], r1[j], r2[j], r3[j]
            u0, v0, w0, z0 = u >= border, v >= border, w >= border, z >= border
            s0[j] += np.float64((_if(not u0, u) + _if(not v0, v)) + (_if(not w0, w) + _if(not z0, z)))
            s1[j] += np.float64((_if(u0, u) + _if(v0, v)) + (_if(w0, w) + _if(z0, z)))
    for i in range(whole, x.size):
        sums[np.int32(x[i] >= border), i % LANES] += np.float64(x[i])
    return sums


@_compile()
def one_bit_encode(x, unit, out, quantile):
    """Unit: codebook of 2 fp32, then bytes of eight codes, elements i + j q in bit j; q = ⌈n/8⌉."""
    borders = np.empty(1, np.float32)
    at = 0
    for start in range(0, x.size, unit):
        block = x[start : min(start + unit, x.size)]
        if quantile:
            quantile_borders(block, 2, borders)
        else:
            sigma_borders(block, 2, borders)
        border = borders[0]
        eighth = (block.size + 7) // 8
        codes = out[at + 8 : at + 8 + eighth]
        codes[:] = 0
        count = np.int32(0)
        for part in range(8):
            values = block[part * eighth : min((part + 1) * eighth, block.size)]
            for i in range(values.size):
                count = np.int32(count + np.int32(values[i] >= border))
                codes[i] |= np.uint8(np.int32(values[i] >= border) << part)
        sums = _sums1(block, border)
        _sum_huge(block, borders, sums)
        put_float(out, at, _mean(sums[0], block.size - count, block.size))
        put_float(out, at + 4, _mean(sums[1], count, block.size))
        at += 8 + eighth


@_compile()
def one_bit_decode(data, unit, y, subtract):
    """y = codebook entry; or y ← y − that."""
    at = 0
    for start in range(0, y.size, unit):
        block = y[start : min(start + unit, y.size)]
        c0, c1 = get_float(data, at), get_float(data, at + 4)
        eighth = (block.size + 7) // 8
        codes = data[at + 8 : at + 8 + eighth]
        for part in range(8):
            values = block[part * eighth : min((part + 1) * eighth, block.size)]
            for i in range(values.size):
                value = c1 if (codes[i] >> part) & 1 else c0
                values[i] = values[i] - value if subtract else value
        at += 8 + eighth


@_compile()
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


@_compile()
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


@_compile()
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
