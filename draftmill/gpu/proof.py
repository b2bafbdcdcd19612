"""Proving some GPUs free: one clean sample at the idle level, or several that do not move.

Memory of a dying process falls in steps and a starting one has not risen yet, so a level between idle and the limit, or
a GPU that was not clean a moment ago, must hold still before it is believed.
"""

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.record import GpuRecord, Reason, SettleRecord
from draftmill.gpu.sense import sense
from draftmill.gpu.verdict import MIB, Facts, Tenant, decide, judge_gpu, judge_host, reason


@dataclass(frozen=True)
class Proof:
    """The last sample's facts, what they mean for each GPU and for the host, and the samples behind them."""

    facts: Facts
    gpus: tuple[GpuRecord, ...]
    host: tuple[Reason, ...]
    settle: SettleRecord

    @property
    def free(self) -> bool:
        """Whether nothing stands against any of the GPUs or the host."""
        return not self.host and all(gpu.verdict == "free" for gpu in self.gpus)


def prove(
    uuids: tuple[str, ...],
    tenants: Mapping[str, Tenant],
    policy: GatePolicy,
    suspects: Set[str] = frozenset(),
) -> Proof:
    """Sample until every GPU is proven free or one is not; `suspects` were not clean before and must settle."""
    began, levels = time.monotonic(), list[dict[str, int]]()
    while True:
        sample = _sample(uuids, tenants, policy)
        levels.append({gpu.uuid: gpu.mem.used // MIB for gpu in sample.gpus if gpu.mem and gpu.uuid not in tenants})
        settle = _settle(levels, time.monotonic() - began)
        moving = _moving(levels, policy)
        if sample.free and moving:
            return Proof(sample.facts, tuple(_unsettled(gpu, moving) for gpu in sample.gpus), (), settle)
        calm = len(levels) == 1 and settle.used_max_mib <= policy.idle_mib and not suspects & set(uuids)
        if not sample.free or calm or len(levels) >= policy.settle_samples:
            return Proof(sample.facts, sample.gpus, sample.host, settle)
        time.sleep(policy.poll_s)


def _sample(uuids: Iterable[str], tenants: Mapping[str, Tenant], policy: GatePolicy) -> Proof:
    names = tuple(uuids)
    facts = sense(names, policy)
    gpus = tuple(judge_gpu(uuid, facts, policy, tenants.get(uuid)) for uuid in names)
    return Proof(facts, gpus, tuple(judge_host(facts, policy)), SettleRecord(samples=1, window_s=0, used_max_mib=0))


def _settle(levels: list[dict[str, int]], window_s: float) -> SettleRecord:
    highest = max((mib for level in levels for mib in level.values()), default=0)
    return SettleRecord(samples=len(levels), window_s=round(window_s, 3), used_max_mib=highest)


def _moving(levels: list[dict[str, int]], policy: GatePolicy) -> dict[str, int]:
    """MiB between the lowest and the highest sample of each GPU that moved by more than the idle level."""
    spans = {
        uuid: max(x[uuid] for x in levels if uuid in x) - min(x[uuid] for x in levels if uuid in x)
        for uuid in levels[-1]
    }
    return {uuid: span for uuid, span in spans.items() if span > policy.idle_mib}


def _unsettled(gpu: GpuRecord, moving: Mapping[str, int]) -> GpuRecord:
    if gpu.uuid not in moving:
        return gpu
    span = moving[gpu.uuid]
    reasons = (*gpu.reasons, reason("memory_not_settled", gpu.uuid, span, f"memory moved by {span} MiB"))
    return gpu.model_copy(update={"reasons": reasons, "verdict": decide(reasons)})
