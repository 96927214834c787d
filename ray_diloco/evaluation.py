"""Held-out loss of a committed anchor in this process, without Ray and DeepSpeed.

The same blocks in micro-batches of the same composition as in the run, so the figure is the run's own.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from ray_diloco.checkpoint.reader import no_commit
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.config.schema import Config
from ray_diloco.data.blocks import prepare
from ray_diloco.inner.evaluate import block_losses
from ray_diloco.inner.model import build_model
from ray_diloco.observe.metrics import perplexity


def evaluate_run(folder: Path, config: Config) -> dict[str, Any]:
    """Evaluates the newest commit of the run in `folder`; see `api.evaluate`.

    Raises:
      CommittedError: RD-563, the run has no commit.
      CheckpointError: 5xx, it cannot be read.
      DataError: its data cannot be prepared.
    """
    store = CheckpointStore(config.run.storage or str(folder))
    manifest = store.newest()
    if manifest is None:
        raise no_commit(folder)
    corpus = prepare(config.data, config.tokenizer)
    model = build_model(config.model, corpus.vocab_size, corpus.eos_id, config.data.sequence_length, config.run.seed)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, array in store.load(manifest):
            parameters[name].copy_(from_dlpack(array))
    model.eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    blocks = corpus.open().heldout(np.arange(corpus.heldout_blocks))
    with torch.no_grad():
        losses = block_losses(lambda ids: model(input_ids=ids, labels=ids), blocks, config.inner.micro_batch, device)
    tokens = sum(count for _, count in losses)
    loss = math.fsum(nats for nats, _ in losses) / tokens if tokens else math.nan
    return {
        "run": config.run.name,
        "round": manifest.round,
        "loss": loss,
        "ppl": perplexity(loss),
        "blocks": len(losses),
        "tokens": tokens,
        "unigram_entropy": corpus.unigram_entropy,
    }
