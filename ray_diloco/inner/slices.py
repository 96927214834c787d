"""Where the canonical form lives in a rank's memory, at every ZeRO stage.

A `Home` is a piece of one tensor: its canonical range, and the stretch of one of the optimiser's flat fp32 tensors
that holds it.  Parameters and optimiser state are both reached through it, as views, so reading copies nothing and
writing needs no engine.  Stages 1 and 2 keep the map in `p._hp_mapping` (semi-private, the only way), stage 3 has a
public local API.  Source: ../shared/ray-and-deepspeed.md Part 2 §2, bit-exact at every stage; the option
`round_robin_gradients` would break it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ray_diloco.outer.exchange import Slice
from ray_diloco.outer.layout import Layout, Range, Ranges, TensorSpec, layout_of, normalise, split_evenly

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Home:
    """A piece of a tensor and where the optimiser keeps it.

    Attributes:
      spec: the tensor in the canonical layout.
      range: the elements of this piece, in the flat canonical space.
      flat: fp32 tensor that the optimiser steps; its state has the same shape.
      at: first element of the piece in `flat.view(-1)`.
    """

    spec: TensorSpec
    range: Range
    flat: torch.Tensor
    at: int

    @property
    def values(self) -> torch.Tensor:
        """1-D fp32 view of the piece; writing it changes the master weights."""
        return self.part_of(self.flat)

    def part_of(self, like_flat: torch.Tensor) -> torch.Tensor:
        """1-D view of this piece in a tensor that is laid out as `flat` (optimiser state)."""
        return like_flat.detach().view(-1).narrow(0, self.at, self.range.numel)


def layout_of_model(model: nn.Module) -> Layout:
    """Canonical layout of the trainable tensors, tied weights once; asked before DeepSpeed shards them."""
    return layout_of((name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad)


def find_homes(engine: DeepSpeedEngine, layout: Layout, stage: int) -> tuple[Home, ...]:
    """What this rank holds of the master weights, ascending; empty pieces are left out."""
    parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    find = {0: _whole, 1: _mapped, 2: _mapped, 3: _partitioned}[stage]
    homes = (find(engine, spec, parameters[spec.name]) for spec in layout.tensors)
    return tuple(home for home in homes if home is not None and home.range.numel > 0)


def slices_of(homes: tuple[Home, ...]) -> tuple[Slice, ...]:
    """The same pieces as slices of the canonical form."""
    return tuple(Slice(home.range, home.values) for home in homes)


def emitted_ranges(homes: tuple[Home, ...], layout: Layout, stage: int, rank: int, world: int) -> Ranges:
    """What this rank emits: the ranks' parts cover the canonical space once.

    Every rank holds everything at stage 0, so each emits an equal share; from stage 1 on each emits what it holds.
    """
    if stage == 0:
        return split_evenly(layout.whole, world)[rank]
    return normalise(home.range for home in homes)


def commit_writes(engine: DeepSpeedEngine, stage: int) -> None:
    """Copies written master weights to the model that computes; a collective of the island from stage 1 on."""
    if stage in (1, 2):
        engine.optimizer.update_lp_params()
    elif stage == 3:
        optimizer = engine.optimizer
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        # Small parameters stay gathered between steps; this gathers them anew.
        optimizer.checkpoint_event_epilogue()


def _whole(_: DeepSpeedEngine, spec: TensorSpec, p: torch.Tensor) -> Home:
    return Home(spec, spec.range, p, 0)


def _mapped(engine: DeepSpeedEngine, spec: TensorSpec, p: torch.Tensor) -> Home | None:
    mapping = p._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    start = spec.offset + mapping.lp_fragment_address.start
    flat = engine.basic_optimizer.param_groups[mapping.param_group_index]["params"][0]
    return Home(spec, Range(start, start + mapping.lp_fragment_address.numel), flat, mapping.hp_fragment_address.start)


def _partitioned(engine: DeepSpeedEngine, spec: TensorSpec, p: torch.Tensor) -> Home | None:
    import deepspeed.comm
    from deepspeed.utils import safe_get_local_fp32_param

    values = safe_get_local_fp32_param(p)
    part = p.ds_tensor.ds_numel  # type: ignore[attr-defined]
    first = deepspeed.comm.get_rank(group=p.ds_process_group) * part  # type: ignore[attr-defined]
    stop = min(first + part, spec.numel)
    if stop <= first:
        return None
    flat = next(f for f in engine.optimizer.fp32_partitioned_groups_flat if _contains(f, values))
    at = (values.data_ptr() - flat.data_ptr()) // flat.element_size()
    return Home(spec, Range(spec.offset + first, spec.offset + stop), flat, at)


def _contains(flat: torch.Tensor, part: torch.Tensor) -> bool:
    return flat.data_ptr() <= part.data_ptr() < flat.data_ptr() + flat.numel() * flat.element_size()
