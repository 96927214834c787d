"""Every block of a recipe in two phases: prepare, abort, commit, load, and rounds without contributions."""

import numpy as np
import pytest
import torch
from outer_world import LAYOUT, WHOLE, anchor_payload, chunk_size, elements, flat, founded, offer
from shard_rounds import NESTEROV, RANDOM, anchor_of, drawn, everything, moved, selected_offer

from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.codec import Bf16, Fp32
from ray_diloco.outer.layout import layout_of
from ray_diloco.outer.merge import MergeSettings
from ray_diloco.outer.optimizer import AdamW, EmaNesterov, HeavyBall, Sgd
from ray_diloco.outer.payload import open_payload
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.shard import AnchorShard
from ray_diloco.outer.stale import DirectionSettings

pytestmark = pytest.mark.usefixtures("small_chunks")

RECIPES = {
    "nesterov": Recipe(NESTEROV),
    "adamw": Recipe(AdamW(0.1, 0.9, 0.99, 0.1, 0.0)),
    "average": Recipe(NESTEROV, average=OuterAverage("uniform", 4, 0.25)),
    "merged": Recipe(NESTEROV, "centred_clipping", MergeSettings(tau=1.0)),
    "rda": Recipe(NESTEROV, "rda"),
    "median": Recipe(NESTEROV, "median"),
    "reanchor": Recipe(NESTEROV, max_age=2, reanchor=True),
    "direction": Recipe(EmaNesterov(0.7, 0.9), direction=DirectionSettings(), lookahead=True),
    "consensus": Recipe(HeavyBall(0.7, 0.5), consensus=0.5),
    "recode": Recipe(NESTEROV, recode=Bf16()),
    "lookahead": Recipe(NESTEROV, lookahead=True, average=OuterAverage("ema", 4, 0.25)),
}
CASES = [
    *((name, recipe, down, None) for name, recipe in RECIPES.items() for down in (Fp32(), Bf16())),
    *((f"random {name}", RECIPES[name], down, RANDOM)
      for name in ("nesterov", "average", "reanchor", "consensus", "median") for down in (Fp32(), Bf16())),
]  # fmt: skip


def work(shard, draw, version, seed=0):
    """Contributions to the round of a version, and what else `prepare` needs."""
    offers = []
    for k in range(3):
        values = drawn(100 * seed + 10 * version + k)
        if draw is None:
            offers.append(offer(f"i{k}", values, version=version))
        else:
            offers.append(selected_offer(f"i{k}", values, version, draw))
    settings = {}
    if shard.recipe.rule.needs_whole_vector:
        settings["scale"] = [1 / 3] * 3 + [0.0] * len(shard.recipe.rule.extras)
    if shard.recipe.consensus:
        settings["neighbours"] = [[shard.payload(0).copy()], [anchor_payload(drawn(7), WHOLE)]]
    return offers, settings


@pytest.mark.parametrize(("name", "recipe", "down", "draw"), CASES, ids=[f"{c[0]} {c[2].name}" for c in CASES])
def test_an_abort_leaves_no_trace_and_the_same_round_has_the_same_bytes(name, recipe, down, draw):
    shard = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    straight = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    for version in range(4):
        before = everything(shard)
        other, settings = work(shard, draw, version, seed=1)
        shard.prepare("lost", 0, other, **settings)
        assert everything(shard) == before
        shard.abort("lost")
        shard.prepare("idle", 0, (), idle=True)
        assert everything(shard) == before
        shard.abort("idle")
        offers, settings = work(shard, draw, version)
        first, sent = shard.prepare("r", 0, offers, **settings)
        sent = sent.tobytes()
        assert everything(shard) == before
        shard.abort("r")
        # Aborting what is not open is nothing.
        shard.abort("r")
        key = f"r{version}"
        again, repeated = shard.prepare(key, 0, offers, **settings)
        assert repeated.tobytes() == sent
        assert again.digest == first.digest == open_payload(repeated).digest
        shard.commit(key)
        shard.commit(key)
        shard.payload(0)
        # Who lost the answer asks again, before and after others have asked for the anchor.
        same, repeated = shard.prepare(key, 0, offers, **settings)
        assert (same, repeated.tobytes()) == (again, sent)
        assert straight.prepare(key, 0, offers, **settings)[1].tobytes() == sent
        straight.commit(key)
        assert everything(shard) == everything(straight)


@pytest.mark.parametrize(("name", "recipe", "down", "draw"), CASES, ids=[f"{c[0]} {c[2].name}" for c in CASES])
def test_a_loaded_shard_goes_on_with_every_block(name, recipe, down, draw):
    shard = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    for version in range(2):
        offers, settings = work(shard, draw, version)
        moved(shard, version, offers, **settings)
    loaded = AnchorShard(LAYOUT, WHOLE, [WHOLE], recipe, down, draw)
    states = {state: shard.state_tensors(state) for state in recipe.state_names}
    loaded.load(shard.tensors(), states, shard.versions)
    assert loaded.payload(0).tobytes() == shard.payload(0).tobytes()
    offers, settings = work(shard, draw, 2)
    assert moved(loaded, 2, offers, **settings).tobytes() == moved(shard, 2, offers, **settings).tobytes()
    assert loaded.published(0).tobytes() == shard.published(0).tobytes()


@pytest.mark.parametrize(("name", "recipe", "down", "draw"), CASES, ids=[f"{c[0]} {c[2].name}" for c in CASES])
def test_an_idle_round_moves_the_version_alone(name, recipe, down, draw):
    shard = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    offers, settings = work(shard, draw, 0)
    moved(shard, 0, offers, **settings)
    anchor, asked = anchor_of(shard), elements(shard.payload(0))
    states = [flat(shard.state_tensors(s)).tobytes() for s in recipe.optimizer.state_names]
    prepared, sent = shard.prepare("idle", 0, (), idle=True)
    sent = sent.copy()
    shard.commit("idle")
    assert shard.versions == {0: 2} == open_payload(sent).header.meta.versions
    assert (prepared.squared_update_norm, prepared.squared_delta_norm) == (0.0, 0.0)
    assert prepared.squared_anchor_norm == pytest.approx(np.sum(anchor**2), rel=1e-5)
    assert anchor_of(shard).tolist() == anchor.tolist()
    assert elements(shard.payload(0)).tolist() == asked.tolist()
    assert [flat(shard.state_tensors(s)).tobytes() for s in recipe.optimizer.state_names] == states
    at = slice(None) if draw is None else draw.of(1).packed(WHOLE)
    assert elements(sent).tolist() == asked[at].tolist()


def test_an_idle_round_is_an_iterate_of_the_average():
    average = OuterAverage("uniform", rounds=3, start=0.3)
    shard = founded(LAYOUT, Recipe(Sgd(1.0), average=average), np.zeros(8))
    shard.prepare("idle", 0, (), idle=True)
    shard.commit("idle")
    moved(shard, 1, [offer("i0", np.full(8, -2.0), version=1)])
    assert elements(shard.published(0)).tolist() == [1.0] * 8


def test_plain_rounds_make_no_arrays_of_the_size_of_the_model():
    import resource

    numel = 9_000_000
    with chunk_size(131072):
        layout = layout_of([("w", (numel,))])
        shard = founded(layout, NESTEROV, torch.zeros(numel))
        offers = [offer(f"i{k}", torch.ones(numel), ranges=layout.whole) for k in range(2)]
        for _ in range(2):
            shard.prepare("r", 0, offers)
            shard.abort("r")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        shard.prepare("r", 0, offers)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 4 * numel / resource.getpagesize() / 8
