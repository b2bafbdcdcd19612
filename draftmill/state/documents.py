"""The small JSON objects that a state is read from, each parsed with patience.

Heartbeats, records and claims are written by other versions and may be torn by a hand that copied them: a field that is
absent is unknown, a field that makes no sense makes the whole object unreadable, which is said and never raised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError


def _instant(value: Any) -> Any:
    """Seconds since 1970 from a number or an ISO 8601 text."""
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else value


Count = Annotated[int, Field(ge=0, le=2**53)]
Speed = Annotated[float, Field(ge=0, le=1e12)]
Instant = Annotated[float, BeforeValidator(_instant), Field(ge=0, le=1e11)]


class Document(BaseModel):
    """A part of a JSON object of the store; what is not known here is let through."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Server(Document):
    """The server that answers a generate job."""

    uuid: str | None = None
    url: str | None = None
    state: str | None = None
    epoch: int | str | None = None


class Gate(Document):
    """What the GPU gate said before a job: free, busy, unknown or not_required, when, and the codes of its reasons."""

    verdict: str
    checked_at: Instant | None = None
    reasons: tuple[str, ...] = ()


class Beat(Document):
    """The last heartbeat of a job (progress.py). Times are seconds since 1970 by the job's own clock.

    `resumed` rows are of an earlier run; `found` ones were there when the job came, also those answered ahead of it.
    """

    state: str = "running"
    unit: str = "rows"
    total: Count = 0
    done: Count = 0
    resumed: Count = 0
    found: Count | None = None
    useful: Count | None = None
    rejected: Count | None = None
    retries: Count | None = None
    tokens: Count = 0
    tokens_per_second: Speed | None = None
    tokens_1m: Speed | None = None
    trained_tokens: Count | None = None
    started: Instant | None = None
    updated: Instant | None = None
    host: str = ""
    pid: int | None = None
    gpus: tuple[str, ...] = ()
    server: Server | None = None
    gate: Gate | None = None
    memory_bytes: Count | None = None
    error: str | None = None
    loss: float | None = None
    accuracy: float | None = None
    learning_rate: float | None = None


class JobRecord(Document):
    """What is kept of the record of a job that succeeded (records.py)."""

    run: str = ""
    host: str = ""
    git: str = ""
    started: Instant | None = None
    finished: Instant | None = None
    gpus: tuple[str, ...] = ()


class Claim(Document):
    """Who works on a job now (store/claims.py), until when, and whether only its outputs are still to be published."""

    host: str = ""
    run: str = ""
    expires: Instant | None = None
    publishing: bool = False


class SourceCounts(Document):
    """An audit's counts of one source (audit/counts.py)."""

    rows: Count = 0
    histogram: dict[int, int] = {}
    histogram_cut: dict[int, int] = {}
    finish: dict[str, int] = {}
    thinking: dict[str, int] = {}
    empty: Count = 0
    template_only: Count = 0
    repetitive: Count = 0
    duplicates: Count = 0
    boundary_moved: Count = 0
    rejected: dict[str, int] = {}


class ShardAudit(Document):
    """What is kept of a shard's audit: its verdict, its counts by source, and its findings in sentences."""

    verdict: str
    by_source: dict[str, SourceCounts]
    findings: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Answers."""
        return sum(counts.rows for counts in self.by_source.values())

    @property
    def rejected(self) -> int:
        """Rows without an answer."""
        return sum(sum(counts.rejected.values()) for counts in self.by_source.values())

    @property
    def loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(
            value * rows
            for counts in self.by_source.values()
            for histogram in (counts.histogram, counts.histogram_cut)
            for value, rows in histogram.items()
        )


_Model = TypeVar("_Model", bound=Document)


def parse(model: type[_Model], value: Any) -> _Model | None:
    """A value as a document; None if it is none."""
    try:
        return model.model_validate(value)
    except (ValidationError, ValueError, OverflowError):
        return None


def load_json(data: bytes) -> Any:
    """The JSON value of an object's bytes; None if it is no JSON or only half of one."""
    try:
        return json.loads(data, parse_constant=lambda _: math.nan)
    except (ValueError, RecursionError):
        return None


def slim(model: type[Document]) -> Callable[[bytes], Any]:
    """Bytes to the JSON value of just the model's fields; None for what is no such document."""

    def reduce(data: bytes) -> Any:
        found = parse(model, load_json(data))
        return None if found is None else found.model_dump(mode="json", exclude_defaults=True)

    return reduce


def slim_audit(data: bytes) -> Any:
    """The part of an audit's JSON that a state needs: without examples and digests, a twentieth of it."""
    value = load_json(data)
    if not isinstance(value, Mapping):
        return None
    measured, findings = value.get("measurements"), value.get("findings")
    return {
        "verdict": value.get("verdict"),
        "by_source": measured.get("by_source") if isinstance(measured, Mapping) else None,
        "findings": [one.get("sentence", "") for one in findings or [] if isinstance(one, Mapping)],
    }
