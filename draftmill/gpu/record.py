"""The verdict record `gpu-gate/1`: what was asked, seen, and decided, as one JSON document.

Records are kept as the sentinel's output and in logs, and read back by people and by other versions, so unknown keys
are refused on the way in: a record that does not say exactly this proves nothing. Memory is in bytes, durations in
seconds, instants in UTC (ISO 8601). A value that is not known is null, never an empty string.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Decision = Literal["free", "busy", "unknown", "not_required"]
EXIT_CODES: dict[Decision, int] = {"free": 0, "not_required": 0, "busy": 1, "unknown": 2}


class Part(BaseModel):
    """Base of every part of the record."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reason(Part):
    """Why a GPU is not free: a code of `reasons.KINDS`, the number behind it, and the number it was held against."""

    code: str
    gpu: str | None
    value: float
    limit: float | None = None
    detail: str


class Fault(Part):
    """An NVML error in place of a fact."""

    code: int
    name: str


class ProcessOnGpu(Part):
    """A process that the driver lists. `visible`: it can be looked up here; the rest is null where it cannot."""

    kind: Literal["compute", "graphics", "mps"]
    pid: int
    bytes: int | None
    visible: bool
    user: str | None = None
    command: str | None = None


class Memory(Part):
    """NVML memory of one GPU in bytes. Version 1 counts the driver's reserve inside `used`, version 2 beside it."""

    version: Literal[1, 2]
    total: int
    reserved: int | None
    used: int


class Health(Part):
    """Facts about the card's state; null where the card does not have the feature (`absent` says why)."""

    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retire_pending: bool | None = None
    recovery_action: int | None = None
    clocks_event_reasons: int | None = None
    xid: tuple[int, ...] | Literal["not readable"] = "not readable"


class GpuRecord(Part):
    """One GPU: what was read and what it means."""

    uuid: str
    index: int | None = None
    name: str | None = None
    pci: str | None = None
    mem: Memory | None = None
    processes: tuple[ProcessOnGpu, ...] = ()
    utilization: int | None = None
    compute_mode: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    health: Health = Health()
    absent: dict[str, Fault] = Field(default_factory=dict)
    server: dict[str, Any] | None = None
    verdict: Decision = "unknown"
    reasons: tuple[Reason, ...] = ()


class ProbeRecord(Part):
    """How the first sensor answered."""

    source: Literal["nvml"] = "nvml"
    status: Literal["ok", "error", "hung", "garbled", "failed", "not_run"]
    binding: str | None = None
    driver: str | None = None
    error_code: int | None = None
    detail: str | None = None
    devices_reported: int | None = None
    payload_sha256: str | None = None
    elapsed_s: float = 0.0


class SecondSensorRecord(Part):
    """How nvidia-smi answered; `agrees` is null when there was nothing to compare."""

    source: Literal["nvidia-smi"] = "nvidia-smi"
    status: Literal["ok", "missing", "failed", "hung", "garbled", "off"]
    exit_code: int | None = None
    complete: bool = False
    used_mib: dict[str, int] = Field(default_factory=dict)
    agrees: bool | None = None
    elapsed_s: float = 0.0


class ShmFile(Part):
    """An engine's file in /dev/shm; `creator_alive` is null where the name does not say who made it."""

    name: str
    bytes: int
    uid: int
    mtime: float
    creator_pid: int | None
    creator_alive: bool | None


class ShmRecord(Part):
    """Shared memory of the host in bytes."""

    free_bytes: int | None = None
    leftovers: tuple[ShmFile, ...] = ()


class SettleRecord(Part):
    """The samples behind a verdict: how many clean ones in a row, over how long, and the highest level seen."""

    samples: int
    window_s: float
    used_max_mib: int


class LeaseRecordPart(Part):
    """The leases that were held when the verdict was given."""

    dir: str
    uuids: tuple[str, ...]
    holder_pid: int
    acquired_at: str


class Verdict(Part):
    """The whole record. `exit_code` is 0 for free and not_required, 1 for busy, 2 for unknown."""

    schema_: Literal["gpu-gate/1"] = Field(default="gpu-gate/1", alias="schema")
    run_id: str | None
    stage: str | None
    shard: str | None
    host: str
    boot_id: str | None
    checked_at: str
    expires_at: str
    elapsed_s: float
    waited_s: float = 0.0
    device: Literal["cuda", "cpu"]
    wanted: int
    requested: tuple[str, ...]
    probe: ProbeRecord
    second_sensor: SecondSensorRecord
    policy: dict[str, Any]
    gpus: tuple[GpuRecord, ...] = ()
    settle: SettleRecord | None = None
    shm: ShmRecord = ShmRecord()
    ports: dict[str, Literal["free", "taken"]] = Field(default_factory=dict)
    lease: LeaseRecordPart | None = None
    attestation: dict[str, Any] | None = None
    verdict: Decision
    reasons: tuple[Reason, ...] = ()

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)

    @property
    def exit_code(self) -> int:
        """Exit status of a command that says this verdict."""
        return EXIT_CODES[self.verdict]

    def text(self) -> str:
        """The record as one line of JSON with a newline."""
        return self.model_dump_json() + "\n"
