"""Canonical JSON, digests, and the cache of digests: equal values have equal names, and a stale entry decides nothing."""

import hashlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.canonical import canonical_json, digest_bytes, digest_file, fingerprint
from draftmill.digests import DigestCache

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def reversed_keys(value):
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(list(value))}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


@given(VALUES)
def test_the_text_is_json_of_the_value_and_does_not_depend_on_the_order_of_keys(value):
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(reversed_keys(value)) == text
    assert fingerprint(reversed_keys(value)) == fingerprint(value)


def test_the_form_is_fixed_for_ever():
    assert canonical_json({"b": [1, 2.5, None], "a": "é\n"}) == '{"a":"é\\n","b":[1,2.5,null]}'
    assert fingerprint({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()[:12]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_json_number_has_no_name(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint({"x": value})


@given(st.binary(max_size=200))
def test_a_file_has_the_digest_of_its_bytes(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "digested"
    path.write_bytes(data)
    assert digest_file(path) == digest_bytes(data) == "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture
def read_files(monkeypatch):
    """Names of the files whose bytes were read for a digest."""
    read = []
    real = digest_file
    monkeypatch.setattr("draftmill.digests.digest_file", lambda path: read.append(path.name) or real(path))
    return read


def test_a_file_is_read_once_until_its_size_or_time_changes(tmp_path, read_files):
    path, known = tmp_path / "weights", tmp_path / "cache/known.json"
    path.write_bytes(b"one")
    for _ in range(2):
        cache = DigestCache(known, write=True)
        assert cache.digest(path) == digest_bytes(b"one")
        cache.save()
    assert read_files == ["weights"]
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert DigestCache(known, write=True).digest(path) == digest_bytes(b"two")
    assert read_files == ["weights", "weights"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"a": 1'])
def test_a_damaged_cache_is_an_empty_one(tmp_path, damage):
    (tmp_path / "known").write_bytes(damage)
    (tmp_path / "x").write_bytes(b"x")
    assert DigestCache(tmp_path / "known", write=True).digest(tmp_path / "x") == digest_bytes(b"x")


def test_a_cache_that_may_not_write_does_not(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    cache = DigestCache(tmp_path / "known", write=False)
    cache.digest(tmp_path / "x")
    cache.save()
    assert not (tmp_path / "known").exists()


def test_a_file_that_changed_a_moment_ago_is_read_again(tmp_path, read_files):
    """It could change once more within the grain of its time stamp."""
    path, known = tmp_path / "prompts", tmp_path / "known.json"
    path.write_bytes(b"one")
    for _ in range(2):
        cache = DigestCache(known, write=True, settled_s=1e6)
        cache.digest(path)
        cache.save()
    assert read_files == ["prompts", "prompts"]


def test_a_cache_that_cannot_be_written_costs_only_the_next_look(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"")
    cache = DigestCache(tmp_path / "file/known.json", write=True)
    assert cache.digest(tmp_path / "x") == digest_bytes(b"x")
    cache.save()
