"""One rank of an island: a model in a DeepSpeed engine, trained for given steps on given batches.

A rank knows nothing of other islands.  It trains from any global step (learning rate and random state are functions
of the step, nothing has to be resumed), and shows its part of the model as canonical slices that can be read and
written in place; optimiser state stays with it.  Methods marked collective must be called by all ranks of the island.
"""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ray_diloco.inner import group, state
from ray_diloco.inner.builder import output_field
from ray_diloco.inner.corrections import (
    Correction,
    EvaluationMix,
    before_each_step,
    check_correction,
    check_given,
    correct,
    over_slices,
)
from ray_diloco.inner.engine import build_engine, clip_gradients, set_learning_rates
from ray_diloco.inner.evaluate import block_losses
from ray_diloco.inner.model import build_model
from ray_diloco.inner.muon import hidden_matrices, place_matrices
from ray_diloco.inner.noise import seed_step
from ray_diloco.inner.optimizer import OPTIMIZERS
from ray_diloco.inner.schedule import learning_rate_factor, rewarm_factor
from ray_diloco.inner.settings import RankSettings
from ray_diloco.inner.slices import commit_writes, emitted_ranges, find_homes, layout_of_model, slices_of
from ray_diloco.inner.stop import StopVote
from ray_diloco.outer.exchange import Slice
from ray_diloco.outer.layout import Layout, Ranges

# Called after every step with the global step and this rank's loss (a 0-dimensional tensor: reading it waits for the
# device); returns True to ask the island to stop.
OnStep = Callable[[int, torch.Tensor], bool | None]
# Token ids of a step of the segment, counted from 0: int64 [accumulation, micro_batch, sequence].
StepBatches = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class TrainReport:
    """What a segment of training came to, over all ranks of the island unless said otherwise.

    Attributes:
      steps: optimiser steps done; fewer than asked for if `stopped`.
      tokens: tokens of the sequences trained on.
      loss_mean: nats per predicted token, mean over the segment (NaN without a step).
      loss_last: the same of the last step, of this rank.
      grad_norm_last: gradient norm of the last step before clipping.
      seconds: time of the whole segment in this rank.
      step_seconds: median time of a step in this rank.
      skipped: steps that the engine did not apply because their gradient overflowed (bf16).
      finite: every loss and the last gradient norm are finite.
      stopped: a rank asked to stop, or time was up, before the last step.
    """

    steps: int
    tokens: int
    loss_mean: float
    loss_last: float
    grad_norm_last: float
    seconds: float
    step_seconds: float
    skipped: int
    finite: bool
    stopped: bool


@dataclass(frozen=True)
class Earlier:
    """What was done of a segment before it was taken up: losses of its steps, seconds, and steps without effect."""

    losses: Sequence[torch.Tensor] = ()
    seconds: float = 0.0
    skipped: int = 0


NOTHING = Earlier()

# Name, among the pieces of an inner state, of the steps that are left of a warm-up after a reset.
REWARM = "rewarm"


class InnerRank:
    """A rank in this process; its construction is a collective.

    Args:
      settings: see `RankSettings`.
      store: the store that this process opened with `group.open_store` (rank 0 of several).

    Attributes:
      layout: the canonical form of the model.
      slices: what this rank holds of it.
      emits: what this rank sends of it.
      correction: what changes the gradient before the step; None: nothing.
      mix: says where the gradient is taken; None: at `θ`.
      rate_sum: sum of the learning rates of the steps done since somebody set it to 0 (`inner.lr` × schedule each).

    Raises:
      InnerError: 7xx, the model or engine cannot be built, or the island did not come together in time.
    """

    def __init__(self, settings: RankSettings, store: Store | None = None) -> None:
        self.settings = settings
        self._stage = settings.inner.zero_stage
        self._kind = OPTIMIZERS[settings.inner.optimizer.name]
        check_correction(settings.inner)
        torch.set_num_threads(settings.threads)
        self._joined = not dist.is_initialized()
        if self._joined:
            _join(settings, store)
        model = build_model(
            settings.model, settings.vocab_size, settings.eos_id, settings.sequence_length, settings.seed
        )
        self.layout: Layout = layout_of_model(model)
        # The key-value cache of Hugging Face models is for generation only.
        self._extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        self._state_names = self._kind.state_names(model, settings.inner)
        matrices = hidden_matrices(model)
        initial = _values_by_name(model) if settings.inner.precision != "fp32" else {}
        self._engine = build_engine(model, settings.inner, compile_model=settings.model.compile)
        self._control = dist.new_group(backend="gloo") if settings.world > 1 else None
        group.limit_waits(settings.timeout_s)
        self._homes = find_homes(self._engine, self.layout, self._stage)
        place_matrices(self._engine, self._stage, self.layout, self._homes, matrices, self._control)
        self.slices: tuple[Slice, ...] = slices_of(self._homes)
        self.emits: Ranges = emitted_ranges(self._homes, self.layout, self._stage, settings.rank, settings.world)
        self.correction: Correction | None = None
        self.mix: EvaluationMix | None = None
        self.rate_sum = 0.0
        self._rewarm_left = 0
        if self._stage > 0:
            before_each_step(self._engine.basic_optimizer, self._correct)
        if initial:
            self._write_initial(initial)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._engine.device
        return device

    @property
    def skipped(self) -> int:
        """Steps that this engine has not applied because their gradient overflowed."""
        return int(self._engine.skipped_steps)

    def commit_writes(self) -> None:
        """Makes what was written into `slices` the parameters of the next forward pass; collective."""
        commit_writes(self._engine, self._stage)

    def over_slices(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """A vector [total(emits)] in the order of `emits`, as flat tensors aligned with `slices`; collective.

        This is how `A`, `B` or a control, of which a rank has what it emits, become what `correction` and `mix` want.
        """
        return over_slices(packed, self.emits, self.slices, self.layout, self._control)

    def train(
        self,
        start_step: int,
        steps: int,
        batches: StepBatches,
        on_step: OnStep | None = None,
        seconds: float = 0.0,
        earlier: Earlier = NOTHING,
    ) -> TrainReport:
        """Does `steps` optimiser steps, or as many as fit into a time; collective.

        When a rank's `on_step` returns True or its time is up, all ranks end after the same step: that one, or the next
        if there are several ranks.

        Args:
          start_step: global step of the run that the first of them is.
          steps: how many.
          batches: this rank's token ids by step of the segment.
          on_step: called after every step.
          seconds: time after which no further step begins, but for the one that it takes several ranks to agree; the
            first is always done.  0: no limit.
          earlier: what was done of these steps before, whose state was restored; the report counts it.

        Raises:
          InnerError: RD-716, `correction` or `mix` is not set though the settings ask for it.
        """
        check_given(self.settings.inner, self.correction, self.mix)
        self._engine.train()
        vote = StopVote(self._control)
        skipped = self._engine.skipped_steps
        losses: list[torch.Tensor] = list(earlier.losses)
        norm: torch.Tensor | float = 0.0
        moments = [time.perf_counter()]
        for k in range(len(losses), steps):
            loss, norm = self._step(start_step + k, batches(k))
            losses.append(loss)
            moments.append(time.perf_counter())
            wants_stop = bool(on_step(start_step + k, loss)) if on_step else False
            wants_stop = wants_stop or 0.0 < seconds <= earlier.seconds + time.perf_counter() - moments[0]
            if vote.decided(wants_stop):
                break
        vote.close()
        report = self._report(losses, float(norm), moments, self._engine.skipped_steps - skipped, steps)
        return replace(report, seconds=earlier.seconds + report.seconds, skipped=earlier.skipped + report.skipped)

    def evaluate(self, blocks: np.ndarray) -> list[tuple[float, int]]:
        """Sum of nats and number of predicted tokens of each block, under the present parameters.

        At ZeRO stage 3 this is a collective, in which ranks may have different numbers of blocks, also none.

        Args:
          blocks: token ids [n, sequence] of any integer type.
        """
        batch = self.settings.evaluation_batch or self.settings.inner.micro_batch
        filled = self._filled_to_longest(blocks) if self._stage == 3 else blocks
        self._engine.eval()
        try:
            with torch.no_grad():
                losses = block_losses(self._forward, filled, batch, self.device)
        finally:
            self._engine.train()
        return losses[: len(blocks)]

    def inner_state(self) -> dict[str, np.ndarray]:
        """Copy of the optimiser state of the elements in `emits` (`ray_diloco.inner.state` names the pieces).

        Beside them, the steps that are left of a warm-up after a reset.
        """
        pieces = state.read_state(self._engine.basic_optimizer, self._homes, self.emits, self._state_names)
        return pieces | ({REWARM: np.asarray(self._rewarm_left, dtype=np.int64)} if self._rewarm_left else {})

    def load_inner_state(self, pieces: Mapping[str, np.ndarray]) -> None:
        """Restores the state from the pieces of all ranks of an island, of any world size and ZeRO stage.

        Raises:
          InnerError: RD-730, the pieces do not cover what this rank holds; the state is unchanged then.
        """
        of_optimizer = {name: piece for name, piece in pieces.items() if name != REWARM}
        state.write_state(self._engine.basic_optimizer, self._homes, self._state_names, of_optimizer)
        self._rewarm_left = int(pieces.get(REWARM, 0))

    def reset_inner_state(self) -> None:
        """Makes the next step that of an optimiser that has not stepped."""
        state.reset_state(self._engine.basic_optimizer, self._homes)
        self._rewarm_left = 0

    def rewarm(self) -> None:
        """Warms the learning rate up again: moments that begin anew in the middle of a run know nothing yet."""
        self._rewarm_left = self.settings.inner.schedule.rewarm_steps

    def close(self) -> None:
        """Frees the engine, and leaves the process group if this rank joined it."""
        self._engine.destroy()
        if self._joined:
            group.leave()

    def _step(self, step: int, micro_batches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """One optimiser step; mean loss of its micro-batches and gradient norm before clipping."""
        s, engine = self.settings, self._engine
        factor = learning_rate_factor(s.inner.schedule, step, s.total_steps) if self._kind.scheduled else 1.0
        if self._rewarm_left and self._kind.scheduled:
            factor *= rewarm_factor(s.inner.schedule, self._rewarm_left)
        set_learning_rates(engine, factor)
        seed_step(s.seed, s.island, s.rank, step, self.device)
        skipped = engine.skipped_steps
        losses = []
        norm: torch.Tensor | float = 0.0
        if self.mix is not None:
            self.mix.enter(self.slices)
            self.commit_writes()
        for k, ids in enumerate(micro_batches.to(self.device, non_blocking=True)):
            loss = output_field(self._forward(ids), "loss")
            engine.backward(loss)
            if k == len(micro_batches) - 1:
                norm = self._before_step()
            engine.step()
            losses.append(loss.detach())
        if self._stage > 0:
            norm = engine.get_global_grad_norm()
        if engine.skipped_steps == skipped:
            self._rewarm_left = max(0, self._rewarm_left - 1)
            self.rate_sum += self._kind.base_lr(s.inner) * factor
        elif self.mix is not None:
            # No step has replaced the mixed values in the model that computes.
            self.commit_writes()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean(), norm

    def _before_step(self) -> torch.Tensor | float:
        """What happens between the last backward pass and the step; the gradient norm where it is ours (stage 0)."""
        if self.mix is not None:
            self.mix.leave(self.slices)
        if self._stage > 0:
            return 0.0
        self._correct()
        return clip_gradients(self._engine.module, self.settings.inner.clip)

    def _correct(self) -> None:
        if self.correction is not None:
            correct(self.correction, self._homes, self.slices, self._engine.basic_optimizer)

    def _forward(self, ids: torch.Tensor) -> Any:
        return self._engine(input_ids=ids, labels=ids, **self._extra)

    def _filled_to_longest(self, blocks: np.ndarray) -> np.ndarray:
        """Adds blocks of zeros up to the largest number that any rank has."""
        longest = torch.tensor([len(blocks)])
        if self._control is not None:
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._control)
        missing = int(longest) - len(blocks)
        return np.concatenate([blocks, np.zeros((missing, self.settings.sequence_length), dtype=blocks.dtype)])

    def _write_initial(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Sets fp32 masters to the model as it was built: DeepSpeed cloned them from rounded bf16 copies."""
        for home in self._homes:
            start = home.range.start - home.spec.offset
            home.values.copy_(initial[home.spec.name].view(-1)[start : start + home.range.numel])
        self.commit_writes()

    def _report(
        self, losses: list[torch.Tensor], norm: float, moments: list[float], skipped: int, asked: int
    ) -> TrainReport:
        s = self.settings
        total = torch.stack(losses).double().sum().cpu() if losses else torch.zeros((), dtype=torch.float64)
        tally = torch.stack([total, torch.tensor(float(len(losses)), dtype=torch.float64)])
        if self._control is not None:
            dist.all_reduce(tally, group=self._control)
        nats, count = tally.tolist()
        durations = [after - before for before, after in itertools.pairwise(moments)]
        return TrainReport(
            steps=len(losses),
            tokens=len(losses) * s.world * s.inner.gradient_accumulation * s.inner.micro_batch * s.sequence_length,
            loss_mean=nats / count if count else math.nan,
            loss_last=float(losses[-1]) if losses else math.nan,
            grad_norm_last=norm,
            seconds=time.perf_counter() - moments[0],
            step_seconds=statistics.median(durations) if durations else math.nan,
            skipped=skipped,
            finite=math.isfinite(nats) and math.isfinite(norm),
            stopped=len(losses) < asked,
        )


def _join(settings: RankSettings, store: Store | None) -> None:
    backend = "nccl" if settings.accelerator == "cuda" else "gloo"
    s = settings
    group.join(s.rank, s.world, s.host, s.port, s.timeout_s, backend=backend, store=store)


def _values_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
