"""Verdict records of real hosts (recorded/*.jsonl, from tests/gpu/real_gate.py): judged again, they say the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.probe import Device, Probe
from draftmill.gpu.record import GpuRecord, Verdict
from draftmill.gpu.smi import Row, Second
from draftmill.gpu.verdict import Facts, Person, Tenant, judge_gpu

RECORDED = Path(__file__).with_name("recorded")
CASES = [
    pytest.param(json.loads(line), id=f"{path.stem}-{number}")
    for path in sorted(RECORDED.glob("*.jsonl"))
    for number, line in enumerate(path.read_text().splitlines())
]
KINDS = ("compute", "graphics", "mps")
# Reasons that come from leases and from the start, not from a GPU's facts.
OTHER = {"leased", "lease_orphaned", "paused", "memory_not_settled"}


def device(gpu: GpuRecord) -> Device:
    of = {kind: [p.model_dump(include={"pid", "bytes"}) for p in gpu.processes if p.kind == kind] for kind in KINDS}
    same_health = {"ecc_uncorrected", "retire_pending", "recovery_action", "clocks_event_reasons"}
    health = gpu.health.model_dump(include=same_health)
    remapped = None if gpu.health.remap_pending is None else (gpu.health.remap_pending, gpu.health.remap_failed)
    same = gpu.model_dump(include={"uuid", "index", "name", "pci", "utilization", "compute_mode", "mig", "persistence"})
    missing = dict.fromkeys(gpu.absent)
    return Device.model_validate(
        {**same, **of, **health, "remapped": remapped, "mem": gpu.mem, "errors": gpu.absent, **missing}
    )


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_host_is_judged_as_it_was(case: dict[str, Any]) -> None:
    verdict = Verdict.model_validate(case["record"])
    policy = GatePolicy.model_validate(verdict.policy)
    people = {p.pid: Person(p.visible, p.user, p.command) for gpu in verdict.gpus for p in gpu.processes}
    for gpu in verdict.gpus:
        if gpu.mem is None:
            continue
        rows = {u: Row(mib, gpu.mem.total >> 20) for u, mib in verdict.second_sensor.used_mib.items()}
        facts = Facts(Probe(verdict.probe, (device(gpu),)), Second(verdict.second_sensor, rows), people=people)
        tenant = Tenant(frozenset(p.pid for p in gpu.processes), gpu.server) if gpu.server else None
        again = {r.code for r in judge_gpu(gpu.uuid, facts, policy, tenant).reasons}
        assert again == {r.code for r in gpu.reasons} - OTHER
