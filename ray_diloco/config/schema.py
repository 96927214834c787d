"""Every configuration key, its type and default, as plain dataclasses.

These are the schema for OmegaConf (`compose.py`) and travel to the actors as they are.  Each key is explained in
`conf/`; the check that belongs to a section stands in `check.py`.  The blocks of an algorithm, `inner` apart, are in
`blocks.py`, who takes part in `islands.py`.  No import of Ray, torch or OmegaConf here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ray_diloco.config.blocks import (
    AdoptConfig,
    ChannelConfig,
    CodecsConfig,
    FragmentsConfig,
    MergeConfig,
    OuterConfig,
    QuorumConfig,
    ScheduleConfig,
    StaleConfig,
    TopologyConfig,
)
from ray_diloco.config.islands import GuardConfig, IslandsConfig
from ray_diloco.config.plan import PlanConfig
from ray_diloco.config.simulate import SimulateConfig


@dataclass
class ModelConfig:
    """A Hugging Face causal language model."""

    # Name of the group file that was loaded, for people and reports.
    name: str = "tiny"
    # `model_type` of the Hugging Face configuration, when built from a configuration.
    architecture: str = "llama"
    # Keyword arguments of that configuration (hidden_size, num_hidden_layers, …); vocab_size is set from the tokenizer.
    config: dict[str, Any] = field(default_factory=dict)
    # Folder or hub name to start from instead of a seeded initialisation.
    pretrained: str | None = None
    # `package.module:function` that builds the model instead; see docs/python.md.
    builder: str | None = None
    attention: str = "sdpa"
    activation_checkpointing: bool = False
    compile: bool = False


@dataclass
class DataConfig:
    """A source of documents, cut into blocks of token ids."""

    name: str = "stdlib"
    # stdlib | text | jsonl | parquet | csv | hf
    source: str = "stdlib"
    # Glob or list of globs (joined by commas) of local files.
    path: str | None = None
    # Hugging Face dataset name or local dataset folder, its configuration and split.
    dataset: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    text_column: str = "text"
    streaming: bool = False
    # Stop after so many documents (0: all).
    max_documents: int = 0
    # Tokens per block; one block is one training sequence.
    sequence_length: int = 256
    # Blocks that no island ever trains on.
    heldout_blocks: int = 64
    # Folder for prepared blocks; default: ~/.cache/ray_diloco.
    cache: str | None = None
    # `package.module:function` that yields documents instead; see docs/python.md.
    builder: str | None = None


@dataclass
class TokenizerConfig:
    """bytes, bpe (trained on the corpus), or a Hugging Face tokenizer folder or hub name."""

    name: str = "bytes"
    vocab_size: int = 4096
    builder: str | None = None


@dataclass
class InnerOptimizerConfig:
    """Optimiser of the inner steps."""

    # adamw | sgd | muon (matrices; adamw for the rest) | raw (θ − g)
    name: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    # Of the matrices under muon; inner.lr is the rate of the rest.
    muon_momentum: float = 0.95
    muon_lr: float = 0.02
    muon_weight_decay: float = 0.0


@dataclass
class InnerScheduleConfig:
    """Learning-rate schedule over the run's global inner step."""

    # wsd (warm-up, stable, 1 − √ decay) | cosine | constant
    kind: str = "wsd"
    warmup_steps: int = 20
    # Steps of decay at the end (wsd).
    decay_steps: int = 0
    # Length of the schedule in steps; 0: run.rounds × inner.H.
    total_steps: int = 0
    # Learning rate at the end as a part of inner.lr (cosine, wsd with decay).
    final_ratio: float = 0.05
    # Steps of warm-up of an island whose moments began anew in the middle of a run.
    rewarm_steps: int = 10


@dataclass
class InnerConfig:
    """Training inside an island."""

    # Inner steps between two rounds.
    H: int = 50
    # Seconds that every island trains between two rounds, at most H steps; 0: always H steps.
    round_seconds: float = 0.0
    # fixed | by_speed (DyLU: slower islands take fewer steps)
    work: str = "fixed"
    lr: float = 1e-3
    # Sequences per rank and forward pass.
    micro_batch: int = 4
    gradient_accumulation: int = 1
    zero_stage: int = 0
    # fp32 | bf16
    precision: str = "fp32"
    # Gradient norm limit; 0: none.
    clip: float = 1.0
    # Gradients are taken at mix · A + (1 − mix) · θ (GPA's μ_y).
    mix: float = 0.0
    # none | fedprox | scaffold
    correction: str = "none"
    # μ of fedprox.
    proximal: float = 0.0
    optimizer: InnerOptimizerConfig = field(default_factory=InnerOptimizerConfig)
    schedule: InnerScheduleConfig = field(default_factory=InnerScheduleConfig)


@dataclass
class AlgorithmConfig:
    """Name of the published method that the block settings come from."""

    name: str = "diloco"


@dataclass
class OverlayConfig:
    """Name of the file whose settings are laid over the algorithm's."""

    name: str = "none"


@dataclass
class AnchorConfig:
    """The actors that hold the anchor and outer state."""

    # Actors that hold the anchor and outer state; 0: one per island from 4 million parameters on, else one.
    shards: int = 0
    # GB of contributions kept for the successor of a shard that dies, beyond which a commit is made durable early.
    kept_gb: float = 4.0


@dataclass
class RunConfig:
    """Name, place and length of the run."""

    name: str = "run"
    root: str = "runs"
    seed: int = 0
    # Outer rounds in total; the same command with a larger number continues the run.
    rounds: int = 10
    # Where commits go: a path or any fsspec URL; default: the run's own folder.
    storage: str | None = None
    # Refuse a run directory that has commits of trained rounds; without any, begin anew.
    fresh: bool = False
    # How often a driver that died is started again within one command.
    max_restarts: int = 3


@dataclass
class CheckpointConfig:
    """Commits that survive."""

    # Rounds between durable commits; the last round is always durable.
    every: int = 1
    keep_last: int = 2
    # Also keep every n-th (0: none).
    keep_every: int = 0
    # Save each island's inner optimiser state with every commit, so that a resumed run equals an uninterrupted one.
    inner: bool = True
    # Rounds between commits that hold inner states.
    inner_every: int = 1
    # Inner steps between progress points of an island within a segment of training (0: none): who takes its place after
    # a loss goes on from the newest.
    progress_every: int = 0
    # Seconds that a round waits for the successor of an island that was lost with such points.
    progress_wait_s: float = 120.0
    # Rounds that may be made without being durable before the run waits for its storage; 0: any number.
    max_lag: int = 20


@dataclass
class EvaluateConfig:
    """Measuring the anchor on held-out blocks."""

    # Rounds between evaluations of the anchor on held-out blocks (0: only at the end).
    every: int = 1
    # Held-out blocks used in those (0: all); the final evaluation uses all.
    blocks: int = 0


@dataclass
class ObserveConfig:
    """What is shown and mirrored."""

    # off | offline | online
    wandb: str = "off"
    wandb_project: str = "ray_diloco"
    # Group of the run at the mirror; default: its own name.
    wandb_group: str | None = None
    quiet: bool = False


@dataclass
class TraceConfig:
    """What is kept of the exchange, for study."""

    # Keep every decoded contribution and every committed anchor as safetensors under trace/.
    contributions: bool = False


@dataclass
class ExportConfig:
    """What is written at the end."""

    enabled: bool = True
    # float32 | bfloat16
    dtype: str = "float32"
    # Prompt of the sample that is generated at the end; empty: none.
    prompt: str = "def "
    sample_tokens: int = 200


@dataclass
class RayConfig:
    """The Ray cluster."""

    # Cluster to join; default: a Ray of its own for this command.
    address: str | None = None
    # CPUs of the local Ray; 0: what islands need, at least the machine's.
    num_cpus: int = 0
    temp_dir: str | None = None


@dataclass
class DeadlinesConfig:
    """Seconds after which a wait ends with a named error."""

    # Resources for all ranks of an island.
    placement_s: float = 30.0
    # Each stage of a launch: the processes, then model, engine and data.
    launch_s: float = 300.0
    # A segment of inner steps and what is emitted behind it; 0: any time, as long as silence_s is kept.
    train_s: float = 0.0
    # Emit, merge, adopt, evaluate, and each write of a commit.
    exchange_s: float = 300.0
    # Between two steps of an island before it counts as stalled.
    silence_s: float = 60.0
    # Between two heartbeats of a rank or an anchor shard before it counts as frozen.
    heartbeat_s: float = 15.0
    # Without a word from any driver before a rank ends itself.
    orphan_s: float = 120.0
    # Losses of an island in a row, without a commit in between, before the run fails.
    losses: int = 6


@dataclass
class FaultsConfig:
    """What is to go wrong, on purpose."""

    # Lines `KIND TARGET ROUND PHASE`; see rounds/faults.py.
    plan: list[Any] = field(default_factory=list)
    # Without this a plan is refused.
    allowed: bool = False


@dataclass
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    overlay: OverlayConfig = field(default_factory=OverlayConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    fragments: FragmentsConfig = field(default_factory=FragmentsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    codec: CodecsConfig = field(default_factory=CodecsConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    quorum: QuorumConfig = field(default_factory=QuorumConfig)
    stale: StaleConfig = field(default_factory=StaleConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    adopt: AdoptConfig = field(default_factory=AdoptConfig)
    # Further exchanges over the same parameters, by name.
    channels: dict[str, ChannelConfig] = field(default_factory=dict)
    guard: GuardConfig = field(default_factory=GuardConfig)
    anchor: AnchorConfig = field(default_factory=AnchorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)


# Islands that anybody may ask for where islands.max does not say.
SLOTS = 64


def island_names(config: Config) -> list[str]:
    """Names of the islands that a run begins with, sorted: the order of every sum."""
    islands = config.islands
    by_region = [f"{region}-{k}" for region, count in islands.regions.items() for k in range(count)]
    return sorted(by_region or list(islands.names) or [f"i{k}" for k in range(islands.count)])


def slot_names(config: Config) -> list[str]:
    """Names of all islands that a run can have, in the order in which they come: first those that it begins with."""
    first, islands = island_names(config), config.islands
    if not elastic(config):
        return first
    most = islands.max or max(SLOTS, len(first))
    others = [f"{region}-{k}" for k in range(most) for region in sorted(islands.regions)]
    if others:
        return [*first, *(name for name in others if name not in first)]
    names = [*first, *(name for name in (f"i{k}" for k in range(len(first) + most)) if name not in first)]
    return names[:most]


def elastic(config: Config) -> bool:
    """Whether a run can have other islands than it begins with: not where each has its own anchor, or is alone."""
    return config.topology.anchors == "shared" and config.topology.kind != "none"


def region_of(config: Config, name: str) -> str:
    """The region that an island has to be in; empty: anywhere."""
    region = name.rpartition("-")[0]
    return region if region in config.islands.regions else ""


def island_data(config: Config, name: str) -> DataConfig:
    """The data section of one island: the run's, with what that island overrides."""
    override = config.islands.overrides.get(name)
    if override is None:
        return config.data
    changes: dict[str, Any] = {}
    if override.data is not None:
        changes = {"name": override.data, "source": override.data, "path": None}
    changes |= override.data_settings
    if override.data_path is not None:
        changes["path"] = override.data_path
    return replace(config.data, **changes)
