"""`draftmill verify`: every object of a store against its record, its own inside, and the objects it was made from.

Objects that belong together are checked together, many such units at a time. A share of them can be sampled: whole
shards, for a row is only lost between two files. Damage spreads by bytes, never by names: what was made from the right
bytes before they were damaged equals what a rebuild gives, and stays; what a record shows to be made from the damaged
bytes is damaged too.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from draftmill import layout
from draftmill.catalog import OBJECTS, Entry, finished, identify
from draftmill.integrity.checks import Unit
from draftmill.integrity.descent import made_from_damage
from draftmill.integrity.findings import Finding
from draftmill.integrity.reader import Reader
from draftmill.integrity.refusals import refused
from draftmill.store.claims import SKEW_S, Claim

# Units done, units in all.
Progress = Callable[[int, int], None]
_LOCAL_WORKERS, _REMOTE_WORKERS = 2, 16


@dataclass(frozen=True, slots=True)
class Options:
    """How closely to look: every byte, at what share of the shards, and which share (the seed of the choice)."""

    deep: bool = False
    sample: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, by key; how many objects of how many bytes were looked at, and how many of them unopened."""

    findings: list[Finding]
    objects: int
    bytes: int
    unopened: int

    @property
    def damage(self) -> list[Finding]:
        """The findings that make an object of no use."""
        return [finding for finding in self.findings if finding.damage]

    @property
    def notes(self) -> list[Finding]:
        """The findings that harm nothing."""
        return [finding for finding in self.findings if not finding.damage]


def verify(reader: Reader, options: Options = Options(), progress: Progress | None = None) -> Verdict:
    """Look through a store; nothing is changed. Raises UserError for what the system does not let be read."""
    try:
        return _look(reader, options, progress)
    except OSError as error:
        raise refused(error, reader.store.url) from None


def _look(reader: Reader, options: Options, progress: Progress | None) -> Verdict:
    entries = [entry for key in sorted(reader.present) if (entry := identify(key)) is not None]
    units = [unit for unit in _units(entries) if _chosen(unit, options)]
    findings = [*_checked(reader, units, options, progress), *_litter(reader, entries), *_foreign(reader)]
    findings += made_from_damage(reader, findings)
    looked = [entry.key for unit in units for entry in unit]
    return Verdict(
        sorted(findings, key=lambda finding: (finding.key, finding.what)),
        len(looked),
        sum(reader.listing[key].size for key in looked),
        0 if options.deep else sum(not reader.within_reach(key) for key in looked),
    )


def _units(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Objects that are checked together: those of one shard, the files of one window's drafter, or one alone."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind in OBJECTS or entry.kind == "index":
            groups[entry.shard or (entry.name if entry.stage == "train" else entry.key)].append(entry)
    yield from groups.values()


def _chosen(unit: Sequence[Entry], options: Options) -> bool:
    if options.sample >= 1 or not unit[0].shard:
        return True
    drawn = hashlib.sha256(f"{options.seed}/{unit[0].shard}".encode()).digest()[:8]
    return int.from_bytes(drawn) < options.sample * 2.0**64


def _checked(
    reader: Reader, units: Sequence[list[Entry]], options: Options, progress: Progress | None
) -> Iterator[Finding]:
    def check(unit: list[Entry]) -> list[Finding]:
        return Unit(reader, unit, deep=options.deep).check()

    with ThreadPoolExecutor(_LOCAL_WORKERS if reader.local else _REMOTE_WORKERS) as pool:
        for done, found in enumerate(pool.map(check, units), 1):
            if progress is not None:
                progress(done, len(units))
            yield from found


def _litter(reader: Reader, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Work and claims that a kill has left behind."""
    journals = {(entry.stage, entry.name): entry.key.rpartition("/")[0] for entry in entries if entry.kind == "journal"}
    for (stage, name), folder in journals.items():
        if finished(stage, name, reader.present):
            yield Finding(folder, "orphaned journal", "no journal of a finished job", "one")
    for entry in entries:
        if entry.kind == "claim" and (left := claim_left(reader, entry.key)):
            yield Finding(entry.key, "orphaned claim", "a claim that its holder renews", left)


def claim_left(reader: Reader, key: str, clock: Callable[[], float] = time.time) -> str:
    """Why nobody holds a claim any more; empty if somebody may. A claim that vanished is nobody's concern."""
    try:
        claim = Claim.decode(reader.store.get(key))
    except KeyError:
        return ""
    if claim is None:
        return "no claim in it"
    late = clock() - claim.expires
    return f"one that ran out {late:.0f} s ago" if late > SKEW_S else ""


def _foreign(reader: Reader) -> Iterator[Finding]:
    for key in reader.present:
        if identify(key) is None and key != layout.BUILD:
            yield Finding(key, "foreign", "a name that draftmill writes", "another")
