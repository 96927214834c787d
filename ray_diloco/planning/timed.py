"""An inner step, timed here: forward, backward and AdamW of the model in plain torch, on one batch, for one rank.

Without DeepSpeed and on an idle machine, so it is what a step takes at best (../shared/ray-and-deepspeed.md Part 2 §6
compares the two).
"""

from __future__ import annotations

import time

import torch

from ray_diloco.config.schema import Config
from ray_diloco.inner.model import build_model
from ray_diloco.planning.model import vocabulary

_STEPS = 3


def timed_step(config: Config) -> float:
    """Seconds of a step of one rank; the best of a few."""
    inner, length = config.inner, config.data.sequence_length
    vocab_size = vocabulary(config)
    before = torch.get_num_threads()
    torch.set_num_threads(config.islands.threads or max(1, int(config.islands.cpus_per_rank)))
    try:
        model = build_model(config.model, vocab_size, None, length, config.run.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        tokens = torch.zeros(inner.micro_batch, length, dtype=torch.long)
        seconds = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            for _ in range(inner.gradient_accumulation):
                model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        return min(seconds)
    finally:
        torch.set_num_threads(before)
