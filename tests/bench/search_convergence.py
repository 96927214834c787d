"""How close DiLoCo comes to synchronous data parallelism on the embedded corpus: a search over the blocks of a method.

Set-up of ../shared/numbers.md, "Convergence on the embedded corpus": a Llama of 1.0 M parameters reads the standard
library as bytes, K = 4 islands × 4 sequences × 256 bytes, 240 steps from scratch, AdamW 2e-3, one seed.  Every
configuration sees the same blocks in the same steps, so tokens are equal; what is reported is the loss of the anchor
(or of the average of anchors, where there is one) on all held-out blocks at the end, in nats per byte.

Islands are simulated one after the other in this process, from the package's own blocks: model, data, inner optimiser
and schedule, emission schedule, outer optimiser, outer rate, average and adoption, read from a configuration as
`ray-diloco train` reads it.  There is no Ray and no DeepSpeed; bf16 is done as ZeRO does it (bf16 parameters for the
passes, fp32 ones in the optimiser).  A configuration takes one to four minutes on one shared core.

    python tests/bench/search_convergence.py --list
    python tests/bench/search_convergence.py sync diloco-0.7-0.9 plain-1-0
    python tests/bench/search_convergence.py --add mine="outer.lr=0.8 outer.momentum=0.2" sync diloco-0.7-0.9 mine

Results are appended to `--results`; a configuration that is there with the same settings is not run again, so a search
can go on, and with `--table` nothing is run at all.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ray_diloco.config.compose import compose
from ray_diloco.config.schema import Config
from ray_diloco.data.blocks import Blocks, Corpus, prepare
from ray_diloco.inner.batches import Batches
from ray_diloco.inner.evaluate import block_losses
from ray_diloco.inner.model import build_model
from ray_diloco.inner.optimizer import OPTIMIZERS
from ray_diloco.inner.schedule import learning_rate_factor
from ray_diloco.outer.adopt import AdoptChunk, adopt_of
from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.layout import Range
from ray_diloco.outer.optimizer import outer_optimizer
from ray_diloco.outer.rate import OuterRate
from ray_diloco.outer.schedule import Schedule

STEPS = 240
BASE = "model=tiny data=stdlib tokenizer=bytes algorithm=diloco islands.count=4 inner.H=20 inner.lr=0.002"
# Gap that a configuration is to close part of: from the first of these to the second, both with its own seed.
REFERENCES = ("diloco-0.7-0.9", "sync")

COSINE = "inner.schedule.kind=cosine inner.schedule.final_ratio=0.05"
# The last 40 steps, down to a tenth.
WSD = "inner.schedule.kind=wsd inner.schedule.decay_steps=40 inner.schedule.final_ratio=0.1"
PAPER = "outer.lr=0.7 outer.momentum=0.9"
FEDAVG = "outer.lr=1.0 outer.momentum=0.0"
LOW = "outer.lr=0.7 outer.momentum=0.5"
LOWER = "outer.lr=0.9 outer.momentum=0.3"
HALF = "inner.lr=0.001"
MUON = "inner.optimizer.name=muon inner.optimizer.muon_lr=0.02"

# Settings over `BASE`.  Three words are this script's own: `sync` trains one model on the batches of all islands;
# `warm=N` does so for the first N steps, and the islands then begin with that model and fresh optimisers, as
# `model.pretrained` has it; `steps=N` takes another number of steps than 240.
CONFIGURATIONS = {
    "sync": "sync",
    "diloco-0.7-0.9": PAPER,
    "plain-1-0": FEDAVG,
    "plain-0.7-0.5": LOW,
    "plain-0.9-0.3": LOWER,
    "sync-cosine": f"sync {COSINE}",
    "cosine-1-0": f"{FEDAVG} {COSINE}",
    "sync-wsd": f"sync {WSD}",
    "wsd-1-0": f"{FEDAVG} {WSD}",
    "wsd-0.9-0.3": f"{LOWER} {WSD}",
    "wsd-0.7-0.5": f"{LOW} {WSD}",
    "wsd-1-0-H24": f"{FEDAVG} {WSD} inner.H=24",
    "wsd-1-0-H30": f"{FEDAVG} {WSD} inner.H=30",
    "wsd-1-0-delay": f"{FEDAVG} {WSD} schedule.delay=2 adopt.kind=rebase",
    "average-1-0": f"{FEDAVG} outer.average.kind=uniform outer.average.start=0.75",
    "outer-cosine-0.9-0.5": f"outer.lr=0.9 outer.momentum=0.5 outer.schedule.kind=cosine {WSD}",
    "warm60-1-0": f"warm=60 {FEDAVG}",
    "warm60-wsd-1-0": f"warm=60 {FEDAVG} {WSD}",
    "sync-lr-0.004": "sync inner.lr=0.004",
    "lr-0.004-1-0": f"{FEDAVG} inner.lr=0.004",
    "lr-0.0014-1-0": f"{FEDAVG} inner.lr=0.0014",
    "sync-lr-0.001": f"sync {HALF}",
    "lr-0.001-0.7-0.9": f"{PAPER} {HALF}",
    "lr-0.001-1-0": f"{FEDAVG} {HALF}",
    "lr-0.0007-1-0": f"{FEDAVG} inner.lr=0.0007",
    "b95-1-0": f"{FEDAVG} inner.optimizer.beta1=0.95",
    "b99-1-0": f"{FEDAVG} inner.optimizer.beta2=0.99",
    "sync-muon": f"sync {MUON}",
    "muon-0.7-0.9": f"{MUON} {PAPER}",
    "muon-0.7-0.5": f"{MUON} {LOW}",
    "muon-0.9-0.3": f"{MUON} {LOWER}",
    "muon-1-0": f"{MUON} {FEDAVG}",
    "muon-half-1-0": f"{FEDAVG} {HALF} inner.optimizer.name=muon inner.optimizer.muon_lr=0.01",
    "sync-seed-1": "sync run.seed=1",
    "diloco-0.7-0.9-seed-1": f"{PAPER} run.seed=1",
    "plain-1-0-seed-1": f"{FEDAVG} run.seed=1",
    "sync-lr-0.001-seed-1": f"sync {HALF} run.seed=1",
    "lr-0.001-0.7-0.9-seed-1": f"{PAPER} {HALF} run.seed=1",
    "lr-0.001-1-0-seed-1": f"{FEDAVG} {HALF} run.seed=1",
    "demo-long-decay": f"steps=480 islands.count=2 {LOW} inner.schedule.decay_steps=120",
    "demo-1-0": f"steps=480 islands.count=2 {FEDAVG}",
    "demo-lr-0.001": f"steps=480 islands.count=2 {FEDAVG} {HALF}",
    "demo-0.7-0.5": f"steps=480 islands.count=2 {LOW} {WSD}",
}


@dataclasses.dataclass
class Workshop:
    """What all configurations share: data, initial parameters, and one model that makes all passes.

    Attributes:
      model: a model in fp32, to be copied.
      worker: the model that computes losses and gradients, in the precision of the passes.
      loss: mean loss of `worker` on token ids [batch, sequence].
    """

    corpus: Corpus
    blocks: Blocks
    model: nn.Module
    worker: nn.Module
    loss: Callable[[torch.Tensor], torch.Tensor]

    def heldout(self, flat: torch.Tensor) -> float:
        """Nats per byte of parameters on all held-out blocks, in fp32."""
        model = copy.deepcopy(self.model)
        flatten(model).copy_(flat)
        every = self.blocks.heldout(torch.arange(self.corpus.heldout_blocks).numpy())
        with torch.no_grad():
            losses = block_losses(lambda ids: model(input_ids=ids), every, 4, torch.device("cpu"))
        return sum(nats for nats, _ in losses) / sum(count for _, count in losses)


class Island:
    """fp32 parameters, one after the other in `theta`, and their inner optimiser."""

    def __init__(self, workshop: Workshop, config: Config, theta: torch.Tensor, steps: int) -> None:
        self._workshop, self._inner, self._steps = workshop, config.inner, steps
        self._model = copy.deepcopy(workshop.model)
        self.theta = flatten(self._model)
        self.theta.copy_(theta)
        self.base = theta.clone()
        self.emitted = theta.clone()
        self._optimizer = OPTIMIZERS[config.inner.optimizer.name].build(self._model, config.inner)

    def step(self, step: int, batches: list[torch.Tensor]) -> None:
        """One step of the optimiser on the mean gradient of some batches [sequences, sequence]."""
        own, passes = list(self._model.parameters()), list(self._workshop.worker.parameters())
        torch._foreach_copy_([p.data for p in passes], [p.data for p in own])
        for number, ids in enumerate(batches):
            self._workshop.loss(ids).backward()
            for mine, computed in zip(own, passes, strict=True):
                gradient = computed.grad.float() / len(batches)
                mine.grad = gradient if number == 0 else mine.grad.add_(gradient)
                computed.grad = None
        torch.nn.utils.clip_grad_norm_(own, self._inner.clip)
        factor = learning_rate_factor(self._inner.schedule, step, self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        self._optimizer.step()


class Keeper:
    """The anchor, the outer optimiser's state and the average of anchors."""

    def __init__(self, config: Config, rounds: int, anchor: torch.Tensor) -> None:
        outer = dataclasses.asdict(config.outer) | {"buffer": config.outer.buffer or config.islands.count}
        schedule, average = config.outer.schedule, config.outer.average
        self._optimizer = outer_optimizer(**outer)
        self._lr = config.outer.lr
        self._rate = OuterRate(schedule.kind, rounds, schedule.warmup_rounds, schedule.final_ratio)
        self._averaging = OuterAverage(average.kind, rounds, average.start, average.decay)
        self.anchor, self._average = anchor.clone(), anchor.clone()
        self._state = [torch.full_like(anchor, self._optimizer.initial) for _ in self._optimizer.state_names]
        self._version = 0

    @property
    def result(self) -> torch.Tensor:
        """What is evaluated: the average of anchors as soon as there is one, else the anchor."""
        return self._average if self._averaging.count(self._version) else self.anchor

    def move(self, deltas: list[torch.Tensor]) -> None:
        """One outer step on the mean of the pseudo-gradients."""
        old, state = self.anchor.clone(), [tensor.clone() for tensor in self._state]
        self._optimizer.step(
            old, state, torch.stack(deltas).mean(0), self.anchor, self._state, version=self._version, lr=self._now()
        )
        self._version += 1
        self._averaging.update(self._average, self.anchor, self._version)

    def sent(self, from_lookahead: bool) -> torch.Tensor:
        """What islands are sent: the anchor, or the point that its momentum leads to."""
        out = self.anchor.clone()
        if from_lookahead:
            self._optimizer.lookahead(self.anchor, self._state, out, self._now())
        return out

    def _now(self) -> float:
        return self._lr * self._rate.factor(self._version)


def train(workshop: Workshop, settings: str) -> dict[str, Any]:
    """Trains one configuration; the losses by step, the last of them being that of the end."""
    own, overrides = own_words(settings)
    config = compose([*BASE.split(), *overrides]).config
    steps, warm = int(own.get("steps", STEPS)), int(own.get("warm", 0))
    began = time.perf_counter()
    batches = batches_of_all(workshop, config, steps)
    together = Island(workshop, config, flatten(initial_model(config, workshop.corpus)), steps)
    losses: dict[int, float] = {}
    for step in range(steps if "sync" in own else warm):
        together.step(step, next(batches))
        if (step + 1) % 60 == 0 or step + 1 == warm:
            losses[step + 1] = workshop.heldout(together.theta)
    if "sync" not in own:
        losses |= train_apart(workshop, config, together.theta, warm, steps, batches)
    return {"losses": losses, "loss": losses[max(losses)], "seconds": time.perf_counter() - began}


def own_words(settings: str) -> tuple[dict[str, str], list[str]]:
    """The words of a configuration that are this script's, with their values, and the others."""
    own, overrides = {}, []
    for word in settings.split():
        key, _, value = word.partition("=")
        if key in ("sync", "warm", "steps"):
            own[key] = value
        else:
            overrides.append(word)
    return own, overrides


def train_apart(
    workshop: Workshop,
    config: Config,
    start: torch.Tensor,
    first: int,
    steps: int,
    batches: Iterator[list[torch.Tensor]],
) -> dict[int, float]:
    """Islands that train apart from step `first` on and meet as the configuration says; losses by step."""
    H, delay = config.inner.H, config.schedule.delay
    rounds = (steps - first) // H
    if rounds * H != steps - first:
        raise SystemExit(f"{steps - first} steps are no whole number of rounds of {H}")
    keeper = Keeper(config, rounds, start)
    islands = [Island(workshop, config, start, steps) for _ in range(config.islands.count)]
    adopt = adopt_of(config.adopt.kind, alpha=config.adopt.alpha, strength=config.adopt.strength, delay=delay, H=H)
    losses: dict[int, float] = {}
    step = first
    for boundary in Schedule(H=H, rounds=rounds, delay=delay, origin=(0, first)).boundaries(first):
        for now in range(step, boundary.step):
            for island, ids in zip(islands, next(batches), strict=True):
                island.step(now, [ids])
        step = boundary.step
        if boundary.emits:
            for island in islands:
                island.emitted.copy_(island.theta)
            keeper.move([island.base - island.theta for island in islands])
        if boundary.adopts:
            sent = keeper.sent(adopt.from_lookahead)
            for island in islands:
                adopt.apply(AdoptChunk(island.theta, island.base, sent, island.emitted))
        if boundary.emits and (step % 60 == 0 or step == steps):
            losses[step] = workshop.heldout(keeper.result)
    return losses


def batches_of_all(workshop: Workshop, config: Config, steps: int) -> Iterator[list[torch.Tensor]]:
    """For each step, the token ids [sequences, sequence] of every island: one batch of the run's order each."""
    micro_batch, count = config.inner.micro_batch, config.islands.count
    lease = (Range(0, steps * count * micro_batch),)
    corpus = workshop.corpus
    batches = Batches(workshop.blocks, corpus.train_blocks, lease, config.run.seed, 0, 1, count, micro_batch)
    for step in range(steps):
        yield list(batches(step))


def flatten(model: nn.Module) -> torch.Tensor:
    """Moves the parameters of a model into one vector, in order, and returns it; both share their elements."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    at = 0
    for p in parameters:
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return flat


def initial_model(config: Config, corpus: Corpus) -> nn.Module:
    sequence = config.data.sequence_length
    return build_model(config.model, corpus.vocab_size, corpus.eos_id, sequence, config.run.seed)


def workshop_of(precision: str, compiled: bool) -> Workshop:
    # Written-out attention is faster than torch's kernel for the CPU at this size, and compiling gains a fifth.
    config = compose([*BASE.split(), "model.attention=eager"]).config
    corpus = prepare(config.data, config.tokenizer)
    model = initial_model(config, corpus)
    worker = copy.deepcopy(model).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = worker(input_ids=ids, labels=ids).loss
        return value

    return Workshop(corpus, corpus.open(), model, worker, torch.compile(loss, dynamic=False) if compiled else loss)


def table(results: dict[str, dict[str, Any]], names: list[str]) -> str:
    """A Markdown table, and the share of the gap that each configuration closes; none for other numbers of steps."""
    lines = ["| configuration | settings | held-out loss | gap closed |", "|---|---|---|---|"]
    for name in names:
        loss = results[name]["loss"]
        suffix = name[at:] if (at := name.find("-seed-")) >= 0 else ""
        worst, best = (results.get(reference + suffix, {}).get("loss") for reference in REFERENCES)
        comparable = worst is not None and best is not None and "steps" not in own_words(results[name]["settings"])[0]
        share = f"{(worst - loss) / (worst - best):.0%}" if comparable else ""
        lines.append(f"| {name} | `{results[name]['settings']}` | {loss:.3f} | {share} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="configurations; default: all")
    parser.add_argument("--list", action="store_true", help="print the configurations")
    parser.add_argument("--table", action="store_true", help="print what --results has, without training")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=SETTINGS", help="a further configuration")
    parser.add_argument("--results", type=Path, default=Path("convergence.jsonl"))
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--compile", action="store_true", help="torch.compile: a minute first, then a fifth faster")
    arguments = parser.parse_args()
    known = CONFIGURATIONS | dict(entry.split("=", 1) for entry in arguments.add)
    if arguments.list:
        print("\n".join(f"{name:24} {settings}" for name, settings in known.items()))
        return
    torch.set_num_threads(1)
    lines = arguments.results.read_text(encoding="utf-8").splitlines() if arguments.results.exists() else []
    results = {line["name"]: line for line in map(json.loads, lines) if line["precision"] == arguments.precision}
    names = arguments.names or list(known)
    todo = [name for name in names if results.get(name, {}).get("settings") != known[name] and not arguments.table]
    workshop = workshop_of(arguments.precision, arguments.compile) if todo else None
    for name in todo:
        assert workshop is not None
        about = {"name": name, "settings": known[name], "precision": arguments.precision}
        results[name] = about | train(workshop, known[name])
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results[name]) + "\n")
        curve = " ".join(f"{step}:{loss:.3f}" for step, loss in results[name]["losses"].items())
        print(f"{name}: {curve} in {results[name]['seconds']:.0f} s", flush=True)
    print(table(results, [name for name in names if name in results] if arguments.names else list(results)))


if __name__ == "__main__":
    main()
