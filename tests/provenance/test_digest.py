"""Canonical JSON and its digest."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.provenance import canonical_json, digest_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_text_is_sorted_compact_and_ascii():
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5,null]}'


def test_digest_is_sha256_of_that_text():
    assert digest_json({"b": 1, "a": (True,)}) == hashlib.sha256(b'{"a":[true],"b":1}').hexdigest()


def test_order_of_keys_does_not_matter_and_order_of_items_does():
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    assert digest_json([1, 2]) != digest_json([2, 1])


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_a_plain_value_comes_back_equal(value):
    assert json.loads(canonical_json(value)) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"ledger": {"loss": float("nan")}}, r"ledger\.loss is nan"),
        ({"a": [0, float("inf")]}, r"a\[1\] is inf"),
        ({"ledger": {3: "x"}}, r"ledger has the key 3"),
        ({"tokens": np.int64(3)}, r"tokens is a numpy\.int64"),
        ({"state": b"raw"}, r"state is a builtins\.bytes"),
        (float("nan"), r"the value is nan"),
    ],
)
def test_what_json_would_change_is_refused_by_path(value, words):
    with pytest.raises(ValueError, match=words):
        canonical_json(value)
