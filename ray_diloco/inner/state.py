"""The inner optimiser's state in canonical pieces: saved, restored into any world size or ZeRO stage, or reset.

A piece is named `<state>|<start>:<stop>|<tensor>`, with `start` and `stop` counted inside the tensor, and is fp32; the
step count is `step`.  The pieces of an island's ranks are disjoint, so the island's state is their union.  Nothing is
exchanged between islands.  State is reached by the optimiser's flat tensors, since DeepSpeed 0.19.8 links its own
fragments for the first parameter group only.  Source: ../shared/ray-and-deepspeed.md Part 2 §3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from ray_diloco.errors import InnerError
from ray_diloco.inner.slices import Home
from ray_diloco.outer.layout import Range, Ranges, intersect, overlaps

STEP = "step"
# Names of the tensors that are kept for each parameter, by the parameter's name.
Names = Mapping[str, tuple[str, ...]]


def read_state(
    optimizer: torch.optim.Optimizer, homes: tuple[Home, ...], emits: Ranges, names: Names
) -> dict[str, np.ndarray]:
    """Copies of the state of the elements `emits`, by piece; an optimiser that has not stepped has none."""
    pieces: dict[str, np.ndarray] = {}
    for home in homes:
        state = optimizer.state.get(home.flat)
        if not state:
            continue
        if STEP in state:
            pieces[STEP] = np.asarray(int(state[STEP]), dtype=np.int64)
        for r in intersect((home.range,), emits):
            for name in names[home.spec.name]:
                part = home.part_of(state[name]).narrow(0, r.start - home.range.start, r.numel)
                pieces[_key(name, home, r)] = part.cpu().numpy().copy()
    return pieces


def write_state(
    optimizer: torch.optim.Optimizer, homes: tuple[Home, ...], names: Names, pieces: Mapping[str, np.ndarray]
) -> None:
    """Restores the state of all elements of `homes` from pieces of any cut, bit by bit.

    No pieces at all is the state of an optimiser that has not stepped.

    Raises:
      InnerError: RD-730, an element is covered by no piece; nothing has been changed then.
    """
    if not pieces:
        reset_state(optimizer, homes)
        return
    saved = _by_tensor(pieces)
    for home in homes:
        for name in names[home.spec.name]:
            _check_cover(home, name, saved[name, home.spec.name])
    _ensure_state(optimizer, homes, names)
    for home in homes:
        state = optimizer.state[home.flat]
        if STEP in state:
            state[STEP].fill_(float(pieces.get(STEP, 0)))
        for name in names[home.spec.name]:
            target = home.part_of(state[name])
            for start, array in saved[name, home.spec.name]:
                first = home.spec.offset + start
                for at_saved, at_home, n in overlaps((Range(first, first + array.size),), (home.range,)):
                    target.narrow(0, at_home, n).copy_(from_dlpack(array[at_saved : at_saved + n]))


def reset_state(optimizer: torch.optim.Optimizer, homes: tuple[Home, ...]) -> None:
    """Zeroes the state in place: the next step is then that of a new optimiser, exactly."""
    for flat in _flats(homes):
        for value in optimizer.state.get(flat, {}).values():
            value.zero_()


def _ensure_state(optimizer: torch.optim.Optimizer, homes: tuple[Home, ...], names: Names) -> None:
    """Creates what an optimiser creates at its first step, so that it can be filled before."""
    # The pieces of a flat tensor are of one parameter group, hence of one kind.
    for home in {id(home.flat): home for home in homes}.values():
        state, kept = optimizer.state[home.flat], names[home.spec.name]
        if state:
            continue
        if "exp_avg" in kept:
            # Adam counts its steps, the others do not.
            state[STEP] = torch.zeros((), dtype=torch.float32, device=home.flat.device)
        for name in kept:
            state[name] = torch.zeros_like(home.flat.detach())


def _flats(homes: tuple[Home, ...]) -> Iterator[torch.Tensor]:
    yield from {id(home.flat): home.flat for home in homes}.values()


def _key(name: str, home: Home, r: Range) -> str:
    return f"{name}|{r.start - home.spec.offset}:{r.stop - home.spec.offset}|{home.spec.name}"


def _by_tensor(pieces: Mapping[str, np.ndarray]) -> defaultdict[tuple[str, str], list[tuple[int, np.ndarray]]]:
    """Pieces as `(start in the tensor, values)`, ascending, by state and tensor name."""
    found: defaultdict[tuple[str, str], list[tuple[int, np.ndarray]]] = defaultdict(list)
    for key, array in pieces.items():
        if key != STEP:
            name, span, tensor = key.split("|", 2)
            found[name, tensor].append((int(span.split(":")[0]), array))
    for parts in found.values():
        parts.sort(key=lambda part: part[0])
    return found


def _check_cover(home: Home, name: str, parts: list[tuple[int, np.ndarray]]) -> None:
    reached = home.range.start
    for start, array in parts:
        if home.spec.offset + start <= reached:
            reached = max(reached, home.spec.offset + start + array.size)
    if reached < home.range.stop:
        raise InnerError(
            730,
            f"the saved inner state lacks {name} of {home.spec.name} from element {reached - home.spec.offset} on",
            "restore the state of all ranks of the island together, or reset the inner state",
        )
