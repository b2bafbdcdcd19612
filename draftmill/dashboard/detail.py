"""One shard in full: its chain, why it was built, what its objects say of their making, and the ends of its logs.

Logs lie in the folder that a build runs in, not in the store; they are shown where the board runs in that folder on the
host that wrote them.
"""

from __future__ import annotations

import re
import socket
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from draftmill import layout, provenance
from draftmill.canonical import canonical_json
from draftmill.dashboard.board import View
from draftmill.records import describe, parse_record
from draftmill.state.cache import version_of
from draftmill.state.shards import Link, ShardRow, changed_settings, shard_rows
from draftmill.store.base import Store

_SHARD = re.compile(r"[0-9a-f]{12}")
_LOG_BYTES, _SETTINGS, _VALUE = 16_384, 40, 400
_LARGE, _KEPT = 64 << 20, 512
"""JSON above so many bytes is not fetched only for what it says of itself; how many objects' sayings are kept."""


class Details:
    """Tells of the shards of one store. What an object says of its making is read once a version."""

    def __init__(self, store: Store, logs: Path | None = None) -> None:
        """`logs` is the build's own folder if it is here."""
        self._store, self._logs = store, logs
        self._said: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, view: View, shard: str) -> dict[str, Any] | None:
        """A shard as a JSON value. None if there is no such shard."""
        if view.picture is None or not _SHARD.fullmatch(shard):
            return None
        row = next((row for row in shard_rows(view.picture) if row.name == shard), None)
        if row is None:
            return None
        return row.to_json() | {"chain": [self._link(view, row, link) for link in row.chain]}

    def _link(self, view: View, row: ShardRow, link: Link) -> dict[str, Any]:
        values = {name: getattr(link, name) for name in Link.__slots__}
        return values | {
            "gpus": list(link.gpus),
            "before": list(link.before),
            "record": self._record(view, row, link),
            "made_of": self._made_of(view, link.key),
            "changed": self._changed(view, row, link),
            "log_end": _log_end(link, self._logs),
        }

    def _record(self, view: View, row: ShardRow, link: Link) -> dict[str, Any] | None:
        key = layout.record(link.stage, f"{row.name}-{link.fingerprint}")
        if key not in view.snapshot.listing:
            return None
        try:
            record = parse_record(self._store.get(key))
        except KeyError:
            return None
        return describe(record) if record is not None else None

    def _made_of(self, view: View, key: str) -> dict[str, Any] | None:
        """The provenance inside an object; None if it is not there, damaged, or too large to be asked."""
        info = view.snapshot.listing.get(key)
        if info is None or (key.endswith(".json") and info.size > _LARGE):
            return None
        place = (key, version_of(info))
        with self._lock:
            if place in self._said:
                self._said.move_to_end(place)
                return self._said[place]
        try:
            found = provenance.of_object(self._store, key, info.size)
        except (KeyError, ValueError, OSError):
            return None
        with self._lock:
            self._said[place] = found
            while len(self._said) > _KEPT:
                self._said.popitem(last=False)
        return found

    def _changed(self, view: View, row: ShardRow, link: Link) -> list[dict[str, str]]:
        """Settings in which the object differs from the newest one of other settings, as far as both are there."""
        if not link.before:
            return []
        before = self._made_of(view, _key(row, link.stage, link.before[0]))
        now = self._made_of(view, link.key)
        if before is None or now is None:
            return []
        found = changed_settings(before, now)
        return [{"name": key, "before": _short(old), "after": _short(new)} for key, old, new in found[:_SETTINGS]]


def _key(row: ShardRow, stage: str, fingerprint: str) -> str:
    """An object of a shard from any settings."""
    hidden = layout.held_out_hidden if row.window is None else layout.hidden
    return {"generate": layout.completions, "audit": layout.audit, "extract": hidden}[stage](row.name, fingerprint)


def _short(value: Any) -> str:
    return "absent" if value is None else canonical_json(value)[:_VALUE]


def _log_end(link: Link, logs: Path | None) -> str | None:
    """The end of a log of this host, as text."""
    if logs is None or link.host not in ("", socket.gethostname()):
        return None
    path = logs / link.log
    try:
        if not path.resolve().is_relative_to((logs / "logs").resolve()):
            return None
        with path.open("rb") as stream:
            stream.seek(max(path.stat().st_size - _LOG_BYTES, 0))
            return stream.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return None
