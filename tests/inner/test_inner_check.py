import subprocess
import sys

import pytest

from ray_diloco.config.schema import InnerConfig, InnerOptimizerConfig, InnerScheduleConfig
from ray_diloco.errors import InnerError
from ray_diloco.inner.check import check_inner


@pytest.mark.parametrize("stage", range(4))
def test_every_zero_stage_is_accepted_in_fp32(stage):
    check_inner(InnerConfig(zero_stage=stage))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_accepted_from_stage_1_on(stage):
    check_inner(InnerConfig(zero_stage=stage, precision="bf16"))


@pytest.mark.parametrize(
    ("number", "inner"),
    [
        (720, InnerConfig(precision="bf16", zero_stage=0)),
        (721, InnerConfig(zero_stage=4)),
        (722, InnerConfig(precision="fp16")),
        (723, InnerConfig(optimizer=InnerOptimizerConfig(name="lamb"))),
        (724, InnerConfig(schedule=InnerScheduleConfig(kind="step"))),
        (725, InnerConfig(micro_batch=0)),
        (725, InnerConfig(gradient_accumulation=0)),
        (725, InnerConfig(clip=-1.0)),
        (725, InnerConfig(lr=float("nan"))),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_number(number, inner):
    with pytest.raises(InnerError) as caught:
        check_inner(inner)
    assert caught.value.number == number


def test_the_way_out_of_bf16_at_stage_0_is_named():
    with pytest.raises(InnerError) as caught:
        check_inner(InnerConfig(precision="bf16", zero_stage=0))
    assert "inner.zero_stage=1" in caught.value.mend


def test_checking_imports_neither_torch_nor_deepspeed():
    code = "import sys, ray_diloco.inner.check; sys.exit(bool({'torch', 'deepspeed', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
