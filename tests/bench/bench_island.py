"""Islands in a real run against plain torch loops of the same model: tokens per second, utilisation, start-up.

A plain loop is what a user would write without us: the same Hugging Face model, torch AdamW(fused), gradient clipping,
one process and one thread per island, all at the same time as the islands run at the same time.  Plain and ours take
turns; medians of `--turns`.

    python tests/bench/bench_island.py --turns 3
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ISLANDS, STEPS, ROUNDS = 2, 50, 4


def plain_loop(steps: int, precision: str, results: multiprocessing.Queue) -> None:
    """Trains the tiny model in this process; puts tokens per second of each part of `STEPS` steps but the first."""
    import numpy as np
    import torch

    from ray_diloco.config.compose import compose
    from ray_diloco.data.blocks import prepare
    from ray_diloco.inner.model import build_model

    torch.set_num_threads(1)
    config = compose(["model=tiny"]).config
    corpus = prepare(config.data, config.tokenizer)
    blocks = corpus.open()
    model = build_model(config.model, corpus.vocab_size, corpus.eos_id, config.data.sequence_length, 0)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), fused=True
    )
    batch = config.inner.micro_batch
    ends = []
    for step in range(steps):
        ids = torch.from_numpy(blocks.train(np.arange(step * batch, (step + 1) * batch)))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % STEPS == 0:
            ends.append(time.perf_counter())
    tokens = STEPS * batch * config.data.sequence_length
    results.put([tokens / (end - start) for start, end in pairwise(ends)])


def plain(precision: str) -> float:
    """Tokens per second of one process, while as many run as there are islands; taken as ours are: median of parts."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=plain_loop, args=(STEPS * ROUNDS, precision, results)) for _ in range(ISLANDS)]
    for process in processes:
        process.start()
    speeds = [speed for _ in processes for speed in results.get(timeout=600)]
    for process in processes:
        process.join(60)
    return statistics.median(speeds)


def ours(folder: Path, turn: int, precision: str) -> dict[str, float]:
    """One run by the command line: speed of an island, utilisation, and seconds from command to first step."""
    name = f"turn{turn}"
    began = time.time()
    stage = ["inner.precision=bf16", "inner.zero_stage=1"] if precision == "bf16" else []
    subprocess.run(
        [
            sys.executable, "-m", "ray_diloco.cli", "train", "--quiet", "model=tiny", f"islands.count={ISLANDS}",
            f"inner.H={STEPS}", f"run.rounds={ROUNDS}", f"run.name={name}", f"run.root={folder}", "outer.momentum=0.5",
            "evaluate.every=0", "export.enabled=false", *stage,
        ],
        check=True,
    )  # fmt: skip
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    later = [line for line in lines if line["kind"] == "island" and line["round"] > 1]
    return {
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in later),
        "utilisation": json.loads((folder / name / "summary.json").read_text())["utilisation"],
        "utilisation_later": statistics.mean(line["train_s"] / line["wall_s"] for line in later),
        "start_s": next(e["t"] for e in events if e["event"] == "round_opened") - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    arguments = parser.parse_args()
    theirs, mine = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns):
            theirs.append(plain(arguments.precision))
            mine.append(ours(Path(folder), turn, arguments.precision))
            print(f"turn {turn}: plain {theirs[-1]:.0f} tokens/s, ours {mine[-1]}", flush=True)
    ratio = statistics.median(m["tokens_per_s"] / p for m, p in zip(mine, theirs, strict=True))
    print(f"island tokens/s against plain: {ratio:.3f}")
    for key in ("utilisation", "utilisation_later", "start_s"):
        print(f"{key}: {statistics.median(m[key] for m in mine):.3f}")


if __name__ == "__main__":
    main()
