"""What a run keeps in memory, in bytes: a rank, an anchor shard, the object store.  The driver holds no tensors.

Counted from what the code allocates: `outer/held.py`, `outer/sides.py`, `outer/writer.py`, and the optimisers of the
inner step.  Activations, the libraries themselves and what they cache are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_diloco.blocks import CONTROL, Channel, adopt_of, recipe_of
from ray_diloco.config.schema import InnerConfig
from ray_diloco.planning.traffic import Traffic

# fp32 vectors of state that an inner optimiser keeps for each parameter.
_INNER_STATES = {"adamw": 2, "sgd": 0, "muon": 1, "raw": 0}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors.

    Attributes:
      model: of a rank: parameters, gradients and inner optimiser state.
      exchange: of a rank: bases, error memory, messages, what rules of adoption keep.
      shard: of the largest anchor shard.
      store: in the object store of the anchor's node while a round is merged.
      driver: tensors in the driver.
    """

    model: int
    exchange: int
    shard: int
    store: int
    driver: int = 0


def memory_of(traffic: Traffic, channels: Sequence[Channel], inner: InnerConfig, ranks: int) -> Memory:
    """Memory of a run whose islands have `ranks` ranks."""
    up = max(sum(f.up[name] for c in traffic.channels for f in c.fragments) for name in traffic.islands)
    down = sum(f.down for c in traffic.channels for f in c.fragments)
    exchange = sum(_exchange_bytes(channel, traffic.parameters, ranks, inner.zero_stage) for channel in channels)
    return Memory(
        _model_bytes(inner, traffic.parameters, ranks),
        exchange + math.ceil(up / ranks),
        sum(_shard_bytes(channel, traffic.parameters) for channel in channels) // traffic.shards
        + _down_memory(traffic, channels) // traffic.shards,
        _in_flight(traffic) + down,
    )


def _model_bytes(inner: InnerConfig, parameters: int, ranks: int) -> int:
    """fp32 masters, gradients and states; with bf16 half-width parameters and gradients beside them (ZeRO 0 to 3)."""
    stage = inner.zero_stage
    states = _INNER_STATES.get(inner.optimizer.name, 2)
    if inner.optimizer.name == "sgd" and inner.optimizer.momentum:
        states = 1
    whole, part = parameters, -(-parameters // ranks)
    width = 2 if inner.precision == "bf16" else 4
    kept = 4 * states * (part if stage >= 1 else whole)
    if stage == 0:
        return kept + 2 * width * whole
    weights = width * (part if stage == 3 else whole)
    gradients = width * (part if stage >= 2 else whole)
    # ZeRO keeps fp32 masters apart from what computes, at every precision.
    return kept + weights + gradients + 4 * part


def _exchange_bytes(channel: Channel, parameters: int, ranks: int, stage: int) -> int:
    emitted = -(-parameters // ranks)
    held = parameters if stage == 0 else emitted
    control = channel.signal == CONTROL
    vectors = 4 * emitted
    vectors += 4 * emitted if channel.up.feedback else 0
    vectors += 4 * held if adopt_of(channel).reads_emitted else 0
    # Its own control and the shared one.
    return vectors + (4 * held + 4 * emitted if control else 0)


def _shard_bytes(channel: Channel, parameters: int) -> int:
    """Two sides of anchor and state, where plain fp32 messages are the anchor, and anchors that are still needed."""
    recipe = recipe_of(channel)
    apart = channel.down.kind != "fp32" or recipe.lookahead
    return 4 * parameters * (2 * (len(recipe.initials) + (1 if apart else 0)) + recipe.passed + recipe.past)


def _down_memory(traffic: Traffic, channels: Sequence[Channel]) -> int:
    """Two messages of each fragment, whole even where a selection travels."""
    found = 0
    for channel, moved in zip(channels, traffic.channels, strict=True):
        whole = channel.fragments.kind == "random"
        found += 2 * (4 * traffic.parameters if whole else sum(f.down for f in moved.fragments))
    return found


def _in_flight(traffic: Traffic) -> int:
    """The largest fragment's messages from all islands."""
    return max(sum(f.up.values()) for c in traffic.channels for f in c.fragments)
