"""A commit of round 0 holds nothing that was trained: the same command goes on from it, any other begins anew."""

import pytest
from commits import commit

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
    config = lambda **more: compose((), settings=settings | more).config  # noqa: E731
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


def test_a_damaged_round_was_trained_too(begun, tmp_path):
    store, config = begun
    commit(store, 1, config_digest=digest_of(config()))
    (tmp_path / "r/checkpoints/round-000001/manifest.json").write_text("{")
    with pytest.raises(CommittedError, match="RD-562"):
        _survey(store, config(), fresh=True)
    manifest, warnings = _survey(store, config(**{"inner.lr": 0.5}), fresh=False)
    assert manifest.round == 0 and "round 1 is not usable" in warnings[0]
