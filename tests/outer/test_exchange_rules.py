"""Rules of adoption, random fragments and nested channels, rank and keeper together, against direct loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import Island, anchor_payload, chunk_size, elements, partitions

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.adopt import adopt_of
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import Range, intersect, layout_of, shard_ranges
from ray_diloco.outer.optimizer import EmaNesterov, Nesterov, Sgd
from ray_diloco.outer.payload import Meta, Writer
from ray_diloco.outer.random_fragments import Draw
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shard import AnchorShard, Contribution

LAYOUT = layout_of([("w", (4, 6)), ("b", (5,)), ("v", (3, 7)), ("s", ())])
WHOLE, N = LAYOUT.whole, LAYOUT.numel
META = Meta("contribution", {0: 0}, "i0")
RULES = {
    "overwrite": adopt_of("overwrite"),
    "mix": adopt_of("mix", alpha=0.25),
    "keep": adopt_of("keep"),
    "keep_own": adopt_of("keep_own"),
    "rebase": adopt_of("rebase"),
    "compensated_rebase": adopt_of("compensated_rebase", strength=2.0, delay=2, H=8),
    "lookahead": adopt_of("lookahead"),
}

chunk_sizes = st.sampled_from([1, 3, 8, 1024])


def drawn(seed):
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32).astype(np.float64)


def adopted(rule, theta, emitted, anchor):
    """The new `θ` and `B`, in float64."""
    d = theta - emitted
    return {
        "overwrite": (anchor, anchor),
        "lookahead": (anchor, anchor),
        "mix": (0.25 * theta + 0.75 * anchor, anchor),
        "keep": (theta, anchor),
        "keep_own": (theta, theta),
        "rebase": (anchor + d, anchor),
        "compensated_rebase": (anchor + d - 2.0 / (2 * 8) * d * d * (anchor - emitted), anchor),
    }[rule]


def bases(island):
    """`B` as the ranks that emit it have it."""
    values = np.full(N, np.nan)
    for rank, part in zip(island.ranks, island.parts, strict=True):
        at = 0
        for r in part:
            values[r.start : r.stop] = rank.base[at : at + r.numel]
            at += r.numel
    return values


class Keeper:
    """All shards of an anchor."""

    def __init__(self, recipe, start, count=1, fragments=(WHOLE,), draw=None):
        self.fragments = list(fragments)
        self.shards = [AnchorShard(LAYOUT, r, self.fragments, recipe, draw=draw) for r in shard_ranges(LAYOUT, count)]
        self.draw = draw
        for shard in self.shards:
            values = np.concatenate([start[r.start : r.stop] for r in shard.ranges] or [[]])
            writer = Writer(Fp32(), shard.ranges, Meta("parameters"))
            for at in range(0, writer.numel, chunks.CHUNK):
                writer.put(at, torch.from_numpy(values[at : at + chunks.CHUNK]).float())
            shard.found([writer.seal(Meta("parameters"))])

    def payloads(self):
        return [shard.payload(p) for shard in self.shards for p in range(len(self.fragments))]

    def anchor(self):
        tensors = {name: array for shard in self.shards for name, array in shard.tensors().items()}
        return np.concatenate([tensors[t.name].reshape(-1) for t in LAYOUT.tensors]).astype(np.float64)

    def offers(self, islands, p, version):
        """What islands offer to each shard."""
        found = []
        for shard in self.shards:
            kept = intersect(self.fragments[p], shard.ranges)
            selection = None if self.draw is None else self.draw.of(version)
            of_shard = []
            for island in islands:
                meta = Meta("contribution", {p: version}, island.name)
                sent = [r.emit(intersect(kept, r.emits), Fp32(), meta, selection).payload.copy() for r in island.ranks]
                of_shard.append(Contribution(island.name, 1.0, version, tuple(sent)))
            found.append(of_shard)
        return found

    def moved(self, p, version, offers):
        sent = []
        for shard, of_shard in zip(self.shards, offers, strict=True):
            sent.append(shard.prepare(f"{p}/{version}", p, of_shard)[1])
            shard.commit(f"{p}/{version}")
        return sent


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(RULES)), partitions(N, 3), st.booleans(), st.integers(1, 4), chunk_sizes)
def test_rounds_with_steps_between_emission_and_adoption_are_those_of_a_direct_loop(rule, parts, whole, count, chunk):
    with chunk_size(chunk):
        lookahead = rule == "lookahead"
        recipe = Recipe(EmaNesterov(0.7, 0.9), lookahead=lookahead)
        keeper, island = Keeper(recipe, drawn(0), count), Island("i0", LAYOUT, parts, whole, rule=RULES[rule])
        anchor, u = drawn(0), np.zeros(N)
        island.write(torch.full((N,), 5.0))
        for rank in island.ranks:
            rank.adopt(keeper.payloads(), rule=adopt_of("overwrite"))
        theta = base = anchor
        for version in range(3):
            theta = theta - 0.1 * drawn(2 * version + 1)
            island.write(torch.from_numpy(theta).float())
            for rank in island.ranks:
                rank.note(WHOLE)
            offers, emitted = keeper.offers([island], 0, version), theta
            delta = base - theta
            theta = theta - 0.1 * drawn(2 * version + 2)
            island.write(torch.from_numpy(theta).float())
            island.adopt(keeper.moved(0, version, offers))
            u = 0.9 * u + 0.1 * delta
            anchor = anchor - 0.7 * (delta + 0.9 * u)
            theta, base = adopted(rule, theta, emitted, anchor - 0.7 * 0.9 * u if lookahead else anchor)
            np.testing.assert_allclose(keeper.anchor(), anchor, rtol=1e-4, atol=1e-5)
            for rank, memory in zip(island.ranks, island.memory, strict=True):
                for r in rank.holds:
                    part = slice(r.start, r.stop)
                    np.testing.assert_allclose(memory[part], theta[part], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(bases(island), base, rtol=1e-4, atol=1e-5)


def test_adoption_that_keeps_everything_is_independent_runs():
    keeper = Keeper(Recipe(Nesterov(0.7, 0.9)), drawn(0), 2)
    rule = adopt_of("mix", alpha=1.0)
    islands = [Island(f"i{k}", LAYOUT, [WHOLE], True, rule=rule) for k in range(2)]
    alone = [drawn(k + 1).astype(np.float32) for k in range(2)]
    for island, theta in zip(islands, alone, strict=True):
        island.write(torch.from_numpy(theta))
        island.adopt(keeper.payloads())
    for version in range(3):
        for k, island in enumerate(islands):
            alone[k] = (alone[k] * np.float32(0.9)).astype(np.float32)
            island.write(torch.from_numpy(island.theta() * np.float32(0.9)))
        sent = keeper.moved(0, version, keeper.offers(islands, 0, version))
        for island, theta in zip(islands, alone, strict=True):
            island.adopt(sent)
            assert island.theta().tobytes() == theta.tobytes()


@pytest.mark.parametrize("count", [1, 3])
def test_fragments_that_are_all_sent_together_are_one(count):
    fragments = [(Range(0, 10), Range(29, 35)), (Range(10, 29),), (Range(35, N),)]
    one, many = Keeper(Nesterov(0.7, 0.9), drawn(0), count), Keeper(Nesterov(0.7, 0.9), drawn(0), count, fragments)
    worlds = [(keeper, [Island(f"i{k}", LAYOUT, [WHOLE], True) for k in range(3)]) for keeper in (one, many)]
    for keeper, islands in worlds:
        for island in islands:
            island.adopt(keeper.payloads())
    for version in range(3):
        for keeper, islands in worlds:
            for k, island in enumerate(islands):
                island.write(torch.from_numpy(island.theta() + drawn(10 * version + k).astype(np.float32)))
            fragmented = range(len(keeper.fragments))
            offers = [keeper.offers(islands, p, version) for p in fragmented]
            sent = [array for p in fragmented for array in keeper.moved(p, version, offers[p])]
            for island in islands:
                island.adopt(sent)
        assert one.anchor().tobytes() == many.anchor().tobytes()
        assert len({island.theta().tobytes() for _, islands in worlds for island in islands}) == 1


def test_replicas_agree_on_a_fragment_just_after_its_round_and_keepers_always():
    fragments = [(Range(0, 20),), (Range(20, N),)]
    keepers = [Keeper(Nesterov(0.7, 0.9), drawn(0), n, fragments) for n in (1, 2)]
    islands = [Island(f"i{k}", LAYOUT, [WHOLE], True) for k in range(2)]
    for island in islands:
        island.adopt(keepers[0].payloads())
    for turn in range(6):
        p, version = turn % 2, turn // 2
        for k, island in enumerate(islands):
            island.write(torch.from_numpy(island.theta() + drawn(10 * turn + k).astype(np.float32)))
        offers = [keeper.offers(islands, p, version) for keeper in keepers]
        sent = [keeper.moved(p, version, o) for keeper, o in zip(keepers, offers, strict=True)]
        for island in islands:
            island.adopt(sent[turn % 2], fragments[p])
        (part,) = fragments[p]
        first, second = (island.theta() for island in islands)
        assert first[part.start : part.stop].tobytes() == second[part.start : part.stop].tobytes()
        assert first.tobytes() != second.tobytes()
        assert keepers[0].anchor().tobytes() == keepers[1].anchor().tobytes()


# Random fragments


@settings(deadline=None, max_examples=40)
@given(
    partitions(N, 3), st.booleans(), st.integers(1, 4), chunk_sizes,
    st.sampled_from([("bernoulli", 0.3), ("partitioned", 0.34), ("bernoulli", 1.0)]),
)  # fmt: skip
def test_sparse_averaging_is_that_of_a_direct_loop(parts, whole, count, chunk, drawing):
    draw = Draw(*drawing, seed=4)
    with chunk_size(chunk):
        keeper = Keeper(Recipe(Sgd(1.0)), drawn(0), count, draw=draw)
        islands = [Island("i0", LAYOUT, parts, whole), Island("i1", LAYOUT, [WHOLE], True)]
        for island in islands:
            island.adopt(keeper.payloads())
        thetas = [drawn(0), drawn(0)]
        for version in range(4):
            for k, island in enumerate(islands):
                thetas[k] = thetas[k] + drawn(10 * version + k)
                island.write(torch.from_numpy(thetas[k]).float())
            mean, gap = np.mean(thetas, axis=0), thetas[0] - thetas[1]
            at = draw.of(version).packed(WHOLE)
            sent = keeper.moved(0, version, keeper.offers(islands, 0, version))
            assert sum(elements(array).size for array in sent) == len(at)
            for k, island in enumerate(islands):
                island.adopt(sent)
                thetas[k][at] = mean[at]
                np.testing.assert_allclose(island.theta(), thetas[k], rtol=1e-4, atol=1e-5)
            got = [island.theta().astype(np.float64) for island in islands]
            np.testing.assert_allclose(np.mean(got, axis=0), mean, rtol=1e-4, atol=1e-5)
            assert (np.abs(got[0] - got[1]) <= np.abs(gap) + 1e-5).all()


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_selection_is_adopted_by_every_rule_and_the_rest_stays(rule):
    selection = Selection("bernoulli", 0.4, 1, 0)
    at = selection.packed(WHOLE)
    with chunk_size(8):
        theta = torch.zeros(N)
        held = [Slice(t.range, theta[t.range.start : t.range.stop]) for t in LAYOUT.tensors]
        exchange = Exchange(LAYOUT, held, (Range(3, 40),), rule=RULES[rule])
        exchange.adopt([anchor_payload(drawn(0), WHOLE)], rule=adopt_of("overwrite"))
        emitted = drawn(1)
        theta.copy_(torch.from_numpy(emitted))
        exchange.note(WHOLE)
        exchange.emit((Range(3, 40),), Fp32(), META, selection)
        before = drawn(2)
        theta.copy_(torch.from_numpy(before))
        exchange.adopt([selected_anchor(drawn(3), selection)])
        new_theta, new_base = adopted(rule, before, emitted, drawn(3))
        expected, base = before.copy(), drawn(0)
        expected[at], base[at] = new_theta[at], new_base[at]
        np.testing.assert_allclose(theta, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(exchange.base, base[3:40], rtol=1e-4, atol=1e-5)


def selected_anchor(values, selection, versions=None):
    at, meta = selection.packed(WHOLE), Meta("anchor", versions or {0: 1})
    writer, chosen = Writer(Fp32(), WHOLE, meta, selection, numel=len(at)), torch.from_numpy(values[at]).float()
    for start in range(0, len(at), chunks.CHUNK):
        writer.put(start, chosen[start : start + chunks.CHUNK])
    return writer.seal(meta)


def holder(**settings):
    theta = torch.zeros(N)
    exchange = Exchange(LAYOUT, [Slice(WHOLE[0], theta)], WHOLE, **settings)
    exchange.adopt([anchor_payload(drawn(0), WHOLE)], rule=adopt_of("overwrite"))
    return theta, exchange


def test_a_damaged_selection_changes_nothing():
    with chunk_size(8):
        theta, exchange = holder()
        damaged = selected_anchor(drawn(1), Selection("bernoulli", 0.6, 1, 0)).copy()
        damaged[-1] ^= 1
        with pytest.raises(SyncError, match="RD-405"):
            exchange.adopt([damaged])
        np.testing.assert_array_equal(theta, drawn(0).astype(np.float32))
        assert exchange.emit(WHOLE, Fp32(), META).squared_norm == 0


def test_elements_that_were_not_selected_go_on_counting_from_where_they_did():
    theta, exchange = holder()
    selection = Selection("bernoulli", 0.5, 1, 0)
    at = selection.packed(WHOLE)
    theta.sub_(1.0)
    exchange.adopt([selected_anchor(drawn(0), selection)])
    theta.sub_(1.0)
    expected = np.full(N, 2.0)
    expected[at] = 1.0
    np.testing.assert_allclose(elements(exchange.emit(WHOLE, Fp32(), META).payload), expected, rtol=1e-5)
    assert exchange.versions == {0: 1}


def test_an_anchor_in_codes_of_whole_tensors_is_refused():
    codec, shapes = Dct(), tuple(t.shape for t in LAYOUT.tensors)
    writer = Writer(codec, WHOLE, Meta("anchor", {0: 1}), shapes=shapes)
    theta, exchange = holder()
    with pytest.raises(SyncError, match="RD-412: an anchor in dct"):
        exchange.adopt([writer.seal(Meta("anchor", {0: 1}))])
    np.testing.assert_array_equal(theta, drawn(0).astype(np.float32))


# Nested channels, saved parameters


def test_a_faster_channel_measures_from_what_a_slower_one_adopted():
    theta = torch.zeros(N)
    fast, slow = (Exchange(LAYOUT, [Slice(WHOLE[0], theta)], WHOLE) for _ in range(2))
    for exchange in (fast, slow):
        exchange.adopt([anchor_payload(drawn(0), WHOLE)])
    theta.sub_(1.0)
    fast.adopt([anchor_payload(drawn(1), WHOLE, {0: 1})])
    # The slow difference contains what the fast channel did.
    said = elements(slow.emit(WHOLE, Fp32(), META).payload)
    np.testing.assert_allclose(said, drawn(0) - drawn(1), rtol=1e-4, atol=1e-5)
    slow.adopt([anchor_payload(drawn(2), WHOLE, {0: 1})], (Range(5, 30),))
    fast.measure_from_here((Range(5, 30),))
    assert fast.emit(WHOLE, Fp32(), META).squared_norm == 0
    theta.sub_(1.0)
    np.testing.assert_allclose(elements(fast.emit(WHOLE, Fp32(), META).payload), np.ones(N), rtol=1e-5)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("keeps", [False, True])
def test_parameters_and_bases_survive_a_restart_bit_by_bit(rule, keeps):
    emits = (Range(2, 24), Range(29, 45))
    with chunk_size(8):
        memory = [torch.zeros(N), torch.zeros(N)]
        one, other = (
            Exchange(
                LAYOUT,
                [Slice(t.range, theta[t.range.start : t.range.stop]) for t in LAYOUT.tensors],
                emits,
                rule=RULES[rule],
                keeps_anchor=keeps,
            )
            for theta in memory
        )
        one.adopt([anchor_payload(drawn(0), WHOLE)], rule=adopt_of("overwrite"))
        memory[0].copy_(torch.from_numpy(drawn(1)))
        one.note(WHOLE)
        one.emit(emits, Fp32(), META)
        memory[0].copy_(torch.from_numpy(drawn(2)))
        state = one.state(with_parameters=True)
        with pytest.raises(SyncError, match="RD-442"):
            other.emit(emits, Fp32(), META)
        assert other.load_state(state, {0: 3})
        assert other.versions == {0: 3}
        for array in state.values():
            array.fill(7)
        assert memory[0].numpy().tobytes() == memory[1].numpy().tobytes()
        for seed in (3, 4):
            for exchange in (one, other):
                exchange.adopt([anchor_payload(drawn(seed), WHOLE, {0: seed + 1})])
            assert memory[0].numpy().tobytes() == memory[1].numpy().tobytes()
            sent = [exchange.emit(emits, Fp32(), META).payload.tobytes() for exchange in (one, other)]
            assert sent[0] == sent[1]
            if keeps:
                np.testing.assert_array_equal(one.anchor, other.anchor)


def test_the_anchor_is_kept_beside_another_base_where_it_is_asked_for():
    theta, exchange = holder(rule=adopt_of("keep_own"), keeps_anchor=True)
    theta.copy_(torch.from_numpy(drawn(5)))
    exchange.adopt([anchor_payload(drawn(1), WHOLE, {0: 1})])
    np.testing.assert_array_equal(exchange.anchor, drawn(1).astype(np.float32))
    np.testing.assert_array_equal(exchange.base, drawn(5).astype(np.float32))
    np.testing.assert_array_equal(theta, drawn(5).astype(np.float32))
