"""The keys of the blocks that make an algorithm, apart from `inner`: one dataclass for each (algorithms.md §10.2).

A published method is a file of `conf/algorithm/` that sets some of them; the defaults are plain DiLoCo's.  Keys that
the chosen `kind` does not read are ignored.  Each key is explained in `conf/config.yaml`, combinations are checked in
`combinations.py`.  No import of Ray, torch or OmegaConf here.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FragmentsConfig:
    """Parts of the model that are exchanged apart from one another."""

    # whole | layers | bins | random
    kind: str = "whole"
    # Transformer blocks per fragment, and whether they are taken at equal distances instead of in a row (layers).
    size: int = 3
    strided: bool = True
    # Fragments of nearly equal size (bins).
    count: int = 24
    # Part of the elements in each round (random), and how they are drawn: bernoulli | partitioned.
    p: float = 0.005
    draw: str = "bernoulli"


@dataclass
class ScheduleConfig:
    """When fragments are emitted, and when their merge is adopted."""

    # Fragments take turns inside H instead of all at once.
    spread: bool = False
    # Inner steps between emission and adoption (τ), and the same in rounds.
    delay: int = 0
    lag: int = 0
    # none | loss (AdaComm: shorter as the loss falls) | rate (QSR: longer as the inner learning rate falls)
    adaptive: str = "none"
    # Bounds of an adaptive round in steps; most 0: none.
    least: int = 1
    most: int = 0
    # α of QSR: a round has (growth / inner learning rate)² steps, at least H.
    growth: float = 0.0
    # Fragments that change faster go first in a round (with spread).
    priority: bool = False


@dataclass
class CodecConfig:
    """Form of a payload on its way."""

    kind: str = "fp32"
    # Elements per block or chunk; 0: the codec's own.
    block: int = 0
    # Elements kept per chunk (topk, dct).
    k: int = 0
    rank: int = 4
    # Part of the elements that travels (mask).
    p: float = 0.01
    # Codec of the kept values (topk, dct) or of the factors (low_rank).
    values: str = "fp32"
    # nearest | stochastic
    rounding: str = "nearest"
    # quantile | bin_mean; empty: the codec's own (2bit, 1bit).
    codebook: str = ""
    # Error feedback e ← β e + s Δ, with β = decay and s = scale.
    feedback: bool = False
    decay: float = 1.0
    scale: float = 1.0


@dataclass
class CodecsConfig:
    """How contributions (up) and anchors (down) travel."""

    up: CodecConfig = field(default_factory=CodecConfig)
    down: CodecConfig = field(default_factory=CodecConfig)


@dataclass
class TopologyConfig:
    """Who exchanges with whom, and where the anchor lives."""

    # star | ring | hierarchy | pairs | none
    kind: str = "star"
    # shared | per_island
    anchors: str = "shared"


@dataclass
class QuorumConfig:
    """When a round closes, and what a contribution weighs."""

    # all | at_least | immediate
    kind: str = "all"
    # at_least: islands that must have offered before the grace window opens; or a part of all, rounded up (0: n holds).
    n: int = 1
    fraction: float = 0.0
    grace_s: float = 0.0
    # Seconds after the first offer at which a round closes with what it has (0: no such limit).
    deadline_s: float = 0.0
    # What becomes of an offer after that: drop | carry (it counts in the next round).
    late: str = "drop"
    # tokens | steps | uniform | tokens2_per_step | shard_size
    weights: str = "tokens"


@dataclass
class StaleConfig:
    """What is done to a contribution before the merge because it is old, or points elsewhere."""

    # Weight × (1 + age)^−age_power, age in versions of the anchor.
    age_power: float = 0.0
    # Versions after which a contribution is left out; 0: no limit.
    max_age: int = 0
    # Measure from the keeper's present anchor: Δ + (A − B).
    reanchor: bool = False
    # The island's own share is fresh, the others' are a round old (Eager).
    own_fresh: bool = False
    # none | inverse_sqrt_islands
    scale: str = "none"
    # HeLoCo's correction against the outer momentum, and its constants.
    direction: bool = False
    c_ok: float = 0.2
    k_s: float = 0.5
    k_d: float = 1.0
    kappa: float = 3.0
    beta_max: float = 0.5
    # Seconds of age in which a contribution's weight halves; 0: never.
    half_life_s: float = 0.0
    # Weight × exp(−divergence · max(0, loss − median loss)).
    divergence: float = 0.0


@dataclass
class MergeConfig:
    """How the contributions of a round become one."""

    # mean | mean_over_senders | rda | median | trimmed_mean | krum | multi_krum | bulyan | geometric_median
    # | centred_clipping
    kind: str = "mean"
    # Contributions that may be anything (f), that are cut off at each end (b), and that are kept (m of multi_krum).
    byzantine: int = 0
    trim: int = 0
    keep: int = 0
    # Passes of geometric_median and centred_clipping.
    iterations: int = 3
    # Radius of centred_clipping; 0: relative_tau × the median norm of the contributions.
    tau: float = 0.0
    relative_tau: float = 1.0
    # γ of NoLoCo's pull towards the mean of the neighbourhood's anchors.
    consensus: float = 0.0
    # Name patterns of tensors that get the plain mean (rda).
    plain: list[str] = field(default_factory=lambda: ["*embed*", "*lm_head*"])


@dataclass
class OuterScheduleConfig:
    """Learning rate of the outer optimiser over the rounds."""

    # constant | cosine
    kind: str = "constant"
    warmup_rounds: int = 0
    # Learning rate at the end as a part of outer.lr (cosine).
    final_ratio: float = 0.1


@dataclass
class OuterAverageConfig:
    """Average of the anchors of many rounds, which is evaluated and exported in place of the last one."""

    # none | uniform | ema
    kind: str = "none"
    # Part of the run after which the average begins.
    start: float = 0.8
    # Weight of the past in each round (ema).
    decay: float = 0.9


@dataclass
class OuterConfig:
    """The optimiser that moves the anchor."""

    # nesterov (torch.optim.SGD's form) | sgd | heavy_ball | lookahead_nesterov | ema_nesterov | delayed_nesterov
    # | adamw | adam | yogi | adagrad | sign
    kind: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    # Of adamw; DiLoCo (2311.08105) found it unstable unless eps is as large as 0.1.
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 0.1
    weight_decay: float = 0.0
    # Added to the root of the second moment (adam, yogi, adagrad of FedOpt, 2003.00295).
    tau: float = 1e-3
    # Contributions per step of the momentum (N; 0: the number of islands) and the momentum's part in each (c).
    buffer: int = 0
    c: float = 0.0
    schedule: OuterScheduleConfig = field(default_factory=OuterScheduleConfig)
    average: OuterAverageConfig = field(default_factory=OuterAverageConfig)


@dataclass
class AdoptConfig:
    """What an island does with a new anchor."""

    # overwrite | mix | keep | keep_own | rebase | compensated_rebase | lookahead
    kind: str = "overwrite"
    # mix: θ ← α θ + (1 − α) A.
    alpha: float = 0.5
    # λ of compensated_rebase.
    strength: float = 0.0


@dataclass
class ChannelConfig:
    """A further exchange over the same parameters, with blocks of its own."""

    # Inner steps between two emissions of the channel.
    H: int = 1
    # parameters | control (SCAFFOLD's)
    signal: str = "parameters"
    fragments: FragmentsConfig = field(default_factory=FragmentsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    codec: CodecsConfig = field(default_factory=CodecsConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    adopt: AdoptConfig = field(default_factory=AdoptConfig)
