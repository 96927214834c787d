from pathlib import Path

import pytest

from ray_diloco.config.groups import GROUPS, packaged_conf, search_path
from ray_diloco.config.keys import fields_of
from ray_diloco.config.schema import Config


def test_the_packaged_conf_is_the_one_at_the_root_of_a_source_tree() -> None:
    assert packaged_conf() == Path(__file__).resolve().parents[2] / "conf"


def test_names_are_those_of_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("conf/model", "mine/model"):
        Path(folder).mkdir(parents=True)
    Path("conf/model/b.yaml").touch()
    Path("mine/model/a.yaml").touch()
    assert set(search_path("mine").names("model")) == {"a", "b", "llama_150m", "llama_1b", "tiny"}


def test_a_path_is_no_group_name() -> None:
    search = search_path(None)
    assert search.find("model", "tiny") is not None
    for value in ("../model/tiny", "./tiny", "tiny.yaml", "", "/etc/passwd"):
        assert search.find("model", value) is None


def test_groups_speak_of_keys_that_exist() -> None:
    for name, group in GROUPS.items():
        keys = set(fields_of(fields_of(Config)[name]))
        assert set(group.defining) <= keys
        assert set(group.inline) <= set(group.defining)
        assert (packaged_conf() / name / f"{group.default}.yaml").is_file()
