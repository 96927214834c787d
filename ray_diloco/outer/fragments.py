"""Which parts of the model travel together: sets of whole tensors that partition the canonical form.

    whole     everything at once (DiLoCo)
    layers    some transformer blocks each, strided or consecutive (Streaming DiLoCo, 2501.18512 §2)
    bins      balanced bins of tensors, the embeddings apart (Decoupled DiLoCo, 2604.21428)
    random    everything; `selection.Selection` says for each round which elements travel (SPARTA)

A function of names and shapes alone, so all islands and shards find the same fragments in the same order
(../shared/algorithms.md §9.3, item 30).  A new one is one function and one line in `FRAGMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ray_diloco.errors import SyncError
from ray_diloco.outer.layout import Layout, Ranges, TensorSpec, normalise

# Where a tensor belongs: the name of its stack and its number in there, or None for a tensor outside all blocks.
Block = tuple[str, int]
BlockOf = Callable[[str], Block | None]

# Last parts of names by which GPT-2 and its kin call embeddings that do not have the word in their names.
_EMBEDDINGS = ("wte", "wpe")


@dataclass(frozen=True, slots=True)
class FragmentSettings:
    """What the kinds are told; each looks at its own.

    Attributes:
      size: transformer blocks per fragment (layers).
      strided: fragment `p` of `P` has blocks `p, p+P, p+2P…`, else consecutive ones (layers).
      count: number of fragments, at most one for each tensor (bins).
      block_of: finds the block of a tensor from its name (layers).
    """

    size: int
    strided: bool
    count: int
    block_of: BlockOf


def numbered_block(name: str) -> Block | None:
    """The first integer in a dotted name and what stands before it: `model.layers.7.mlp.up` → `("model.layers", 7)`."""
    parts = name.split(".")
    for k, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:k]), int(part)
    return None


def is_embedding(name: str) -> bool:
    """Whether a tensor is an embedding or the head of the language model."""
    parts = name.split(".")
    return "embed" in name or "lm_head" in parts or any(word in parts for word in _EMBEDDINGS)


def fragments_of(
    kind: str,
    layout: Layout,
    *,
    size: int = 3,
    strided: bool = True,
    count: int = 24,
    block_of: BlockOf = numbered_block,
) -> list[Ranges]:
    """Cuts a model into fragments of whole tensors.

    Args:
      kind: key of `FRAGMENTS`.
      layout: the canonical form.
      size: see `FragmentSettings`, like the other arguments.
      strided: see there.
      count: see there.
      block_of: see there.

    Returns:
      Disjoint sets that together are `layout.whole`, none of them empty.

    Raises:
      SyncError: RD-451 there are no such fragments, or size or count is below 1; RD-452 the model has no numbered
        blocks.
    """
    if kind not in FRAGMENTS:
        raise SyncError(451, f"there are no fragments of kind {kind!r}", f"use one of {', '.join(sorted(FRAGMENTS))}")
    for name, value in (("size", size), ("count", count)):
        if value < 1:
            raise SyncError(451, f"fragments.{name} is {value}", "use a whole number above 0")
    tensors = [spec for spec in layout.tensors if spec.numel]
    if not tensors:
        return []
    groups = FRAGMENTS[kind](tensors, FragmentSettings(size, strided, count, block_of))
    return [normalise(spec.range for spec in group) for group in groups]


def offsets(count: int, H: int, spread: bool) -> tuple[int, ...]:
    """Steps by which each of `count` fragments is emitted later than the first, within `H` steps.

    Args:
      count: number of fragments.
      H: inner steps between two emissions of a fragment.
      spread: fragments take turns, `⌊p·H/count⌋`; else all are emitted together.
    """
    return tuple(p * H // count if spread else 0 for p in range(count))


def _whole(tensors: Sequence[TensorSpec], settings: FragmentSettings) -> list[list[TensorSpec]]:
    return [list(tensors)]


def _layers(tensors: Sequence[TensorSpec], settings: FragmentSettings) -> list[list[TensorSpec]]:
    """Blocks in the order of their stacks and numbers; what is outside them goes to the smallest fragments.

    Embeddings, the final norm and the head have no fragment of their own: there are `⌈blocks / size⌉` of them, as in
    the paper, and the sizes stay as even as whole tensors allow.
    """
    blocks: dict[Block, list[TensorSpec]] = {}
    outside = []
    for spec in tensors:
        block = settings.block_of(spec.name)
        if block is None:
            outside.append(spec)
        else:
            blocks.setdefault(block, []).append(spec)
    if not blocks:
        what = f"no name of a tensor has the number of a transformer block, such as that of {tensors[0].name}"
        raise SyncError(452, what, "use fragments.kind bins or whole for this model")
    stacks = list(dict.fromkeys(stack for stack, _ in blocks))
    ordered = sorted(blocks, key=lambda block: (stacks.index(block[0]), block[1]))
    fragments: list[list[TensorSpec]] = [[] for _ in range(-(-len(ordered) // settings.size))]
    for k, block in enumerate(ordered):
        fragments[k % len(fragments) if settings.strided else k // settings.size] += blocks[block]
    return _pack(outside, fragments)


def _bins(tensors: Sequence[TensorSpec], settings: FragmentSettings) -> list[list[TensorSpec]]:
    """Embeddings are the first of the `count` fragments, so that with `count = H` one is due at each step."""
    embeddings = [spec for spec in tensors if is_embedding(spec.name)]
    others = [spec for spec in tensors if not is_embedding(spec.name)]
    if settings.count == 1:
        return [list(tensors)]
    apart = [embeddings] if embeddings else []
    bins: list[list[TensorSpec]] = [[] for _ in range(min(settings.count - len(apart), len(others)))]
    return apart + _pack(others, bins)


def _pack(tensors: Iterable[TensorSpec], bins: list[list[TensorSpec]]) -> list[list[TensorSpec]]:
    """Puts tensors into bins, largest first into the smallest; ties go to the lower bin and the earlier tensor."""
    load = [sum(spec.numel for spec in group) for group in bins]
    for spec in sorted(tensors, key=lambda spec: (-spec.numel, spec.offset)):
        k = load.index(min(load))
        bins[k].append(spec)
        load[k] += spec.numel
    return bins


FRAGMENTS: dict[str, Callable[[Sequence[TensorSpec], FragmentSettings], list[list[TensorSpec]]]] = {
    "whole": _whole,
    "layers": _layers,
    "bins": _bins,
    "random": _whole,
}
