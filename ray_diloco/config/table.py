"""The tables of algorithms in README.md and docs/algorithms.md, made from the files in `conf/algorithm/`.

    python -m ray_diloco.config.table README.md docs/algorithms.md

writes each anew between its marks.  A dash is the default of the schema, which is plain DiLoCo's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ray_diloco.config.blocks import CodecConfig, FragmentsConfig, OuterConfig, ScheduleConfig
from ray_diloco.config.compose import compose
from ray_diloco.config.groups import packaged_conf
from ray_diloco.config.rows import Row, rows
from ray_diloco.config.schema import Config

DEFAULT = "–"
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "raw": "raw"}
_CORRECTIONS = {"none": "", "fedprox": "FedProx", "scaffold": "SCAFFOLD"}
_MARKED = re.compile(r"(<!-- algorithms: (\w+) -->\n).*?(<!-- end of algorithms -->)", re.DOTALL)


def algorithm_names() -> list[str]:
    """Every method of `conf/algorithm/`, sorted."""
    return sorted(path.stem for path in (packaged_conf() / "algorithm").glob("*.yaml"))


def blocks_table() -> list[str]:
    """Lines of the table of blocks: a row for each method, and one for each channel of it."""
    head = ("`algorithm=`", "inner", "H, delay", "fragments", "codec", "topology", "quorum, weights", "stale", "merge",
            "outer", "adopt")  # fmt: skip
    return _table(head, (cells for name in algorithm_names() for cells in _cells(name)))


def sources_table() -> list[str]:
    """Lines of the table of sources: what each method changes, and where it was published."""
    return _table(("`algorithm=`", "what it changes", "source"), map(_source, algorithm_names()))


TABLES: dict[str, Callable[[], list[str]]] = {"blocks": blocks_table, "sources": sources_table}


def with_tables(page: str) -> str:
    """The text of a page with the tables between its marks as they should be."""
    return _MARKED.sub(lambda mark: "".join((mark[1], *(f"{line}\n" for line in TABLES[mark[2]]()), mark[3])), page)


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *body)]


def _source(name: str) -> tuple[str, str, str]:
    """The two comments that a file begins with; numbers of arXiv become links."""
    lines = (packaged_conf() / "algorithm" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    source, changes = (line.partition(": ")[2].removesuffix(".") for line in lines[:2])
    return f"`{name}`", changes, re.sub(r"\b(\d{4}\.\d{4,5})\b", r"[\1](https://arxiv.org/abs/\1)", source)


def _cells(name: str) -> list[tuple[str, ...]]:
    config = compose([f"algorithm={name}"]).config
    own, *channels = rows(config)
    of_run = (_inner(config), _topology(config), _quorum(config), _stale(config))
    return [
        _row(f"`{name}`", own, *of_run),
        *(_row(f"+ {row.at.split('.')[1]}", row, *("" for _ in of_run)) for row in channels),
    ]


def _length(row: Row) -> str:
    adaptive = row.schedule.adaptive
    return str(row.H) if adaptive == "none" else f"{row.H}, by {adaptive}"


def _turns(schedule: ScheduleConfig) -> str:
    return "fastest first" if schedule.priority else "in turn" * schedule.spread


def _row(name: str, row: Row, inner: str, topology: str, quorum: str, stale: str) -> tuple[str, ...]:
    schedule, merge, adopt = row.schedule, row.merge, row.adopt
    return (
        name,
        inner,
        _said(_length(row), f"τ {schedule.delay}" * (schedule.delay > 0), f"lag {schedule.lag}" * (schedule.lag > 0)),
        _said(_fragments(row.fragments), _turns(schedule)),
        _said(_codec(row.codec.up), f"down {_codec(row.codec.down)}" * (row.codec.down.kind != "fp32")),
        topology,
        quorum,
        stale,
        _said(_words(merge.kind) * (merge.kind != "mean"), f"consensus {merge.consensus:g}" * (merge.consensus > 0)),
        _outer(row.outer),
        _said(
            _words(adopt.kind) * (adopt.kind != "overwrite"),
            f"{adopt.alpha:.3g}" * (adopt.kind == "mix"),
            f"λ {adopt.strength:g}" * (adopt.kind == "compensated_rebase"),
        ),
    )


def _said(*parts: str) -> str:
    return ", ".join(part for part in parts if part) or DEFAULT


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _inner(config: Config) -> str:
    inner = config.inner
    return _said(
        _OPTIMIZERS[inner.optimizer.name],
        _CORRECTIONS[inner.correction],
        f"mix {inner.mix:g}" * (inner.mix > 0),
        "steps by speed" * (inner.work == "by_speed"),
    )


def _fragments(fragments: FragmentsConfig) -> str:
    return {
        "whole": "",
        "layers": f"{fragments.size} blocks" + ", strided" * fragments.strided,
        "bins": f"{fragments.count} bins",
        "random": f"random {fragments.p:g}",
    }[fragments.kind]


def _codec(codec: CodecConfig) -> str:
    if codec.kind == "fp32":
        return ""
    count = {"topk": codec.k, "dct": codec.k, "low_rank": codec.rank, "mask": codec.p}.get(codec.kind)
    kept = f" {count:g}" if count else ""
    values = f" in {codec.values}" * (codec.values != "fp32")
    decay = f" {codec.decay:g}" * (codec.decay != 1)
    return f"{_words(codec.kind)}{kept}{values}" + f", feedback{decay}" * codec.feedback


def _topology(config: Config) -> str:
    topology = config.topology
    return _said(topology.kind * (topology.kind != "star"), "own anchors" * (topology.anchors == "per_island"))


def _quorum(config: Config) -> str:
    quorum = config.quorum
    kind = {"all": "", "at_least": f"≥ {quorum.n}", "immediate": "immediate"}[quorum.kind]
    return _said(
        kind,
        f"grace {quorum.grace_s:g} s" * (quorum.grace_s > 0),
        f"at most {quorum.deadline_s:g} s" * (quorum.deadline_s > 0),
        "carry" * (quorum.late == "carry"),
        _words(quorum.weights) * (quorum.weights != "tokens"),
    )


def _stale(config: Config) -> str:
    stale = config.stale
    return _said(
        "re-anchor" * stale.reanchor,
        "own fresh" * stale.own_fresh,
        "1/√islands" * (stale.scale != "none"),
        "direction" * stale.direction,
        f"age^−{stale.age_power:g}" * (stale.age_power > 0),
    )


def _outer(outer: OuterConfig) -> str:
    numbers = {
        "sgd": f"{outer.lr:g}",
        "sign": f"{outer.lr:g}",
        **dict.fromkeys(("adamw", "adam", "yogi", "adagrad"), f"{outer.lr:g}, {outer.beta1:g}, {outer.beta2:g}"),
    }
    return f"{_words(outer.kind)} {numbers.get(outer.kind, f'{outer.lr:g}, {outer.momentum:g}')}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        Path(argument).write_text(with_tables(Path(argument).read_text(encoding="utf-8")), encoding="utf-8")
