"""What an object of the store says of its own making, whatever its format; this is the one place that reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from draftmill.errors import UserError, reason
from draftmill.store.base import Store
from draftmill.store.local import LocalStore

# The end of a Parquet object that is asked for first: its footer is shorter but for tables of very many columns.
_FOOTER_BYTES = 1 << 16


def read(path: Path) -> dict[str, Any]:
    """The provenance inside a Parquet, safetensors or JSON object. Raises UserError if it is none or carries none."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    store, beside = LocalStore(path.parent), path.with_name("config.json")
    try:
        found = of_object(store, path.name, path.stat().st_size)
        if not found and path.suffix == ".safetensors" and beside.is_file():
            # A drafter's weights have theirs in the config.json beside them.
            found = of_object(store, beside.name, beside.stat().st_size)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or no {path.suffix[1:]} file: {reason(error)}.") from None
    if not found:
        raise UserError(f"{path} carries no provenance: it is no object of a store, or it was made by something else.")
    return found


def of_object(store: Store, key: str, size: int) -> dict[str, Any]:
    """The provenance inside an object of `size` bytes, of which only the part that holds it is fetched; JSON is fetched whole.

    Empty where it says nothing. Raises KeyError if it is gone, ValueError or OSError if it is damaged.
    """
    try:
        if key.endswith(".parquet"):
            return _of_parquet(store, key, size)
        if key.endswith(".safetensors"):
            return _of_safetensors(store, key, size)
        return _of_json(json.loads(store.get(key))) if key.endswith(".json") else {}
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def _of_parquet(store: Store, key: str, size: int) -> dict[str, Any]:
    from draftmill.schemas import read_provenance

    end = store.part(key, max(size - _FOOTER_BYTES, 0), size)
    length = int.from_bytes(end[-8:-4], "little") + 8
    if len(end) < length <= size:
        end = store.part(key, size - length, size)
    return read_provenance(BytesIO(end))


def _of_safetensors(store: Store, key: str, size: int) -> dict[str, Any]:
    # Of an empty object S3 gives no part at all.
    length = int.from_bytes(store.part(key, 0, 8), "little") if size > 8 else 0
    if not 0 < length <= size:
        raise ValueError("it has no header")
    header = json.loads(store.part(key, 8, 8 + length))
    inside = json.loads((header.get("__metadata__") or {}).get("draftmill", "{}"))
    return dict(inside.get("provenance", inside))


def _of_json(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(value.get("provenance") or value.get("draftmill") or {})
