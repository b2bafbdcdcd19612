"""Putting a verdict record together from its parts."""

import socket
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Protocol

from draftmill.gpu import processes
from draftmill.gpu.lease import LeaseRecord
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.record import (
    GpuRecord,
    LeaseRecordPart,
    ProbeRecord,
    Reason,
    SecondSensorRecord,
    SettleRecord,
    ShmRecord,
    Verdict,
)
from draftmill.gpu.verdict import Facts, decide


class Asked(Protocol):
    """The part of a request that the record repeats."""

    @property
    def gpus(self) -> int:
        """How many GPUs are wanted."""

    @property
    def run_id(self) -> str | None:
        """The run, or None by hand."""

    @property
    def stage(self) -> str | None:
        """The stage of the job."""

    @property
    def shard(self) -> str | None:
        """The shard of the job."""


def build_verdict(
    policy: GatePolicy,
    asked: Asked,
    facts: Facts,
    gpus: tuple[GpuRecord, ...],
    host: Iterable[Reason],
    began: float,
    folder: Path,
    lease: LeaseRecord | None = None,
    settle: SettleRecord | None = None,
    waited_s: float = 0.0,
) -> Verdict:
    """The record of what was found.

    `began` is time.monotonic() at the start, in seconds, and `waited_s` the part of it that was waiting. Free when at
    least `asked.gpus` GPUs are and nothing stands against the host; the record keeps the others' reasons.
    """
    host = tuple(host)
    enough = not host and sum(gpu.verdict == "free" for gpu in gpus) >= max(1, asked.gpus)
    reasons = () if enough else (*host, *(r for gpu in gpus for r in gpu.reasons))
    elapsed = time.monotonic() - began
    held = None
    if lease is not None:
        held = LeaseRecordPart(
            dir=str(folder), uuids=lease.uuids, holder_pid=lease.holder.pid, acquired_at=lease.acquired_at
        )
    return _verdict(
        policy,
        asked,
        "cuda",
        elapsed,
        requested=tuple(gpu.uuid for gpu in gpus),
        probe=facts.probe.record,
        second_sensor=_compared(facts, gpus),
        gpus=gpus,
        settle=settle,
        waited_s=round(waited_s, 3),
        shm=facts.shm,
        ports=dict(facts.ports),
        lease=held,
        verdict=decide(reasons),
        reasons=reasons,
    )


def _compared(facts: Facts, gpus: tuple[GpuRecord, ...]) -> SecondSensorRecord:
    record = facts.second.record
    if record.status != "ok":
        return record
    apart = any(r.code == "sensors_disagree" for gpu in gpus for r in gpu.reasons)
    return record.model_copy(update={"agrees": not apart})


def not_required(policy: GatePolicy, asked: Asked) -> Verdict:
    """The record of a job that runs on the CPU: no GPU was read and none is needed."""
    return _verdict(
        policy,
        asked,
        "cpu",
        0.0,
        requested=(),
        probe=ProbeRecord(status="not_run"),
        second_sensor=SecondSensorRecord(status="off"),
        shm=ShmRecord(),
        verdict="not_required",
    )


def _verdict(
    policy: GatePolicy, asked: Asked, device: Literal["cuda", "cpu"], elapsed: float, **parts: object
) -> Verdict:
    checked = datetime.now(UTC)
    expires = checked + timedelta(seconds=policy.verdict_ttl_s)
    return Verdict.model_validate(
        {
            "run_id": asked.run_id,
            "stage": asked.stage,
            "shard": asked.shard,
            "host": socket.gethostname(),
            "boot_id": processes.boot_id(),
            "checked_at": checked.isoformat(timespec="milliseconds"),
            "expires_at": expires.isoformat(timespec="milliseconds"),
            "elapsed_s": round(elapsed, 3),
            "device": device,
            "wanted": asked.gpus if device == "cuda" else 0,
            "policy": policy.model_dump(mode="json"),
            **parts,
        }
    )
