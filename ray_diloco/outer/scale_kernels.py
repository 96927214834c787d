"""Kernels of the linear codecs, whose units have a scale: int8 and int4.

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
# Below this a block is scaled up while it is encoded, so that 127 / absmax stays finite.
_SMALL = np.float32(2.0**-64)
_UP = np.float32(2.0**64)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)


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
