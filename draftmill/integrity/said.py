"""What an object says of its own making, held against its name.

A name promises a fingerprint, and a fingerprint is computed from the spec that stands inside the object and from the
fingerprints of its inputs. So an object that was renamed, or whose spec was edited, gives itself away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmill.canonical import fingerprint
from draftmill.catalog import Entry, identify, parts
from draftmill.integrity.findings import Unsound, require


def check(entry: Entry, provenance: Any) -> None:
    """Raise Unsound unless the inside of an object, any JSON value, agrees with its name."""
    require(bool(provenance), "provenance", "the object's provenance inside", "none")
    for name, value in (("the provenance", provenance), ("its inputs", _part(provenance, "inputs"))):
        require(isinstance(value, Mapping), "provenance", f"{name} as a JSON object", type(value).__name__)
    require(provenance.get("stage") == entry.stage, "name", f"stage {entry.stage}", f"stage {provenance.get('stage')}")
    said = provenance.get("fingerprint")
    require(said == entry.fp, "name", f"fingerprint {entry.fp}", f"fingerprint {said} inside")
    shard = shard_inside(entry.stage, provenance)
    require(shard in (None, entry.shard), "name", f"shard {entry.shard}", f"shard {shard} inside")
    if entry.stage == "train":
        window = str((provenance.get("inputs") or {}).get("window"))
        own = parts(entry.stage, entry.name).part
        require(window == own, "name", f"window {own}", f"window {window} inside")
    inputs = input_fingerprints(entry.stage, provenance)
    if inputs is not None:
        computed = _computed(entry.stage, provenance.get("spec"), inputs)
        require(computed == entry.fp, "fingerprint", entry.fp, f"{computed} from the spec inside")


def _part(provenance: Any, name: str) -> Any:
    return provenance.get(name, {}) if isinstance(provenance, Mapping) else {}


def _computed(stage: str, spec: Any, inputs: list[str]) -> str:
    try:
        return fingerprint([stage, spec, inputs])
    except ValueError:  # no number, or half a character: nothing that draftmill writes
        raise Unsound("fingerprint", "a spec of plain JSON values", "others") from None


def shard_inside(stage: str, provenance: Mapping[str, Any]) -> str | None:
    """The shard that an object says it was made from; None for an object of no one shard."""
    inputs = provenance.get("inputs") or {}
    if stage == "generate":
        return str(inputs.get("prompts"))
    if stage in ("audit", "extract"):
        made_from = identify(str(inputs.get("completions")))
        return made_from.shard if made_from is not None else "unknown"
    return None


def input_fingerprints(stage: str, provenance: Mapping[str, Any]) -> list[str] | None:
    """The fingerprints of an object's inputs, as far as its provenance names them; None where it does not."""
    if stage == "generate":
        return []
    name = {"audit": "completions", "extract": "completions", "evaluate": "drafter"}.get(stage)
    if name is None:
        return None
    entry = identify(str((provenance.get("inputs") or {}).get(name)))
    return None if entry is None else [entry.fp]
