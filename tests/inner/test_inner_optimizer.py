import pytest
import torch

from ray_diloco.config.schema import InnerConfig, InnerOptimizerConfig
from ray_diloco.inner.optimizer import OPTIMIZERS, parameter_groups


@pytest.mark.parametrize(
    "config",
    [InnerOptimizerConfig(), InnerOptimizerConfig(name="sgd"), InnerOptimizerConfig(name="sgd", momentum=0.9)],
    ids=["adamw", "sgd", "momentum"],
)
def test_the_named_state_is_what_torch_keeps_beside_its_step_count(config):
    parameter = torch.ones(4, requires_grad=True)
    kind = OPTIMIZERS[config.name]
    optimizer = kind.build([{"params": [parameter]}], 0.1, config)
    parameter.sum().backward()
    optimizer.step()
    kept = {name for name, value in optimizer.state[parameter].items() if value is not None}
    assert set(kind.state_names(config)) == kept - {"step"}


def test_only_matrices_decay():
    model = torch.nn.Linear(2, 3)
    groups = parameter_groups(model, InnerConfig(optimizer=InnerOptimizerConfig(weight_decay=0.3)))
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in groups] == [(0.3, [2]), (0.0, [1])]


def test_a_model_without_vectors_has_one_group():
    model = torch.nn.Linear(2, 3, bias=False)
    assert len(parameter_groups(model, InnerConfig())) == 1
