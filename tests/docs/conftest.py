import pytest
from docs_pages import code_block


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """An empty current folder with `sums.py` of docs/python.md in it, importable, and a home of its own."""
    (tmp_path / "sums.py").write_text(code_block("docs/python.md", "class LastTokens"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path
