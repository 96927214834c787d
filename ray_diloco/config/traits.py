"""What the choices of the blocks are like, as far as the checker of combinations must know.

Flags of algorithms.md §10.3, by the names that a configuration uses.  The blocks themselves live in `outer/`, which
imports torch; a test holds these tables to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ray_diloco.config.blocks import MergeConfig


@dataclass(frozen=True)
class CodecTraits:
    """What a codec is.

    Attributes:
      for_parameters: it carries parameters, not only differences, which are small and centred: no element is left out
        or cut, and the error is below a hundredth of the largest one.
      sparse: it leaves elements out.
      whole_tensors: it works on tensors with their shape, not on any run of elements.
      needs_feedback: what it leaves out is large enough that error feedback has to bring it later.
      largest_block: of `codec.*.block`, in elements, or for dct the side of a tile; 0: it has none.
      linear: a sum of codes is the code of the sum.
    """

    for_parameters: bool = False
    sparse: bool = False
    whole_tensors: bool = False
    needs_feedback: bool = False
    largest_block: int = 0
    linear: bool = False


# Elements of one pass (`outer/chunks.py`), which blocks of a codec divide.
_CHUNK = 262144

CODEC_TRAITS: dict[str, CodecTraits] = {
    "fp32": CodecTraits(for_parameters=True, linear=True),
    "bf16": CodecTraits(for_parameters=True),
    "fp16": CodecTraits(for_parameters=True),
    "int8": CodecTraits(for_parameters=True, largest_block=_CHUNK),
    "int8_bin_mean": CodecTraits(),
    "int4": CodecTraits(largest_block=_CHUNK),
    "e3m0": CodecTraits(),
    "2bit": CodecTraits(needs_feedback=True),
    "1bit": CodecTraits(needs_feedback=True),
    "topk": CodecTraits(sparse=True, needs_feedback=True, largest_block=_CHUNK),
    "mask": CodecTraits(sparse=True, needs_feedback=True, largest_block=_CHUNK, linear=True),
    "dct": CodecTraits(sparse=True, whole_tensors=True, needs_feedback=True, largest_block=256),
    "low_rank": CodecTraits(whole_tensors=True, needs_feedback=True),
}
# Codecs of every element: they may also carry what the others keep.
DENSE_CODECS = tuple(name for name, traits in CODEC_TRAITS.items() if not (traits.sparse or traits.whole_tensors))


@dataclass(frozen=True)
class MergeTraits:
    """What a merge rule needs.

    Attributes:
      scope: what its factors are found over.
      needs_individuals: the sum of the contributions is not enough.
      reads_weights: a contribution that claims a large weight moves the result.
      robust: it bears contributions that may be anything.
      least: fewest contributions that it works with.
    """

    scope: Literal["element", "tensor", "whole"] = "element"
    needs_individuals: bool = True
    reads_weights: bool = True
    robust: bool = False
    least: Callable[[MergeConfig], int] = lambda merge: 1


def _most(merge: MergeConfig) -> int:
    return 2 * merge.byzantine + 1


MERGE_TRAITS: dict[str, MergeTraits] = {
    "mean": MergeTraits(needs_individuals=False),
    "mean_over_senders": MergeTraits(),
    "rda": MergeTraits("tensor"),
    "median": MergeTraits(reads_weights=False, robust=True, least=_most),
    "trimmed_mean": MergeTraits(
        reads_weights=False, robust=True, least=lambda merge: 2 * max(merge.trim, merge.byzantine) + 1
    ),
    "krum": MergeTraits("whole", reads_weights=False, robust=True, least=lambda merge: 2 * merge.byzantine + 3),
    "multi_krum": MergeTraits(
        "whole",
        reads_weights=False,
        robust=True,
        least=lambda merge: max(2 * merge.byzantine + 3, merge.keep + merge.byzantine),
    ),
    "bulyan": MergeTraits("whole", reads_weights=False, robust=True, least=lambda merge: 4 * merge.byzantine + 3),
    "geometric_median": MergeTraits("whole", robust=True, least=_most),
    "centred_clipping": MergeTraits("whole", robust=True, least=_most),
}


@dataclass(frozen=True)
class OuterTraits:
    """What an outer optimiser is.

    Attributes:
      momentum: it keeps a momentum that can be looked ahead along, or compared with.
      compounds: that momentum adds up over steps without being scaled by 1 − μ, so that the same work in more steps
        moves the anchor further.
    """

    momentum: bool = False
    compounds: bool = False


OUTER_TRAITS: dict[str, OuterTraits] = {
    "nesterov": OuterTraits(momentum=True, compounds=True),
    "sgd": OuterTraits(),
    "heavy_ball": OuterTraits(momentum=True, compounds=True),
    "lookahead_nesterov": OuterTraits(momentum=True, compounds=True),
    "ema_nesterov": OuterTraits(momentum=True),
    "delayed_nesterov": OuterTraits(momentum=True),
    "adamw": OuterTraits(),
    "adam": OuterTraits(),
    "yogi": OuterTraits(),
    "adagrad": OuterTraits(),
    "sign": OuterTraits(),
}


@dataclass(frozen=True)
class AdoptTraits:
    """What a rule of adoption is.

    Attributes:
      reads_outer_state: an island starts from where the outer momentum is going, not from the anchor alone.
      keeps_own: an island's parameters stay as they are.
    """

    reads_outer_state: bool = False
    keeps_own: bool = False


ADOPT_TRAITS: dict[str, AdoptTraits] = {
    "overwrite": AdoptTraits(),
    "mix": AdoptTraits(),
    "keep": AdoptTraits(keeps_own=True),
    "keep_own": AdoptTraits(keeps_own=True),
    "rebase": AdoptTraits(),
    "compensated_rebase": AdoptTraits(),
    "lookahead": AdoptTraits(reads_outer_state=True),
}
