import itertools

import pytest
import torch

from ray_diloco.doctor import arithmetic
from ray_diloco.doctor.arithmetic import TOLERANCE, check_round
from ray_diloco.errors import SyncError
from ray_diloco.outer.momentum import Sgd


def test_a_round_of_equal_islands_is_plain_training_here():
    check = check_round("us")
    assert (check.status, check.name, check.where) == ("pass", "a round", "us") and not check.mend


@pytest.mark.parametrize("lr", [0.99, 1.01])
def test_an_anchor_that_moves_too_little_or_too_far_is_found(monkeypatch, lr):
    monkeypatch.setattr(arithmetic, "Sgd", lambda _: Sgd(lr))
    check = check_round()
    assert check.status == "fail" and check.mend and f"more than {TOLERANCE:.0e}" in check.said


def test_training_really_moves_what_is_compared():
    moved, begun = arithmetic._model(), arithmetic._model()
    arithmetic._train(moved)
    assert (arithmetic._flat(moved) - arithmetic._flat(begun)).abs().max() > 1e-3
    assert torch.equal(arithmetic._flat(begun), arithmetic._flat(arithmetic._model()))


def test_a_machine_that_refuses_its_own_payloads_is_named(monkeypatch):
    def broken(*_):
        raise SyncError(404, "the payload is damaged", "look")

    monkeypatch.setattr(arithmetic, "_difference", broken)
    check = check_round()
    assert (check.status, check.said, check.mend) == ("fail", "the payload is damaged", "look")


@pytest.mark.parametrize("island", [1, 2])
def test_what_is_no_number_fails_on_either_island(monkeypatch, island):
    real, asked = arithmetic._flat, itertools.count()
    monkeypatch.setattr(arithmetic, "_flat", lambda model: real(model) * (torch.nan if next(asked) == island else 1.0))
    assert check_round().status == "fail"
