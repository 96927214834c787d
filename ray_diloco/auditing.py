"""`ray-diloco audit RUN`: whether what a run has left holds together, without Ray and without training anything.

Every file of every commit is read and compared with its digest, commits are compared with those before them, the
ledger with the tokens that were counted, the summary with the newest commit, and the trace, if there is one, with a
replay in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_diloco.doctor.record import Check, Status, passed, show_checks
from ray_diloco.errors import EXIT_FAILED, EXIT_FINISHED, CheckpointError

if TYPE_CHECKING:
    import numpy as np

    from ray_diloco.checkpoint.manifest import Manifest
    from ray_diloco.checkpoint.store import CheckpointStore
    from ray_diloco.config.schema import Config

# Largest difference between a traced anchor and its replay, as a part of the largest of its elements.
ROUNDING = 1e-5
# What a plain run has; the replay is of no other.
PLAIN: dict[str, tuple[Any, ...]] = {
    "outer.kind": ("nesterov", "sgd"),
    "outer.weight_decay": (0.0,),
    "merge.kind": ("mean",),
    "merge.consensus": (0.0,),
    "fragments.kind": ("whole",),
    "topology.kind": ("star", "hierarchy"),
    "topology.anchors": ("shared",),
    "quorum.kind": ("all", "at_least"),
    "codec.down.kind": ("fp32",),
    "stale.scale": ("none",),
    "stale.direction": (False,),
    "stale.divergence": (0.0,),
}


def add_commands(commands: Any) -> None:
    """Adds the command to the parser of `ray-diloco`."""
    audit = commands.add_parser("audit", help="whether what a run has left holds together")
    audit.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    audit.add_argument("--root", default="runs", metavar="DIR", help="folder of all runs (default %(default)s)")
    audit.add_argument("--json", action="store_true", help="print the checks as JSON")
    audit.set_defaults(handler=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    from ray_diloco.api import run_folder
    from ray_diloco.config.compose import compose

    folder = run_folder(arguments.run, arguments.root)
    checks = audit(folder, compose((), str(folder / "config.yaml")).config)
    print(json.dumps([asdict(check) for check in checks], indent=2) if arguments.json else show_checks(checks))
    return EXIT_FAILED if any(check.status == "fail" for check in checks) else EXIT_FINISHED


def audit(folder: Path, config: Config) -> list[Check]:
    """Checks a run.

    Args:
      folder: of the run; its commits may be in `run.storage`.
      config: that it was trained with.

    Raises:
      CommittedError: RD-563, the run has no commit.
      CheckpointError: 503 to 506, its storage does not answer.
    """
    from ray_diloco.checkpoint.reader import no_commit
    from ray_diloco.checkpoint.store import CheckpointStore

    store = CheckpointStore(config.run.storage or str(folder))
    commits, checks = _read(store)
    if not commits and not checks:
        raise no_commit(folder)
    checks += _chain(store, commits)
    if commits:
        checks += [*_ledger(commits, config), *_summary(folder, store, commits[-1])]
    return [*checks, *_trace(folder, config)]


def _read(store: CheckpointStore) -> tuple[list[Manifest], list[Check]]:
    """The good commits, oldest first, with a check for each that is not, and one for all that are."""
    from ray_diloco.checkpoint.reader import UNFINISHED

    commits, checks, size = [], [], 0
    rounds = store.rounds()
    for number in rounds:
        try:
            commits.append(store.read(number, full=True))
        except CheckpointError as error:
            if number not in store.rounds():
                # The run goes on, and has removed it meanwhile.
                continue
            # What a writer left that was killed is no commit, and the next run passes over it.
            status: Status = "warn" if error.number == UNFINISHED else "fail"
            checks.append(Check("commits", f"round {number}", status, error.what, error.mend))
        else:
            size += sum(entry.bytes for entry in commits[-1].files)
        if sys.stderr.isatty():
            print(f"\r{len(commits)} of {len(rounds)} commits read", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty() and rounds:
        print(file=sys.stderr)
    if commits:
        kept = ", ".join(str(commit.round) for commit in commits[-8:])
        said = f"{len(commits)} whole, {size / 1e6:.1f} MB as their digests say; newest rounds {kept}"
        checks.append(passed("commits", "", said))
    return commits, checks


def _chain(store: CheckpointStore, commits: Sequence[Manifest]) -> Iterator[Check]:
    """Whether each commit follows the one that it names, and nothing in them goes back."""
    broken = [text for commit in commits if (text := store.broken_link(commit))]
    for text in broken:
        yield Check("history", "", "fail", text, "one of the two was replaced; find out which, and remove the other")
    for before, after in pairwise(commits):
        fell = [
            what
            for what, old, new in (
                ("the step", before.step, after.step),
                ("tokens", before.counters.get("tokens", 0), after.counters.get("tokens", 0)),
                *((f"version of fragment {f}", v, after.versions.get(f, -1)) for f, v in before.versions.items()),
            )
            if new < old
        ]
        lost = _not_in(before.ledger, after.ledger)
        if lost:
            fell.append(f"{lost} blocks that were credited")
        if fell:
            said = f"{', '.join(fell)} went back from round {before.round} to round {after.round}"
            yield Check("history", "", "fail", said, "these are commits of two runs; report it if they are not")
            return
    if commits and not broken:
        yield passed("history", "", "each commit follows the one that it names, and nothing goes back")


def _ledger(commits: Sequence[Manifest], config: Config) -> Iterator[Check]:
    """Whether every block was credited once, and as many tokens were counted as blocks have."""
    from ray_diloco.config.schema import island_data, slot_names

    newest = commits[-1]
    blocks = 0
    for source, state in sorted(newest.ledger.items()):
        ranges = state["credited"]
        blocks += sum(stop - start for start, stop in ranges)
        if any(start >= stop for start, stop in ranges) or any(a[1] >= b[0] for a, b in pairwise(ranges)):
            yield Check("ledger", source, "fail", f"blocks are credited twice: {ranges}", "report it")
            return
    tokens, islands = newest.counters.get("tokens", 0), newest.counters.get("islands", {})
    booked = sum(tally["tokens"] for tally in islands.values())
    if booked != tokens:
        yield Check("ledger", "", "fail", f"islands are credited with {booked} tokens of {tokens}", "report it")
        return
    lengths = {island_data(config, name).sequence_length for name in slot_names(config)}
    if len(lengths) == 1 and blocks * (length := lengths.pop()) != tokens:
        said = f"{blocks} blocks of {length} are credited, and {tokens} tokens counted"
        yield Check("ledger", "", "fail", said, "report it")
        return
    of = f" of {len(newest.ledger)} sources" * (len(newest.ledger) > 1)
    said = f"{blocks} blocks{of}, each credited once: {tokens} tokens in {newest.round} rounds"
    yield passed("ledger", "", said)


def _summary(folder: Path, store: CheckpointStore, newest: Manifest) -> Iterator[Check]:
    """Whether the summary is that of the newest commit."""
    from ray_diloco.checkpoint.anchor import anchor_digest

    path = folder / "summary.json"
    if not path.is_file():
        return
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        yield Check("summary", "", "fail", f"summary.json is no JSON: {error}", "the same command writes it again")
        return
    found = {
        "rounds": newest.round,
        "tokens_committed": newest.counters.get("tokens", 0),
        "anchor_digest": anchor_digest(store, newest),
    }
    other = [
        f"{key} {said.get(key)!r}, the newest commit {value!r}"
        for key, value in found.items()
        if said.get(key) != value
    ]
    if other:
        text = f"summary.json says {'; '.join(other)}"
        yield Check("summary", "", "warn", text, "a run that goes on, or was killed, has commits that are newer")
    else:
        yield passed("summary", "", f"rounds, tokens and the digest {found['anchor_digest'][:16]}… of the anchor agree")


def _trace(folder: Path, config: Config) -> Iterator[Check]:
    """Whether each traced anchor follows from the contributions."""
    from safetensors import SafetensorError

    rounds = sorted((folder / "trace").glob("round-*"))
    if not rounds:
        return
    reason = _not_plain(config)
    if rounds[0].name != "round-000000":
        reason = f"the trace begins with {rounds[0].name}, and nothing says the momentum there"
    if reason:
        yield passed("trace", "", f"{len(rounds)} rounds, not replayed: {reason}")
        return
    try:
        worst, where = _replay(rounds, config.outer.kind == "nesterov")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        mend = "a run that was killed may leave its last round half written, and writes it anew when it goes on"
        yield Check("trace", "", "fail", f"it cannot be read: {type(error).__name__}: {error}", mend)
        return
    said = f"{len(rounds) - 1} rounds replayed in float64: the largest difference is {worst:.1e} of the largest element"
    if worst > ROUNDING:
        yield Check("trace", where, "fail", said, "report it with the folder of that round and of the one before")
    else:
        yield passed("trace", "", said)


def _replay(rounds: Sequence[Path], momentum: bool) -> tuple[float, str]:
    """The largest relative difference between a traced anchor and its replay from the first one, and its round."""
    import numpy as np
    from safetensors.numpy import load_file

    anchor = {name: tensor.astype(np.float64) for name, tensor in load_file(rounds[0] / "anchor.safetensors").items()}
    u = {name: np.zeros_like(tensor) for name, tensor in anchor.items()}
    worst, where = 0.0, ""
    for folder in rounds[1:]:
        about = json.loads((folder / "round.json").read_text())
        lr, mu = about["outer_lr"], about["momentum"] if momentum else 0.0
        delta: dict[str, np.ndarray] = {name: np.zeros_like(tensor) for name, tensor in anchor.items()}
        for island, weight in about["weights"].items():
            for name, sent in load_file(folder / f"island-{island}.safetensors").items():
                delta[name] += weight * sent.astype(np.float64)
        kept = load_file(folder / "anchor.safetensors")
        for name in anchor:
            u[name] = mu * u[name] + delta[name]
            anchor[name] -= lr * (delta[name] + mu * u[name])
        largest = max(float(np.abs(tensor).max()) for tensor in anchor.values())
        off = max(float(np.abs(anchor[name] - kept[name]).max()) for name in anchor) / max(largest, 1e-30)
        if not off <= worst:
            worst, where = off, folder.name
    return worst, where


def _not_plain(config: Config) -> str:
    """Why a run is none that the replay knows; empty: it is one."""
    if config.channels:
        return "it has several channels"
    for key, usual in PLAIN.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value not in usual:
            return f"{key}={value}"
    return ""


def _not_in(before: dict[str, Any], after: dict[str, Any]) -> int:
    """How many blocks an older ledger has credited that a newer one has not."""
    from ray_diloco.outer.layout import Range, subtract, total

    missing = 0
    for source, state in before.items():
        old, new = (
            tuple(Range(start, stop) for start, stop in one["credited"])
            for one in (state, after.get(source, {"credited": []}))
        )
        missing += total(subtract(old, new))
    return missing
