"""What was made from damaged bytes: found by the digests of inputs that each job's record holds.

A pair of key and digest is damaged if the object was found damaged with these bytes, now or when it was quarantined
earlier, or if it was itself made from a damaged pair. A consumer that read other bytes under the same key is untouched.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from draftmill.catalog import QUARANTINE, identify
from draftmill.integrity.findings import Finding
from draftmill.integrity.reader import Gone, Reader
from draftmill.records import Record

# An object's key and the sha256 of bytes that are no good.
Pair = tuple[str, str]
MANIFEST = "findings.json"


def made_from_damage(reader: Reader, findings: Sequence[Finding]) -> list[Finding]:
    """What the records show to be made from damaged bytes, and what they leave open."""
    damaged = {finding.key for finding in findings if finding.damage}
    pairs = {*quarantined(reader), *damaged_pairs(reader, damaged)}
    if not pairs:
        return []
    readers = _by_input(reader)
    found = list(_descend(reader, pairs, readers, damaged))
    return [*found, *_unproven(reader, damaged, readers)]


def damaged_pairs(reader: Reader, keys: set[str]) -> Iterator[Pair]:
    """Damaged objects with the digests of their present bytes."""
    for key in keys:
        try:
            yield key, reader.digest(key)
        except (Gone, OSError):  # bytes that the disk does not give back have no digest
            continue


def quarantined(reader: Reader) -> Iterator[Pair]:
    """What earlier calls have found damaged."""
    for key in reader.present:
        if not key.startswith(QUARANTINE) or not key.endswith(f"/{MANIFEST}"):
            continue
        try:
            value: Any = json.loads(reader.store.get(key))
            yield from ((str(key), str(digest)) for key, digest in value["digests"].items())
        except (KeyError, ValueError, AttributeError, TypeError):
            continue


def _by_input(reader: Reader) -> dict[str, list[Record]]:
    """Every record under each object that its job read."""
    found: dict[str, list[Record]] = defaultdict(list)
    for key in reader.present:
        entry = identify(key)
        record = reader.record(entry.stage, entry.name) if entry is not None and entry.kind == "record" else None
        for read in record.inputs if record is not None else ():
            found[read].append(record)  # type: ignore[arg-type]
    return found


def _descend(
    reader: Reader, pairs: set[Pair], readers: dict[str, list[Record]], damaged: set[str]
) -> Iterator[Finding]:
    left, seen = list(pairs), set(pairs)
    while left:
        key, digest = left.pop()
        for record in readers.get(key, ()):
            if record.inputs[key].sha256 != digest:
                continue
            for made, content in record.outputs.items():
                pair = (made, content.sha256 or "")
                if made not in reader.present or pair in seen:
                    continue
                seen.add(pair)
                left.append(pair)
                if made not in damaged:
                    damaged.add(made)
                    yield Finding(made, "consumer", f"a sound {key}", f"made from its damaged bytes, sha256 {digest}")


def _unproven(reader: Reader, damaged: set[str], readers: dict[str, list[Record]]) -> Iterator[Finding]:
    """Consumers whose records hold no digest of a damaged input, because it was too large."""
    for key in damaged:
        for record in readers.get(key, ()):
            if record.inputs[key].sha256 is not None:
                continue
            for made in record.outputs:
                if made in reader.present and made not in damaged:
                    yield Finding(made, "input unproven", f"a sound {key}", "damage, and no digest of what was read")
