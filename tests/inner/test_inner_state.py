import numpy as np
import pytest
import torch

from ray_diloco.errors import InnerError
from ray_diloco.inner.muon import HIDDEN, MuonAdamW
from ray_diloco.inner.slices import Home
from ray_diloco.inner.state import read_state, reset_state, write_state
from ray_diloco.outer.layout import Range, layout_of

LAYOUT = layout_of([("a", (2, 3)), ("b|odd", (4,))])
KEPT = ("exp_avg", "exp_avg_sq")
NAMES = {"a": KEPT, "b|odd": KEPT}


def stepped(seed):
    """An optimiser over one flat tensor that holds `a`, a pad of 2 and `b`."""
    flat = torch.nn.Parameter(torch.randn(12, generator=torch.Generator().manual_seed(seed)))
    optimizer = torch.optim.AdamW([flat], lr=0.1, fused=True)
    homes = (
        Home(LAYOUT.tensors[0], Range(0, 6), flat, 0),
        Home(LAYOUT.tensors[1], Range(6, 10), flat, 8),
    )
    return optimizer, homes, flat


def step(optimizer, flat, times=1):
    for k in range(times):
        flat.grad = torch.arange(12.0) + k
        optimizer.step()


def test_pieces_are_named_by_state_place_and_tensor():
    optimizer, homes, flat = stepped(0)
    step(optimizer, flat)
    pieces = read_state(optimizer, homes, (Range(2, 8),), NAMES)
    assert set(pieces) == {
        "step", "exp_avg|2:6|a", "exp_avg|0:2|b|odd", "exp_avg_sq|2:6|a", "exp_avg_sq|0:2|b|odd",
    }  # fmt: skip
    np.testing.assert_allclose(pieces["exp_avg|2:6|a"], 0.1 * np.array([2, 3, 4, 5]), rtol=1e-6)
    np.testing.assert_allclose(pieces["exp_avg|0:2|b|odd"], 0.1 * np.array([8, 9]), rtol=1e-6)
    assert pieces["step"] == 1


def test_what_was_read_does_not_change_with_the_next_step():
    optimizer, homes, flat = stepped(0)
    step(optimizer, flat)
    pieces = read_state(optimizer, homes, LAYOUT.whole, NAMES)
    before = pieces["exp_avg|0:6|a"].copy()
    step(optimizer, flat)
    np.testing.assert_array_equal(pieces["exp_avg|0:6|a"], before)


def test_pieces_of_another_cut_are_put_together():
    optimizer, homes, flat = stepped(0)
    step(optimizer, flat, 3)
    parts = [read_state(optimizer, homes, (r,), NAMES) for r in (Range(0, 1), Range(1, 7), Range(7, 10))]
    other, other_homes, other_flat = stepped(1)
    write_state(other, other_homes, NAMES, {k: v for part in parts for k, v in part.items()})
    for name in KEPT:
        for home, target in zip(homes, other_homes, strict=True):
            assert torch.equal(target.part_of(other.state[other_flat][name]), home.part_of(optimizer.state[flat][name]))
    assert int(other.state[other_flat]["step"]) == 3


def test_an_incomplete_state_is_refused_and_changes_nothing():
    optimizer, homes, flat = stepped(0)
    step(optimizer, flat)
    pieces = read_state(optimizer, homes, (Range(0, 9),), NAMES)
    other, other_homes, other_flat = stepped(1)
    with pytest.raises(InnerError, match=r"RD-730.*b\|odd from element 3"):
        write_state(other, other_homes, NAMES, pieces)
    assert not other.state[other_flat]


def test_a_reset_optimiser_steps_like_a_new_one():
    optimizer, homes, flat = stepped(0)
    step(optimizer, flat, 4)
    reset_state(optimizer, homes)
    new, _, new_flat = stepped(0)
    with torch.no_grad():
        flat.copy_(new_flat)
    step(optimizer, flat)
    step(new, new_flat)
    assert torch.equal(flat, new_flat)


def test_no_pieces_are_the_state_of_an_optimiser_that_has_not_stepped():
    optimizer, homes, flat = stepped(0)
    assert read_state(optimizer, homes, LAYOUT.whole, NAMES) == {}
    step(optimizer, flat)
    write_state(optimizer, homes, NAMES, {})
    assert float(optimizer.state[flat]["exp_avg"].abs().sum()) == 0.0
    assert int(optimizer.state[flat]["step"]) == 0


def two_kinds(seed):
    """Muon on `a`, AdamW on `b|odd`."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.nn.Parameter(torch.randn(*spec.shape, generator=generator)) for spec in LAYOUT.tensors)
    rates = {"lr": 0.1, "weight_decay": 0.0}
    optimizer = MuonAdamW(
        [{"params": [a], HIDDEN: True, "momentum": 0.9, **rates}, {"params": [b], HIDDEN: False, **rates}]
    )
    homes = tuple(Home(spec, spec.range, p, 0) for spec, p in zip(LAYOUT.tensors, (a, b), strict=True))
    a.grad, b.grad = torch.randn(2, 3, generator=generator), torch.randn(4, generator=generator)
    return optimizer, homes, (a, b)


def test_each_parameter_has_the_state_of_its_own_kind():
    names = {"a": ("momentum_buffer",), "b|odd": KEPT}
    optimizer, homes, parameters = two_kinds(0)
    optimizer.step()
    pieces = read_state(optimizer, homes, LAYOUT.whole, names)
    assert set(pieces) == {"step", "momentum_buffer|0:6|a", "exp_avg|0:4|b|odd", "exp_avg_sq|0:4|b|odd"}
    other, other_homes, other_parameters = two_kinds(1)
    write_state(other, other_homes, names, pieces)
    for p, q in zip(parameters, other_parameters, strict=True):
        q.data.copy_(p.data)
        q.grad = p.grad
    optimizer.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, other_parameters, strict=True))
    assert int(other.state[other_parameters[1]]["step"]) == 2 and "step" not in other.state[other_parameters[0]]
