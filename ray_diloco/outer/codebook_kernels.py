"""Kernels of the codecs of 2 bits and 1 bit, whose units have a codebook.

Imported only when a codec that needs it is built, since numba takes a second.  All arrays are contiguous; `x` is fp32
[n] and `out` uint8.  A kernel works unit by unit: the last one may be shorter.  How they are compiled, and why what
they call is in this file: `compiled`.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from ray_diloco.outer.compiled import compiled

_ZERO = np.float32(0.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Sums run in this many lanes, element i in lane i mod LANES, and the lanes are added in order.
LANES = 64
# Codes are brought into aligned memory, and read as words from there, so many bytes at a time.
ROOM = 4096
# Every second bit, every second pair of bits, every second nibble, every second byte.
_BITS, _PAIRS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_NIBBLES, _BYTES = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x00FF00FF00FF00FF)
# At most about this many elements of a unit are looked at for the borders of a codebook, which need not be exact: the
# means that they lead to are.
BORDER_SAMPLE = 2048


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
def put_float(out, at, value):
    """Writes an fp32 number."""
    put_int32(out, at, np.float32(value).view(np.int32))


@compiled()
def get_float(data, at):
    """Reads an fp32 number."""
    return np.int32(get_int32(data, at)).view(np.float32)


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


@compiled(inline=True)
def _rows(x, i):
    return (
        x[i : i + LANES],
        x[i + LANES : i + 2 * LANES],
        x[i + 2 * LANES : i + 3 * LANES],
        x[i + 3 * LANES : i + 4 * LANES],
    )


@compiled()
def _total(lanes, n):
    total = 0.0
    for j in range(min(LANES, n)):
        total += lanes[j]
    return total


@compiled()
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


@compiled()
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


@compiled()
def sigma_borders(x, parts, borders):
    """Puts the inner borders of `parts` equal bins between mean − 3σ and mean + 3σ."""
    mean, sigma = mean_and_sigma(x)
    for part in range(1, parts):
        borders[part - 1] = np.float32(mean + sigma * (6.0 * part / parts - 3.0))


@compiled(inline=True)
def _code2(v, b0, b1, b2):
    return np.int32(np.int32(np.int32(v >= b0) + np.int32(v >= b1)) + np.int32(v >= b2))


@compiled(inline=True)
def _if(condition, value):
    return value if condition else _ZERO


@compiled()
def _sum_huge(x, borders, sums):
    """Adds up again, in float64 throughout, where adding four numbers in fp32 first has left its range."""
    if not np.isfinite(sums.sum()):
        sums[:] = 0.0
        for i in range(x.size):
            code = 0
            for border in borders:
                code += 1 if x[i] >= border else 0
            sums[code, 0] += np.float64(x[i])


@compiled(inline=True)
def _ones(v):
    """Numbers of ones among the even bits of each 16 of 64, which add up to those of 8191 words without overflow."""
    v = (v & _PAIRS) + ((v >> np.uint64(2)) & _PAIRS)
    v = (v + (v >> np.uint64(4))) & _NIBBLES
    return (v + (v >> np.uint64(8))) & _BYTES


@compiled(inline=True)
def _sum16(v):
    low = np.int64(v & np.uint64(0xFFFF)) + np.int64((v >> np.uint64(16)) & np.uint64(0xFFFF))
    return low + np.int64((v >> np.uint64(32)) & np.uint64(0xFFFF)) + np.int64(v >> np.uint64(48))


@compiled()
def _counts2(codes):
    """Numbers of packed codes from 1, from 2 and from 3 on."""
    room = np.empty(ROOM, np.uint8)
    words = room.view(np.uint64)
    n0, n1, n2 = 0, 0, 0
    for start in range(0, codes.size, ROOM):
        piece = codes[start : min(start + ROOM, codes.size)]
        room[piece.size :] = 0
        for i in range(piece.size):
            room[i] = piece[i]
        some, high, both = np.uint64(0), np.uint64(0), np.uint64(0)
        for i in range(words.size):
            word = words[i]
            above = word >> np.uint64(1)
            some += _ones((word | above) & _BITS)
            high += _ones(above & _BITS)
            both += _ones(word & above & _BITS)
        n0, n1, n2 = n0 + _sum16(some), n1 + _sum16(high), n2 + _sum16(both)
    return n0, n1, n2


@compiled()
def _pack2(x, b0, b1, b2, codes, sums):
    """Packs the codes of a unit, and adds up in `sums`, float64 [4, LANES], what lies between the borders.

    Of the four elements of a byte those between the same borders are added in fp32 first.

    Returns:
      Numbers of elements from each border on.
    """
    quarter = codes.size
    s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3]
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
    return _counts2(codes)


@compiled()
def _mean(lanes, count, n):
    return np.float32(_total(lanes, n) / count) if count > 0 else _ZERO


@compiled()
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


@compiled()
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


@compiled()
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


@compiled()
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
        count = np.int32(0)
        for i in range(eighth):
            count = np.int32(count + np.int32(block[i] >= border))
            codes[i] = np.uint8(block[i] >= border)
        for part in range(1, 8):
            values = block[part * eighth : min((part + 1) * eighth, block.size)]
            for i in range(values.size):
                count = np.int32(count + np.int32(values[i] >= border))
                codes[i] |= np.uint8(np.int32(values[i] >= border) << part)
        sums = _sums1(block, border)
        _sum_huge(block, borders, sums)
        put_float(out, at, _mean(sums[0], block.size - count, block.size))
        put_float(out, at + 4, _mean(sums[1], count, block.size))
        at += 8 + eighth


@compiled()
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
