"""Reading a store: one listing, and of the small objects only those that changed since the last look.

A Reader is kept by whoever looks again and again (`status --watch`, a page); a snapshot is what it saw, unchangeable, and
everything that is shown is computed from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from draftmill import layout
from draftmill.build_record import parse_record
from draftmill.errors import UserError
from draftmill.prompts import index as prompt_index
from draftmill.state.cache import Cache, Reduce, version_of
from draftmill.state.documents import (
    Beat,
    Claim,
    Document,
    JobRecord,
    ShardAudit,
    load_json,
    parse,
    slim,
    slim_audit,
)
from draftmill.state.plan import STAGES, Plan, plan_of
from draftmill.store.base import ObjectInfo, Store

Job = tuple[str, str]
"""Stage and name."""
Choose = Callable[[Plan | None], tuple[Plan | None, list[str]]]
"""Takes the plan that the last build announced, gives the one to show and what a person should know about it."""

LOST_S = 600.0
"""Seconds without a heartbeat after which a job is given up for dead."""
_JOB_KEY = re.compile(r"(progress|records|claims)/([a-z_]+)/([0-9a-f-]+)\.json")
_AUDIT_KEY = re.compile(r"audits/(failed/)?[0-9a-f]{12}-[0-9a-f]{12}\.json")
_SHOWN_KEYS = 3
_LARGE, _AT_ONCE = 4000, 6
_NEWEST = 64
_PARTS = (
    *("completions/", "prompts/", "audits/", "hidden/", "drafter/", "pilot/", "eval/", "report/", "claims/"),
    *(f"{folder}/{stage}/" for folder in ("records", "progress") for stage in STAGES),
    layout.BUILD,
)
"""What a state and its pages are read from, apart; S3 lists a thousand objects a request, one after another."""
_UNANNOUNCED = "No build has announced itself in this store, so there are no totals: give its --configfile."


@dataclass(frozen=True)
class Snapshot:
    """What a store held when it was looked at. Jobs are (stage, name); audits are by key."""

    url: str
    listing: Mapping[str, ObjectInfo]
    plan: Plan | None = None
    beats: Mapping[Job, Beat] = field(default_factory=dict)
    records: Mapping[Job, JobRecord] = field(default_factory=dict)
    claims: Mapping[Job, Claim] = field(default_factory=dict)
    audits: Mapping[str, ShardAudit] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Reader:
    """Looks at one store again and again."""

    def __init__(self, store: Store, *, choose: Choose | None = None, cache: Path | None = None) -> None:
        """`choose` may put another plan in the place of the announced one; `cache` is a file that keeps what was read."""
        self.store = store
        self._choose = choose
        self._small = True
        self._announced: tuple[tuple[str, ...], Plan | None, list[str]] | None = None
        self._cache = Cache(store, cache)
        self._models: dict[str, tuple[Any, Document | None]] = {}

    @property
    def fetched(self) -> int:
        """Objects fetched so far."""
        return self._cache.fetched

    def snapshot(self) -> Snapshot:
        """Look at the store now. Raises UserError if it cannot be listed, KeyError never."""
        listing = self._list()
        plan, notes = self._current_plan(listing)
        jobs = {key: match.groups() for key in listing if (match := _JOB_KEY.fullmatch(key)) and key != layout.BUILD}
        unreadable: list[str] = []
        snapshot = Snapshot(
            self.store.url,
            listing,
            plan,
            self._jobs("progress", jobs, listing, Beat, unreadable),
            self._jobs("records", jobs, listing, JobRecord, unreadable),
            self._jobs("claims", jobs, listing, Claim, unreadable),
            self._audits(listing, unreadable),
            (*notes, *_say_unreadable(unreadable)),
        )
        self._cache.forget_all_but(listing)
        self._models = {key: held for key, held in self._models.items() if key in listing}
        self._cache.save()
        return snapshot

    def newer(self, snapshot: Snapshot, now: float) -> Snapshot | None:
        """The snapshot with the newest heartbeats of jobs at work as they are `now`; None if none has changed.

        These are at most 64 objects, asked for one by one: nothing is listed. A job that is done by now is left as it was,
        as its outputs are not listed yet. Raises what the store raises when away.
        """
        changed = self._heard_again(snapshot, now)
        keys = {info.key: ("progress", *job) for job, info in changed.items()}
        told = self._jobs("progress", keys, {info.key: info for info in changed.values()}, Beat, [])
        beats = {job: beat for job, beat in told.items() if beat.state != "done"}
        if not beats:
            return None
        listing = {changed[job].key: changed[job] for job in beats}
        return replace(snapshot, listing={**snapshot.listing, **listing}, beats={**snapshot.beats, **beats})

    def _heard_again(self, snapshot: Snapshot, now: float) -> dict[Job, ObjectInfo]:
        """The newest heartbeats of jobs at work that are others by now."""
        at_work = [job for job, beat in snapshot.beats.items() if beat.state == "running"]
        heard = {job: snapshot.listing[layout.progress(*job)] for job in at_work}
        # A killed job's heartbeat says for ever that it runs.
        alive = sorted((info.modified, job) for job, info in heard.items() if info.modified > now - LOST_S)
        jobs = [job for _, job in alive[-_NEWEST:]]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = zip(jobs, pool.map(self.store.info, [heard[job].key for job in jobs]), strict=True)
            return {job: info for job, info in found if info and version_of(info) != version_of(heard[job])}

    def _list(self) -> dict[str, ObjectInfo]:
        """The listing; of a large store in parts at once, without the parts that no state is read from."""
        if self._small:
            listing = self.store.list()
            self._small = len(listing) < _LARGE
            return listing
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            parts = pool.map(self.store.list, _PARTS)
            return {key: info for part in parts for key, info in part.items()}

    def json(
        self, keys: Iterable[str], listing: Mapping[str, ObjectInfo], reduce: Reduce = load_json
    ) -> dict[str, Any]:
        """JSON objects by key, reduced by a function of the bytes that is always the same for a key.

        Each is fetched once a version; a key that is not listed is left out, and None stands for what is no JSON.
        """
        return self._cache.values((key for key in keys if key in listing), listing, reduce)

    def _jobs(
        self,
        folder: str,
        jobs: Mapping[str, tuple[str, ...]],
        listing: Mapping[str, ObjectInfo],
        model: type[_Model],
        unreadable: list[str],
    ) -> dict[Job, _Model]:
        keys = [key for key, (place, _, _) in jobs.items() if place == folder]
        found = self._documents(keys, listing, model, slim(model), unreadable)
        return {(jobs[key][1], jobs[key][2]): document for key, document in found.items()}

    def _audits(self, listing: Mapping[str, ObjectInfo], unreadable: list[str]) -> dict[str, ShardAudit]:
        keys = [key for key in listing if _AUDIT_KEY.fullmatch(key)]
        return self._documents(keys, listing, ShardAudit, slim_audit, unreadable)

    def _documents(
        self,
        keys: Iterable[str],
        listing: Mapping[str, ObjectInfo],
        model: type[_Model],
        reduce: Any,
        unreadable: list[str],
    ) -> dict[str, _Model]:
        documents: dict[str, _Model] = {}
        for key, value in self._cache.values(keys, listing, reduce).items():
            held = self._models.get(key)
            if held is None or held[0] is not value:
                held = self._models[key] = (value, parse(model, value))
            if isinstance(held[1], model):
                documents[key] = held[1]
            else:
                unreadable.append(key)
        return documents

    def _current_plan(self, listing: Mapping[str, ObjectInfo]) -> tuple[Plan | None, list[str]]:
        parts = [listing[key] for key in (layout.BUILD, layout.INDEX) if key in listing]
        version = tuple(version_of(info) for info in parts)
        if self._announced is None or self._announced[0] != version:
            plan, notes = self._read_plan() if len(parts) == 2 else (None, [_UNANNOUNCED])
            if self._choose is not None:
                plan, notes = self._choose(plan)
            self._announced = (version, plan, notes)
        return self._announced[1], self._announced[2]

    def _read_plan(self) -> tuple[Plan | None, list[str]]:
        try:
            record = parse_record(self.store.get(layout.BUILD))
            index = prompt_index.load(self.store)
        except KeyError:
            record, index = None, None
        except UserError as error:
            return None, [str(error)]
        if record is None or index is None:
            return None, [f"{layout.BUILD} or {layout.INDEX} is of another version or damaged: start the build again."]
        return plan_of(record, index)


_Model = TypeVar("_Model", bound=Document)


def _say_unreadable(keys: list[str]) -> list[str]:
    if not keys:
        return []
    shown = ", ".join(json.dumps(key) for key in sorted(keys)[:_SHOWN_KEYS])
    more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
    return [f"Not readable and left out: {shown}{more}."]
