"""The door to comparisons: runs the variants of one, one after the other on one Ray, and writes what they came to.

A variant is a run like any other.  One that has finished is not run again, one that was stopped goes on, and one that
fails is reported while the others go on; so the same command completes a comparison.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ray_diloco import api
from ray_diloco.blocks import rounds_of
from ray_diloco.config.comparison import Comparison, Variant
from ray_diloco.config.compose import compose
from ray_diloco.config.keys import dotted
from ray_diloco.config.schema import Config
from ray_diloco.config.typed import leaf_values
from ray_diloco.errors import CheckpointError, ConfigError, DilocoError
from ray_diloco.observe.comparison import Results, gather
from ray_diloco.observe.comparison_page import has_marks, write_page, write_results
from ray_diloco.observe.summary import read_summary

# Sections that don't change what a run computes.
_BESIDE = ("run", "ray", "observe", "deadlines", "checkpoint", "export", "trace")

Say = Callable[[str], object]


def compare(
    comparison: Comparison, command: Sequence[str], *, quiet: bool = False, say: Say = print
) -> tuple[Results, bool]:
    """Runs what is left of a comparison and writes its results into its folder.

    Args:
      comparison: see `read_comparison`.
      command: words of the command, for the record.
      quiet: show nothing of the runs.
      say: is told which variant begins.

    Returns:
      The results, and whether a signal stopped a variant; then the ones after it were not begun.

    Raises:
      ConfigError: RD-151, a run in the folder was made with other settings.
    """
    for variant in comparison.variants:
        refuse_other_settings(variant.composed.config)
    left = [variant for variant in comparison.variants if not is_finished(variant.composed.config)]
    failures: dict[str, str] = {}
    stopped = False
    with _one_ray(left):
        for number, variant in enumerate(comparison.variants, start=1):
            if variant not in left or stopped:
                continue
            if not quiet:
                say(f"\n[{number}/{len(comparison.variants)}] {variant.name}: {' '.join(variant.settings)}")
                for warning in variant.warnings:
                    print(f"warning: {warning}", file=sys.stderr)
            try:
                stopped = api.run(variant.composed, quiet=quiet)["status"] == "stopped"
            except DilocoError as error:
                failures[variant.name] = error.what
                print(f"{variant.name} failed: {error}", file=sys.stderr)
            # A defect of ours: it is shown whole, and the others are not concerned.
            except Exception as error:
                failures[variant.name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
    results = results_of(comparison, command, failures)
    write_results(comparison.folder, results)
    return results, stopped


def results_of(comparison: Comparison, command: Sequence[str], failures: dict[str, str] | None = None) -> Results:
    """What the runs of a comparison came to so far."""
    return gather(
        comparison.folder,
        {variant.name: variant.settings for variant in comparison.variants},
        [asdict(ordering) for ordering in comparison.orderings],
        command=shlex.join(command),
        common=comparison.common,
        failures=failures,
    )


def is_finished(config: Config) -> bool:
    """Whether a run has ended with all its rounds."""
    try:
        summary = read_summary(Path(config.run.root, config.run.name, "summary.json"))
    except CheckpointError:
        return False
    return summary.status == "finished" and summary.rounds >= rounds_of(config)


def refuse_other_settings(config: Config) -> None:
    """Refuses to take a run that was made with other settings for this one.

    Raises:
      ConfigError: RD-151.
    """
    folder = Path(config.run.root, config.run.name)
    metrics, stored = folder / "metrics.jsonl", folder / "config.yaml"
    if not (metrics.is_file() and metrics.stat().st_size and stored.is_file()):
        return
    old = compose((), str(stored)).config
    then, now = (
        {dotted(path): value for path, value in leaf_values(each) if path[0] not in _BESIDE} for each in (old, config)
    )
    other = [key for key in (then | now) if then.get(key) != now.get(key)]
    other += ["run.seed"] * (old.run.seed != config.run.seed) + ["run.rounds"] * (old.run.rounds > config.run.rounds)
    if other:
        raise ConfigError(
            151,
            f"{folder} was made with other settings: {', '.join(other)}",
            "remove that folder, or give the comparison another name with run.name=…",
        )


def check_page(page: Path, comparison: str) -> None:
    """Sees that a page has a place for a comparison, before anything is run for it.

    Raises:
      ConfigError: RD-152, it has none.
    """
    if not page.is_file() or not has_marks(page.read_text(encoding="utf-8"), comparison):
        raise ConfigError(
            152,
            f"{page} has no place for the comparison {comparison!r}",
            f"put the lines <!-- comparison: {comparison} --> and <!-- end of comparison --> where it belongs",
        )


def write_docs(page: Path, results: Results) -> None:
    """Writes the results between their marks in a page, and the charts into `figures/` beside it."""
    check_page(page, results.comparison)
    write_page(page, results)


@contextmanager
def _one_ray(variants: Sequence[Variant]) -> Iterator[None]:
    """One Ray with room for the largest of these variants; none is started where there are none."""
    if not variants:
        yield
        return
    from ray_diloco.cluster.build import cpus_needed
    from ray_diloco.cluster.session import ray_session

    configs = [variant.composed.config for variant in variants]
    with ray_session(configs[0], max(map(cpus_needed, configs))):
        yield
