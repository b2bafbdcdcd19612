"""What an object of the store says of its own making, whatever its format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from draftmill.errors import UserError, reason


def read(path: Path) -> dict[str, Any]:
    """The provenance inside a Parquet, safetensors or JSON object. Raises UserError if it is none or carries none."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    try:
        found = _READERS.get(path.suffix, _nothing)(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # pyarrow's errors are ValueError and OSError
        raise UserError(f"{path} is damaged or no {path.suffix[1:]} file: {reason(error)}.") from None
    if not found:
        raise UserError(f"{path} carries no provenance: it is no object of a store, or it was made by something else.")
    return found


def _nothing(_path: Path) -> dict[str, Any]:
    return {}


def _parquet(path: Path) -> dict[str, Any]:
    from draftmill.schemas import read_provenance

    return read_provenance(path)


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with cast(Any, safe_open)(path, framework="np") as file:
            inside = json.loads((file.metadata() or {}).get("draftmill", "{}"))
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    beside = path.with_name("config.json")
    if not inside and beside.is_file():  # a drafter's weights have theirs in the config.json beside them
        return _json(beside)
    return dict(inside.get("provenance", inside))


def _json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    return dict(value.get("provenance") or value.get("draftmill") or {})


_READERS = {".parquet": _parquet, ".safetensors": _safetensors, ".json": _json}
