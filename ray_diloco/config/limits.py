"""What single keys may be: allowed values and bounds of numbers, as two tables.

The tables import nothing of the code that knows the choices; tests compare the two.  Keys of a channel
(`channels.<name>.outer.lr`) have the limits of the same key of the run (`outer.lr`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ray_diloco.config.traits import ADOPT_TRAITS, CODEC_TRAITS, DENSE_CODECS, MERGE_TRAITS, OUTER_TRAITS

FILE_SOURCES = ("text", "jsonl", "parquet", "csv")

# Of `plan`, and of each of `plan.islands`.
PLAN_NUMBERS = (
    "step_seconds",
    "up_mbit",
    "down_mbit",
    "rtt_ms",
    "dollars_per_hour",
    "watts",
    "grams_co2_per_kwh",
)

# Of `channels.<name>.signal`.
SIGNALS = ("parameters", "control")


def _codec(at: str) -> dict[str, tuple[Any, ...]]:
    return {
        f"{at}.kind": tuple(CODEC_TRAITS),
        f"{at}.values": (*DENSE_CODECS, "sign"),
        f"{at}.rounding": ("nearest", "stochastic"),
        f"{at}.codebook": ("", "quantile", "bin_mean"),
    }


ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.attention": ("sdpa", "eager", "flash_attention_2"),
    "data.source": ("stdlib", *FILE_SOURCES, "hf"),
    "inner.zero_stage": (0, 1, 2, 3),
    "inner.precision": ("fp32", "bf16"),
    "inner.work": ("fixed", "by_speed"),
    "inner.correction": ("none", "fedprox", "scaffold"),
    "inner.optimizer.name": ("adamw", "sgd", "muon", "raw"),
    "inner.schedule.kind": ("wsd", "cosine", "constant"),
    "fragments.kind": ("whole", "layers", "bins", "random"),
    "fragments.draw": ("bernoulli", "partitioned"),
    **_codec("codec.up"),
    **_codec("codec.down"),
    "topology.kind": ("star", "ring", "hierarchy", "pairs", "none"),
    "topology.anchors": ("shared", "per_island"),
    "quorum.kind": ("all", "at_least", "immediate"),
    "quorum.late": ("drop", "carry"),
    "quorum.weights": ("tokens", "steps", "uniform", "tokens2_per_step", "shard_size"),
    "stale.scale": ("none", "inverse_sqrt_islands"),
    "merge.kind": tuple(MERGE_TRAITS),
    "outer.kind": tuple(OUTER_TRAITS),
    "outer.schedule.kind": ("constant", "cosine"),
    "schedule.adaptive": ("none", "loss", "rate"),
    "outer.average.kind": ("none", "uniform", "ema"),
    "adopt.kind": tuple(ADOPT_TRAITS),
    "observe.wandb": ("off", "offline", "online"),
    "export.dtype": ("float32", "bfloat16"),
}


@dataclass(frozen=True)
class Bound:
    """Where a number must lie; every number must be finite as well."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the value lies inside."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = (
            ("at least", self.at_least),
            ("more than", self.above),
            ("at most", self.at_most),
            ("less than", self.below),
        )
        return "finite, " + " and ".join(f"{words} {limit:g}" for words, limit in parts if limit is not None)


_COUNT, _COUNT_OR_NONE = Bound(at_least=1), Bound(at_least=0)
_POSITIVE, _NOT_NEGATIVE = Bound(above=0.0), Bound(at_least=0.0)
_BELOW_ONE, _PART = Bound(at_least=0.0, below=1.0), Bound(at_least=0.0, at_most=1.0)
_SOME = Bound(above=0.0, at_most=1.0)


def _codec_bounds(at: str) -> dict[str, Bound]:
    return {
        f"{at}.block": _COUNT_OR_NONE,
        f"{at}.k": _COUNT_OR_NONE,
        f"{at}.rank": _COUNT,
        f"{at}.p": _SOME,
        f"{at}.decay": _PART,
        f"{at}.scale": _POSITIVE,
    }


BOUNDS: dict[str, Bound] = {
    "run.seed": Bound(at_least=0, below=2**63),
    "run.rounds": _COUNT,
    "data.max_documents": _COUNT_OR_NONE,
    "data.sequence_length": Bound(at_least=2),
    "data.heldout_blocks": _COUNT,
    "tokenizer.vocab_size": _COUNT,
    "islands.count": _COUNT,
    "islands.ranks": _COUNT,
    "islands.min": _COUNT_OR_NONE,
    "islands.max": _COUNT_OR_NONE,
    "islands.joins": _COUNT_OR_NONE,
    "islands.drain_s": _NOT_NEGATIVE,
    "islands.away_s": _NOT_NEGATIVE,
    "islands.cpus_per_rank": _NOT_NEGATIVE,
    "islands.gpus_per_rank": _NOT_NEGATIVE,
    "islands.threads": _COUNT_OR_NONE,
    "inner.H": _COUNT,
    "inner.round_seconds": _NOT_NEGATIVE,
    "inner.lr": _POSITIVE,
    "inner.micro_batch": _COUNT,
    "inner.gradient_accumulation": _COUNT,
    "inner.clip": _NOT_NEGATIVE,
    "inner.mix": _PART,
    "inner.proximal": _NOT_NEGATIVE,
    "inner.optimizer.beta1": _BELOW_ONE,
    "inner.optimizer.beta2": _BELOW_ONE,
    "inner.optimizer.eps": _POSITIVE,
    "inner.optimizer.weight_decay": _NOT_NEGATIVE,
    "inner.optimizer.momentum": _BELOW_ONE,
    "inner.optimizer.muon_momentum": _BELOW_ONE,
    "inner.optimizer.muon_lr": _POSITIVE,
    "inner.optimizer.muon_weight_decay": _NOT_NEGATIVE,
    "inner.schedule.warmup_steps": _COUNT_OR_NONE,
    "inner.schedule.decay_steps": _COUNT_OR_NONE,
    "inner.schedule.total_steps": _COUNT_OR_NONE,
    "inner.schedule.final_ratio": _PART,
    "inner.schedule.rewarm_steps": _COUNT_OR_NONE,
    "fragments.size": _COUNT,
    "fragments.count": _COUNT,
    "fragments.p": _SOME,
    "schedule.delay": _COUNT_OR_NONE,
    "schedule.lag": _COUNT_OR_NONE,
    "schedule.least": _COUNT,
    "schedule.most": _COUNT_OR_NONE,
    "schedule.growth": Bound(at_least=0),
    **_codec_bounds("codec.up"),
    **_codec_bounds("codec.down"),
    "outer.lr": _POSITIVE,
    "outer.momentum": _BELOW_ONE,
    "outer.beta1": _BELOW_ONE,
    "outer.beta2": _BELOW_ONE,
    "outer.eps": _POSITIVE,
    "outer.weight_decay": _NOT_NEGATIVE,
    "outer.tau": _POSITIVE,
    "outer.buffer": _COUNT_OR_NONE,
    "outer.c": _PART,
    "outer.schedule.warmup_rounds": _COUNT_OR_NONE,
    "outer.schedule.final_ratio": _PART,
    "outer.average.start": _BELOW_ONE,
    "outer.average.decay": _BELOW_ONE,
    "quorum.n": _COUNT,
    "quorum.fraction": _PART,
    "quorum.grace_s": _NOT_NEGATIVE,
    "quorum.deadline_s": _NOT_NEGATIVE,
    "stale.age_power": _NOT_NEGATIVE,
    "stale.max_age": _COUNT_OR_NONE,
    "stale.c_ok": Bound(at_least=-1.0, at_most=1.0),
    "stale.k_s": _NOT_NEGATIVE,
    "stale.k_d": _NOT_NEGATIVE,
    "stale.kappa": _NOT_NEGATIVE,
    "stale.beta_max": _PART,
    "stale.half_life_s": _NOT_NEGATIVE,
    "stale.divergence": _NOT_NEGATIVE,
    "merge.byzantine": _COUNT_OR_NONE,
    "merge.trim": _COUNT_OR_NONE,
    "merge.keep": _COUNT_OR_NONE,
    "merge.iterations": _COUNT,
    "merge.tau": _NOT_NEGATIVE,
    "merge.relative_tau": _POSITIVE,
    "merge.consensus": _PART,
    "adopt.alpha": _PART,
    "adopt.strength": _NOT_NEGATIVE,
    "guard.norm": _NOT_NEGATIVE,
    "guard.loss": _NOT_NEGATIVE,
    "guard.strikes": _COUNT_OR_NONE,
    "guard.rounds": _COUNT,
    "anchor.shards": _COUNT_OR_NONE,
    "anchor.kept_gb": _NOT_NEGATIVE,
    "checkpoint.every": _COUNT,
    "checkpoint.inner_every": _COUNT,
    "checkpoint.progress_every": _COUNT_OR_NONE,
    "checkpoint.progress_wait_s": _NOT_NEGATIVE,
    "checkpoint.max_lag": _COUNT_OR_NONE,
    "checkpoint.keep_last": _COUNT,
    "checkpoint.keep_every": _COUNT_OR_NONE,
    "evaluate.every": _COUNT_OR_NONE,
    "evaluate.blocks": _COUNT_OR_NONE,
    "export.sample_tokens": _COUNT,
    "ray.num_cpus": _COUNT_OR_NONE,
    "simulate.parameters": _COUNT_OR_NONE,
    "simulate.spread": _NOT_NEGATIVE,
    "simulate.jitter": _NOT_NEGATIVE,
    "simulate.hub_mbit": _NOT_NEGATIVE,
    "simulate.launch_s": _NOT_NEGATIVE,
    "simulate.repair_s": _NOT_NEGATIVE,
    "simulate.detect_s": _NOT_NEGATIVE,
    "simulate.merge_s": _NOT_NEGATIVE,
    "simulate.write_s": _NOT_NEGATIVE,
    "simulate.restart_s": _NOT_NEGATIVE,
    "simulate.restarts": _COUNT_OR_NONE,
    "simulate.failures.exit": _NOT_NEGATIVE,
    "simulate.failures.freeze": _NOT_NEGATIVE,
    "simulate.failures.link_cut": _NOT_NEGATIVE,
    "simulate.failures.link_slow": _NOT_NEGATIVE,
    "simulate.failures.trouble_s": _POSITIVE,
    "simulate.failures.corrupt": _PART,
    "simulate.failures.nan": _PART,
    "simulate.failures.storage": _PART,
    "simulate.failures.driver": _NOT_NEGATIVE,
    "deadlines.placement_s": _POSITIVE,
    "deadlines.launch_s": _POSITIVE,
    "deadlines.train_s": _NOT_NEGATIVE,
    "deadlines.exchange_s": _POSITIVE,
    "deadlines.silence_s": _POSITIVE,
    "deadlines.heartbeat_s": _POSITIVE,
    "deadlines.orphan_s": _POSITIVE,
    "run.max_restarts": _COUNT_OR_NONE,
    "deadlines.losses": _COUNT,
    **{f"plan.{key}": _NOT_NEGATIVE for key in PLAN_NUMBERS},
    "plan.quality": _NOT_NEGATIVE,
}
