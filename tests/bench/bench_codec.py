"""How fast the codecs are, beside a memory copy in the same run.

    python tests/bench/bench_codec.py [--millions 32] [--repeats 7] [--only int8 e3m0]

One process, one thread, as a rank does it: chunk by chunk, from and into memory that is far larger than the cache.  All
operations take turns in every repetition, so that a busy moment of the machine hits them alike; medians of the time of
the thread, which other processes on its core do not lengthen.  GB/s count the fp32 side of an operation, 4 bytes an
element, for the copy too; `/copy` is the ratio of the two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# torch then asks for huge pages for large tensors, as the processes of a run do.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from ray_diloco.outer.chunks import CHUNK
from ray_diloco.outer.codec import Codec, Param, codec_of

CASES: list[tuple[str, str, dict[str, Param]]] = [
    ("fp32", "fp32", {}),
    ("bf16", "bf16", {}),
    ("fp16", "fp16", {}),
    ("int8", "int8", {}),
    ("int8 stochastic", "int8", {"rounding": "stochastic"}),
    ("int8_bin_mean", "int8_bin_mean", {}),
    ("int4", "int4", {}),
    ("int4 4096", "int4", {"block": 4096}),
    ("int4 stochastic", "int4", {"rounding": "stochastic"}),
    ("e3m0 median", "e3m0", {"scale": "median"}),
    ("e3m0 sampled", "e3m0", {"scale": "sampled"}),
    ("2bit quantile", "2bit", {"codebook": "quantile"}),
    ("2bit bin_mean", "2bit", {"codebook": "bin_mean"}),
    ("1bit quantile", "1bit", {"codebook": "quantile"}),
    ("1bit bin_mean", "1bit", {"codebook": "bin_mean"}),
    ("topk 1 %", "topk", {"k": 41}),
    ("topk 3 % 2bit", "topk", {"k": 128, "values": "2bit"}),
    ("mask 1 %", "mask", {}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=32, help="million elements")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", help="names of codecs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in CASES if not options.only or case[1] in options.only]
    numel = int(options.millions * 1e6) // CHUNK * CHUNK
    torch.manual_seed(0)
    original, decoded, left = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    data = torch.zeros(4 * numel + 4 * (numel // 32), dtype=torch.uint8)

    def copy() -> None:
        decoded.copy_(original)

    operations: dict[str, Callable[[], None]] = {"copy": copy}
    for label, name, params in cases:
        codec = codec_of(name, params)
        operations |= {
            f"{label}/encode": _pass(codec, codec.encode, original, data),
            f"{label}/decode": _decoding(codec, decoded, data),
            f"{label}/residual": _pass(codec, codec.encode_residual, left, data),
        }
    seconds: dict[str, list[float]] = {key: [] for key in operations}
    for repeat in range(options.repeats + 1):
        for key, operation in operations.items():
            if key.endswith("/residual"):
                left.copy_(original)
            start = time.thread_time()
            operation()
            # The first repetition compiles and touches memory.
            if repeat:
                seconds[key].append(time.thread_time() - start)
    rates = {key: 4e-9 * numel / statistics.median(times) for key, times in seconds.items()}
    print(f"{numel / 1e6:.1f} M elements, median of {options.repeats}; load {os.getloadavg()[0]:.1f}")
    print(f"copy {rates['copy']:.1f} GB/s")
    print(
        f"{'codec':<16} {'bits':>6} {'encode':>7} {'/copy':>6} {'decode':>7} {'/copy':>6} {'residual':>8} {'/copy':>6}"
    )
    for label, name, params in cases:
        bits = 8 * codec_of(name, params).nbytes(numel) / numel
        columns = [rates[f"{label}/{what}"] for what in ("encode", "decode", "residual")]
        cells = [
            f"{rate:{width}.1f} {rate / rates['copy']:6.2f}" for rate, width in zip(columns, (7, 7, 8), strict=True)
        ]
        print(f"{label:<16} {bits:6.3f} {' '.join(cells)}")


def _pass(codec: Codec, encode: Callable[..., None], source: torch.Tensor, data: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        for start in range(0, source.numel(), CHUNK):
            at = codec.nbytes(start)
            encode(source[start : start + CHUNK], data[at : at + codec.nbytes(CHUNK)], nonce=start)

    return run


def _decoding(codec: Codec, target: torch.Tensor, data: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        for start in range(0, target.numel(), CHUNK):
            at = codec.nbytes(start)
            codec.decode(data[at : at + codec.nbytes(CHUNK)], target[start : start + CHUNK], nonce=start)

    return run


if __name__ == "__main__":
    main()
