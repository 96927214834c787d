"""A commit of round 0 holds nothing that was trained: the same command goes on from it, any other begins anew."""

import pytest
from commits import commit, number_of

from ray_diloco.api import _refuse_early
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.cluster.build import digest_of
from ray_diloco.cluster.driver import _survey
from ray_diloco.config.compose import compose
from ray_diloco.errors import CommittedError


@pytest.fixture
def begun(tmp_path):
    """A run of which only version 0 is durable: its storage, and its configuration with more settings."""
    settings = {"run.name": "r", "run.root": str(tmp_path), "run.storage": str(tmp_path / "r")}

    def config(**more):
        return compose((), settings=settings | more).config

    store = CheckpointStore(str(tmp_path / "r"))
    commit(store, 0, config_digest=digest_of(config()))
    return store, config


def test_the_same_command_goes_on_from_it(begun):
    store, config = begun
    manifest, warnings = _survey(store, config(), fresh=False)
    assert manifest.round == 0 and not warnings and store.rounds() == [0]


@pytest.mark.parametrize("fresh", [False, True])
def test_other_settings_or_a_fresh_run_begin_anew(begun, fresh):
    store, config = begun
    other = config() if fresh else config(**{"inner.lr": 0.5})
    _refuse_early(config(**{"run.fresh": fresh}))
    assert _survey(store, other, fresh) == (None, []) and store.rounds() == []


def test_what_was_trained_is_never_given_up(begun):
    store, config = begun
    commit(store, 1, config_digest=digest_of(config()))
    with pytest.raises(CommittedError, match="RD-562"):
        _survey(store, config(), fresh=True)
    with pytest.raises(CommittedError, match="RD-562"):
        _refuse_early(config(**{"run.fresh": True}))
    manifest, _ = _survey(store, config(**{"inner.lr": 0.5}), fresh=False)
    assert manifest.round == 1 and store.rounds() == [0, 1]


def damage(tmp_path, round):
    (tmp_path / f"r/checkpoints/round-{round:06d}/manifest.json").write_text("{")


def test_it_stands_in_for_the_newest_round_but_not_for_several(begun, tmp_path):
    store, config = begun
    for round in (1, 2):
        commit(store, round, config_digest=digest_of(config()))
    damage(tmp_path, 2)
    damage(tmp_path, 1)
    for other in (config(), config(**{"inner.lr": 0.5})):
        assert number_of(_survey, store, other, fresh=False) == 522
    assert store.rounds() == [0, 1, 2]
    store.discard_after(1)
    manifest, warnings = _survey(store, config(**{"inner.lr": 0.5}), fresh=False)
    assert manifest.round == 0 and "round 1 is not usable" in warnings[0]


def test_a_damaged_round_is_one_that_was_trained(begun, tmp_path):
    store, config = begun
    commit(store, 1, config_digest=digest_of(config()))
    damage(tmp_path, 1)
    assert number_of(_survey, store, config(), fresh=True) == 562 and store.rounds() == [0, 1]


@pytest.mark.parametrize("fresh", [False, True])
def test_where_it_is_damaged_itself_the_run_begins_anew(begun, tmp_path, fresh):
    store, config = begun
    damage(tmp_path, 0)
    manifest, warnings = _survey(store, config(), fresh)
    assert manifest is None and "round 0 is not usable" in warnings[0] and store.rounds() == []
