"""Rounds of one shard that keeps eight elements, for tests of what it does for blocks of the configuration."""

import numpy as np
import torch
from outer_world import WHOLE, flat, offer

from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.optimizer import Nesterov
from ray_diloco.outer.payload import Meta, Writer
from ray_diloco.outer.random_fragments import Draw
from ray_diloco.outer.shard import Contribution

NESTEROV = Nesterov(0.7, 0.9)
RANDOM = Draw("bernoulli", 0.5, 3)


def drawn(seed, numel=8):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def moved(shard, version, offers=None, **settings):
    """Makes the round that moves the anchor of a version; what it sends."""
    _, payload = shard.prepare(f"r{version}", 0, offers or [offer("i0", drawn(version), version=version)], **settings)
    shard.commit(f"r{version}")
    return payload


def anchor_of(shard):
    return flat(shard.tensors()).astype(np.float64)


def everything(shard):
    """All that is committed, as bytes."""
    return (
        repr(shard.versions),
        flat(shard.tensors()).tobytes(),
        *(flat(shard.state_tensors(name)).tobytes() for name in shard.recipe.state_names),
        *(repr(sorted((v, a.numpy().tobytes()) for v, a in part.past.items())) for part in shard._fragments),
        shard.payload(0).tobytes(),
        shard.published(0).tobytes(),
    )


def selected_offer(island, values, version, draw, base=None, ranges=WHOLE):
    """A contribution of the elements that a draw selects."""
    selection = draw.of(version)
    base = version if base is None else base
    at = selection.packed(ranges)
    writer = Writer(Fp32(), ranges, Meta("contribution", {0: base}, island), selection, numel=len(at))
    chosen = torch.from_numpy(np.float32(values)[at])
    for start in range(0, len(at), 4):
        writer.put(start, chosen[start : start + 4])
    return Contribution(island, 1.0, base, (writer.seal(Meta("contribution", {0: base}, island)),))
