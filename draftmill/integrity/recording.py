"""Records that are missing: written for sound objects, so that a store from before records can be verified from then on.

Such a record knows the bytes and nothing else: no run, host or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftmill import layout
from draftmill.catalog import identify, outputs
from draftmill.integrity.findings import Finding
from draftmill.integrity.reader import Gone, Reader
from draftmill.records import Content, Record, parse_record, write_record

_MENDED = ("record missing", "record unreadable", "record of another")


def write_missing(reader: Reader, findings: Sequence[Finding]) -> list[str]:
    """Write the records that are missing or wrong of jobs whose objects are all there and sound; their keys."""
    damaged = {finding.key for finding in findings if finding.damage}
    lacking = [entry for f in findings if f.what in _MENDED and (entry := identify(f.key)) is not None]
    written = []
    for stage, name in sorted({(entry.stage, entry.name) for entry in lacking}):
        made = next((keys for keys in outputs(stage, name) if reader.present.issuperset(keys)), [])
        if made and damaged.isdisjoint(made):
            try:
                contents = {key: Content(bytes=reader.listing[key].size, sha256=reader.digest(key)) for key in made}
            except Gone:
                continue
            known = reader.record(stage, name) or Record(stage=stage, name=name, outputs={})
            write_record(reader.store, known.model_copy(update={"outputs": contents}))
            written.append(layout.record(stage, name))
    return written


def near(path: Path) -> Record | None:
    """The record of a file of a local store, whichever folder above it is the store's."""
    place = path.absolute()
    for root in place.parents:
        entry = identify(place.relative_to(root).as_posix())
        if entry is None or entry.job is None:
            continue
        record = root / layout.record(entry.stage, entry.name)
        found = parse_record(record.read_bytes()) if record.is_file() else None
        if found is not None and entry.key in found.outputs:
            return found
    return None
