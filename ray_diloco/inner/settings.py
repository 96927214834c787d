"""What a rank is built from: plain values that travel to its process.  No import of torch: the driver makes them."""

from __future__ import annotations

from dataclasses import dataclass

from ray_diloco.config.schema import InnerConfig, ModelConfig


@dataclass(frozen=True)
class RankSettings:
    """What a rank needs to exist; travels to its process.

    Attributes:
      model, inner: what to train and how.
      vocab_size: token ids of the tokenizer.
      eos_id: its end-of-text id, if it has one.
      sequence_length: tokens per sequence.
      seed: of initialisation and dropout; the same on all islands.
      total_steps: length of the learning-rate schedule in global steps.
      island: name of the island, so that islands draw different dropout.
      rank, world: place in the island.
      host, port: rank 0's store; a single rank needs none.
      threads: CPU threads.
      accelerator: `cpu` or `cuda`.
      evaluation_batch: blocks per forward pass of an evaluation; 0: `inner.micro_batch`.
      timeout_s: seconds that ranks of the island wait for one another.
    """

    model: ModelConfig
    inner: InnerConfig
    vocab_size: int
    eos_id: int | None
    sequence_length: int
    seed: int
    total_steps: int
    island: str = "island"
    rank: int = 0
    world: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    accelerator: str = "cpu"
    evaluation_batch: int = 0
    timeout_s: float = 120.0
