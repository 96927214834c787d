"""The DeepSpeed engine of a rank: ZeRO stage 0 to 3, fp32 or bf16, with a torch optimiser.

What was measured decides the settings (../shared/ray-and-deepspeed.md Part 2): bf16 at stage 1 with fp32 accumulation
is within a few percent of a plain loop; `round_robin_gradients` breaks the map from parameters to master weights and is
never used.  At stage 0 the gradient norm is ours, because DeepSpeed's own takes one pass and one all-reduce more and
does not say the norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ray_diloco.config.check import check_inner
from ray_diloco.config.schema import InnerConfig
from ray_diloco.inner.model import parameter_count
from ray_diloco.inner.optimizer import OPTIMIZERS

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# DeepSpeed's own default, in elements; a bucket larger than the model would only take memory.
_LARGEST_BUCKET = 500_000_000


def build_engine(model: nn.Module, inner: InnerConfig, *, compile_model: bool = False) -> DeepSpeedEngine:
    """Hands the model to DeepSpeed; a collective of the island's process group.

    Args:
      model: fp32, on the CPU; in bf16 its parameters become bf16 copies of fp32 master weights.
      inner: precision, ZeRO stage, batch, clipping and optimiser.
      compile_model: compile forward and backward with torch's inductor (20 to 50 s at the first step).

    Raises:
      ConfigError: 110, 111, 115 or 120, settings that the engine cannot train with.
    """
    check_inner(inner)
    import deepspeed
    import deepspeed.runtime.bf16_optimizer

    # It prints a dozen lines and collects garbage for a second, whatever the log level.
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None
    optimizer = OPTIMIZERS[inner.optimizer.name].build(model, inner)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_config(inner, parameter_count(model)),
        dist_init_required=False,
    )
    if inner.zero_stage == 0 and engine.dp_world_size == 1:
        # Nothing to reduce, but DeepSpeed would copy all gradients into a bucket and back.
        engine.enable_backward_allreduce = False
    if compile_model:
        engine.compile()
    return engine


def deepspeed_config(inner: InnerConfig, parameters: int) -> dict[str, Any]:
    """The configuration that DeepSpeed gets; `parameters` is the number of trainable elements."""
    # Even, as stages 1 and 2 demand.
    bucket = min(_LARGEST_BUCKET, parameters + parameters % 2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": inner.micro_batch,
        "gradient_accumulation_steps": inner.gradient_accumulation,
        "gradient_clipping": inner.clip if inner.zero_stage > 0 else 0.0,
        "zero_optimization": {
            "stage": inner.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "round_robin_gradients": False,
        },
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    if inner.precision == "bf16":
        # Otherwise DeepSpeed 0.19.8 keeps bf16 gradients between micro-batches at stage 1 and adds their running sum to
        # the fp32 ones after each: the first of n micro-batches would count n times.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def set_learning_rates(engine: DeepSpeedEngine, factor: float) -> None:
    """Sets the rate of the next step in all groups: `factor` times the group's own."""
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scales the gradients at stage 0 to a norm of at most `limit` (0: leaves them) and returns their norm before."""
    gradients = [p for p in model.parameters() if p.grad is not None]
    if limit > 0:
        return torch.nn.utils.clip_grad_norm_(gradients, limit)
    return torch.nn.utils.get_total_norm([p.grad for p in gradients if p.grad is not None])
