"""How fast one anchor shard and one rank work, beside a memory copy in the same run.

    python tests/bench/bench_outer_shard.py [--sizes 25 100] [--islands 2 4] [--repeats 7] [--codec fp32]

One process, one thread.  `moved` counts the bytes that each operation must read and write; for a copy that is twice its
size.  `prepare` reads K contributions, anchor and momentum and writes anchor and momentum, with digests, finiteness
check and norms; `emit` reads base and parameters and writes the payload; `adopt` reads the payload and writes
parameters and base.  On a busy machine the best CPU time says more than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# torch then asks for huge pages for large tensors: all passes here take a fifth less time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from ray_diloco.outer.codec import Codec, codec_of
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import Layout, Range, layout_of
from ray_diloco.outer.optimizer import Nesterov
from ray_diloco.outer.payload import Bytes, Meta
from ray_diloco.outer.shard import AnchorShard, Contribution


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[25, 100], help="million parameters")
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--codec", default="fp32", help="codec of contributions and anchors")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for millions in options.sizes:
        for islands in options.islands:
            _measure(int(millions * 1e6), islands, options.repeats, codec_of(options.codec))


def _measure(numel: int, islands: int, repeats: int, codec: Codec) -> None:
    layout = _transformer_like(numel)
    numel = layout.numel
    shard = AnchorShard(layout, layout.whole, [layout.whole], Nesterov(0.7, 0.9), codec)
    theta = torch.randn(numel)
    rank = Exchange(layout, [Slice(Range(0, numel), theta)], layout.whole)
    shard.found([rank.read(layout.whole, Meta("parameters", island="i0"))])
    rank.adopt([shard.payload(0)])
    theta.add_(torch.randn(numel), alpha=1e-3)
    payloads = [_emitted(rank, layout, codec, f"i{k}").copy() for k in range(islands)]
    offers = [Contribution(f"i{k}", 1.0, 0, (payload,)) for k, payload in enumerate(payloads)]
    source, target = torch.randn(numel), torch.zeros(numel)

    def prepare() -> None:
        shard.prepare("bench", 0, offers)
        shard.abort("bench")

    wire = codec.nbytes(numel)
    down = 0 if codec.plain else wire
    work: dict[str, tuple[Callable[[], object], int]] = {
        "copy fp32": (lambda: target.copy_(source), 8 * numel),
        "prepare": (prepare, islands * wire + 16 * numel + down),
        "emit": (lambda: _emitted(rank, layout, codec, "i0"), 8 * numel + wire),
        "adopt": (lambda: rank.adopt([shard.payload(0)]), wire + 8 * numel),
    }
    wall: dict[str, list[float]] = {name: [] for name in work}
    cpu: dict[str, list[float]] = {name: [] for name in work}
    for round_number in range(repeats + 1):
        for name, (run, _) in work.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            run()
            if round_number:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - began_cpu)
    print(f"{numel / 1e6:.0f} M parameters, K = {islands}, {codec.name}, load {os.getloadavg()[0]:.1f}")
    for name, (_, moved) in work.items():
        median, best, own = statistics.median(wall[name]), min(wall[name]), min(cpu[name])
        speeds = ", ".join(f"{moved / s / 1e9:.1f}" for s in (median, best, own))
        print(f"  {name:10s} {median:.4f} s median, {best:.4f} best, {own:.4f} best CPU; moved {speeds} GB/s")


def _emitted(rank: Exchange, layout: Layout, codec: Codec, island: str) -> Bytes:
    return rank.emit(layout.whole, codec, Meta("contribution", {0: 0}, island)).payload


def _transformer_like(numel: int) -> Layout:
    """Blocks of four matrices, two wide ones and two norms, until the size is reached."""
    width = 768
    block = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width), (width,), (width,)]
    per_block = 12 * width * width + 2 * width
    blocks = max(1, numel // per_block)
    return layout_of((f"layers.{b}.{k}", shape) for b in range(blocks) for k, shape in enumerate(block))


if __name__ == "__main__":
    main()
