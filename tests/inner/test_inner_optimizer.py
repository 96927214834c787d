import pytest
import torch

from ray_diloco.config.schema import InnerConfig, InnerOptimizerConfig
from ray_diloco.inner.engine import set_learning_rates
from ray_diloco.inner.optimizer import OPTIMIZERS, parameter_groups

CONFIGS = {
    "adamw": InnerOptimizerConfig(),
    "sgd": InnerOptimizerConfig(name="sgd"),
    "momentum": InnerOptimizerConfig(name="sgd", momentum=0.9),
    "muon": InnerOptimizerConfig(name="muon"),
    "raw": InnerOptimizerConfig(name="raw", momentum=0.9),
}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def built(config, **changes):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    inner = InnerConfig(optimizer=config, **changes)
    return model, OPTIMIZERS[config.name].build(model, inner), inner


def backward(model):
    (model(torch.tensor([[1.0, -2.0]])) ** 2).sum().backward()


@EACH
def test_the_named_state_is_what_is_kept_beside_the_step_count(config):
    model, optimizer, inner = built(config)
    backward(model)
    optimizer.step()
    names = OPTIMIZERS[config.name].state_names(model, inner)
    for name, p in model.named_parameters():
        kept = {key for key, value in optimizer.state.get(p, {}).items() if value is not None}
        assert set(names[name]) == kept - {"step"}


@EACH
def test_all_parameters_are_in_one_group_and_have_a_base_rate(config):
    model, optimizer, _ = built(config)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()} and len(grouped) == 2
    assert all(group["lr"] == group["base_lr"] > 0 for group in optimizer.param_groups)


def test_the_schedule_keeps_the_ratio_of_different_rates():
    _, optimizer, _ = built(InnerOptimizerConfig(name="muon", muon_lr=0.5), lr=0.25)
    engine = type("Engine", (), {"basic_optimizer": optimizer})
    set_learning_rates(engine, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def test_a_raw_step_subtracts_the_gradient_whatever_the_rate_and_decay_say():
    model, optimizer, _ = built(CONFIGS["raw"], lr=0.25)
    backward(model)
    expected = [p.detach() - p.grad for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert not OPTIMIZERS["raw"].scheduled and OPTIMIZERS["raw"].base_lr(InnerConfig(lr=0.25)) == 1.0


def test_only_matrices_decay():
    groups = parameter_groups(torch.nn.Linear(2, 3).parameters(), 0.1, 0.3)
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in groups] == [(0.3, [2]), (0.0, [1])]


def test_a_model_without_vectors_has_one_group():
    assert len(parameter_groups(torch.nn.Linear(2, 3, bias=False).parameters(), 0.1, 0.3)) == 1


@pytest.mark.parametrize(
    ("config", "torchs"),
    [
        (InnerOptimizerConfig(), lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)),
        (InnerOptimizerConfig(name="sgd", momentum=0.9), lambda groups: torch.optim.SGD(groups, momentum=0.9)),
    ],
    ids=["adamw", "sgd"],
)
def test_steps_and_states_are_those_of_torchs_own_class_to_the_bit(config, torchs):
    model, ours, inner = built(config)
    other = built(config)[0]
    theirs = torchs(parameter_groups(other.parameters(), inner.lr, inner.optimizer.weight_decay))
    assert isinstance(ours, type(theirs))
    for _ in range(3):
        for network, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            backward(network)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    states = [optimizer.state_dict()["state"] for optimizer in (ours, theirs)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_at_stage_0_a_rank_does_not_import_the_compiler_that_it_does_not_use(little_worlds, world):
    assert not any(record["compiler", (0, "fp32")] for record in little_worlds[world])
