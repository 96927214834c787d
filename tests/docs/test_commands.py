"""Commands, keys and links in README and docs/: whatever a page tells to type exists and is accepted."""

import re
import shlex

import pytest
from docs_pages import ROOT, blocks, commands, page

from ray_diloco.cli import build_parser, main
from ray_diloco.config.check import check
from ray_diloco.config.comparison import read_comparison
from ray_diloco.config.compose import compose
from ray_diloco.config.keys import canonical, fields_of, type_of
from ray_diloco.config.schema import Config
from ray_diloco.config.sweep import read_sweep
from ray_diloco.errors import DilocoError

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FILE_ENDINGS = ("json", "jsonl", "yaml", "html", "md", "py", "safetensors")
FILES = ("corpus/a.txt", "corpus/a.jsonl", "us/a.jsonl", "eu/a.jsonl", "runs/x/config.yaml")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A current folder with the files that pages speak of."""
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "my_variants.yaml").write_text("variants: {short: {inner.H: 10}, long: {inner.H: 50}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_lines(name):
    """Lines of blocks that hold nothing but settings, and those of the script that passes them on."""
    script, setting = r"(?:RAY_ADDRESS=\S+ jobs/train\.sh )?", r"[a-z_]+(?:\.\w+)*=\S+"
    return [
        shlex.split(line) for line in re.findall(rf"^{script}({setting}(?: {setting})*)$", blocks(name), re.MULTILINE)
    ]


def accepted(settings, config=None, conf_dir=None):
    check(compose(settings, config, conf_dir=conf_dir).config)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_in_a_block_is_accepted(name, desk):
    shown = set(re.findall(r"^    RD-(\d+): argument", page(name), re.MULTILINE))
    for words in commands(name):
        arguments = build_parser().parse_args(words[1:])
        if arguments.command == "train":
            try:
                accepted(arguments.settings, arguments.config, arguments.conf_dir)
            except DilocoError as error:
                assert str(error.number) in shown, f"{shlex.join(words)}: {error}"
        if arguments.command == "compare":
            names, settings = ([t for t in arguments.settings if ("=" in t) is given] for given in (False, True))
            read_comparison(*names, arguments=settings, config_file=arguments.config, conf_dir=arguments.conf_dir)
        if arguments.command == "tune":
            read_sweep(arguments.settings, arguments.config, conf_dir=arguments.conf_dir)
    for words in settings_lines(name):
        accepted(words)


def test_the_pages_hold_commands_and_settings_to_look_at():
    assert sum(len(commands(name)) for name in PAGES) > 15
    assert sum(len(settings_lines(name)) for name in PAGES) >= 2


def test_the_error_that_the_page_of_errors_begins_with_is_what_the_command_prints(desk, capsys):
    (arguments,) = [words[1:] for words in commands("docs/errors.md")]
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    shown = re.search(r"^    \$ .*\n((?:    .*\n)+)", page("docs/errors.md"), re.MULTILINE).group(1)
    for line, said in zip(printed.splitlines(), shown.splitlines(), strict=True):
        assert line.startswith(said.removeprefix("    ").removesuffix("…"))


@pytest.mark.parametrize("name", PAGES)
def test_every_subcommand_and_option_that_a_page_names_exists(name):
    subparsers = next(action for action in build_parser()._actions if action.dest == "command").choices
    options = {
        option for parser in subparsers.values() for action in parser._actions for option in action.option_strings
    }
    assert set(re.findall(r"ray-diloco ([a-z]+)\b", page(name))) <= set(subparsers)
    for line in re.findall(r"ray-diloco [a-z]+ [^`\n]*", page(name)):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= options, line


@pytest.mark.parametrize("name", PAGES)
def test_every_key_that_a_page_names_exists(name):
    for key in re.findall(r"`([a-z_]+(?:\.\w+)+)(?:=[^`]*)?`", page(name)):
        path = tuple(key.split("."))
        if path[0] in fields_of(Config) and path[-1] not in FILE_ENDINGS:
            type_of(canonical(path), name)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_headings_that_exist(name):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page(name)):
        text = (ROOT / name).parent.joinpath(target).read_text(encoding="utf-8") if target else page(name)
        slugs = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        assert anchor in slugs, f"{target}#{anchor}"


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_leads_to_every_page():
    linked = set(re.findall(r"\]\(([\w./]+)\)", page("docs/index.md")))
    assert linked == {"../README.md", *(path.name for path in (ROOT / "docs").glob("*.md"))} - {"index.md"}
