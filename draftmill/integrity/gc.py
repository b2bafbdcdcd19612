"""`draftmill gc`: what none of the given configurations reaches, and nothing else.

Everything is doubted in favour of staying: a key that no part of draftmill writes, an object younger than the grace
period (somebody may be at work under a configuration that was not given), an object that `draftmill adopt` would still
take over, and whatever was quarantined, unless that is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from draftmill.catalog import OBJECTS, Entry, finished, identify
from draftmill.integrity.reach import Job
from draftmill.records import parse_record
from draftmill.store.base import ObjectInfo, Store

_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Waste:
    """What may go: each key with its kind and size in bytes, by kind; how many others are only too young."""

    kinds: Mapping[str, Mapping[str, int]]
    young: int = 0

    @property
    def keys(self) -> list[str]:
        """Every key."""
        return [key for sizes in self.kinds.values() for key in sizes]

    @property
    def bytes(self) -> int:
        """The bytes of all together."""
        return sum(size for sizes in self.kinds.values() for size in sizes.values())


@dataclass(slots=True)
class _Sweep:
    """One listing, what is reached, and the verdict on every key."""

    store: Store
    listing: Mapping[str, ObjectInfo]
    keys: frozenset[str]
    jobs: frozenset[Job]
    before: float
    quarantine: bool
    young: int = 0
    gone: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))

    def run(self) -> Waste:
        """Decide on all objects, then on what only accompanies them."""
        entries = [entry for key in sorted(self.listing) if (entry := identify(key)) is not None]
        for entry in entries:
            unreached = entry.kind in OBJECTS and entry.key not in self.keys
            if unreached or entry.kind == "probe" or (entry.kind == "quarantine" and self.quarantine):
                self._take([entry])
        for journal in _by_job(entries, "journal"):
            self._sweep_journal(journal)
        for kind in ("progress", "claim"):
            self._sweep_stale([entry for entry in entries if entry.kind == kind])
        self._sweep_records([entry for entry in entries if entry.kind == "record"])
        return Waste({kind: dict(sizes) for kind, sizes in self.gone.items()}, self.young)

    def _take(self, entries: Iterable[Entry]) -> None:
        """These go together, if the youngest of them is old enough."""
        found = list(entries)
        if any(self.listing[entry.key].modified > self.before for entry in found):
            self.young += len(found)
            return
        for entry in found:
            self.gone[entry.kind][entry.key] = self.listing[entry.key].size

    def _sweep_journal(self, entries: list[Entry]) -> None:
        job = entries[0].stage, entries[0].name
        if job not in self.jobs or finished(*job, frozenset(self.listing)):
            self._take(entries)

    def _sweep_stale(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.stage and (entry.stage, entry.name) not in self.jobs:
                self._take([entry])

    def _sweep_records(self, entries: Iterable[Entry]) -> None:
        """A record goes with the last object that it tells of; those of reached jobs tell how long such work takes."""
        left = self.listing.keys() - {key for sizes in self.gone.values() for key in sizes}
        for entry in entries:
            if (entry.stage, entry.name) in self.jobs:
                continue
            record = parse_record(self._get(entry.key))
            if record is None or not left & record.outputs.keys():
                self._take([entry])

    def _get(self, key: str) -> bytes:
        try:
            return self.store.get(key)
        except KeyError:
            return b""


def waste(
    store: Store,
    listing: Mapping[str, ObjectInfo],
    reached: tuple[frozenset[str], frozenset[Job]],
    *,
    before: float,
    quarantine: bool = False,
) -> Waste:
    """What may go of a listing: not `reached` (reach.py) and last changed at `before` (seconds since 1970) or earlier."""
    return _Sweep(store, listing, *reached, before=before, quarantine=quarantine).run()


def remove(store: Store, found: Waste) -> None:
    """Delete it, an object's record after the object."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        for kind in sorted(found.kinds, key=lambda kind: kind == "record"):
            list(pool.map(store.delete, found.kinds[kind]))


def _by_job(entries: Iterable[Entry], kind: str) -> Iterator[list[Entry]]:
    jobs: dict[Job, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind == kind:
            jobs[entry.stage, entry.name].append(entry)
    yield from jobs.values()
