"""The doors for Python, where no Ray is needed; `tests/cluster/` runs the rest."""

from pathlib import Path

import pytest

from ray_diloco import api
from ray_diloco.cluster.command import for_any_folder
from ray_diloco.config.compose import compose
from ray_diloco.errors import ConfigError


@pytest.mark.parametrize(
    ("root", "storage", "at", "commits"),
    [
        ("runs", None, "cwd/runs", None),
        ("~/runs", "~/commits", "home/runs", "home/commits"),
        ("runs", "commits", "cwd/runs", "cwd/commits"),
    ],
)
def test_the_processes_of_a_run_get_places_that_mean_the_same_in_every_folder(
    root: str, storage: str | None, at: str, commits: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = for_any_folder(compose(settings={"run.root": root, "run.storage": storage}).config)
    assert config.run.root == str(tmp_path / at)
    assert config.run.storage == (commits and str(tmp_path / commits))


def test_a_storage_with_a_scheme_is_left_as_it_is() -> None:
    config = for_any_folder(compose(["run.storage=s3://bucket/x"]).config)
    assert config.run.storage == "s3://bucket/x"


def test_a_run_is_found_by_name_or_folder_and_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/config.yaml").touch()
    assert api.run_folder("one", str(tmp_path)) == tmp_path / "one"
    assert api.run_folder(str(tmp_path / "one"), "elsewhere") == tmp_path / "one"
    with pytest.raises(ConfigError, match="RD-171: there is no run 'two'") as caught:
        api.run_folder("two", str(tmp_path))
    assert "one" in caught.value.mend
