"""The record of a finished job: who made which bytes of what, when, and with which GPUs.

Objects are functions of their inputs, so times, hosts and devices stand beside them, in one JSON object a job. It is no
object of the build and decides nothing: a store without records builds on. It is what `draftmill verify` holds bytes
against. Digests are taken of the job's own files, before anything is sent anywhere, and of what the job read: when an
object turns out to be damaged, its consumers' records say whether they were made from the damaged bytes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill import layout
from draftmill.canonical import canonical_json, digest_file
from draftmill.catalog import identify
from draftmill.errors import UserError, reason
from draftmill.store.base import Store

# Reading a window of hidden states a second time only for its digest would cost minutes; larger inputs go without.
INPUT_DIGEST_BYTES = 1 << 30
_GIT_SECONDS = 5.0


class Content(BaseModel):
    """The bytes of one object: their number and, unless it was too large an input, the hex digits of their sha256."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str | None = None


class Record(BaseModel):
    """What one finished job made, from what, where and when (seconds since 1970). Unknown fields are passed over."""

    model_config = ConfigDict(frozen=True)

    stage: str
    name: str
    outputs: dict[str, Content]
    inputs: dict[str, Content] = {}
    run: str = ""
    host: str = ""
    git: str = ""
    started: float = 0.0
    finished: float = 0.0
    versions: dict[str, str] = {}
    gpus: list[str] = []

    @property
    def key(self) -> str:
        """Where this record lies."""
        return layout.record(self.stage, self.name)


@dataclass(slots=True)
class Work:
    """A job at work: what is known of it before it has finished. `gpus` grows when the job takes its leases."""

    stage: str
    name: str
    run: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)


def content_of(path: Path, *, most: int | None = None) -> Content:
    """Size and digest of a file; without the digest if it has more than `most` bytes."""
    size = path.stat().st_size
    return Content(
        bytes=size, sha256=None if most is not None and size > most else digest_file(path).removeprefix("sha256:")
    )


def write_record(store: Store, record: Record) -> None:
    """Publish a record, replacing that of an earlier making of the same objects."""
    store.put(record.key, (canonical_json(record.model_dump(mode="json")) + "\n").encode())


@contextmanager
def recording(store: Store, work: Work, *, outputs: Mapping[str, Path], inputs: Mapping[str, Path]) -> Iterator[Work]:
    """Run a job inside; if it succeeds, its record is written. Both mappings give each object's local file by key."""
    started = time.time()
    read = {key: content_of(path, most=INPUT_DIGEST_BYTES) for key, path in inputs.items() if path.is_file()}
    yield work
    if not outputs:
        return
    record = Record(
        stage=work.stage,
        name=work.name,
        outputs={key: content_of(path) for key, path in outputs.items()},
        inputs=read,
        run=work.run,
        host=socket.gethostname(),
        git=git_revision(),
        started=started,
        finished=time.time(),
        versions=dict(work.versions),
        gpus=work.gpus,
    )
    try:
        write_record(store, record)
    except (OSError, UserError) as error:  # the objects are worth more than what is known about them
        print(f"No record of this job was written: {reason(error)}.", flush=True)


def parse_record(data: bytes) -> Record | None:
    """A record from its bytes; None if they are none."""
    try:
        return Record.model_validate_json(data)
    except ValidationError:
        return None


def read_record(store: Store, key: str) -> Record | None:
    """The record at `key`; None if there is none or it is damaged."""
    try:
        return parse_record(store.get(key))
    except KeyError:
        return None


def record_of(store: Store, key: str) -> Record | None:
    """The record of the job that made an object; None if there is none or another job's record names it."""
    entry = identify(key)
    found = None if entry is None or not entry.job else read_record(store, layout.record(entry.stage, entry.name))
    return found if found is not None and key in found.outputs else None


@cache
def git_revision() -> str:
    """The commit of the code that runs, with + for uncommitted changes; empty if it is no git checkout."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return ""
    commit = _git(here, "rev-parse", "HEAD")
    return commit + ("+" if commit and _git(here, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_SECONDS,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def describe(record: Record) -> dict[str, Any]:
    """A record as JSON values for people: times as ISO 8601 in UTC."""
    from datetime import UTC, datetime

    values = record.model_dump(mode="json")
    for name in ("started", "finished"):
        values[name] = datetime.fromtimestamp(values[name], UTC).isoformat(timespec="seconds")
    return values
