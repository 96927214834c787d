"""What a rank does in the tests of tests/inner, run as a process: `inner_scenarios.py RANK WORLD FOLDER`.

All engines of one world size live one after the other in the same processes, since starting those takes seconds.
Each scenario returns plain records; the tests judge them.  Rank 0 prints the port of its store, the others read it.
"""

import math
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ray_diloco.config.schema import InnerConfig, InnerOptimizerConfig, InnerScheduleConfig, ModelConfig
from ray_diloco.errors import InnerError
from ray_diloco.inner import group
from ray_diloco.inner.rank import InnerRank
from ray_diloco.inner.settings import RankSettings

VOCAB, SEQUENCE, SEED, LR, CLIP = 2048, 16, 7, 1e-2, 0.5
TOTAL_STEPS = 12
ENGINES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
# Above DeepSpeed's threshold of 1e5 elements only the embeddings: stage 3 shards those and keeps the rest gathered.
LLAMA = ModelConfig(
    config={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
)
SCHEDULE = InnerScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=6, final_ratio=0.1)


def tokens(step, sequences=4):
    """The island's sequences of a global step: the same for every world size."""
    return torch.randint(0, VOCAB, (sequences, SEQUENCE), generator=torch.Generator().manual_seed(100 + step))


def delta(numel):
    """A change of every canonical element that another place would not have."""
    return 0.01 * torch.sin(torch.arange(numel, dtype=torch.float64)).float()


def settings(stage, precision, rank, world, **changes):
    inner = InnerConfig(
        lr=LR,
        micro_batch=2 if world == 1 else 1,
        gradient_accumulation=2,
        zero_stage=stage,
        precision=precision,
        clip=CLIP,
        optimizer=InnerOptimizerConfig(),
        schedule=SCHEDULE,
    )
    values = {
        "model": LLAMA,
        "inner": inner,
        "vocab_size": VOCAB,
        "eos_id": 0,
        "sequence_length": SEQUENCE,
        "seed": SEED,
        "total_steps": TOTAL_STEPS,
        "rank": rank,
        "world": world,
        "evaluation_batch": 2,
        "timeout_s": 60.0,
    }
    return RankSettings(**(values | changes))


def batches(s, start):
    """This rank's part of the island's sequences, shaped by micro-batch."""

    def at(k):
        mine = tokens(start + k).chunk(s.world)[s.rank]
        return mine.reshape(s.inner.gradient_accumulation, s.inner.micro_batch, SEQUENCE)

    return at


def train(rank, start, steps):
    """Island losses by step, and the report."""
    losses = []
    report = rank.train(start, steps, batches(rank.settings, start), lambda _, loss: losses.append(float(loss)))
    return np.asarray(losses), report


def held(rank):
    return [(s.range.start, s.values.clone().numpy()) for s in rank.slices]


def write(rank, change):
    """Writes `values + change` into every slice."""
    for s in rank.slices:
        s.values.copy_(s.values + change[s.range.start : s.range.stop])
    rank.commit_writes()


def restore(rank, values):
    for s, (start, saved) in zip(rank.slices, values, strict=True):
        assert s.range.start == start
        s.values.copy_(torch.from_numpy(saved))
    rank.commit_writes()


def gathered_state(rank):
    """The island's inner state: the union of the ranks' pieces."""
    pieces = [None] * rank.settings.world
    dist.all_gather_object(pieces, rank.inner_state())
    return {key: value for part in pieces for key, value in part.items()}


def engine_scenario(stage, precision, rank_number, world):
    """Train, write, evaluate, train, save, go on; then the same from what was saved, in this engine and a new one."""
    rank = InnerRank(settings(stage, precision, rank_number, world))
    record = {"layout": rank.layout, "emits": rank.emits, "initial": held(rank)}
    record["before"], record["report"] = train(rank, 0, 3)
    record["trained"] = held(rank)
    write(rank, delta(rank.layout.numel))
    record["written"] = held(rank)
    mine = tokens(50, 5)[rank_number::world] if stage != 3 else tokens(50, 5)[: 5 if rank_number == 0 else 0]
    record["evaluated"] = rank.evaluate(mine.numpy())
    record["after_write"], _ = train(rank, 3, 1)
    record["values"], record["state"] = held(rank), gathered_state(rank)
    record["continued"], _ = train(rank, 4, 2)
    record["continued_values"] = held(rank)

    restore(rank, record["values"])
    rank.load_inner_state(record["state"])
    record["again"], _ = train(rank, 4, 2)
    restore(rank, record["initial"])
    rank.reset_inner_state()
    record["from_reset"], _ = train(rank, 0, 3)
    rank.rewarm()
    rank.rate_sum = 0.0
    train(rank, 3, 3)
    record["rate_rewarmed"], record["rewarm"] = rank.rate_sum, rank.inner_state().get("rewarm")
    rank.load_inner_state(record["state"])
    record["rewarm_of_old"] = rank.inner_state().get("rewarm")
    rank.close()

    fresh = InnerRank(settings(stage, precision, rank_number, world))
    restore(fresh, record["values"])
    fresh.load_inner_state(record["state"])
    record["state_of_fresh"] = gathered_state(fresh)
    record["fresh"], _ = train(fresh, 4, 2)
    record["fresh_values"] = held(fresh)
    fresh.close()
    return record


def load_elsewhere(stage, rank_number, world, source):
    """Another engine's state in a new engine of this stage, read back."""
    rank = InnerRank(settings(stage, "fp32", rank_number, world))
    rank.load_inner_state(source)
    state = gathered_state(rank)
    rank.close()
    return state


def stop_scenario(rank_number, world):
    """Only the last rank asks to stop, in step 1 of 6."""
    rank = InnerRank(settings(0, "fp32", rank_number, world))
    report = rank.train(0, 6, batches(rank.settings, 0), lambda step, _: rank_number == world - 1 and step == 1)
    rank.close()
    return report


def broken_scenario(rank_number, world):
    """Every rank's first slice holds infinities."""
    rank = InnerRank(settings(1, "fp32", rank_number, world))
    rank.slices[0].values.fill_(math.inf)
    rank.commit_writes()
    report = train(rank, 0, 1)[1]
    rank.close()
    return report


def variants(rank_number, world):
    """First losses of engines that must not differ from the plain one, or must in a known way."""
    plain = settings(0, "fp32", rank_number, world)
    checkpointed = ModelConfig(config=LLAMA.config, activation_checkpointing=True)
    dropout = ModelConfig(
        architecture="gpt2",
        config={"n_embd": 64, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.3, "tie_word_embeddings": True},
    )
    found = {}
    for name, s in {
        "plain": plain,
        "checkpointed": settings(0, "fp32", rank_number, world, model=checkpointed),
        "checkpointed_stage_3": settings(3, "fp32", rank_number, world, model=checkpointed),
        "dropout": settings(1, "fp32", rank_number, world, model=dropout),
        "dropout_again": settings(1, "fp32", rank_number, world, model=dropout),
        "dropout_elsewhere": settings(1, "fp32", rank_number, world, model=dropout, island="another"),
    }.items():
        rank = InnerRank(s)
        found[name] = train(rank, 0, 2)[0]
        rank.close()
    return found


def sgd_scenario(stage, rank_number, world):
    """SGD with momentum: losses of 3 steps, and of the third again after a restore into a new engine."""
    s = settings(stage, "fp32", rank_number, world)
    s = replace(s, inner=replace(s.inner, optimizer=InnerOptimizerConfig(name="sgd", momentum=0.9), clip=0.0, lr=0.5))
    rank = InnerRank(s)
    losses = train(rank, 0, 2)[0]
    values, state = held(rank), gathered_state(rank)
    last = train(rank, 2, 1)[0]
    rank.close()
    fresh = InnerRank(s)
    restore(fresh, values)
    fresh.load_inner_state(state)
    again = train(fresh, 2, 1)[0]
    fresh.close()
    return np.concatenate([losses, last]), again, sorted({key.split("|")[0] for key in state})


def builder_scenario(stage, rank_number, world):
    """A user's model that returns only a loss: training losses, then evaluation of blocks that rank 0 has alone."""
    model = ModelConfig(builder="inner_builders:loss_only")
    rank = InnerRank(settings(stage, "fp32", rank_number, world, model=model, vocab_size=64))
    report = rank.train(0, 2, lambda k: batches(rank.settings, 0)(k) % 64)
    blocks = (tokens(50, 3) % 64)[: 3 if rank_number == 0 else 0]
    losses = rank.evaluate(blocks.numpy())
    rank.close()
    return report.loss_mean, losses


def timeouts():
    """Seconds after which collectives of each group of this process give up."""
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in distributed_c10d._world.pg_map
    ]


def join_alone():
    """The number of the error when the second of two ranks never comes."""
    store = group.open_store("127.0.0.1", 1.0)
    try:
        group.join(0, 2, "127.0.0.1", store.port, 1.0, store=store)
    except InnerError as error:
        return error.number
    return None


def main(rank, world, folder):
    store = None
    if world > 1 and rank == 0:
        store = group.open_store("127.0.0.1", 60.0)
        print(store.port, flush=True)
    port = store.port if store else int(sys.stdin.readline() or 0) if world > 1 else 0
    group.join(rank, world, "127.0.0.1", port, 60.0, store=store)
    results = {engine: engine_scenario(*engine, rank, world) for engine in ENGINES}
    results["timeouts"] = timeouts()
    results["stop"] = stop_scenario(rank, world)
    results["broken"] = broken_scenario(rank, world)
    results["variants"] = variants(rank, world)
    results["sgd"] = {stage: sgd_scenario(stage, rank, world) for stage in (0, 1, 3)}
    results["builder"] = {stage: builder_scenario(stage, rank, world) for stage in (0, 3)}
    results["elsewhere"] = {
        stage: load_elsewhere(stage, rank, world, results[1, "fp32"]["state"]) for stage in range(4)
    }
    other = folder.parent / f"world-{3 - world}" / "rank-0.pkl"
    if other.exists():
        state = pickle.loads(other.read_bytes())[3, "fp32"]["state"]
        results["from_other_world"] = state, {s: load_elsewhere(s, rank, world, state) for s in range(4)}
    group.leave()
    if world == 1:
        results["joined_alone"] = join_alone()
        owner = InnerRank(settings(0, "fp32", rank, world))
        results["owner"] = train(owner, 0, 3)[0]
        owner.close()
    (folder / f"rank-{rank}.pkl").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
