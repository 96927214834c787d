"""What the inner engine cannot do, said before anything is started: no import of torch here.

Measured on DeepSpeed 0.19.8: bf16 at ZeRO stage 0 calls the optimiser once with zero gradients while it is set up
(weight decay applied, Adam's step one ahead), so bf16 needs stage 1 or more; stage 1 at one rank costs nothing.
"""

from __future__ import annotations

from ray_diloco.config.schema import InnerConfig
from ray_diloco.errors import InnerError
from ray_diloco.inner.schedule import KINDS as SCHEDULES

PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "sgd")
ZERO_STAGES = (0, 1, 2, 3)


def check_inner(inner: InnerConfig) -> None:
    """Refuses settings of `inner` that the engine cannot train with.

    Raises:
      InnerError: RD-720 bf16 at stage 0, RD-721 stage, RD-722 precision, RD-723 optimiser, RD-724 schedule, RD-725 a
        number out of range.
    """
    _one_of(721, "inner.zero_stage", inner.zero_stage, ZERO_STAGES)
    _one_of(722, "inner.precision", inner.precision, PRECISIONS)
    _one_of(723, "inner.optimizer.name", inner.optimizer.name, OPTIMIZERS)
    _one_of(724, "inner.schedule.kind", inner.schedule.kind, SCHEDULES)
    if inner.precision == "bf16" and inner.zero_stage == 0:
        raise InnerError(
            720,
            "inner.precision=bf16 with inner.zero_stage=0: DeepSpeed has no correct fp32 master weights there",
            "Set inner.zero_stage=1; with one rank per island it shards nothing and costs the same.",
        )
    for name, value, low, high in (
        ("lr", inner.lr, 0.0, float("inf")),
        ("micro_batch", inner.micro_batch, 1, float("inf")),
        ("gradient_accumulation", inner.gradient_accumulation, 1, float("inf")),
        ("clip", inner.clip, 0.0, float("inf")),
        ("optimizer.beta1", inner.optimizer.beta1, 0.0, 1.0),
        ("optimizer.beta2", inner.optimizer.beta2, 0.0, 1.0),
        ("optimizer.momentum", inner.optimizer.momentum, 0.0, 1.0),
        ("optimizer.weight_decay", inner.optimizer.weight_decay, 0.0, float("inf")),
        ("schedule.warmup_steps", inner.schedule.warmup_steps, 0, float("inf")),
        ("schedule.decay_steps", inner.schedule.decay_steps, 0, float("inf")),
        ("schedule.final_ratio", inner.schedule.final_ratio, 0.0, 1.0),
    ):
        if not low <= value <= high:
            raise InnerError(
                725, f"inner.{name}={value} is outside {low} to {high}", f"Give inner.{name} a value in it."
            )


def _one_of(number: int, key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise InnerError(number, f"{key}={value!r} is not supported", f"Use one of {', '.join(map(str, allowed))}.")
