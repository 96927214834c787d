"""The door to simulations: `ray-diloco simulate`, and `simulate` for Python.  Nothing here imports Ray.

The same configuration that `train` takes, in the world that `plan` and `simulate` describe, by the run loop that the
cluster runs.  `--seeds` runs random schedules instead and holds them to what must always hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from ray_diloco.config.schema import Config, island_names, region_of
from ray_diloco.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError

if TYPE_CHECKING:
    from ray_diloco.outer.codec import Codec
    from ray_diloco.simulate.conditions import Conditions, LinkSpeed
    from ray_diloco.simulate.report import Report
    from ray_diloco.simulate.setup import Setup, Sizes
    from ray_diloco.simulate.world import World

# Seconds between two words of progress, and before the first.
WORD_S = 2.0

_HELP = """\
Runs the run loop with simulated islands, links and failures on a virtual clock, in seconds, without Ray.

KEY=VALUE as for train.  plan.* has the speeds of islands and links, simulate.* everything else about the world:
  ray-diloco simulate islands.count=1000 plan.step_seconds=2 plan.up_mbit=500 plan.down_mbit=500 \\
      simulate.parameters=1000000000 simulate.failures.exit=0.1 quorum.kind=at_least quorum.fraction=0.8
--seeds A:B tries random schedules of faults instead; a seed that fails prints how to see it again."""


def add_commands(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "simulate",
        help="try a configuration in a simulated world",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="keys and groups, as for train")
    parser.add_argument("--config", metavar="FILE", help="experiment file, or the config.yaml of a run")
    parser.add_argument("--conf-dir", metavar="DIR", help="folder with group files of your own, searched first")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--seeds", metavar="A:B", help="try the random schedules of these seeds")
    parser.set_defaults(handler=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    if arguments.seeds is not None:
        return _try_seeds(*_seeds(arguments.seeds), as_json=arguments.json)

    from ray_diloco.config.check import check
    from ray_diloco.config.compose import compose

    composed = compose(arguments.settings, arguments.config, conf_dir=arguments.conf_dir)
    for warning in check(composed.config):
        print(f"warning: {warning}", file=sys.stderr)
    report = simulate(composed.config, say=_say)
    print(json.dumps(asdict(report), indent=2) if arguments.json else text_of(report))
    return EXIT_FINISHED if report.status == "finished" else EXIT_FAILED


def simulate(config: Config, say: Callable[[str], object] | None = None) -> Report:
    """Simulates a run.

    Args:
      config: checked.
      say: is told every few seconds how far it has come.

    Raises:
      ConfigError: 161–165, a fault that cannot happen.
      InnerError: 7xx, the model cannot be laid out.
    """
    from ray_diloco.blocks import faults_of
    from ray_diloco.simulate.report import report_of
    from ray_diloco.simulate.world import World

    last = time.monotonic()

    def watch(world: World) -> None:
        nonlocal last
        if say is not None and time.monotonic() - last >= WORD_S:
            last = time.monotonic()
            rules = world.rules.schedule.rounds
            say(f"simulated {world.now / 3600:.2f} h: round {world.position.round} of {rules}")

    world = World(setup_of(config), conditions_of(config), faults_of(config), audited=False, watch=watch)
    return report_of(world, world.run())


def setup_of(config: Config) -> Setup:
    """What of a configuration is simulated; the model is laid out unless its size is given and its parts are whole."""
    from ray_diloco.blocks import channels_of, needs_layout
    from ray_diloco.simulate.problem import small_layout
    from ray_diloco.simulate.setup import Setup, Sizes

    parameters = config.simulate.parameters
    if parameters and not needs_layout(channels_of(config)):
        layout, sizes = small_layout(), _sizes_of(config, parameters)
    else:
        from ray_diloco.planning.model import layout_of_config
        from ray_diloco.planning.traffic import traffic_of

        layout = layout_of_config(config)
        fragments = [fragment for channel in traffic_of(config, layout).channels for fragment in channel.fragments]
        scale = parameters / layout.numel if parameters else 1.0
        sizes = Sizes(
            {f.number: round(scale * max(f.up.values())) for f in fragments},
            {f.number: round(scale * f.down) for f in fragments},
        )
    heldout = config.evaluate.blocks or config.data.heldout_blocks
    return Setup(config, layout, sizes, config.data.sequence_length, 1_000_000, heldout if config.evaluate.every else 0)


def _sizes_of(config: Config, parameters: int) -> Sizes:
    """Bytes of a whole model of so many elements, one fragment for each channel."""
    from ray_diloco.blocks import channels_of, codec_of
    from ray_diloco.outer.shaped import is_shaped
    from ray_diloco.simulate.setup import Sizes

    up: dict[int, int] = {}
    down: dict[int, int] = {}
    for number, channel in enumerate(channels_of(config)):
        elements = int(parameters * (channel.fragments.p if channel.fragments.kind == "random" else 1.0))
        for table, section in ((up, channel.up), (down, channel.down)):
            codec = codec_of(section, channel.seed)
            if is_shaped(codec):
                what = f"{section.kind} needs the shapes of the tensors, and simulate.parameters says only how many"
                raise ConfigError(167, f"codec: {what}", "set simulate.parameters=0, and choose a model")
            table[number] = cast("Codec", codec).nbytes(elements)
    return Sizes(up, down)


def conditions_of(config: Config) -> Conditions:
    """The world that a configuration describes."""
    from ray_diloco.simulate.conditions import Conditions, Rates

    told, plan, deadlines = config.simulate, config.plan, config.deadlines
    names = island_names(config)
    own = {name for name in names if name in plan.islands}
    failures = told.failures
    return Conditions(
        seed=config.run.seed,
        step_s=plan.step_seconds or 1.0,
        steps_s={n: s for n in own if (s := plan.islands[n].step_seconds)},
        spread=told.spread,
        jitter=told.jitter,
        link=_link(config, None),
        links={name: _link(config, name) for name in own},
        hub=_speed(0.0, told.hub_mbit, told.hub_mbit),
        launch_s=told.launch_s,
        repair_s=told.repair_s,
        detect_s=told.detect_s,
        silence_s=deadlines.silence_s,
        exchange_s=deadlines.exchange_s,
        merge_s=told.merge_s,
        write_s=told.write_s,
        restart_s=told.restart_s,
        restarts=told.restarts,
        rates=Rates(
            failures.exit,
            failures.freeze,
            failures.link_cut,
            failures.link_slow,
            failures.corrupt,
            failures.nan,
            failures.storage,
            failures.driver,
            failures.trouble_s,
        ),
        region={name: region_of(config, name) or "" for name in names},
    )


def _link(config: Config, name: str | None) -> LinkSpeed:
    plan = config.plan
    site = plan.islands[name] if name is not None else None

    def of(key: str) -> float:
        mine = getattr(site, key) if site is not None else None
        return float(getattr(plan, key) if mine is None else mine)

    return _speed(of("rtt_ms") / 2000.0, of("up_mbit"), of("down_mbit"))


def _speed(latency_s: float, up_mbit: float, down_mbit: float) -> LinkSpeed:
    from ray_diloco.simulate.conditions import LinkSpeed

    return LinkSpeed(latency_s, up_mbit * 125_000.0, down_mbit * 125_000.0)


def text_of(report: Report) -> str:
    """A report as a table."""
    rows = [
        ("status", report.status + (f": {report.reason}" if report.reason else "")),
        ("islands, rounds", f"{report.islands}, {report.rounds}"),
        ("time", f"{report.seconds / 3600:.2f} h"),
        ("tokens committed", f"{report.tokens:,} ({report.tokens_per_s:,.0f}/s; {report.tokens_lost:,} lost)"),
        ("goodput", f"{report.goodput:.1%} of what the islands could train"),
        ("utilisation", f"{report.utilisation:.1%} of their time is training"),
        ("of a round", f"{report.send:.1%} sending, {report.wait:.1%} waiting, {report.adopt:.1%} adopting"),
        ("bytes up, down", f"{report.bytes_up / 1e9:,.2f} GB, {report.bytes_down / 1e9:,.2f} GB"),
        ("contributions", f"{report.contributions:,}"),
        ("driver lives", str(report.lives)),
    ]
    lines = [f"{name:<18}{value}" for name, value in rows]
    lines += ["", f"{'until':>10}  {'goodput':>8}  {'commits':>8}  {'lost':>6}"]
    lines += [
        f"{t.until_s / 3600:>8.2f} h  {t.goodput:>8.1%}  {t.commits:>8}  {t.islands_lost:>6}" for t in report.timeline
    ]
    shown = {name: count for name, count in report.events.items() if name not in ("round_opened", "round_closed")}
    lines += ["", "events: " + ", ".join(f"{name} {count:,}" for name, count in shown.items())]
    return "\n".join(lines)


def _seeds(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() if colon else not last)):
        raise ConfigError(166, f"--seeds {text} are no seeds", "write 0:1000, or one number")
    return int(first), int(last) if colon else int(first) + 1


def _try_seeds(first: int, last: int, *, as_json: bool) -> int:
    """Runs random schedules; prints what did not hold and how to see it again."""
    from ray_diloco.simulate.schedules import try_seed

    endings: dict[str, int] = {}
    failed, said = [], time.monotonic()
    for seed in range(first, last):
        verdict = try_seed(seed)
        error = verdict.ending.error if verdict.ending is not None else None
        how = f"failed with RD-{error.number}" if error is not None else "finished" if verdict.ending else "raised"
        endings[how] = endings.get(how, 0) + 1
        if verdict.blamed:
            failed.append(asdict(verdict) | {"ending": how, "command": verdict.command})
            print(f"{verdict.command}  {verdict.variant}  {verdict.blamed[0]}", file=sys.stderr)
        if time.monotonic() - said >= WORD_S:
            said = time.monotonic()
            _say(f"{seed + 1 - first:,} of {last - first:,} schedules, {len(failed)} with something that did not hold")
    counts = {"schedules": last - first, "endings": endings, "failed": failed}
    ways = ", ".join(f"{n:,} {how}" for how, n in sorted(endings.items()))
    print(json.dumps(counts, indent=2) if as_json else f"{last - first:,} schedules: {ways}; {len(failed)} violations")
    return EXIT_FAILED if failed else EXIT_FINISHED


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
