"""Kernels of the codec of 8 bits whose units have a codebook of 256 means.

Imported only when a codec that needs it is built, since numba takes a second.  All arrays are contiguous; `x` is fp32
[n] and `out` uint8.  A kernel works unit by unit: the last one may be shorter.  How they are compiled, and why what
they call is in this file: `compiled`.

Most of the time goes into adding each element to its bin, a read and a write that depend on the element: that alone
takes about as long as a copy of the unit, so that encoding stays far below a copy's rate however it is written.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from ray_diloco.outer.compiled import compiled

_ZERO, _LAST = np.float32(0.0), np.float32(255.0)
# Sums of a unit run in this many lanes, element i in lane i mod LANES, and the lanes are added in order.
LANES = 64
# Codes are brought into aligned memory, and read as words from there, so many bytes at a time.
ROOM = 4096
# Where σ lies between these, the bins are told apart in fp32.
_LEAST_SIGMA, _LARGEST_SIGMA = 2.0**-100, 2.0**120
_BYTE = np.uint64(0xFF)


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
def _codes8(x, low, inverse, codes):
    """Bins of a few elements, told apart in fp32."""
    for i in range(x.size):
        codes[i] = np.uint8(np.int32(min(max((x[i] - low) * inverse, _ZERO), _LAST)))


@compiled()
def _codes8_wide(x, low, inverse, codes):
    """As `_codes8`, in float64."""
    for i in range(x.size):
        codes[i] = np.uint8(np.int32(min(max((np.float64(x[i]) - low) * inverse, 0.0), 255.0)))


@compiled()
def _add8(x, codes, sums, counts):
    """Adds element i to bin `codes[i]` of the table i mod 4: one table would wait for what was just written to it."""
    words = codes.view(np.uint64)
    whole = x.size // 8
    for w in range(whole):
        word = words[w]
        for j in range(8):
            at = ((word >> np.uint64(8 * j)) & _BYTE) + np.uint64(256 * (j % 4))
            sums[at] += np.float64(x[8 * w + j])
            counts[at] += np.int32(1)
    for i in range(8 * whole, x.size):
        at = 256 * (i % 4) + np.int64(codes[i])
        sums[at] += np.float64(x[i])
        counts[at] += np.int32(1)


@compiled()
def bin_mean8_encode(x, unit, out):
    """Unit: codebook of 256 fp32, then a byte an element: its bin of 256 between mean − 3σ and mean + 3σ."""
    sums, counts = np.empty(4 * 256), np.empty(4 * 256, np.int32)
    room = np.empty(ROOM, np.uint8)
    at = 0
    for start in range(0, x.size, unit):
        block = x[start : min(start + unit, x.size)]
        mean, sigma = mean_and_sigma(block)
        low = mean - 3.0 * sigma
        inverse = 256.0 / (6.0 * sigma) if sigma > 0.0 else 0.0
        sums[:] = 0.0
        counts[:] = 0
        for i in range(0, block.size, ROOM):
            piece = block[i : min(i + ROOM, block.size)]
            if _LEAST_SIGMA < sigma < _LARGEST_SIGMA:
                _codes8(piece, np.float32(low), np.float32(inverse), room)
            else:
                _codes8_wide(piece, low, inverse, room)
            codes = out[at + 1024 + i : at + 1024 + i + piece.size]
            for j in range(codes.size):
                codes[j] = room[j]
            _add8(piece, room, sums, counts)
        for c in range(256):
            count = (counts[c] + counts[256 + c]) + (counts[512 + c] + counts[768 + c])
            total = (sums[c] + sums[256 + c]) + (sums[512 + c] + sums[768 + c])
            put_float(out, at + 4 * c, np.float32(total / count) if count > 0 else _ZERO)
        at += 1024 + block.size


@compiled()
def bin_mean8_decode(data, unit, y, subtract):
    """y = codebook entry; or y ← y − that."""
    book, room = np.empty(256, np.float32), np.empty(ROOM, np.uint8)
    words = room.view(np.uint64)
    at = 0
    for start in range(0, y.size, unit):
        block = y[start : min(start + unit, y.size)]
        for c in range(256):
            book[c] = get_float(data, at + 4 * c)
        for i in range(0, block.size, ROOM):
            piece = block[i : min(i + ROOM, block.size)]
            codes = data[at + 1024 + i : at + 1024 + i + piece.size]
            for j in range(codes.size):
                room[j] = codes[j]
            whole = piece.size // 8
            for w in range(whole):
                word = words[w]
                for j in range(8):
                    value = book[(word >> np.uint64(8 * j)) & _BYTE]
                    piece[8 * w + j] = piece[8 * w + j] - value if subtract else value
            for j in range(8 * whole, piece.size):
                piece[j] = piece[j] - book[room[j]] if subtract else book[room[j]]
        at += 1024 + block.size
