"""Choices that a configuration allows are those that the code has: the tables of `check.py` import none of it."""

from collections.abc import Iterable

import pytest

from ray_diloco.config.limits import ALLOWED
from ray_diloco.data.sources import SOURCES
from ray_diloco.export import DTYPES
from ray_diloco.inner.optimizer import OPTIMIZERS as INNER_OPTIMIZERS
from ray_diloco.inner.schedule import SCHEDULES
from ray_diloco.outer.adopt import ADOPTS
from ray_diloco.outer.average import AVERAGES
from ray_diloco.outer.codec import CODECS
from ray_diloco.outer.fragments import FRAGMENTS
from ray_diloco.outer.merge import MERGES
from ray_diloco.outer.optimizer import OPTIMIZERS as OUTER_OPTIMIZERS
from ray_diloco.outer.rate import SHAPES
from ray_diloco.outer.selection import DRAWS
from ray_diloco.outer.shaped import SHAPED
from ray_diloco.outer.stale import ISLAND_SCALES
from ray_diloco.outer.weights import WEIGHTS


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("data.source", SOURCES),
        ("inner.optimizer.name", INNER_OPTIMIZERS),
        ("inner.schedule.kind", SCHEDULES),
        ("outer.kind", OUTER_OPTIMIZERS),
        ("outer.schedule.kind", SHAPES),
        ("outer.average.kind", {*AVERAGES, "none"}),
        ("fragments.kind", FRAGMENTS),
        ("fragments.draw", DRAWS),
        ("codec.up.kind", {*CODECS, *SHAPED}),
        ("codec.down.kind", {*CODECS, *SHAPED}),
        ("stale.scale", ISLAND_SCALES),
        ("merge.kind", MERGES),
        ("adopt.kind", ADOPTS),
        ("quorum.weights", WEIGHTS),
        ("export.dtype", DTYPES),
    ],
)
def test_a_choice_is_allowed_if_and_only_if_the_code_has_it(key: str, known: Iterable[str]) -> None:
    assert set(ALLOWED[key]) == set(known)
