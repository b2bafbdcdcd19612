"""Damaged objects are moved out of the way, never deleted: a person may want to see them, and a check may be wrong.

They go to `quarantine/{number}/{key}`, a name that no plan looks for, so that the next build makes the object again. A
list of what was found, with the digests of the damaged bytes, is published before the first object moves; its conditional
creation also gives each call a number of its own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftmill import layout
from draftmill.catalog import QUARANTINE, identify
from draftmill.integrity.descent import MANIFEST, damaged_pairs
from draftmill.integrity.findings import Finding
from draftmill.integrity.reader import Reader
from draftmill.store.base import Store
from draftmill.store.local import LocalStore


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Where damaged objects went, and the keys that they had."""

    folder: str
    keys: list[str]


def quarantine(reader: Reader, findings: Sequence[Finding]) -> Quarantined | None:
    """Move every damaged object with its job's record; None if nothing is damaged."""
    damaged = sorted({finding.key for finding in findings if finding.damage} & reader.present)
    if not damaged:
        return None
    folder = _claim_folder(reader, findings, damaged)
    moved = [key for key in damaged if move(reader.store, key, f"{folder}{key}")]
    for key in {record for key in moved if (record := _record_of(key)) in reader.present}:
        move(reader.store, key, f"{folder}{key}")
    return Quarantined(folder, moved)


def _record_of(key: str) -> str:
    entry = identify(key)
    return layout.record(entry.stage, entry.name) if entry is not None and entry.job else ""


def _claim_folder(reader: Reader, findings: Sequence[Finding], damaged: Sequence[str]) -> str:
    about = {
        "digests": dict(damaged_pairs(reader, set(damaged))),
        "findings": [finding.to_json() for finding in findings if finding.damage],
    }
    data = (json.dumps(about, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    number = 1
    while not reader.store.create(f"{QUARANTINE}{number:04d}/{MANIFEST}", data):
        number += 1
    return f"{QUARANTINE}{number:04d}/"


def move(store: Store, key: str, to: str) -> bool:
    """Give an object another key; False if it is not there any more."""
    if isinstance(store, LocalStore):
        return _rename(store, key, to)
    with tempfile.TemporaryDirectory(prefix="draftmill-") as folder:
        path = Path(folder) / "object"
        try:
            store.fetch(key, path)
        except KeyError:
            return False
        store.publish(to, path)
    store.delete(key)
    return True


def _rename(store: LocalStore, key: str, to: str) -> bool:
    target = store.path(to)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(store.path(key), target)
    except FileNotFoundError:
        return False
    store.delete(key)  # only the folders that this left empty
    return True
