"""An object under a new name: the same content, with another provenance inside.

Nothing but the provenance changes, and each format is written as its stage writes it, so that a relabelled object is what
the present code would have made, up to the versions that made it and a list of the fingerprints that it had before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill.canonical import canonical_json
from draftmill.integrity.tables import schema_of
from draftmill.schemas import read_rows, write_rows
from draftmill.store.local import publish_text, publishing

Provenance = Mapping[str, Any]
_LENGTH_BYTES = 8
_ALIGNMENT = 8


def relabel(old: Path, new: Path, provenance: Provenance, names: Mapping[str, str]) -> None:
    """Write the object at `old` to `new` with that provenance. A drafter's weights have theirs in the file beside them.

    `names` are the old and new stems of what it was made from: an audit says in its title which completions it is of.
    """
    if old.name == "model.safetensors":
        with publishing(new) as temporary:
            shutil.copyfile(old, temporary)
    elif old.suffix == ".parquet":
        _parquet(old, new, provenance)
    elif old.suffix == ".safetensors":
        _safetensors(old, new, provenance)
    else:
        _json(old, new, provenance, names)


def page_of(audit: Path, page: Path) -> None:
    """Write the page of an audit's JSON."""
    from draftmill.audit.result import read_result
    from draftmill.stages.audit import publish

    publish(read_result(audit), None, page)


def _parquet(old: Path, new: Path, provenance: Provenance) -> None:
    schema = schema_of(old, "rejected" if old.name.endswith(".rejected.parquet") else "completions")
    write_rows(new, schema, read_rows(old, schema), provenance)


def _json(old: Path, new: Path, provenance: Provenance, names: Mapping[str, str]) -> None:
    text = old.read_text(encoding="utf-8")
    value = json.loads(text)
    value["draftmill" if "draftmill" in value else "provenance"] = dict(provenance)
    for before, after in names.items() if isinstance(value.get("name"), str) else ():
        value["name"] = value["name"].replace(before, after)
    indented = text.startswith("{\n")
    written = (
        json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        if indented
        else canonical_json(value)
    )
    publish_text(new, written + "\n")


def _safetensors(old: Path, new: Path, provenance: Provenance) -> None:
    """Only the header is written anew; the tensors behind it may be terabytes and are copied as they are."""
    with old.open("rb") as source, publishing(new) as temporary, temporary.open("wb") as target:
        header = json.loads(source.read(int.from_bytes(source.read(_LENGTH_BYTES), "little")))
        inside = json.loads(header["__metadata__"]["draftmill"])
        header["__metadata__"]["draftmill"] = canonical_json({**inside, "provenance": dict(provenance)})
        data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        data += b" " * (-len(data) % _ALIGNMENT)
        target.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        shutil.copyfileobj(source, target, 1 << 22)
