"""What a build says of itself when it starts, so that a reader of the store alone knows what is wanted.

A machine that only watches has neither the prompt sources nor the target, from which a plan is made. Everything else that
decides a plan is small: the configuration and the fingerprints stand here, the shards in the index beside it. The
record is no output of the build, so it may hold a time; of two builds on one store it is the later one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill import __version__, layout
from draftmill.canonical import canonical_json, fingerprint
from draftmill.config import Config
from draftmill.graph import Graph
from draftmill.store.base import Store

FORMAT = 1


class BuildRecord(BaseModel):
    """One build: its run, start in seconds since 1970, version, fingerprints by stage, and whole configuration."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: int
    run: str
    started: float
    draftmill: str
    fingerprints: dict[str, str]
    shards: str
    """Digest of the shards' names in order (shards_digest)."""
    config: dict[str, Any]


def shards_digest(names: list[str]) -> str:
    """A digest of shard names in order, by which a reader sees that the index is no longer the build's."""
    return fingerprint(names)


def announce(store: Store, graph: Graph, run: str, clock: Callable[[], float] = time.time) -> None:
    """Publish the record of a build that starts now; its index has been published before."""
    record = BuildRecord(
        format=FORMAT,
        run=run,
        started=clock(),
        draftmill=__version__,
        fingerprints=dict(graph.specs.fp),
        shards=shards_digest(graph.shards),
        config=public(graph.config),
    )
    store.put(layout.BUILD, canonical_json(record.model_dump(mode="json")).encode())


def public(config: Config) -> dict[str, Any]:
    """A configuration as JSON without how servers are started and reached: variables and flags may hold secrets."""
    values = config.model_dump(mode="json")
    values["generate"].pop("sglang", None)
    return values


def parse_record(data: bytes) -> BuildRecord | None:
    """A record from its bytes; None for anything else, such as one of another format."""
    try:
        record = BuildRecord.model_validate_json(data)
    except ValidationError:
        return None
    return record if record.format == FORMAT else None


def config_of(record: BuildRecord) -> Config | None:
    """The configuration of a build; None if this version of draftmill does not know all its keys."""
    try:
        return Config.model_validate(record.config)
    except ValidationError:
        return None
