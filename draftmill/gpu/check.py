"""The verdict by hand: what the gate would say now, without taking a lease.

Unlike a job, a person wants to see every GPU, the leased ones too; so all of them are read at once and leases and
pauses are added to what the sensors say.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from draftmill.gpu import lease as leases
from draftmill.gpu import pause
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.probe import Device, Probe, probe
from draftmill.gpu.proof import Proof, prove
from draftmill.gpu.reasons import KINDS
from draftmill.gpu.record import GpuRecord, Reason, SecondSensorRecord, Verdict
from draftmill.gpu.search import Notify, Request, too_few
from draftmill.gpu.smi import Second
from draftmill.gpu.verdict import Facts, decide, judge_gpu, judge_probe, reason
from draftmill.gpu.visible import resolve
from draftmill.gpu.writing import build_verdict


def check(
    policy: GatePolicy,
    *,
    gpus: int | None = None,
    uuids: Sequence[str] = (),
    wait_s: float = 0.0,
    notify: Notify | None = None,
) -> Verdict:
    """Whether `gpus` of the visible GPUs, or exactly `uuids` (all visible ones by default), are free.

    Waits up to `wait_s` seconds for what may pass. Never raises for a GPU's state: the verdict says it.
    """
    began, suspects = time.monotonic(), set[str]()
    while True:
        waited_s = time.monotonic() - began if suspects else 0.0
        verdict = _once(policy, gpus, uuids, began, suspects).model_copy(update={"waited_s": round(waited_s, 3)})
        passing = all(KINDS[r.code].passing for r in verdict.reasons)
        if verdict.verdict == "free" or not passing or time.monotonic() - began >= wait_s:
            return verdict
        suspects |= {gpu.uuid for gpu in verdict.gpus if gpu.verdict != "free"}
        if notify:
            notify("waiting: " + "; ".join(f"{r.gpu or 'host'}: {r.detail}" for r in verdict.reasons))
        time.sleep(policy.poll_s)


def _once(policy: GatePolicy, gpus: int | None, uuids: Sequence[str], began: float, suspects: set[str]) -> Verdict:
    folder = leases.lock_dir(policy.lock_dir)
    listing = probe(policy.probe_timeout_s, only_list=True)
    wanted, unclear = _wanted(policy, uuids, listing)
    request = Request(gpus or max(1, len(wanted)), None, None, None)
    facts = Facts(listing, Second(SecondSensorRecord(status="off"), {}))
    host = (*judge_probe(listing), *unclear)
    if not host and len(wanted) < request.gpus:
        host = (too_few(wanted, listing.devices, request.gpus),)
    if host:
        return build_verdict(policy, request, facts, (), host, began, folder)
    # nvidia-smi fails as a whole when it is asked for a GPU that is not there, so only the others are proven.
    absent = tuple(judge_gpu(uuid, facts, policy) for uuid in wanted if listing.device(uuid) is None)
    present = tuple(uuid for uuid in wanted if listing.device(uuid) is not None)
    if not present:
        return build_verdict(policy, request, facts, absent, (), began, folder)
    proof = _prove_enough(present, request.gpus, policy, suspects)
    records = (*(_with_lease(folder, gpu) for gpu in proof.gpus), *absent)
    return build_verdict(policy, request, proof.facts, records, proof.host, began, folder, settle=proof.settle)


def _wanted(policy: GatePolicy, uuids: Sequence[str], listing: Probe) -> tuple[tuple[str, ...], tuple[Reason, ...]]:
    if uuids or policy.expected_uuids:
        return tuple(_full(uuid, listing.devices) for uuid in uuids or policy.expected_uuids), ()
    visible = resolve(listing.devices, os.environ)
    return visible.uuids, visible.reasons


def _full(name: str, devices: Sequence[Device]) -> str:
    """The UUID that the beginning `name` stands for, or `name` itself where it stands for none."""
    fits = [d.uuid for d in devices if d.uuid is not None and d.uuid.startswith(name)]
    return fits[0] if len(fits) == 1 else name


def _prove_enough(uuids: tuple[str, ...], count: int, policy: GatePolicy, suspects: set[str]) -> Proof:
    """A proof of all; where some are not free, the others are proven by themselves, so that they settle as well."""
    whole = prove(uuids, {}, policy, suspects)
    clean = tuple(gpu.uuid for gpu in whole.gpus if gpu.verdict == "free")
    if whole.free or whole.host or len(clean) < count:
        return whole
    part = prove(clean, {}, policy, suspects)
    fresh = {gpu.uuid: gpu for gpu in part.gpus}
    return Proof(part.facts, tuple(fresh.get(gpu.uuid, gpu) for gpu in whole.gpus), part.host, part.settle)


def _with_lease(folder: Path, gpu: GpuRecord) -> GpuRecord:
    against = list(gpu.reasons)
    if (occupant := leases.occupant(folder, gpu.uuid)) is not None:
        code = "lease_orphaned" if occupant.orphaned else "leased"
        pid = occupant.record.holder.pid if occupant.record else 0
        against.append(reason(code, gpu.uuid, pid, occupant.describe()))
    if pause.is_paused(folder, gpu.uuid):
        by = (pause.who(folder, gpu.uuid) or {}).get("by") or "somebody"
        against.append(reason("paused", gpu.uuid, 1, f"paused by {by}"))
    return gpu.model_copy(update={"reasons": tuple(against), "verdict": decide(against)})
