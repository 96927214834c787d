import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_diloco.cli import build_parser, main
from ray_diloco.config.compose import Composed, compose
from ray_diloco.errors import CheckpointError, InfeasibleError


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stands in for `ray_diloco.api`, so that only the door is under test; `calls` holds what was asked of it."""
    module: Any = types.ModuleType("ray_diloco.api")
    module.calls = []
    module.status = "finished"

    def run(composed: Composed, *, quiet: bool) -> dict[str, Any]:
        module.calls.append((composed, quiet))
        return {"status": module.status}

    def generate(run: str, prompt: str, *, show: Callable[[str], object], **options: Any) -> None:
        module.calls.append((run, prompt, options))
        for piece in (prompt, "…"):
            show(piece)

    def evaluate(run: str, **options: Any) -> dict[str, float]:
        module.calls.append((run, options))
        return {"loss": 2.0}

    module.run, module.generate, module.evaluate = run, generate, evaluate
    monkeypatch.setitem(sys.modules, "ray_diloco.api", module)
    monkeypatch.setattr("ray_diloco.api", module, raising=False)
    return module


def test_the_surface_of_the_command_is_frozen() -> None:
    subparsers = next(action for action in build_parser()._actions if action.dest == "command")
    surface = {
        name: [*(option for a in parser._actions for option in a.option_strings or [a.dest])]
        for name, parser in subparsers.choices.items()
    }
    assert surface == {
        "train": ["-h", "--help", "settings", "--config", "--conf-dir", "--print-config", "--quiet"],
        "compare": ["-h", "--help", "settings", "--config", "--conf-dir", "--write-docs", "--quiet"],
        "generate": ["-h", "--help", "run", "--root", "prompt", "--tokens", "--temperature", "--seed"],
        "evaluate": ["-h", "--help", "run", "--root"],
        "audit": ["-h", "--help", "run", "--root", "--json"],
        "scale": ["-h", "--help", "run", "--root", "--address", "islands"],
        "drain": ["-h", "--help", "run", "--root", "--address", "island"],
        "status": ["-h", "--help", "run", "--root", "--address", "--json"],
        "stop": ["-h", "--help", "run", "--root", "--address"],
        "doctor": ["-h", "--help", "settings", "--config", "--conf-dir", "--cluster", "--json"],
        "simulate": ["-h", "--help", "settings", "--config", "--conf-dir", "--json", "--seeds"],
        "tune": ["-h", "--help", "settings", "--config", "--conf-dir", "--print-config", "--quiet"],
        "plan": ["-h", "--help", "settings", "--config", "--conf-dir", "--table", "--json"],
        "version": ["-h", "--help"],
    }


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["generate", "-h"], ["evaluate", "-h"], ["compare", "-h"]]
)
def test_help_is_printed_and_is_no_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0
    assert "usage: ray-diloco" in capsys.readouterr().out


def test_settings_may_stand_around_the_options(api: Any) -> None:
    assert main(["train", "model=tiny", "inner.H=3", "--quiet", "inner.H=4", "outer.momentum=0.5"]) == 0
    ((composed, quiet),) = api.calls
    assert quiet is True
    assert composed.config.inner.H == 4
    assert composed == compose(["model=tiny", "inner.H=3", "inner.H=4", "outer.momentum=0.5"])


def test_a_config_file_and_a_conf_dir_are_passed_on(
    api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("architecture: gpt2\n")
    (tmp_path / "e.yaml").write_text("model: mine\nobserve: {quiet: true}\n")
    assert main(["train", "--config", str(tmp_path / "e.yaml"), "--conf-dir", str(tmp_path)]) == 0
    ((composed, quiet),) = api.calls
    assert composed.config.model.architecture == "gpt2"
    assert quiet is True, "observe.quiet in a file is as good as --quiet"
    assert capsys.readouterr().err == ""


def test_the_print_can_be_given_back_and_trains_nothing(
    api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--print-config", "experiment=demo"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(printed)
    assert main(["train", "--print-config", "--config", str(tmp_path / "config.yaml")]) == 0
    values = [line.split("  #")[0].rstrip() for line in printed.splitlines()]
    assert [line.split("  #")[0].rstrip() for line in capsys.readouterr().out.splitlines()] == values
    assert api.calls == []


def test_warnings_go_to_the_error_stream_and_quiet_hides_them(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.rounds=3"]) == 0
    assert capsys.readouterr().err.startswith("warning: outer.lr=0.7 with outer.momentum=0.9")
    assert main(["train", "run.rounds=3", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 130), ("failed", 4)])
def test_the_exit_code_tells_how_a_run_ended(api: Any, status: str, code: int) -> None:
    api.status = status
    assert main(["train", "--quiet"]) == code


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["train", "inner.h=3"], "RD-101: argument 'inner.h=3': unknown key"),
        (["train", "inner.H=0"], "RD-111: inner.H=0"),
        (["train", "foo"], "RD-104: argument 'foo'"),
        (["train", "--config", "nowhere.yaml"], "RD-105: cannot read nowhere.yaml"),
        (["train", "--cofig", "x"], "RD-130: unrecognized arguments: --cofig"),
        (["train", "--print"], "RD-130: unrecognized arguments: --print"),
        (["generate", "run"], "RD-130: the following arguments are required: prompt"),
        (["generate", "run", "a", "b"], "RD-130: unrecognized arguments: b"),
        (["generate", "run", "a", "--tokens", "x"], "RD-130: argument --tokens: invalid int value: 'x'"),
        (["compare", "a", "inner.H=3", "b"], "RD-130: unrecognized arguments: b"),
        (["compare", "famly"], "RD-102: compare famly: there is no compare 'famly'"),
        (["compare", "family", "inner.h=3"], "RD-101: argument 'inner.h=3': unknown key"),
        (["compare", "family", "--config", "x.yaml"], "RD-108: both --config x.yaml and the comparison family"),
        (["tran"], "RD-130: argument COMMAND: invalid choice: 'tran'"),
        ([], "RD-130: the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_one_numbered_text_and_code_2(
    api: Any, arguments: list[str], start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(start)
    assert "\n  mend: " in printed.err
    assert "Traceback" not in printed.err
    assert api.calls == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InfeasibleError(201, "needs 8 GPUs", "ask for fewer"), 3, "RD-201: needs 8 GPUs\n  mend: ask for fewer\n"),
        (CheckpointError(501, "torn", "remove it"), 4, "RD-501: torn\n  mend: remove it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_every_family_leaves_with_its_code(
    api: Any, error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(composed: Composed, *, quiet: bool) -> dict[str, Any]:
        raise error

    api.run = run
    assert main(["train", "--quiet"]) == code
    assert capsys.readouterr().err == words


def test_an_unexpected_error_is_shown_whole_with_a_request_to_report_it(
    api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(composed: Composed, *, quiet: bool) -> dict[str, Any]:
        raise ZeroDivisionError("x")

    api.run = run
    assert main(["train", "--quiet"]) == 4
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("unexpected ZeroDivisionError; please report it with the lines above\n")


def test_generate_prints_the_text_as_it_comes(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "def ", "--tokens", "5", "--temperature", "0", "--seed", "3", "--root", "r"]) == 0
    assert capsys.readouterr().out == "def …\n"
    assert api.calls == [("demo", "def ", {"root": "r", "tokens": 5, "temperature": 0.0, "seed": 3})]


def test_evaluate_prints_json(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "demo"]) == 0
    assert capsys.readouterr().out == '{\n  "loss": 2.0\n}\n'
    assert api.calls == [("demo", {"root": "runs"})]


def test_version_names_this_package_and_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    packages = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert packages == ["ray_diloco", "ray", "deepspeed", "torch", "transformers"]


def run_command(patch: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, with a line of Python before it."""
    code = f"import os, signal, sys, time\nfrom ray_diloco import cli\n{patch}\nsys.exit(cli.main())"
    arguments = [sys.executable, "-c", code, "train", "--print-config"]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"


# The sleeps below are never slept: the handler leaves them at once.  Without it the command outlasts its deadline.


def test_sigterm_after_the_outcome_leaves_at_once_with_its_code() -> None:
    ended = run_command(f"import atexit; atexit.register(lambda: {TERMINATE} or time.sleep(600))")
    assert ended.returncode == 0


def test_sigterm_before_anything_has_begun_interrupts() -> None:
    ended = run_command(f"cli._train = lambda arguments: {TERMINATE} or time.sleep(600)")
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
