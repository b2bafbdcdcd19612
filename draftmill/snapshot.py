"""What a build saw when it was planned, kept on this machine for its jobs.

Snakemake parses the Snakefile again inside every job. A job must draw the same edges as the plan did, whatever was stored
or edited since, and it must neither read the sources nor list the store.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from draftmill.prompts.index import Index
from draftmill.store.local import publish_text

_FOLDER = "plans"
# Nobody reads the plan of a build that began so long ago.
_AGE_S = 30 * 24 * 3600.0
_INDEX = TypeAdapter(Index)


@dataclass(frozen=True, slots=True)
class Seen:
    """The prompt index and the keys of the objects that were there."""

    index: Index
    present: frozenset[str]


def _place(cache: Path, run_id: str) -> Path:
    return cache / _FOLDER / f"{run_id}.json"


def save(cache: Path, run_id: str, seen: Seen) -> None:
    """Keep what a build saw, and forget what builds of long ago did."""
    for path in (cache / _FOLDER).glob("*.json"):
        if time.time() - path.stat().st_mtime > _AGE_S:
            path.unlink(missing_ok=True)
    publish_text(_place(cache, run_id), json.dumps({"index": asdict(seen.index), "present": sorted(seen.present)}))


def load(cache: Path, run_id: str) -> Seen | None:
    """What the build saw that this process belongs to; None on another machine, which has to look by itself."""
    try:
        values = json.loads(_place(cache, run_id).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Seen(_INDEX.validate_python(values["index"]), frozenset(values["present"]))
