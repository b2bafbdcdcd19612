"""What planning costs: the real Snakefile against a bare one with as many jobs and files, in the same run.

python -m benchmarks.planning [--shards 250 1000 2000 4000] [--repeat 3] [--s3] [--samples]

Seconds are medians; `cpu` are those of the processor, which say more on a busy machine. `all` has every object present,
`none` only the prompts. The bare Snakefile has no sentinels where nothing is to run, as a real build has none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planning import bare, measure, project
from benchmarks.planning.measure import Plan

_BARE_FACTOR, _S3_MORE_S, _S3_NONE_S = 1.5, 5.0, 45.0
_LIMIT_SHARDS = 2000


@dataclass(frozen=True, slots=True)
class Result:
    """One number of shards in one state."""

    shards: int
    present: bool
    made: int
    """Files that jobs make; the prompts are there in any case."""
    real: Plan
    bare: Plan
    s3: Plan | None = None
    requests: int = 0

    @property
    def state(self) -> str:
        return "all" if self.present else "none"

    @property
    def allowed_requests(self) -> float:
        there, missing = (self.made, 0) if self.present else (0, self.made)
        return (2 * (there + self.shards) + missing) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[250, 1000, 2000, 4000])
    parser.add_argument("--repeat", type=int, default=3, help="plans of each kind; the median is told")
    parser.add_argument("--s3", action="store_true", help="also with the store on SeaweedFS")
    parser.add_argument("--samples", action="store_true", help="also sample whose code the time is spent in")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planning-") as folder:
        results = list(_results(Path(folder), given.shards, given.repeat, given.s3, given.samples))
    print()
    for line in (*_growth(results), *_limits(results)):
        print(line)


def _results(folder: Path, shards: Sequence[int], repeat: int, s3: bool, samples: bool) -> Iterator[Result]:
    print("| shards | present | jobs | real s (cpu) | bare s (cpu) | cpu ratio | S3 s (cpu) | requests | load |")
    print("|-|-|-|-|-|-|-|-|-|")
    with ExitStack() as stack:
        bucket = None
        if s3:
            from benchmarks.planning.bucket import running

            bucket = stack.enter_context(running(folder / "weed"))
        for count in shards:
            graph = project.make(folder / "real", count)
            made = project.objects(graph)
            for present in (True, False):
                (project.fill if present else project.empty)(folder / "real/build", made)
                bare.write(folder / "bare", graph.shards, present=present)
                result = _measured(folder, graph.shards, len(made), present, repeat, bucket)
                print(_row(result), flush=True)
                if samples:
                    _tell_samples(folder)
                yield result
            shutil.rmtree(folder / "real")
            shutil.rmtree(folder / "bare")


def _measured(folder: Path, shards: Sequence[str], made: int, present: bool, repeat: int, bucket: object) -> Result:
    pairs = [
        (measure.plan(folder / "real", real=True), measure.plan(folder / "bare", real=False)) for _ in range(repeat)
    ]
    real, plain = (_median([pair[side] for pair in pairs]) for side in (0, 1))
    assert real.jobs == plain.jobs, f"{real.jobs} jobs and {plain.jobs} in the bare Snakefile"
    s3, requests = _on_s3(folder, f"{len(shards)}-{present}", repeat, bucket) if bucket else (None, 0)
    return Result(len(shards), present, made, real, plain, s3, requests)


def _on_s3(folder: Path, prefix: str, repeat: int, bucket: object) -> tuple[Plan, int]:
    from benchmarks.planning.bucket import Bucket

    assert isinstance(bucket, Bucket)
    there = bucket.project(folder / "s3" / prefix, folder / "real", prefix)
    before = len(bucket.door.requests)
    plans = [measure.plan(there, real=True, environment=bucket.environment) for _ in range(repeat)]
    return _median(plans), (len(bucket.door.requests) - before) // repeat


def _median(plans: Sequence[Plan]) -> Plan:
    wall, cpu = (statistics.median(getattr(one, name) for one in plans) for name in ("wall_s", "cpu_s"))
    return Plan(wall, cpu, plans[0].rules)


def _row(one: Result) -> str:
    s3 = f"{one.s3.wall_s:.1f} ({one.s3.cpu_s:.1f})" if one.s3 else "-"
    return (
        f"| {one.shards} | {one.state} | {one.real.jobs} | {one.real.wall_s:.1f} ({one.real.cpu_s:.1f}) | "
        f"{one.bare.wall_s:.1f} ({one.bare.cpu_s:.1f}) | {one.real.cpu_s / one.bare.cpu_s:.2f} | {s3} | "
        f"{one.requests or '-'} | {os.getloadavg()[0]:.1f} |"
    )


def _tell_samples(folder: Path) -> None:
    found = measure.sample(folder / "real")
    named = ", ".join(f"{name} {count / found['samples']:.1%}" for name, count in found["outermost"][:4])
    print(f"  ours: {found['ours'] / found['samples']:.1%} of the samples ({named})", flush=True)


def _growth(results: Sequence[Result]) -> Iterator[str]:
    for state in ("all", "none"):
        some = [one for one in results if one.state == state]
        if len(some) > 1:
            first, last = some[0], some[-1]
            real, plain = last.real.cpu_s / first.real.cpu_s, last.bare.cpu_s / first.bare.cpu_s
            yield (
                f"{state}: {last.shards / first.shards:g} times the shards take {real:.1f} times the processor's time "
                f"(bare: {plain:.1f} times)"
            )


def _limits(results: Sequence[Result]) -> Iterator[str]:
    for one in results:
        if one.shards == _LIMIT_SHARDS:
            yield _limit(f"{one.state}: of bare", one.real.cpu_s / one.bare.cpu_s, _BARE_FACTOR)
            if one.s3 and one.present:
                yield _limit("all: seconds more on S3", one.s3.wall_s - one.real.wall_s, _S3_MORE_S)
            if one.s3 and not one.present:
                yield _limit("none: seconds on S3", one.s3.wall_s, _S3_NONE_S)
        if one.s3:
            yield _limit(f"{one.shards} {one.state}: requests", one.requests, one.allowed_requests)


def _limit(name: str, value: float, limit: float) -> str:
    return f"{'met' if value <= limit else 'NOT MET'}: {name} {value:.2f}, limit {limit:.2f}"


if __name__ == "__main__":
    main()
