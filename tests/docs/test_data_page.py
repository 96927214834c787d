"""`docs/data.md` against the code: its sources and tokenizers exist, and its lines read blocks."""

import json

from docs_pages import ROOT, code_block, code_blocks, names, rows, section

from ray_diloco.config.groups import GROUPS
from ray_diloco.data.sources import SOURCES
from ray_diloco.data.tokenizers import ByteTokenizer
from ray_diloco.rounds.ledger import Ledger

PAGE = "docs/data.md"


def group_files(group):
    return {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_the_page_has_every_source():
    said = [name for cell, _, _ in rows(section(PAGE, "## Sources")) for name in names(cell)]
    assert sorted(said) == sorted(SOURCES) == sorted(group_files("data"))
    assert GROUPS["data"].default == said[0]


def test_the_page_has_every_tokenizer_and_the_size_of_the_default_one():
    table = rows(section(PAGE, "## Tokenizers"))
    assert {names(cell)[0] for cell, _ in table[:2]} == group_files("tokenizer")
    assert GROUPS["tokenizer"].default == "bytes"
    assert f"{ByteTokenizer.vocab_size} ids" in table[0][1]


def test_the_lines_of_the_page_read_the_first_blocks_of_a_run(workshop, capsys):
    (workshop / "corpus").mkdir()
    (workshop / "corpus/a.txt").write_text("One block after the other. " * 400)
    exec(code_block(PAGE, "virtual_to_block"), {})
    assert capsys.readouterr().out == "(8, 256)\n"


def test_the_ledger_that_the_page_shows_can_be_read():
    (block,) = code_blocks(PAGE, "json")
    ((name, state),) = json.loads(block).items()
    ledger = Ledger.from_json(state)
    assert (ledger.source, ledger.issued, ledger.in_flight, ledger.returned) == (name, 8000, 0, 0)
