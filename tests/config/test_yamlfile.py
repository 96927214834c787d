from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ray_diloco.config.yamlfile import escape_references, read_file, read_scalar, write_scalar
from ray_diloco.errors import ConfigError

SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("null", None),
        ("", None),
        ("-5", -5),
        ("1e-3", 0.001),
        ("4.", 4.0),
        ("[no, 1, 1.5]", ["no", 1, 1.5]),
        ("'1'", "1"),
    ],
)
def test_a_scalar_means_what_a_configuration_means_by_it(text: str, value: object) -> None:
    assert read_scalar(text) == value


@settings(deadline=None)
@given(SCALARS | st.lists(SCALARS) | st.dictionaries(st.text(min_size=1), SCALARS))
def test_a_written_value_is_one_line_that_our_reader_and_plain_yaml_both_read_back(value: object) -> None:
    line = write_scalar(value)
    assert "\n" not in line
    assert read_scalar(line) == value
    assert yaml.safe_load(line) == value


@settings(deadline=None)
@given(st.text(alphabet="a\\${}:.") | st.text())
def test_an_escaped_text_is_no_reference_to_omegaconf(text: str) -> None:
    assert OmegaConf.create({"key": escape_references(text)})["key"] == text


def test_a_file_remembers_the_line_of_every_key(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# top\nrun:\n  name: x\n\ninner:\n  optimizer: {eps: 1e-8}\n")
    document = read_file(file)
    assert document.values == {"run": {"name": "x"}, "inner": {"optimizer": {"eps": 1e-8}}}
    assert document.lines == {
        ("run",): 2,
        ("run", "name"): 3,
        ("inner",): 5,
        ("inner", "optimizer"): 6,
        ("inner", "optimizer", "eps"): 6,
    }


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# only a comment\n")
    assert read_file(file).values == {}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"run:\n  name: [x\n", 3),
        (b"run:\n\tname: x\n", 2),
        (b"run: {}\nrun: {}\n", 2),
        (b"- a\n- b\n", 1),
        (b"just text\n", 1),
        (b"a: &x\n  b: !python/object:os.system 1\n", 2),
    ],
)
def test_bad_yaml_is_named_with_file_and_line(tmp_path: Path, content: bytes, line: int) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.yaml:{line}") as caught:
        read_file(file)
    assert caught.value.number == 106


def test_a_file_that_is_not_text_is_bad_yaml(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(b"run: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        read_file(file)
    assert caught.value.number == 106


def test_a_missing_file_and_a_folder_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)) as caught:
            read_file(path)
        assert caught.value.number == 105
