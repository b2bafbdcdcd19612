"""The first sensor: NVML, read by probe_child.py in a process of its own, checked for wholeness here.

`probe` never raises and never hangs; whatever goes wrong is in the status. The facts are as the driver gave them, with
nothing filled in: judging them is verdict.py's work.
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftmill.gpu.child import Answer, Running
from draftmill.gpu.record import Fault, Memory, Part, ProbeRecord

_CHILD = Path(__file__).with_name("probe_child.py")


class RawProcess(Part):
    """A process as the driver lists it; `bytes` is null where the driver does not say."""

    pid: int
    bytes: int | None


class Device(Part):
    """One device as read; a null field has its NVML error under `errors`, keyed by the field's name."""

    index: int
    uuid: str | None
    name: str | None
    pci: str | None
    errors: dict[str, Fault]
    mem: Memory | None = None
    compute: tuple[RawProcess, ...] | None = None
    graphics: tuple[RawProcess, ...] | None = None
    mps: tuple[RawProcess, ...] | None = None
    utilization: int | None = None
    compute_mode: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    ecc_uncorrected: int | None = None
    remapped: tuple[bool, bool] | None = None
    retire_pending: bool | None = None
    recovery_action: int | None = None
    clocks_event_reasons: int | None = None
    xid: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Probe:
    """A reading: how it went, and the devices in NVML's order (empty unless the status is "ok")."""

    record: ProbeRecord
    devices: tuple[Device, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the reading is whole."""
        return self.record.status == "ok"

    def device(self, uuid: str) -> Device | None:
        """The device of that full UUID, if it was reported."""
        return next((d for d in self.devices if d.uuid == uuid), None)


class PendingProbe:
    """A reading under way; `result` waits for it, at most until its deadline."""

    def __init__(self, timeout_s: float, only_list: bool = False) -> None:
        argv = [sys.executable, "-P", str(_CHILD)] + (["--list"] if only_list else [])
        self._running = Running(argv, timeout_s)

    def result(self) -> Probe:
        """The reading, once."""
        try:
            return read_answer(self._running.answer())
        finally:
            self._running.close()


def probe(timeout_s: float, only_list: bool = False) -> Probe:
    """Read all devices (or their identities alone) within `timeout_s` seconds."""
    return PendingProbe(timeout_s, only_list).result()


def read_answer(answer: Answer) -> Probe:
    """The child's answer as a reading; anything short of one whole document of the right digest is not ok."""
    elapsed = round(answer.elapsed_s, 3)
    if answer.status == "hung":
        return Probe(ProbeRecord(status="hung", elapsed_s=elapsed))
    if answer.status == "flooded":
        return Probe(ProbeRecord(status="garbled", error_code=len(answer.out), detail="too long", elapsed_s=elapsed))
    if answer.exit_code != 0:
        detail = (answer.err.strip().splitlines() or ["no Python interpreter"])[-1][-200:]
        return Probe(ProbeRecord(status="failed", error_code=answer.exit_code, detail=detail, elapsed_s=elapsed))
    try:
        return _read_document(answer.out, elapsed)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        detail = f"{len(answer.out)} bytes: {str(error).splitlines()[0]}"[:200]
        return Probe(ProbeRecord(status="garbled", error_code=len(answer.out), detail=detail, elapsed_s=elapsed))


def _read_document(text: str, elapsed_s: float) -> Probe:
    document: dict[str, Any] = json.loads(text)
    if document["schema"] != "gpu-probe/1":
        raise ValueError("not a gpu-probe/1 document")
    if "error" in document:
        fault = Fault.model_validate(document["error"])
        record = ProbeRecord(
            status="error",
            binding=document["binding"],
            error_code=fault.code,
            detail=fault.name,
            elapsed_s=elapsed_s,
        )
        return Probe(record)
    gpus, count = document["gpus"], document["devices_reported"]
    digest = hashlib.sha256(json.dumps(gpus, sort_keys=True).encode()).hexdigest()
    if len(gpus) != count or digest != document["sha256"]:
        raise ValueError(f"{len(gpus)} of {count} devices, or a digest that does not match")
    named = [gpu["uuid"] for gpu in gpus if gpu["uuid"] is not None]
    if len(set(named)) != len(named):
        raise ValueError("two devices of one UUID")
    record = ProbeRecord(
        status="ok",
        binding=document["binding"],
        driver=document["driver"],
        devices_reported=count,
        payload_sha256=digest,
        elapsed_s=elapsed_s,
    )
    return Probe(record, tuple(Device.model_validate(gpu) for gpu in gpus))
