"""The command `ray-diloco`: reads arguments, calls `api.py`, prints results and errors, and leaves with a code.

Exit codes: 0 finished, 1 some variants of a comparison or trials of a sweep did not finish, 2 bad input, 3 infeasible,
4 failed, 130 interrupted.  Everything heavy is imported inside the handlers, so that `--help`, `--print-config` and a
mistyped key are answered at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ray_diloco import auditing, simulating, steering, tuning
from ray_diloco.advice import add_commands
from ray_diloco.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INCOMPLETE,
    EXIT_INTERRUPTED,
    ConfigError,
    DilocoError,
)

_EXIT_BY_STATUS = {"finished": EXIT_FINISHED, "stopped": EXIT_INTERRUPTED, "failed": EXIT_FAILED}

_TRAIN_HELP = """\
Trains a language model on islands that exchange pseudo-gradients once in a while.

KEY=VALUE sets any key of the configuration (values are YAML), or chooses a group:
  model=tiny data=stdlib tokenizer=bytes algorithm=diloco experiment=demo
  inner.H=50 outer.lr=0.7 islands.count=4 islands.names=[us,eu] islands.us.ranks=2
Later ones win: defaults, group files, --config or experiment=, chosen groups, single keys.
Every key is explained in conf/config.yaml and docs/configuration.md.
The same command again continues the run; a larger run.rounds makes it longer."""

_COMPARE_HELP = """\
Trains several variants one after the other and lays them side by side: held-out loss at equal tokens, bytes, time.

NAME is a file in conf/compare/ (default: family), which names the variants and what is claimed about them; KEY=VALUE
lies over all of them, and run.name names the comparison.  Every variant is a run below runs/NAME/, and the results are
runs/NAME/compare.json, compare.md and compare.html.
The same command again runs what has not finished, and nothing else."""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are numbered like every other mistake, and that knows no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(130, message, f"see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The whole surface of the command; a test freezes it."""
    parser = _Parser(prog="ray-diloco", description="DiLoCo and its family on Ray and DeepSpeed.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    train = commands.add_parser(
        "train",
        help="train, or continue a run",
        description=_TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="keys and groups, see above")
    train.add_argument("--config", metavar="FILE", help="experiment file, or the config.yaml of a run")
    train.add_argument("--conf-dir", metavar="DIR", help="folder with group files of your own, searched first")
    train.add_argument(
        "--print-config", action="store_true", help="print every resolved value with its origin, and train nothing"
    )
    train.add_argument("--quiet", action="store_true", help="print errors and nothing else")
    train.set_defaults(handler=_train)

    compare = commands.add_parser(
        "compare",
        help="train several variants and lay them side by side",
        description=_COMPARE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument(
        "settings", nargs="*", metavar="NAME | KEY=VALUE", help="comparison, and keys for all variants"
    )
    compare.add_argument("--config", metavar="FILE", help="comparison file, in place of a name")
    compare.add_argument("--conf-dir", metavar="DIR", help="folder with group files of your own, searched first")
    compare.add_argument("--write-docs", metavar="PAGE", help="Markdown page to write the results into, between marks")
    compare.add_argument("--quiet", action="store_true", help="print errors and nothing else")
    compare.set_defaults(handler=_compare)

    generate = commands.add_parser("generate", help="continue a text with a trained model")
    _add_run(generate)
    generate.add_argument("prompt", help="text to continue")
    generate.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens to add (default %(default)s)")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: most likely token (default %(default)s)"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draw (default %(default)s)")
    generate.set_defaults(handler=_generate)

    evaluate = commands.add_parser("evaluate", help="held-out loss and perplexity of a run's anchor, as JSON")
    _add_run(evaluate)
    evaluate.set_defaults(handler=_evaluate)

    auditing.add_commands(commands)
    steering.add_commands(commands)
    simulating.add_commands(commands)
    tuning.add_commands(commands)
    add_commands(commands)
    commands.add_parser("version", help="versions of this package and what it stands on").set_defaults(handler=_version)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    parser.add_argument("--root", default="runs", metavar="DIR", help="folder of all runs (default %(default)s)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: arguments without the program's name; default: those of the process.

    Returns:
      The exit code.  Where this is the whole process, SIGTERM interrupts like SIGINT from the first moment on, and
      once the outcome stands either ends the process at once with its code, whatever the interpreter still waits for.
    """
    if argv is not None:
        return _run(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = _run(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(code))
    return code


def _run(argv: Sequence[str]) -> int:
    try:
        _import_from_current_folder()
        arguments = _parse(list(argv))
        handler: Callable[[argparse.Namespace], int] = arguments.handler
        code = handler(arguments)
        sys.stdout.flush()
        return code
    except DilocoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`… | head`); nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINISHED
    except Exception as error:  # the last door: whatever comes here is a defect of ours, and is shown whole
        traceback.print_exc()
        print(f"unexpected {type(error).__name__}; please report it with the lines above", file=sys.stderr)
        return EXIT_FAILED


def _import_from_current_folder() -> None:
    """Lets builders stand in the current folder, as with `python -m`, but behind everything that is installed."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parses; settings may stand before, between and behind the options, which argparse alone does not allow."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    free = arguments.command in ("train", "compare", "plan", "doctor", "simulate", "tune")
    unknown = [text for text in rest if text.startswith("-") or not free]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if free:
        arguments.settings = [*arguments.settings, *rest]
    return arguments


def _train(arguments: argparse.Namespace) -> int:
    from ray_diloco.config.check import check
    from ray_diloco.config.compose import compose
    from ray_diloco.config.show import config_yaml

    composed = compose(arguments.settings, arguments.config, conf_dir=arguments.conf_dir)
    quiet = arguments.quiet or composed.config.observe.quiet
    for warning in check(composed.config):
        if not quiet:
            print(f"warning: {warning}", file=sys.stderr)
    if arguments.print_config:
        sys.stdout.write(config_yaml(composed))
        return EXIT_FINISHED

    from ray_diloco import api

    summary = api.run(composed, quiet=quiet)
    return _EXIT_BY_STATUS[summary["status"]]


def _compare(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from ray_diloco.config.comparison import read_comparison

    names = [text for text in arguments.settings if "=" not in text]
    settings = [text for text in arguments.settings if "=" in text]
    if len(names) > 1:
        raise ConfigError(130, f"unrecognized arguments: {' '.join(names[1:])}", "name one comparison")
    comparison = read_comparison(names[0] if names else None, settings, arguments.config, conf_dir=arguments.conf_dir)

    from ray_diloco import comparing
    from ray_diloco.observe.comparison_page import plain

    page = Path(arguments.write_docs) if arguments.write_docs else None
    if page is not None:
        comparing.check_page(page, comparison.name)
    options = ["--config", arguments.config] if arguments.config else []
    options += ["--conf-dir", arguments.conf_dir] if arguments.conf_dir else []
    command = ["ray-diloco", "compare", *names, *options, *settings]
    results, stopped = comparing.compare(comparison, command, quiet=arguments.quiet)
    if page is not None:
        comparing.write_docs(page, results)
    if not arguments.quiet:
        print(f"\n{plain(results)}\n\n{comparison.folder / 'compare.html'}")
    if stopped:
        return EXIT_INTERRUPTED
    complete = all(each.status == "finished" for each in results.variants)
    return EXIT_FINISHED if complete else EXIT_INCOMPLETE


def _generate(arguments: argparse.Namespace) -> int:
    from ray_diloco import api

    api.generate(
        arguments.run,
        arguments.prompt,
        root=arguments.root,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        show=lambda piece: print(piece, end="", flush=True),
    )
    print()
    return EXIT_FINISHED


def _evaluate(arguments: argparse.Namespace) -> int:
    from ray_diloco import api

    print(json.dumps(api.evaluate(arguments.run, root=arguments.root), indent=2))
    return EXIT_FINISHED


def _version(_: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    for package in ("ray_diloco", "ray", "deepspeed", "torch", "transformers"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
