"""Damaged JSON is a finding, never a traceback: any flipped byte, and any value in place of any other."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftmill import layout
from draftmill.catalog import identify
from draftmill.integrity.checks import Unit
from draftmill.integrity.findings import Unsound
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import verify
from draftmill.store.local import LocalStore
from draftmill.store.s3_errors import StoreAwayError
from tests.integrity.stores import Toy

KINDS = ("audit", "pilot", "evaluation", "train", "config", "index")
FOREIGN: Sequence[Any] = (None, 1, -1.5, "x", [], {}, [1], {"a": [1]}, float("inf"), "\ud800", 10**30)
# A prime, so that each bit of a byte and each place of a number is hit somewhere.
STRIDE = 11


def key_of(toy: Toy, kind: str) -> str:
    graph = toy.graph
    keys = {
        "audit": graph.audit(graph.train[0]),
        "pilot": graph.pilot(),
        "evaluation": graph.evaluation(),
        "train": graph.drafter(0, "train.json"),
        "config": graph.drafter(0, "config.json"),
        "index": layout.INDEX,
    }
    return keys[kind]


def damaged(reader: Reader, key: str) -> bool:
    """Whether an object is damaged; a drafter's configuration is held against the weights beside it."""
    keys = [key, key.replace("config.json", "model.safetensors")] if key.endswith("config.json") else [key]
    unit = Unit(reader, [entry for one in keys if (entry := identify(one))], deep=False)
    unit.check()
    return bool(unit.damaged)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value holds values; of a list its first two are enough."""
    yield place
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*place, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:2]):
            yield from places(inner, (*place, number))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = copy.deepcopy(value)
    inside = changed
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = new
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_byte_is_a_finding_or_harmless(toy: Toy, kind: str) -> None:
    key = key_of(toy, kind)
    path, reader = toy.path(key), Reader(toy.store)
    data = path.read_bytes()
    found = 0
    for place in range(0, len(data), STRIDE):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        found += damaged(reader, key)
    assert found > 0
    path.write_bytes(data)
    assert not damaged(reader, key)


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_in_place_of_any_other_is_a_finding_or_harmless(toy: Toy, kind: str) -> None:
    key = key_of(toy, kind)
    for record in toy.store.list("records/"):
        toy.store.delete(record)  # which knows the size
    path, value = toy.path(key), json.loads(toy.store.get(key))
    reader, found = Reader(toy.store), 0
    for number, place in enumerate(places(value)):
        # Each place gets three of them and each of them many places.
        for new in (FOREIGN[(number * 3 + step) % len(FOREIGN)] for step in range(3)) if place else FOREIGN:
            path.write_text(json.dumps(replaced(value, place, new)))
            found += damaged(reader, key)
    assert found > 0


@pytest.mark.parametrize(
    ("kind", "edit", "what"),
    [
        ("evaluation", lambda value: value["rows"][0].update(outputXids=value["rows"][0].pop("output_ids")), "content"),
        ("evaluation", lambda value: value.update(rows={"a": 1}), "content"),
        ("evaluation", lambda value: value.update(rows=5), "content"),
        ("evaluation", lambda value: value.update(target=[1]), "content"),
        ("evaluation", lambda value: value.update(provenance=[1]), "provenance"),
        ("pilot", lambda value: value.update(provenance=5), "provenance"),
        ("train", lambda value: value["provenance"].update(inputs="x"), "provenance"),
        ("audit", lambda value: value.update(measurements=[1]), "content"),
        ("config", lambda value: value.update(draftmill="x"), "provenance"),
        ("config", lambda value: value.update(rope_parameters=[1]), "contract"),
    ],
)
def test_what_is_found_of_other_types(toy: Toy, kind: str, edit: Any, what: str) -> None:
    key = key_of(toy, kind)
    value = json.loads(toy.store.get(key))
    edit(value)
    toy.path(key).write_text(json.dumps(value))
    for record in toy.store.list("records/"):
        toy.store.delete(record)
    found = {(finding.key, finding.what) for finding in verify(Reader(toy.store)).damage}
    place = key.replace("config.json", "model.safetensors") if what == "contract" else key
    assert found == {(place, what)}


def test_damaged_claims_manifests_and_records_end_no_look(toy: Toy) -> None:
    records = sorted(toy.store.list("records/"))
    for number, value in enumerate(FOREIGN):
        data = json.dumps(value).encode()
        holder = {"pid": 1, "start": 1, "boot": None, "namespace": None}
        claim = {"owner": "x", "holder": holder, "host": "gone", "run": "r", "expires": value}
        toy.store.put(layout.claim("generate", f"{number:012x}-{number:012x}"), json.dumps(claim).encode())
        toy.store.put(layout.claim("extract", f"{number:012x}-{number:012x}"), data)
        toy.store.put(f"quarantine/{number:04d}/findings.json", data)
        toy.store.put(f"quarantine/1{number:03d}/findings.json", json.dumps({"digests": value}).encode())
        toy.store.put(f"quarantine/2{number:03d}/findings.json", json.dumps({"digests": {"eval/x": value}}).encode())
        toy.store.put(records[number], data)
    assert verify(Reader(toy.store)).damage == []


def test_a_store_that_is_away_is_no_damage(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(toy.store)

    def away(self: LocalStore, key: str) -> bytes:
        raise StoreAwayError(f"{key} does not answer.")

    monkeypatch.setattr(LocalStore, "get", away)
    with pytest.raises(StoreAwayError):
        damaged(reader, layout.INDEX)


def test_json_that_is_nested_too_deeply_is_unreadable(tmp_path: Path) -> None:
    from draftmill.integrity.documents import read_object

    path = tmp_path / "x.json"
    path.write_text("[" * 200_000)
    with pytest.raises(Unsound, match="unreadable"):
        read_object(path)
