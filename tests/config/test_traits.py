"""The tables of traits against the blocks of `outer/` themselves: `config/` imports none of them."""

import itertools
from dataclasses import replace

import pytest
import torch

from ray_diloco.config.blocks import MergeConfig
from ray_diloco.config.traits import ADOPT_TRAITS, CODEC_TRAITS, DENSE_CODECS, MERGE_TRAITS, OUTER_TRAITS
from ray_diloco.errors import SyncError
from ray_diloco.outer.adopt import ADOPTS, adopt_of
from ray_diloco.outer.chunks import CHUNK
from ray_diloco.outer.codec import CODECS, codec_of
from ray_diloco.outer.merge import MERGES, MergeSettings
from ray_diloco.outer.optimizer import OPTIMIZERS
from ray_diloco.outer.shaped import SHAPED, shaped_of

BLOCKED = [name for name, traits in CODEC_TRAITS.items() if traits.largest_block]


def decoded(name: str, values: torch.Tensor) -> torch.Tensor:
    """A matrix as it comes out of a codec."""
    out = torch.empty_like(values)
    if name in SHAPED:
        shaped, shape = shaped_of(name), tuple(values.shape)
        message = torch.zeros(shaped.nbytes(shape), dtype=torch.uint8)
        shaped.encode(values.flatten(), shape, message)
        shaped.decode(message, shape, out.view(-1))
        return out
    codec = codec_of(name)
    message = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values.flatten(), message)
    codec.decode(message, out.view(-1))
    return out


@pytest.mark.parametrize("name", CODEC_TRAITS)
def test_a_codec_says_the_same_of_itself(name: str) -> None:
    traits = CODEC_TRAITS[name]
    assert traits.whole_tensors == (name in SHAPED)
    assert traits.linear == (shaped_of(name) if name in SHAPED else codec_of(name)).traits.linear


@pytest.mark.parametrize("name", CODEC_TRAITS)
def test_a_sparse_codec_leaves_elements_out_and_no_other_does(name: str) -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).sign() + 0.5
    if name == "dct":
        # What is sparse there are coefficients: the transform of what comes out has zeros, of what went in it has none.
        values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        assert torch.linalg.norm(decoded(name, values)) < 0.5 * torch.linalg.norm(values)
        return
    assert bool((decoded(name, values) == 0).any()) == CODEC_TRAITS[name].sparse


@pytest.mark.parametrize("name", CODEC_TRAITS)
def test_a_codec_for_parameters_keeps_every_element_to_a_hundredth_of_the_largest(name: str) -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) * 0.02 + 1.0
    values[5, 7], values[9, 9] = 3.0, 2.0
    error = (decoded(name, values) - values).abs().max() / values.abs().max()
    assert (float(error) < 0.01) == CODEC_TRAITS[name].for_parameters


@pytest.mark.parametrize("name", BLOCKED)
def test_the_largest_block_is_accepted_and_a_larger_one_is_not(name: str) -> None:
    build = shaped_of if name in SHAPED else codec_of
    largest = CODEC_TRAITS[name].largest_block
    build(name, {"block": largest})
    with pytest.raises(SyncError):
        build(name, {"block": 2 * largest})
    if name not in SHAPED:
        assert largest == CHUNK
        with pytest.raises(SyncError):
            build(name, {"block": 1000})


@pytest.mark.parametrize("name", [name for name in CODEC_TRAITS if name not in BLOCKED])
def test_other_codecs_have_no_block(name: str) -> None:
    with pytest.raises(SyncError):
        (shaped_of if name in SHAPED else codec_of)(name, {"block": 64})


@pytest.mark.parametrize("name", ["topk", "mask", "low_rank", "dct"])
def test_kept_values_travel_in_the_codecs_that_are_allowed(name: str) -> None:
    build = shaped_of if name in SHAPED else codec_of
    fitting = (*DENSE_CODECS, "sign") if name == "dct" else DENSE_CODECS
    for values in {*CODECS, *SHAPED, "sign"}:
        if values in fitting:
            build(name, {"values": values})
        elif name in ("topk", "mask"):
            with pytest.raises(SyncError):
                build(name, {"values": values})


def test_topk_keeps_no_more_than_its_own_block_has() -> None:
    codec_of("topk", {"k": 4096})
    with pytest.raises(SyncError):
        codec_of("topk", {"k": 4097})


@pytest.mark.parametrize("kind", MERGE_TRAITS)
def test_a_merge_says_the_same_of_itself(kind: str) -> None:
    traits, rule = MERGE_TRAITS[kind], MERGES[kind]
    assert (traits.scope, traits.needs_individuals, traits.reads_weights) == (
        rule.scope,
        rule.needs_individuals,
        rule.reads_weights,
    )
    for byzantine, trim, keep in itertools.product(range(4), repeat=3):
        told = {"byzantine": byzantine, "trim": trim, "keep": keep}
        assert traits.least(replace(MergeConfig(), **told)) == rule.minimum(MergeSettings(**told))
    assert traits.robust == (rule.minimum(MergeSettings(byzantine=1)) > 1)


@pytest.mark.parametrize("kind", OUTER_TRAITS)
def test_an_outer_optimiser_says_the_same_of_itself(kind: str) -> None:
    traits, optimizer = OUTER_TRAITS[kind], OPTIMIZERS[kind]
    assert traits.momentum == (optimizer.momentum_state is not None)
    assert traits.compounds == optimizer.compounds_when_async


@pytest.mark.parametrize("kind", ADOPT_TRAITS)
def test_a_rule_of_adoption_says_the_same_of_itself(kind: str) -> None:
    assert set(ADOPTS) == set(ADOPT_TRAITS)
    assert ADOPT_TRAITS[kind].reads_outer_state == adopt_of(kind).reads_outer_state
