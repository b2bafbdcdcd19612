"""What the store has of earlier fingerprints, and which settings have changed since.

An object's own provenance holds the whole spec that it was made by, so the comparison needs no memory beside the store:
one object of an earlier fingerprint is read and held against the present spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftmill.catalog import OBJECTS, Entry, identify
from draftmill.plan.types import Difference
from draftmill.store.base import ObjectInfo

# Part of a stage's spec -> section or key of the configuration that it comes from.
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "generate": {"sampling": "generate", "chat_template_args": "target.chat_template_args"},
    "audit": {"limits": "audit"},
    "extract": {"taps": "hidden.taps"},
    "pilot": {"shard": "pilot"},
    "train": {"training": "train", "drafter.taps": "hidden.taps", "windows": "the shards", "held_out": "the shards"},
    "evaluate": {"decoding": "evaluate", "context_length": "target.context_length"},
    "audit_set": {"shards": "the shards"},
    "report": {"counts": "the prompts"},
}
_VERSION = "draftmill's version of this stage"
# Values that say nothing to a person.
LISTS = ("the shards", "the prompts")


@dataclass(frozen=True)
class Earlier:
    """What was made before. `specs` has, by stage and fingerprint, the spec inside an object, as far as one was read."""

    objects: Mapping[str, tuple[Entry, ...]]
    """By stage the objects in the store, newest first."""
    records: Mapping[str, tuple[Entry, ...]]
    """By stage the records of finished jobs, newest first; their objects may be gone."""
    specs: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def finished(self) -> frozenset[tuple[str, str]]:
        """Stage and name of every job that was finished once, by its record."""
        return frozenset((stage, entry.name) for stage, entries in self.records.items() for entry in entries)

    def fingerprints(self, stage: str, shard: str = "") -> tuple[str, ...]:
        """Fingerprints that objects of the shard, or of any if none is given, have or had; newest first."""
        return self._fingerprints.get((stage, shard), ())

    @cached_property
    def _fingerprints(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        found: dict[tuple[str, str], dict[str, None]] = {}
        for made in (self.objects, self.records):
            for stage, entries in made.items():
                for entry in entries:
                    for shard in {"", entry.shard}:
                        found.setdefault((stage, shard), {})[entry.fp] = None
        return {key: tuple(fps) for key, fps in found.items()}


def objects_of(listing: Mapping[str, ObjectInfo]) -> Mapping[str, tuple[Entry, ...]]:
    """The objects that jobs made, by stage, newest first."""
    return _by_stage(entry for entry in _newest_first(listing) if entry.kind in OBJECTS and entry.stage)


def records_of(listing: Mapping[str, ObjectInfo]) -> Mapping[str, tuple[Entry, ...]]:
    """The records of finished jobs, by stage, newest first, with the shard and the fingerprint in their names."""
    return _by_stage(entry for entry in _newest_first(listing) if entry.kind == "record")


def _newest_first(listing: Mapping[str, ObjectInfo]) -> Iterator[Entry]:
    for key in sorted(listing, key=lambda key: (-listing[key].modified, key)):
        entry = identify(key)
        if entry is not None:
            yield entry


def _by_stage(entries: Iterable[Entry]) -> Mapping[str, tuple[Entry, ...]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.stage, []).append(entry)
    return {stage: tuple(some) for stage, some in found.items()}


def differences(stage: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """The settings in which two specs of a stage differ, by the names that the configuration has for them."""
    found = {_setting(stage, path): (old, new) for path, old, new in _unequal("", was, now)}
    return tuple(Difference(name, *((None, None) if name in LISTS else pair)) for name, pair in sorted(found.items()))


def _unequal(path: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in sorted({*was, *now}):
            yield from _unequal(f"{path}.{key}" if path else str(key), was.get(key), now.get(key))
    elif was != now:
        yield path, was, now


def _setting(stage: str, path: str) -> str:
    if path == "version":
        return _VERSION
    for part, setting in _SETTINGS[stage].items():
        if path == part or path.startswith(f"{part}."):
            return setting if setting in LISTS else setting + path[len(part) :]
    return path
