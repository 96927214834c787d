"""The manifest: round trip, digest, refusals."""

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.checkpoint.manifest import FileEntry, Manifest
from ray_diloco.errors import CheckpointError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.text(max_size=8), PLAIN, max_size=3)
COUNT = st.integers(min_value=0, max_value=2**63)
ENTRY = st.builds(
    FileEntry,
    name=st.text(max_size=12),
    bytes=COUNT,
    sha256=st.text(alphabet="0123456789abcdef", min_size=64, max_size=64),
    kind=st.sampled_from(["anchor", "outer", "inner"]),
    island=st.none() | st.text(max_size=5),
)
MANIFEST = st.builds(
    Manifest,
    run=st.text(max_size=8),
    round=COUNT,
    versions=st.dictionaries(st.text(max_size=4), COUNT, max_size=3),
    step=COUNT,
    layout=st.lists(st.tuples(st.text(max_size=8), st.lists(COUNT, max_size=3).map(tuple)), max_size=3).map(tuple),
    files=st.lists(ENTRY, max_size=3).map(tuple),
    ledger=OBJECT,
    membership=OBJECT | st.lists(PLAIN, max_size=3),
    sinks=OBJECT,
    counters=OBJECT,
    environment=OBJECT,
    config_digest=st.text(max_size=8),
    created=st.floats(min_value=0, max_value=4e9),
    previous=st.text(max_size=8),
    previous_round=st.none() | COUNT,
)

FULL = Manifest(
    run="r",
    round=12,
    versions={"f0": 12, "f1": 11},
    step=600,
    layout=(("wte", (4, 2)), ("bias", ()), ("head", (2,))),
    files=(FileEntry("anchor-00000-of-00001.safetensors", 10, "ab" * 32, "anchor"),),
    ledger={"epoch": 1, "free": [[0, 5], [9, 12]], "state": 2**64 - 1, "big": 2**80, "third": 1 / 3},
    membership={"i0": {"incarnation": 3}},
    sinks={"wandb": "abc123"},
    counters={"tokens": 10**15, "restarts": 0},
    environment={"versions": {"torch": "2.13.0"}},
    config_digest="cd",
    created=1760000000.25,
    previous="ee" * 32,
    previous_round=11,
)


@settings(max_examples=60, deadline=None)
@given(MANIFEST)
def test_every_manifest_comes_back_equal(manifest):
    sealed = manifest.sealed()
    assert Manifest.from_json(sealed.to_json()) == sealed
    assert dataclasses.replace(sealed, digest="") == manifest


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Manifest) if f.name != "digest"])
def test_each_field_is_kept_and_covered_by_the_digest(name):
    empty = Manifest(run="", round=0, versions={}, step=0, layout=(), files=())
    default = getattr(empty, name)
    if name == "format":
        with pytest.raises(CheckpointError) as raised:
            dataclasses.replace(FULL, format=2).sealed()
        assert raised.value.number == 511
        return
    assert getattr(FULL, name) != default
    changed = dataclasses.replace(FULL, **{name: default}).sealed()
    assert getattr(Manifest.from_json(FULL.sealed().to_json()), name) == getattr(FULL, name)
    assert changed.digest != FULL.sealed().digest


def test_digest_is_sha256_over_the_canonical_json_of_the_rest():
    fields = json.loads(FULL.sealed().to_json())
    digest = fields.pop("digest")
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_tuples_in_opaque_parts_are_lists_from_the_seal_on():
    sealed = dataclasses.replace(FULL, ledger={"free": ((0, 5),)}).sealed()
    assert sealed.ledger == {"free": [[0, 5]]}
    assert Manifest.from_json(sealed.to_json()) == sealed


def refused(text: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        Manifest.from_json(text)
    return raised.value


def test_an_edited_value_is_noticed():
    text = FULL.sealed().to_json()
    assert refused(text.replace('"step": 600', '"step": 601')).number == 512
    assert refused(text.replace('"tokens":1000000000000000', '"tokens":1000000000000001')).number == 512


def test_every_torn_manifest_is_refused():
    text = FULL.sealed().to_json()
    for length in range(len(text) - 2):
        assert refused(text[:length]).number == 510, length


def test_missing_and_unknown_keys_are_named():
    fields = json.loads(FULL.sealed().to_json())
    lacking = {key: value for key, value in fields.items() if key != "ledger"}
    error = refused(json.dumps({**lacking, "extra": 1}))
    assert error.number == 510
    assert "['ledger']" in error.what
    assert "['extra']" in error.what


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", "12"),
        ("round", -1),
        ("round", True),
        ("versions", {"f0": 1.5}),
        ("layout", [["wte", 4]]),
        ("layout", [["wte", [4, -1]]]),
        ("files", {}),
        ("files", ["a"]),
        ("files", [{"name": "a", "bytes": 1, "sha256": "", "kind": "other", "island": None}]),
        ("files", [{"name": "a", "bytes": 1, "sha256": "", "kind": "outer"}]),
        ("ledger", []),
        ("created", "now"),
        ("previous_round", "11"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name, value):
    fields = json.loads(FULL.sealed().to_json())
    assert refused(json.dumps({**fields, name: value})).number == 510


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": 1}', "\x00" * 40, "[" * 100_000])
def test_what_is_no_manifest_is_refused(text):
    assert refused(text).number in (510, 511)


def test_a_future_format_is_refused_before_its_keys_are_judged():
    assert refused('{"format": 7, "something": "new"}').number == 511


@pytest.mark.parametrize("ledger", [{"loss": float("nan")}, {"blocks": {3: 4}}, {"raw": b"x"}])
def test_what_json_cannot_hold_is_refused_at_the_seal(ledger):
    with pytest.raises(CheckpointError) as raised:
        dataclasses.replace(FULL, ledger=ledger).sealed()
    assert raised.value.number == 518
    assert "ledger" in raised.value.what


def test_files_of_a_kind_come_by_name_and_by_island():
    files = (
        FileEntry("inner-b-r00000.safetensors", 1, "", "inner", "b"),
        FileEntry("inner-a-r00001.safetensors", 1, "", "inner", "a"),
        FileEntry("inner-a-r00000.safetensors", 1, "", "inner", "a"),
        FileEntry("outer-00000-of-00001.safetensors", 1, "", "outer"),
    )
    manifest = dataclasses.replace(FULL, files=files)
    assert [f.name for f in manifest.files_of("inner", "a")] == [
        "inner-a-r00000.safetensors",
        "inner-a-r00001.safetensors",
    ]
    assert [f.island for f in manifest.files_of("inner")] == ["a", "a", "b"]
    assert manifest.files_of("anchor") == ()
