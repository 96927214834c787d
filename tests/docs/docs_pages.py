"""What the pages of docs/ say: their code blocks, tables and commands, read from the text itself."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(name, language="python"):
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


def code_block(name, containing):
    (found,) = [block for block in code_blocks(name) if containing in block]
    return found


def section(name, heading):
    """The text below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    text = page(name).split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{1,{level}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text):
    """Cells of the tables in a text, heads left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = [k for k, row in enumerate(cells) if set("".join(row)) <= set("-:")]
    heads = {k - 1 for k in rules} | set(rules)
    return [row for k, row in enumerate(cells) if k not in heads]


def names(cell):
    """The words in backquotes of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def blocks(name):
    """The lines of indented blocks, and of fenced ones without a language; those that a backslash breaks are joined."""
    outside = re.sub(r"^```\w+\n.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (.*\n)", outside, re.MULTILINE)
    return re.sub(r"\\\n\s*", "", "".join([*lines, *code_blocks(name, "")]))


def commands(name):
    """Lines of blocks that call the command, as lists of words; comments are left out."""
    lines = [line.removeprefix("$ ") for line in blocks(name).splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("ray-diloco ")]
