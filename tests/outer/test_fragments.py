"""Which tensors travel together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.fragments import fragments_of, is_embedding, numbered_block, offsets
from ray_diloco.outer.layout import Range, layout_of, normalise, total


def transformer(blocks, embedding=(50, 4)):
    """A model like Llama: embedding, `blocks` blocks of 10 elements in two tensors, final norm, head."""
    shapes = [("model.embed_tokens.weight", embedding)]
    for k in range(blocks):
        shapes += [(f"model.layers.{k}.mlp.weight", (3, 3)), (f"model.layers.{k}.norm.weight", (1,))]
    return layout_of([*shapes, ("model.norm.weight", (4,)), ("lm_head.weight", (30, 4))])


def names_in(layout, fragment):
    """Names of the tensors that lie in a fragment, each of which must lie in it wholly or not at all."""
    held = {e for r in fragment for e in range(r.start, r.stop)}
    found = []
    for spec in layout.tensors:
        elements = set(range(spec.range.start, spec.range.stop))
        assert elements <= held or not elements & held
        if elements and elements <= held:
            found.append(spec.name)
    return found


def blocks_in(layout, fragment):
    return sorted({int(name.split(".")[2]) for name in names_in(layout, fragment) if ".layers." in name})


names = st.lists(
    st.one_of(
        st.builds("h.{}.{}".format, st.integers(0, 8), st.sampled_from(["w", "b", "embed"])),
        st.sampled_from(["wte.weight", "norm", "lm_head.weight", "encoder.2.w", "a.b"]),
    ),
    unique=True,
    min_size=1,
    max_size=12,
)
shapes = st.lists(st.integers(0, 9), min_size=12, max_size=12)
kinds = st.sampled_from(["whole", "layers", "bins", "random"])


def test_the_whole_model_is_one_fragment():
    layout = transformer(2)
    assert fragments_of("whole", layout) == [layout.whole]


def test_random_fragments_are_drawn_from_the_whole_model():
    layout = transformer(2)
    assert fragments_of("random", layout) == [layout.whole]


@given(names, shapes, kinds, st.integers(1, 4), st.booleans(), st.integers(1, 9))
def test_fragments_are_a_partition_into_whole_tensors_and_none_is_empty(found, sizes, kind, size, strided, count):
    layout = layout_of((name, (n,)) for name, n in zip(found, sizes, strict=False))
    try:
        fragments = fragments_of(kind, layout, size=size, strided=strided, count=count)
    except SyncError as error:
        assert kind == "layers" and error.number == 452
        assert not any(numbered_block(spec.name) for spec in layout.tensors if spec.numel)
        return
    assert normalise(r for fragment in fragments for r in fragment) == layout.whole
    assert sum(total(fragment) for fragment in fragments) == layout.numel
    held = [name for fragment in fragments for name in names_in(layout, fragment)]
    assert sorted(held) == sorted(spec.name for spec in layout.tensors if spec.numel)
    assert all(total(fragment) and normalise(fragment) == fragment for fragment in fragments)
    assert fragments_of(kind, layout, size=size, strided=strided, count=count) == fragments


def test_strided_layers_skip_as_many_blocks_as_there_are_fragments():
    layout = transformer(8)
    found = fragments_of("layers", layout, size=3, strided=True)
    assert [blocks_in(layout, fragment) for fragment in found] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_consecutive_layers_stand_side_by_side():
    layout = transformer(8)
    found = fragments_of("layers", layout, size=3, strided=False)
    assert [blocks_in(layout, fragment) for fragment in found] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_blocks_are_ordered_by_number_and_not_by_text_or_place():
    layout = layout_of((f"h.{k}.w", (1,)) for k in [10, 9, 2, 1])
    found = fragments_of("layers", layout, size=2, strided=False)
    assert [names_in(layout, fragment) for fragment in found] == [["h.2.w", "h.1.w"], ["h.10.w", "h.9.w"]]


def test_two_stacks_with_the_same_numbers_are_different_blocks():
    layout = layout_of((f"{stack}.{k}.w", (1,)) for stack in ("encoder", "decoder") for k in range(2))
    found = fragments_of("layers", layout, size=2, strided=False)
    assert [names_in(layout, fragment) for fragment in found] == [
        ["encoder.0.w", "encoder.1.w"],
        ["decoder.0.w", "decoder.1.w"],
    ]


def test_the_number_of_an_expert_does_not_make_a_block():
    assert numbered_block("model.layers.7.mlp.experts.3.up.weight") == ("model.layers", 7)
    assert numbered_block("model.norm.weight") is None


def test_what_is_outside_the_blocks_goes_largest_first_to_the_smallest_fragment():
    # Blocks of 10 elements: fragments of 20, 20 and 10.  200 join the 10, 120 the first 20, 4 the other 20.
    layout = transformer(5)
    found = fragments_of("layers", layout, size=2, strided=True)
    outside = [[name for name in names_in(layout, fragment) if ".layers." not in name] for fragment in found]
    assert outside == [["lm_head.weight"], ["model.norm.weight"], ["model.embed_tokens.weight"]]
    assert [total(fragment) for fragment in found] == [140, 24, 210]


def test_a_rule_of_ones_own_finds_the_blocks():
    layout = layout_of([("first/w", (1,)), ("second/w", (1,))])
    found = fragments_of("layers", layout, size=1, block_of=lambda name: ("", ["first", "second"].index(name[:-2])))
    assert found == [(Range(0, 1),), (Range(1, 2),)]


def test_a_model_without_numbered_blocks_has_no_layers():
    with pytest.raises(SyncError, match=r"wte\.weight") as caught:
        fragments_of("layers", layout_of([("wte.weight", (4, 4)), ("head.weight", (4, 4))]))
    assert caught.value.number == 452


def test_bins_are_balanced_and_embeddings_are_apart():
    # 9, 9, 9, 9 and 4, 1, 1, 1, 1 in two bins: 9+9+4 = 22 and 9+9+1+1+1+1 = 22.
    layout = transformer(4)
    embeddings, *bins = fragments_of("bins", layout, count=3)
    assert names_in(layout, embeddings) == ["model.embed_tokens.weight", "lm_head.weight"]
    assert [total(fragment) for fragment in bins] == [22, 22]


def test_there_are_never_more_bins_than_tensors():
    layout = transformer(1)
    found = fragments_of("bins", layout, count=24)
    assert [len(names_in(layout, fragment)) for fragment in found] == [2, 1, 1, 1]


def test_a_model_without_embeddings_uses_all_its_bins():
    layout = layout_of((f"w{k}", (2,)) for k in range(4))
    assert [total(fragment) for fragment in fragments_of("bins", layout, count=2)] == [4, 4]


def test_one_bin_is_the_whole_model():
    layout = transformer(3)
    assert fragments_of("bins", layout, count=1) == [layout.whole]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 8))
def test_no_bin_is_larger_than_the_smallest_by_more_than_a_tensor(sizes, count):
    layout = layout_of((f"w{k}", (n,)) for k, n in enumerate(sizes))
    found = [total(fragment) for fragment in fragments_of("bins", layout, count=count)]
    assert len(found) == min(count, len(sizes))
    assert max(found) - min(found) <= max(sizes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", True),
        ("gpt_neox.embed_out.weight", True),
        ("transformer.wte.weight", True),
        ("lm_head.weight", True),
        ("model.layers.0.mlp.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_embeddings_are_known_by_their_names(name, expected):
    assert is_embedding(name) is expected


@pytest.mark.parametrize(("kind", "settings"), [("thirds", {}), ("layers", {"size": 0}), ("bins", {"count": 0})])
def test_fragments_that_there_are_not_are_refused(kind, settings):
    with pytest.raises(SyncError) as caught:
        fragments_of(kind, transformer(2), **settings)
    assert caught.value.number == 451


def test_a_model_without_elements_has_no_fragments():
    assert fragments_of("layers", layout_of([("h.0.w", (0,))])) == []


def test_offsets_are_even_or_all_zero():
    assert offsets(3, 100, spread=True) == (0, 33, 66)
    assert offsets(24, 24, spread=True) == tuple(range(24))
    assert offsets(4, 2, spread=True) == (0, 0, 1, 1)
    assert offsets(3, 100, spread=False) == (0, 0, 0)
