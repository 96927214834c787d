import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.merge import (
    MERGES,
    MergeSettings,
    add_gram,
    consensus_factors,
    factors_of,
    is_plain,
    mean,
    mean_over_senders,
    merge_rule,
    rda_factors,
    require_enough,
)
from ray_diloco.outer.weights import factors

PLAIN = MergeSettings(plain=())
SEEDS = st.integers(0, 2**32 - 1)


def merged(kind, rows, weights=None, settings=PLAIN, last=None):
    """The result of a rule on float64 rows, through its Gram matrix and its pass in fp32."""
    rule = MERGES[kind]
    vectors = [torch.tensor(np.asarray(row), dtype=torch.float32) for row in rows]
    extras = [torch.zeros_like(vectors[0]) if last is None else torch.tensor(last, dtype=torch.float32)]
    vectors += extras[: len(rule.extras)]
    weights = [1 / len(rows)] * len(rows) if weights is None else weights
    gram = np.zeros((len(vectors), len(vectors)))
    add_gram(gram, vectors)
    out = torch.full_like(vectors[0], float("nan"))
    kept = [vector.clone() for vector in vectors]
    rule.bind(settings)(vectors, factors_of(rule, gram, weights, settings, "weight"), out)
    assert all(torch.equal(a, b) for a, b in zip(vectors, kept, strict=True))
    return out.numpy()


def drawn(seed, count, numel=20):
    return np.random.default_rng(seed).standard_normal((count, numel)).astype(np.float32)


def test_mean_is_the_weighted_sum():
    out = torch.empty(3)
    mean([torch.tensor([4.0, 8.0, -4.0]), torch.tensor([0.0, 4.0, 12.0])], [0.75, 0.25], out)
    assert out.tolist() == [3.0, 7.0, 0.0]


def test_mean_takes_factors_as_they_are():
    out = torch.empty(2)
    mean([torch.tensor([4.0, 8.0])], [0.25], out)
    assert out.tolist() == [1.0, 2.0]
    mean([torch.tensor([4.0, 8.0]), torch.tensor([2.0, 2.0])], [1.0, -1.0], out)
    assert out.tolist() == [2.0, 6.0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_mean_of_equal_contributions_is_that_contribution_bit_for_bit(count):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(count))
    out = torch.empty(1000)
    mean([values] * count, factors([3.0] * count), out)
    assert torch.equal(out, values)


@pytest.mark.parametrize("count", [3, 8, 16])
def test_mean_of_more_equal_contributions_is_that_contribution_to_the_last_bits(count):
    values = torch.rand(1000, generator=torch.Generator().manual_seed(count)) + 1
    out = torch.empty(1000)
    mean([values] * count, factors([3.0] * count), out)
    assert (out - values).abs().max().item() <= count * 2.0**-24


@hypothesis_settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), SEEDS)
def test_mean_equals_float64_arithmetic_to_fp32(raw, seed):
    values = drawn(seed, len(raw), 50)
    out = torch.empty(50)
    mean([torch.from_numpy(row) for row in values], factors(raw), out)
    expected = np.average(values.astype(np.float64), axis=0, weights=raw)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=2e-6)


def test_mean_needs_only_the_sum():
    assert not MERGES["mean"].needs_individuals
    assert not MERGES["mean"].needs_whole_vector


def test_mean_over_senders_divides_by_the_weight_of_who_sent_the_element():
    # Column by column: both sent, one sent, the other, nobody.
    rows = [[4.0, 8.0, 0.0, 0.0], [8.0, 0.0, 5.0, -0.0]]
    assert merged("mean_over_senders", rows, [0.75, 0.25]).tolist() == [5.0, 8.0, 5.0, 0.0]
    assert merged("mean_over_senders", rows, [0.375, 0.125]).tolist() == [2.5, 4.0, 2.5, 0.0]


@hypothesis_settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), SEEDS)
def test_mean_over_senders_has_the_bits_of_the_mean_where_everybody_sent(raw, seed):
    values = [torch.from_numpy(row) for row in drawn(seed, len(raw), 50)]
    out, expected = torch.empty(50), torch.empty(50)
    mean_over_senders(values, factors(raw), out)
    mean(values, factors(raw), expected)
    assert torch.equal(out, expected)


@hypothesis_settings(deadline=None)
@given(st.integers(1, 6), SEEDS)
def test_mean_over_senders_of_sparse_contributions_is_the_mean_of_what_is_there(count, seed):
    values = drawn(seed, count, 40) * (np.random.default_rng([seed, 1]).random((count, 40)) < 0.3)
    sent = (values != 0).sum(axis=0)
    expected = values.astype(np.float64).sum(axis=0) / np.maximum(sent, 1)
    np.testing.assert_allclose(merged("mean_over_senders", values), expected, rtol=0, atol=2e-6)


def rda(rows, weights):
    """The formula of the paper, in float64."""
    rows = np.asarray(rows, dtype=np.float64)
    norms = np.linalg.norm(rows, axis=1)
    there = norms > 0
    rows, norms, w = rows[there], norms[there], np.asarray(weights)[there]
    direction = (w[:, None] * rows / norms[:, None]).sum(axis=0)
    return (w @ norms) / w.sum() * direction / np.linalg.norm(direction)


@hypothesis_settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), SEEDS)
def test_rda_is_the_formula_of_the_paper(weights, seed):
    rows = drawn(seed, len(weights)) * 10.0 ** np.arange(len(weights))[:, None] / 1000
    got = merged("rda", rows, list(np.array(weights) / sum(weights)))
    np.testing.assert_allclose(got, rda(rows, weights), rtol=0, atol=1e-6 * np.abs(rows).max())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_rda_keeps_the_norm_of_orthogonal_contributions_of_equal_norm(count):
    rows = 3 * np.eye(count, 10)
    assert np.linalg.norm(merged("rda", rows)) == pytest.approx(3, rel=1e-6)
    assert np.linalg.norm(merged("mean", rows)) == pytest.approx(3 / count**0.5, rel=1e-6)


def test_rda_of_antiparallel_contributions_is_the_plain_mean():
    rows = [[3.0, 0.0, 3.0], [-1.0, 0.0, -1.0]]
    np.testing.assert_allclose(merged("rda", rows, [0.5, 0.5]), [1.0, 0.0, 1.0], rtol=1e-6)
    assert merged("rda", [[0.1, 0.7], [-0.3, -2.1]], [0.5, 0.5]) == pytest.approx([-0.1, -0.7], rel=1e-6)


def test_rda_of_parallel_contributions_has_the_weighted_mean_norm():
    np.testing.assert_allclose(merged("rda", [[1.0, 2.0], [5.0, 10.0]], [0.75, 0.25]), [2.0, 4.0], rtol=1e-6)


def test_rda_ignores_zero_vectors():
    rows = drawn(1, 2)
    alone = merged("rda", rows, [0.6, 0.4])
    np.testing.assert_allclose(merged("rda", [*rows, np.zeros(20)], [0.3, 0.2, 0.5]), alone, rtol=1e-6)
    assert merged("rda", np.zeros((2, 4))).tolist() == [0.0] * 4


def test_rda_of_one_contribution_is_that_contribution():
    (row,) = drawn(2, 1)
    np.testing.assert_allclose(merged("rda", [row], [0.3]), row, rtol=1e-6)


@hypothesis_settings(deadline=None)
@given(st.integers(2, 5), SEEDS)
def test_rda_commutes_with_rotations(count, seed):
    rows = drawn(seed, count, 8).astype(np.float64)
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 2]).standard_normal((8, 8)))
    turned = merged("rda", rows @ rotation.T)
    np.testing.assert_allclose(turned, rotation @ merged("rda", rows), rtol=0, atol=1e-5 * np.abs(rows).max())


def test_rda_gives_embeddings_the_plain_mean():
    rule, gram = MERGES["rda"], np.diag([1.0, 4.0])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert factors_of(rule, gram, [0.25, 0.75], MergeSettings(), name) == [0.25, 0.75]
    other = factors_of(rule, gram, [0.25, 0.75], MergeSettings(), "model.norm.weight")
    assert other == rda_factors(gram, [0.25, 0.75], MergeSettings())
    assert is_plain("transformer.wte.weight", MergeSettings(plain=("*.wte.*",)))
    assert not is_plain("model.embed_tokens.weight", PLAIN)


@hypothesis_settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), SEEDS)
def test_a_gram_matrix_adds_up_over_chunks(count, numel, seed):
    rows = drawn(seed, count, numel)
    gram = np.zeros((count, count))
    for part in np.array_split(rows, 3, axis=1):
        add_gram(gram, [torch.from_numpy(np.ascontiguousarray(row)) for row in part])
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(gram, exact @ exact.T, rtol=1e-12, atol=1e-12)


def test_a_gram_matrix_of_more_than_a_block_is_exact_in_float64():
    rows = drawn(5, 3, 20000)
    gram = np.zeros((3, 3))
    add_gram(gram, [torch.from_numpy(row) for row in rows])
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(gram, exact @ exact.T, rtol=1e-12)


# Of every rule: contributions in a spread where nobody is clipped or far out, and settings that do something.
ROBUST = MergeSettings(byzantine=1, trim=1, plain=())


@pytest.mark.parametrize("kind", MERGES)
@pytest.mark.parametrize("count", [7, 8])
def test_identical_contributions_give_back_that_contribution(kind, count):
    (row,) = drawn(3, 1)
    np.testing.assert_allclose(merged(kind, [row] * count, settings=ROBUST, last=row), row, rtol=1e-6)


@pytest.mark.parametrize("kind", MERGES)
@given(st.permutations(range(7)), SEEDS)
@hypothesis_settings(deadline=None, max_examples=20)
def test_the_order_of_contributions_does_not_matter(kind, order, seed):
    rows = drawn(seed, 7)
    got = merged(kind, rows[list(order)], settings=ROBUST)
    np.testing.assert_allclose(got, merged(kind, rows, settings=ROBUST), rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", [kind for kind in MERGES if kind not in ("rda", "mean_over_senders")])
@given(SEEDS)
@hypothesis_settings(deadline=None, max_examples=20)
def test_moving_all_contributions_moves_the_result(kind, seed):
    rows, shift = drawn(seed, 7), drawn([seed, 1], 1)[0]
    got = merged(kind, rows + shift, settings=ROBUST, last=shift)
    np.testing.assert_allclose(got, merged(kind, rows, settings=ROBUST) + shift, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", MERGES)
@pytest.mark.parametrize("scale", [2.0**-12, 2.0**12])
def test_scaling_all_contributions_scales_the_result(kind, scale):
    rows = drawn(11, 7)
    got = merged(kind, rows * np.float32(scale), settings=ROBUST)
    np.testing.assert_allclose(got, merged(kind, rows, settings=ROBUST) * np.float32(scale), rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in MERGES if MERGES[kind].reads_weights])
def test_a_contribution_of_weight_zero_changes_nothing(kind):
    rows, stranger = drawn(12, 4), 100 * drawn(13, 1)
    settings = MergeSettings(tau=2.0, plain=())
    got = merged(kind, [*rows, *stranger], [0.1, 0.2, 0.3, 0.4, 0.0], settings)
    np.testing.assert_allclose(got, merged(kind, rows, [0.1, 0.2, 0.3, 0.4], settings), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "settings", "least", "told"),
    [
        ("mean", MergeSettings(), 1, "byzantine=0"),
        ("median", MergeSettings(byzantine=2), 5, "byzantine=2"),
        ("trimmed_mean", MergeSettings(byzantine=1, trim=2), 5, "byzantine=1, trim=2"),
        ("trimmed_mean", MergeSettings(byzantine=2, trim=1), 5, "byzantine=2, trim=1"),
        ("krum", MergeSettings(byzantine=1), 5, "byzantine=1"),
        ("multi_krum", MergeSettings(byzantine=1), 5, "byzantine=1, keep=0"),
        ("multi_krum", MergeSettings(byzantine=1, keep=6), 7, "byzantine=1, keep=6"),
        ("bulyan", MergeSettings(byzantine=2), 11, "byzantine=2"),
        ("geometric_median", MergeSettings(byzantine=1), 3, "byzantine=1"),
        ("centred_clipping", MergeSettings(byzantine=1), 3, "byzantine=1"),
    ],
)
def test_too_few_contributions_are_an_error(kind, settings, least, told):
    require_enough(kind, least, settings)
    with pytest.raises(SyncError) as raised:
        require_enough(kind, least - 1, settings)
    told = f"RD-431: {kind} with {told} needs at least {least} contributions, got {least - 1}\n"
    assert str(raised.value).startswith(told)


def test_an_unknown_rule_is_an_error():
    with pytest.raises(SyncError, match=r"RD-432: there is no merge rule 'crum'\n.*krum, mean, "):
        merge_rule("crum")
    assert merge_rule("krum") is MERGES["krum"]


def test_what_rules_say_of_themselves():
    assert {k for k, m in MERGES.items() if m.needs_whole_vector} == {
        *("krum", "multi_krum", "bulyan", "geometric_median", "centred_clipping")
    }
    assert {k for k, m in MERGES.items() if not m.needs_individuals} == {"mean"}
    assert {k: m.extras for k, m in MERGES.items() if m.extras} == {"centred_clipping": ("last",)}


@hypothesis_settings(deadline=None)
@given(st.integers(2, 6), SEEDS)
def test_the_consensus_pull_draws_anchors_together_and_leaves_their_mean(count, seed):
    gamma, lr = 0.5, 0.7
    anchors = np.random.default_rng(seed).standard_normal((count, 5))
    moved = anchors - lr * np.array([consensus_factors(count, own, gamma, lr) for own in range(count)]) @ anchors
    np.testing.assert_allclose(moved.mean(axis=0), anchors.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(moved[0] - moved[1], (1 - gamma) * (anchors[0] - anchors[1]), atol=1e-12)
