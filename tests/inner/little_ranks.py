"""A rank of a little model with Muon, corrections and the mix, run as a process: `little_ranks.py RANK WORLD FOLDER`.

The model has an odd number of elements and matrices of odd sizes, so that at ZeRO stage 1 ranks share one.  Rank 0
prints the port of its store, the others read it.
"""

import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ray_diloco.config.schema import InnerConfig, InnerOptimizerConfig, InnerScheduleConfig, ModelConfig
from ray_diloco.inner import group
from ray_diloco.inner.corrections import ControlVariate, EvaluationMix
from ray_diloco.inner.rank import InnerRank
from ray_diloco.inner.settings import RankSettings

VOCAB, SEQUENCE, STEPS = 32, 8, 4
ENGINES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16")]
OPTIMIZER = InnerOptimizerConfig(name="muon", muon_lr=0.05, muon_momentum=0.9, muon_weight_decay=0.02)
LR, CLIP, RATES = 0.02, 0.05, (0.5, 1.0, 1.0, 1.0)
MIX = 0.7


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 12)
        self.wide = nn.Linear(12, 7)
        self.tall = nn.Linear(7, 22, bias=False)
        self.square = nn.Linear(22, 22)
        self.head = nn.Linear(22, vocab_size, bias=False)

    def forward(self, input_ids, labels):
        hidden = torch.tanh(self.square(torch.tanh(self.tall(torch.tanh(self.wide(self.embed(input_ids)))))))
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss, logits=logits)


def build(config, vocab_size):
    return Model(vocab_size)


def tokens(step, sequences=4):
    return torch.randint(0, VOCAB, (sequences, SEQUENCE), generator=torch.Generator().manual_seed(10 + step))


def settings(stage, precision, rank, world):
    inner = InnerConfig(
        lr=LR,
        micro_batch=2 // world,
        gradient_accumulation=2,
        zero_stage=stage,
        precision=precision,
        clip=CLIP,
        optimizer=OPTIMIZER,
        schedule=InnerScheduleConfig(kind="constant", warmup_steps=2),
    )
    model = ModelConfig(builder="little_ranks:build")
    return RankSettings(model, inner, VOCAB, 0, SEQUENCE, 3, 100, rank=rank, world=world)


def batches(rank, start):
    s = rank.settings
    return lambda k: tokens(start + k).chunk(s.world)[s.rank].reshape(2, s.inner.micro_batch, SEQUENCE)


def held(rank):
    return [(s.range.start, s.values.clone()) for s in rank.slices]


def muon_scenario(stage, precision, number, world):
    """Parameters after 4 steps, straight and by way of a save after 2 into a new engine; names of the state; splits."""
    rank = InnerRank(settings(stage, precision, number, world))
    rank.train(0, 2, batches(rank, 0))
    values, pieces = held(rank), [None] * world
    dist.all_gather_object(pieces, rank.inner_state())
    state = {key: value for part in pieces for key, value in part.items()}
    rank.train(2, 2, batches(rank, 2))
    straight = held(rank)
    places = [p for ps in rank._engine.basic_optimizer._places.values() for p in ps]
    rank.close()
    fresh = InnerRank(settings(stage, precision, number, world))
    for s, (_, saved) in zip(fresh.slices, values, strict=True):
        s.values.copy_(saved)
    fresh.commit_writes()
    fresh.load_inner_state(state)
    fresh.train(2, 2, batches(fresh, 2))
    return straight, held(fresh), sorted(state), sum(place.split for place in places)


def vectors(numel):
    """`A`, `c_m` and `c`."""
    return 0.1 * torch.randn(3, numel, generator=torch.Generator().manual_seed(8))


def corrected_scenario(stage, number, world):
    """Parameters after 2 steps of SGD with SCAFFOLD at a mixed point, of vectors of which a rank has what it emits."""
    s = settings(stage, "fp32", number, world)
    changes = {
        "optimizer": InnerOptimizerConfig(name="sgd", weight_decay=0.0),
        "schedule": InnerScheduleConfig(kind="constant", warmup_steps=0),
        "clip": 0.0,
        "mix": MIX,
        "correction": "scaffold",
    }
    rank = InnerRank(replace(s, inner=replace(s.inner, **changes)))
    packed = (torch.cat([flat[r.start : r.stop] for r in rank.emits]) for flat in vectors(rank.layout.numel))
    mixed, own, shared = (rank.over_slices(part) for part in packed)
    rank.mix = EvaluationMix(MIX, lambda: mixed)
    rank.correction = ControlVariate(lambda: own, lambda: shared)
    rank.train(0, 2, batches(rank, 0))
    values = held(rank)
    rank.close()
    return values


def timed_scenario(number, world):
    """Steps done when only the last rank's time is up at once."""
    rank = InnerRank(settings(0, "fp32", number, world))
    report = rank.train(0, 4, batches(rank, 0), seconds=1e-9 if number == world - 1 else 3600.0)
    rank.close()
    return report.steps


def main(rank, world, folder):
    store = None
    if rank == 0 and world > 1:
        store = group.open_store("127.0.0.1", 60.0)
        print(store.port, flush=True)
    port = store.port if store else int(sys.stdin.readline() or 0) if world > 1 else 0
    group.join(rank, world, "127.0.0.1", port, 60.0, store=store)
    results = {}
    for engine in ENGINES:
        results[engine] = muon_scenario(*engine, rank, world)
        results["compiler", engine] = "torch._dynamo" in sys.modules
    results |= {("corrected", stage): corrected_scenario(stage, rank, world) for stage in (0, 1)}
    results["timed"] = timed_scenario(rank, world)
    group.leave()
    (folder / f"rank-{rank}.pkl").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
