"""The commands before a run: `ray-diloco plan` says what it will cost, `ray-diloco doctor` whether it will work here.

Both take the arguments of `train`.  The doctor leaves with 0 when nothing failed, else with 3.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ray_diloco.errors import EXIT_FINISHED

_PLAN_HELP = """\
Says what a run will cost before it runs: bytes of a round, its time, what islands train of it, memory, bandwidth,
tokens a day, money, electricity and carbon; and which H, codec and fragments would keep the islands busier, with the
published cost of H in loss beside them.

Takes what train takes.  What only you know are keys of plan: plan.step_seconds=0.4 plan.up_mbit=200 plan.rtt_ms=90,
for one island plan.islands.us.up_mbit=100; see conf/config.yaml.  Links that the doctor measured are found by
themselves.  --table computes published tables anew instead."""

_DOCTOR_HELP = """\
Says whether a run will work here: versions, memory, disk, /dev/shm, compilers, accelerators, addresses, ports, storage,
data and tokenizer; with --cluster on every node of the cluster that ray.address or RAY_ADDRESS names, and also clocks,
and the time and bandwidth between regions, which plan finds afterwards.

Each line is ok, warn or FAIL, with what mends it.  Leaves with 0 where nothing failed, else with 3."""


def add_commands(commands: Any) -> None:
    """Adds the commands to the parser's."""
    plan = commands.add_parser(
        "plan",
        help="what a run will cost",
        description=_PLAN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_arguments(plan)
    plan.add_argument("--table", action="store_true", help="published bandwidths and utilisations, computed anew")
    plan.add_argument("--json", action="store_true", help="for scripts")
    plan.set_defaults(handler=_plan)

    doctor = commands.add_parser(
        "doctor",
        help="whether a run will work here",
        description=_DOCTOR_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_arguments(doctor)
    doctor.add_argument("--cluster", action="store_true", help="all nodes of the cluster and the links between them")
    doctor.add_argument("--json", action="store_true", help="for scripts")
    doctor.set_defaults(handler=_doctor)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="keys and groups, as for train")
    parser.add_argument("--config", metavar="FILE", help="experiment file, or the config.yaml of a run")
    parser.add_argument("--conf-dir", metavar="DIR", help="folder with group files of your own, searched first")


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.table:
        from ray_diloco.planning.published import bandwidth_table, intellect_1
        from ray_diloco.planning.show import show_tables

        _say(arguments.json, _tables, lambda: show_tables(bandwidth_table(), intellect_1()))
        return EXIT_FINISHED
    config = _config(arguments)
    from ray_diloco.planning.gather import plan
    from ray_diloco.planning.show import show_plan

    made, options = plan(config)
    as_json = {"plan": asdict(made), "options": [asdict(option) for option in options]}
    _say(arguments.json, lambda: as_json, lambda: show_plan(made, options))
    return EXIT_FINISHED


def _doctor(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    from ray_diloco.doctor.record import exit_code, show_checks

    if arguments.cluster:
        from ray_diloco.cluster.doctor import examine_cluster

        checks = examine_cluster(config)
    else:
        from ray_diloco.doctor.local import examine

        checks = examine(config)
    _say(arguments.json, lambda: [asdict(check) for check in checks], lambda: show_checks(checks))
    return exit_code(checks)


def _tables() -> dict[str, Any]:
    from ray_diloco.planning.published import bandwidth_table, intellect_1

    return {
        "streaming_diloco": [asdict(cell) | {"steps_off": cell.steps_off} for cell in bandwidth_table()],
        "intellect_1": [dict(zip(("span", "formula", "published"), row, strict=True)) for row in intellect_1()],
    }


def _config(arguments: argparse.Namespace) -> Any:
    """The checked configuration; warnings go to standard error."""
    from ray_diloco.config.check import check
    from ray_diloco.config.compose import compose

    config = compose(arguments.settings, arguments.config, conf_dir=arguments.conf_dir).config
    for warning in check(config):
        print(f"warning: {warning}", file=sys.stderr)
    return config


def _say(as_json: bool, values: Callable[[], Any], text: Callable[[], str]) -> None:
    print(json.dumps(values(), indent=2) if as_json else text())
