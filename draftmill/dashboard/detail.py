"""One shard in full: its chain, why it was built, what its objects say of their making, and the ends of its logs.

Logs lie in the folder that a build runs in, not in the store; they are shown where the board runs in that folder on the
host that wrote them.
"""

from __future__ import annotations

import json
import re
import socket
from io import BytesIO
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.canonical import canonical_json
from draftmill.dashboard.board import View
from draftmill.records import describe, parse_record
from draftmill.state.shards import Link, ShardRow, changed_settings, shard_rows
from draftmill.store.base import Store

_SHARD = re.compile(r"[0-9a-f]{12}")
_LOG_BYTES, _SETTINGS, _VALUE = 16_384, 40, 400
_LARGE = 64 << 20
"""Objects above this are not fetched only to read what they say of themselves."""


def detail(view: View, store: Store, shard: str, logs: Path | None) -> dict[str, Any] | None:
    """A shard as a JSON value; `logs` is the build's own folder if it is here. None if there is no such shard."""
    if view.picture is None or not _SHARD.fullmatch(shard):
        return None
    row = next((row for row in shard_rows(view.picture) if row.name == shard), None)
    if row is None:
        return None
    return row.to_json() | {"chain": [_link(view, store, row, link, logs) for link in row.chain]}


def _link(view: View, store: Store, row: ShardRow, link: Link, logs: Path | None) -> dict[str, Any]:
    values = {name: getattr(link, name) for name in Link.__slots__}
    return values | {
        "gpus": list(link.gpus),
        "before": list(link.before),
        "record": _record(view, store, row, link),
        "made_of": _made_of(view, store, link),
        "changed": _changed(view, store, row, link),
        "log_end": _log_end(link, logs),
    }


def _record(view: View, store: Store, row: ShardRow, link: Link) -> dict[str, Any] | None:
    key = layout.record(link.stage, f"{row.name}-{link.fingerprint}")
    if key not in view.snapshot.listing:
        return None
    try:
        record = parse_record(store.get(key))
    except KeyError:
        return None
    return describe(record) if record is not None else None


def _made_of(view: View, store: Store, link: Link) -> dict[str, Any] | None:
    """The provenance inside an object of Parquet or JSON."""
    info = view.snapshot.listing.get(link.key)
    if info is None or info.size > _LARGE or not link.key.endswith((".parquet", ".json")):
        return None
    try:
        return provenance_of(link.key, store.get(link.key))
    except (KeyError, ValueError, OSError):
        return None


def provenance_of(key: str, data: bytes) -> dict[str, Any]:
    """What an object says of its making. Raises ValueError or OSError for a damaged one."""
    if key.endswith(".json"):
        value = json.loads(data)
        return dict(value.get("provenance") or {}) if isinstance(value, dict) else {}
    import pyarrow.parquet as pq

    from draftmill.schemas import PROVENANCE_KEY

    raw = (pq.read_metadata(BytesIO(data)).metadata or {}).get(PROVENANCE_KEY)
    return dict(json.loads(raw)) if raw else {}


def _changed(view: View, store: Store, row: ShardRow, link: Link) -> list[dict[str, str]]:
    """Settings in which the object differs from the newest one of other settings, as far as both are there."""
    if not link.before or link.stage not in ("generate", "audit"):
        return []
    name = layout.completions if link.stage == "generate" else layout.audit
    before = name(row.name, link.before[0])
    if before not in view.snapshot.listing or link.key not in view.snapshot.listing:
        return []
    try:
        found = changed_settings(store, before, link.key)
    except (KeyError, ValueError, OSError):
        return []
    return [{"name": key, "before": _short(old), "after": _short(new)} for key, old, new in found[:_SETTINGS]]


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
