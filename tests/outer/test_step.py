"""One outer step with every merge rule and correction, against a few lines of numpy in float64."""

import math

import numpy as np
import pytest
import torch
from outer_world import LAYOUT, WHOLE, anchor_payload, chunk_size, elements, flat, founded, offer, parameters_payload

# Imported before chunks are made small, as it keeps their size.
import ray_diloco.outer.quantise  # noqa: F401
from ray_diloco.errors import SyncError
from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.codec import Bf16, codec_of
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.error_feedback import Feedback
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import Range, layout_of, shard_ranges
from ray_diloco.outer.merge import MERGES, MergeSettings, factors_of, merge_rule
from ray_diloco.outer.optimizer import EmaNesterov, HeavyBall, Nesterov, Sgd, Sign
from ray_diloco.outer.payload import Meta
from ray_diloco.outer.rate import OuterRate
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.shard import AnchorShard, BadContribution, Contribution
from ray_diloco.outer.stale import DirectionSettings

CHUNKS = (1, 3, 4, 8, 100)


@pytest.fixture(params=CHUNKS, autouse=True)
def any_chunks(request):
    with chunk_size(request.param):
        yield


def drawn(count, numel=8, seed=0):
    return np.random.default_rng(seed).standard_normal((count, numel)).astype(np.float32).astype(np.float64)


def stepped(shard, offers, key="r", **settings):
    """Prepares and commits a round; the anchor after it, float64."""
    shard.prepare(key, 0, offers, **settings)
    shard.commit(key)
    return flat(shard.tensors()).astype(np.float64)


def offers_of(rows, version=0, weights=None):
    weights = weights or [1.0] * len(rows)
    return [offer(f"i{k}", row, w, version) for k, (row, w) in enumerate(zip(rows, weights, strict=True))]


def merged(rows, merge="mean", weights=None, recipe=None, scale=None, layout=LAYOUT):
    """What a rule makes of contributions: the movement of an anchor under SGD with rate 1."""
    shard = founded(layout, recipe or Recipe(Sgd(1.0), merge), np.zeros(layout.numel))
    return -stepped(shard, offers_of(rows, weights=weights), scale=scale)


def rda(rows, weights):
    """Radial and directional average of one tensor."""
    norms = np.linalg.norm(rows, axis=1)
    direction = sum(w * row / norm for w, row, norm in zip(weights, rows, norms, strict=True))
    radius = np.dot(weights, norms) / np.sum(weights)
    return radius * direction / np.linalg.norm(direction)


def test_the_radial_average_is_taken_tensor_by_tensor():
    rows, weights = drawn(3), [1.0, 2.0, 5.0]
    expected = np.concatenate([rda(rows[:, :6], weights), rda(rows[:, 6:], weights)])
    np.testing.assert_allclose(merged(rows, "rda", weights), expected, rtol=1e-5)


def test_tensors_that_match_a_pattern_get_the_plain_mean():
    rows = drawn(3)
    recipe = Recipe(Sgd(1.0), "rda", MergeSettings(plain=("b",)))
    expected = np.concatenate([rda(rows[:, :6], [1, 1, 1]), rows[:, 6:].mean(0)])
    np.testing.assert_allclose(merged(rows, recipe=recipe), expected, rtol=1e-5)


def test_fragments_that_cut_a_tensor_are_refused_by_rules_that_need_it_whole():
    cut = [(Range(0, 3),), (Range(3, 8),)]
    for recipe in (Recipe(Sgd(1.0), "rda"), Recipe(EmaNesterov(0.7, 0.9), direction=DirectionSettings())):
        with pytest.raises(SyncError, match="RD-421: a fragment cuts tensor w"):
            AnchorShard(LAYOUT, WHOLE, cut, recipe)


@pytest.mark.parametrize("merge", ["mean", "mean_over_senders", "rda", "median", "trimmed_mean"])
def test_factors_that_do_not_sum_to_one_scale_what_any_rule_finds(merge):
    rows = drawn(3)
    whole = merged(rows, merge, scale=[1 / 3] * 3)
    np.testing.assert_allclose(merged(rows, merge, scale=[1 / 6] * 3), whole / 2, rtol=1e-5, atol=1e-7)


def test_median_and_trimmed_mean_are_those_of_each_element():
    rows = drawn(5)
    np.testing.assert_allclose(merged(rows, "median"), np.median(rows, axis=0), rtol=1e-6)
    recipe = Recipe(Sgd(1.0), "trimmed_mean", MergeSettings(trim=1))
    np.testing.assert_allclose(merged(rows, recipe=recipe), np.sort(rows, axis=0)[1:-1].mean(0), rtol=1e-5)


def test_the_mean_over_senders_divides_by_those_who_sent():
    rows = np.array([[1, 0, 2, 0, 0, 4, 0, 0], [3, 0, 0, 5, 0, 4, 0, 0]], np.float64)
    assert merged(rows, "mean_over_senders").tolist() == [2, 0, 2, 5, 0, 4, 0, 0]


def test_rules_over_the_whole_model_use_factors_that_were_found_over_all_shards():
    layout = layout_of([("w", (2, 3)), ("b", (2,)), ("c", (5,))])
    rows = drawn(5, layout.numel)
    rows[4] *= 50
    settings = MergeSettings(byzantine=1)
    distances = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    scores = [np.sort(np.delete(distances[k], k))[:2].sum() for k in range(5)]
    for count in (1, 2, 3):
        shards = [
            AnchorShard(layout, r, [layout.whole], Recipe(Sgd(1.0), "krum", settings))
            for r in shard_ranges(layout, count)
        ]
        flat_offers = {}
        for shard in shards:
            shard.found([parameters_payload(np.zeros(sum(r.numel for r in shard.ranges)), shard.ranges)])
            flat_offers[shard] = [
                offer(f"i{k}", np.concatenate([row[r.start : r.stop] for r in shard.ranges]), ranges=shard.ranges)
                for k, row in enumerate(rows)
            ]
        gram = sum(shard.gram(0, flat_offers[shard]) for shard in shards)
        np.testing.assert_allclose(gram, rows @ rows.T, rtol=1e-5, atol=1e-5)
        factors = factors_of(merge_rule("krum"), gram, [1.0] * 5, settings)
        tensors = {}
        for shard in shards:
            shard.prepare("r", 0, flat_offers[shard], scale=factors)
            shard.commit("r")
            tensors |= shard.tensors()
        moved = -np.concatenate([tensors[t.name].reshape(-1) for t in layout.tensors])
        np.testing.assert_array_equal(moved, rows[int(np.argmin(scores))].astype(np.float32))


def test_centred_clipping_begins_at_what_was_merged_last():
    settings = MergeSettings(iterations=2, tau=1.5)
    shard = founded(LAYOUT, Recipe(Sgd(1.0), "centred_clipping", settings), np.zeros(8))
    last = before = np.zeros(8)
    for version, seed in enumerate((1, 2, 3)):
        rows = drawn(3, seed=seed)
        v = last
        for _ in range(2):
            v = v + np.mean([(x - v) * min(1, 1.5 / np.linalg.norm(x - v)) for x in rows], axis=0)
        offers = offers_of(rows, version)
        gram = shard.gram(0, offers)
        assert gram.shape == (4, 4)
        scale = factors_of(merge_rule("centred_clipping"), gram, [1.0] * 3, settings)
        anchor = stepped(shard, offers, f"r{version}", scale=scale)
        np.testing.assert_allclose(before - anchor, v, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(flat(shard.state_tensors("merged")), v, rtol=1e-4, atol=1e-6)
        last, before = v, anchor


def test_rules_over_the_whole_model_do_not_guess_their_factors():
    shard = founded(LAYOUT, Recipe(Sgd(1.0), "krum"), np.zeros(8))
    with pytest.raises(ValueError, match="krum needs factors over the whole model"):
        shard.prepare("r", 0, offers_of(drawn(3)))


@pytest.mark.parametrize("merge", ["trimmed_mean", "median", "krum", "bulyan"])
def test_too_few_contributions_for_a_rule_are_an_error(merge):
    shard = founded(LAYOUT, Recipe(Sgd(1.0), merge, MergeSettings(byzantine=1)), np.zeros(8))
    with pytest.raises(SyncError, match=f"RD-431: {merge} with byzantine=1"):
        shard.prepare("r", 0, offers_of(drawn(2)), scale=[0.5, 0.5])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("at", [0, 5, 7])
@pytest.mark.parametrize("merge", sorted(MERGES))
def test_what_is_not_finite_is_refused_by_name_under_every_rule(merge, at, value):
    rows = drawn(7)
    rows[3, at] = value
    shard = founded(LAYOUT, Recipe(Sgd(1.0), merge, MergeSettings(byzantine=1, trim=1)), np.zeros(8))
    before = flat(shard.tensors()).tobytes()
    if merge_rule(merge).needs_whole_vector:
        with pytest.raises(BadContribution) as caught:
            shard.gram(0, offers_of(rows))
        assert (caught.value.number, caught.value.island) == (411, "i3")
    # Factor 0, as if a rule had not chosen it.
    scale = [0.0 if k == 3 else 1 / 6 for k in range(7)] + [0.0] * len(merge_rule(merge).extras)
    with pytest.raises(BadContribution) as caught:
        shard.prepare("r", 0, offers_of(rows), scale=scale if merge_rule(merge).needs_whole_vector else None)
    assert (caught.value.number, caught.value.island) == (411, "i3")
    assert flat(shard.tensors()).tobytes() == before


def test_what_is_not_finite_is_refused_before_a_ring_recodes_it():
    rows = drawn(3)
    rows[1, 6] = math.inf
    with pytest.raises(BadContribution, match="RD-411: island i1"):
        merged(rows, recipe=Recipe(Sgd(1.0), recode=codec_of("fp16")))


def test_a_ring_adds_and_recodes_hop_by_hop():
    rows = torch.from_numpy(drawn(4)).float()
    running = rows[0] * 0.25
    for row in rows[1:]:
        running = running.bfloat16().float() + row * 0.25
    got = merged(rows.numpy(), recipe=Recipe(Sgd(1.0), recode=Bf16()))
    np.testing.assert_allclose(got, running.numpy(), rtol=1e-6)


def test_hops_of_a_ring_round_differently_where_they_round_by_chance():
    rows = np.tile([1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], (40, 1))
    with chunk_size(8):
        got = merged(rows, recipe=Recipe(Sgd(1.0), recode=codec_of("int4", {"block": 8, "rounding": "stochastic"})))
    # With one and the same draw at every hop, the errors of 39 hops would all go one way.
    assert abs(got[1:].mean() - 0.3) < 0.12


# Direction


def direction_by_hand(delta, momentum, s):
    norm, length = np.linalg.norm(delta), np.linalg.norm(momentum)
    if norm < s.eps or length < s.eps:
        return delta
    c = delta @ momentum / (norm * length)
    confidence = norm / (norm + s.kappa * length + s.eps)
    if c >= s.c_ok:
        return delta
    if c < 0:
        return delta - min(s.k_s * -c * confidence, s.beta_max) * c * norm * momentum / length
    turn = min(s.k_d * (1 - c) * confidence, 1)
    mixed = (1 - turn) * delta / norm + turn * momentum / length
    return norm * mixed / np.linalg.norm(mixed)


def test_contributions_are_turned_towards_the_momentum_tensor_by_tensor():
    s, rho, eta, mu = DirectionSettings(c_ok=0.9), 0.5, 0.7, 0.9
    shard = founded(LAYOUT, Recipe(EmaNesterov(eta, mu), direction=s), np.zeros(8))
    anchor, m = np.zeros(8), np.zeros(8)
    for version in range(4):
        delta = drawn(1, seed=version + 5)[0]
        turned = np.concatenate([direction_by_hand(delta[p], m[p], s) for p in (slice(0, 6), slice(6, 8))])
        m = mu * m + (1 - mu) * rho * turned
        anchor = anchor - eta * (rho * turned + mu * m)
        got = stepped(shard, offers_of([delta], version), f"r{version}", scale=[rho])
        np.testing.assert_allclose(got, anchor, rtol=1e-5, atol=1e-6)


def test_without_correction_heloco_is_mla_and_its_first_step_is_known():
    rows = drawn(3)
    plain = founded(LAYOUT, Recipe(EmaNesterov(0.7, 0.9), lookahead=True), np.zeros(8))
    heloco = Recipe(EmaNesterov(0.7, 0.9), lookahead=True, direction=DirectionSettings(c_ok=-1.0))
    corrected = founded(LAYOUT, heloco, np.zeros(8))
    for version, row in enumerate(rows):
        sent = []
        for shard in (plain, corrected):
            _, payload = shard.prepare(f"r{version}", 0, offers_of([row], version))
            shard.commit(f"r{version}")
            sent.append(payload.tobytes())
        assert sent[0] == sent[1]
        if version == 0:
            np.testing.assert_allclose(flat(plain.tensors()), -0.7 * (1 + 0.9 * 0.1) * row, rtol=1e-5)


def test_two_contributions_are_each_turned_on_their_own():
    s, mu = DirectionSettings(), 0.5
    shard = founded(LAYOUT, Recipe(EmaNesterov(1.0, mu), direction=s), np.zeros(8))
    first = np.ones(8)
    before = stepped(shard, offers_of([first]))
    m = (1 - mu) * first
    rows = np.array([-2 * np.ones(8), np.tile([1.0, -0.9], 4)])
    turned = [np.concatenate([direction_by_hand(r[p], m[p], s) for p in (slice(0, 6), slice(6, 8))]) for r in rows]
    delta = np.mean(turned, axis=0)
    expected = before - (delta + mu * (mu * m + (1 - mu) * delta))
    np.testing.assert_allclose(stepped(shard, offers_of(rows, 1), "r1"), expected, rtol=1e-5)


# Neighbours


def test_consensus_alone_shrinks_a_pairs_difference_and_keeps_its_mean():
    starts, gamma = drawn(2), 0.25
    pair = [founded(LAYOUT, Recipe(HeavyBall(0.5, 0.0), consensus=gamma), start) for start in starts]
    around = [[shard.payload(0).copy()] for shard in pair]
    silent = [offer("i0", np.zeros(8)), offer("i1", np.zeros(8))]
    after = np.array([stepped(s, silent, neighbours=around, own=k) for k, s in enumerate(pair)])
    np.testing.assert_allclose(after.mean(0), starts.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[0] - after[1], (1 - gamma) * (starts[0] - starts[1]), rtol=1e-5, atol=1e-6)


def test_consensus_uses_the_rate_of_the_round():
    starts, recipe = drawn(2), Recipe(HeavyBall(0.5, 0.0), consensus=0.25, rate=OuterRate(warmup_rounds=4))
    pair = [founded(LAYOUT, recipe, start) for start in starts]
    around = [[shard.payload(0).copy()] for shard in pair]
    silent = [offer("i0", np.zeros(8))]
    after = np.array([stepped(s, silent, neighbours=around, own=k) for k, s in enumerate(pair)])
    np.testing.assert_allclose(after[0] - after[1], 0.75 * (starts[0] - starts[1]), rtol=1e-5, atol=1e-6)


def test_among_equal_anchors_consensus_does_nothing():
    rows = drawn(4)
    heavy = founded(LAYOUT, Recipe(HeavyBall(0.7, 0.5)), np.arange(8.0))
    noloco = founded(LAYOUT, Recipe(HeavyBall(0.7, 0.5), consensus=0.9), np.arange(8.0))
    for version in range(3):
        around = [[noloco.payload(0).copy()]] * 4
        offers = offers_of(rows + version, version)
        straight = stepped(heavy, offers, f"r{version}")
        pulled = stepped(noloco, offers, f"r{version}", neighbours=around, own=2)
        np.testing.assert_allclose(pulled, straight, rtol=1e-5, atol=1e-5)


def test_noloco_by_hand_and_the_mean_of_a_pair_is_that_of_heavy_ball():
    alpha, beta, gamma = 0.5, 0.7, 0.3
    phi, moved = drawn(2), np.zeros((2, 8))
    pair = [founded(LAYOUT, Recipe(HeavyBall(beta, alpha), consensus=gamma), p) for p in phi]
    for version in range(3):
        deltas = drawn(2, seed=version + 9)
        mean = deltas.mean(0)
        moved = alpha * moved - beta * mean + gamma * (phi.mean(0) - phi)
        phi = phi + moved
        around = [[shard.payload(0).copy()] for shard in pair]
        offers = offers_of(deltas, version)
        got = [stepped(s, offers, f"r{version}", neighbours=around, own=k) for k, s in enumerate(pair)]
        np.testing.assert_allclose(got, phi, rtol=1e-4, atol=1e-5)


def test_neighbours_that_lack_elements_or_are_no_anchors_are_refused():
    shard = founded(LAYOUT, Recipe(HeavyBall(0.5, 0.0), consensus=0.5), np.zeros(8))
    short = anchor_payload(np.zeros(6), (LAYOUT.tensors[0].range,))
    for bad, number in ((short, 406), (parameters_payload(np.zeros(8), WHOLE), 412)):
        with pytest.raises(SyncError, match=f"RD-{number}"):
            shard.prepare("r", 0, offers_of(drawn(1)), neighbours=[[shard.payload(0)], [bad]])
        assert shard.versions == {0: 0}


# Rate, average, look-ahead


def test_the_rate_follows_its_schedule_and_a_rate_of_the_round_is_scaled_too():
    shard = founded(LAYOUT, Recipe(Sgd(1.0), rate=OuterRate(warmup_rounds=4)), np.zeros(8))
    ones, at = np.ones((1, 8)), 0.0
    for version, factor in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        at -= factor
        assert stepped(shard, offers_of(ones, version), f"r{version}").tolist() == [at] * 8
    warm = founded(LAYOUT, Recipe(Sgd(1.0), rate=OuterRate(warmup_rounds=4)), np.zeros(8))
    assert stepped(warm, offers_of(ones), lr=8.0).tolist() == [-2.0] * 8


@pytest.mark.parametrize("kind", ["uniform", "ema"])
def test_iterates_are_averaged_from_the_given_part_of_the_run_on(kind):
    average = OuterAverage(kind, rounds=6, start=0.5, decay=0.75)
    shard = founded(LAYOUT, Recipe(Nesterov(0.7, 0.9), average=average), np.zeros(8))
    seen, expected = [], None
    for version in range(6):
        anchor = stepped(shard, offers_of(drawn(2, seed=version), version), f"r{version}")
        if version + 1 >= 4:
            seen.append(anchor)
            ema = anchor if expected is None else 0.75 * expected + 0.25 * anchor
            expected = np.mean(seen, axis=0) if kind == "uniform" else ema
        wanted = anchor if expected is None else expected
        np.testing.assert_allclose(elements(shard.published(0)), wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(elements(shard.payload(0)), anchor.astype(np.float32))
        np.testing.assert_array_equal(elements(shard.published(0)), flat(shard.state_tensors("average")))


def test_islands_get_the_look_ahead_point_and_the_anchor_stays_exact():
    shard = founded(LAYOUT, Recipe(Nesterov(0.5, 0.5), lookahead=True, rate=OuterRate(warmup_rounds=2)), np.zeros(8))
    assert elements(shard.payload(0)).tolist() == [0.0] * 8
    _, sent = shard.prepare("r", 0, offers_of(np.full((1, 8), 4.0)))
    shard.commit("r")
    # η = ¼, u = 4, A = −¼ (4 + 2) = −1.5; A − η μ u = −2.
    assert flat(shard.tensors()).tolist() == elements(shard.published(0)).tolist() == [-1.5] * 8
    assert elements(sent).tolist() == [-2.0] * 8
    again = AnchorShard(LAYOUT, WHOLE, [WHOLE], shard.recipe)
    again.load(shard.tensors(), {"momentum": shard.state_tensors("momentum")}, shard.versions)
    assert again.payload(0).tobytes() == sent.tobytes()


def test_demo_with_whole_tiles_is_the_sign_of_the_mean():
    rows = drawn(3)
    shard = founded(LAYOUT, Recipe(Sign(0.125), "mean_over_senders"), np.zeros(8))
    offers = []
    for k, row in enumerate(rows):
        theta = torch.zeros(8)
        exchange = Exchange(LAYOUT, [Slice(WHOLE[0], theta)], WHOLE, feedback=Feedback(0.999))
        exchange.adopt([anchor_payload(np.zeros(8), WHOLE)])
        theta.copy_(torch.from_numpy(-row).float())
        sent = exchange.emit(WHOLE, Dct(8, 64), Meta("contribution", {0: 0}, f"i{k}"))
        offers.append(Contribution(f"i{k}", 1.0, 0, (sent.payload,)))
        np.testing.assert_allclose(exchange.state(with_parameters=False)["error|0"], 0, atol=1e-6)
    np.testing.assert_array_equal(stepped(shard, offers), -0.125 * np.sign(rows.mean(0)))
