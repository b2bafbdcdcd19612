"""`make chaos`: one build through kills and outages ends in the store that an undisturbed build makes.

    python -m tests.chaos.chaos [--seed N] [--shards 24] [--kills 20] [--outages 5] [--store s3|folder]

What happens is drawn from the seed, which is printed: victims, kinds of outages, and the moments. Moments are counts of
objects that the build has published, not seconds, so that the same seed meets the same stages on a machine of any
speed; a kill of a job waits for a job to be at work. Prints one line an event and ends with status 1 at a difference.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from draftmill.gpu import processes
from draftmill.store.base import Store
from draftmill.store.local import LocalStore
from draftmill.store.s3 import S3Store
from draftmill.store.settings import S3Settings
from tests.chaos.proxy import Proxy
from tests.s3.weed import Weed
from tests.tiny import Project

ROWS_A_SHARD = 6
# What a build leaves beside its objects, which may hold times, and the report, which tells of them.
BESIDE = ("progress/", "records/", "report/", "logs/")
UNFINISHED = ("journal/", "claims/")
OUTAGES = ("down", "slow", "overloaded", "expired")
_LAST = 5
DEADLINE_S, PATIENCE_S = 3 * 3600.0, 120.0


@dataclass(frozen=True)
class Event:
    """What is done to the build once it has published `after` objects: a kill or an outage of `seconds`."""

    after: int
    what: str
    seconds: float
    pick: float


def schedule(seed: int, objects: int, kills: int, outages: int, remote: bool) -> list[Event]:
    """The events of a seed, spread over a build of so many objects; every kind of victim and of outage occurs."""
    rng = random.Random(seed)
    victims = ["job", "snakemake", *(["server"] if remote else [])]
    kinds = [f"kill {victims[n] if n < len(victims) else rng.choice(victims)}" for n in range(kills)]
    kinds += [OUTAGES[n] if n < len(OUTAGES) else rng.choice(OUTAGES) for n in range(outages)] if remote else []
    rng.shuffle(kinds)
    # The last five objects are the drafter's and its evaluation: the latest event meets the training at work.
    moments = sorted(rng.randrange(max(1, objects - _LAST)) for _ in kinds)
    return [Event(after, what, rng.uniform(3, 12), rng.random()) for after, what in zip(moments, kinds, strict=True)]


def say(text: str) -> None:
    print(text, flush=True)


class Bench:
    """A build under `draftmill run`, its store as seen past the proxy, and what can be done to both."""

    def __init__(self, folder: Path, shards: int, weed: Weed | None) -> None:
        self.folder, self.weed = folder, weed
        self.proxy = Proxy(weed.port) if weed else None
        self.project = Project(folder / "disturbed", prompts=shards * ROWS_A_SHARD)
        self.process: subprocess.Popen[bytes] | None = None
        self.ever = set[str]()
        self._log = (folder / "build.log").open("ab")

    def configure(self, project: Project, store: str = "build") -> None:
        """A few rows a shard, so that many shards take little; the store through the proxy."""
        # Every file goes up as an upload in parts, so that kills meet them.
        s3 = {"endpoint_url": self.proxy.endpoint if self.proxy else None, "path_style": True, "multipart_threshold": 0}
        extra = {"s3": s3} if ":" in store else {}
        prompts = {"shard_rows": ROWS_A_SHARD, "sources": [{"path": "prompts.jsonl"}], "held_out": 0.12}
        project.configure(store=store, prompts=prompts, **extra)

    @property
    def url(self) -> str:
        return self.weed.url("chaos") if self.weed else "build"

    def store(self) -> Store:
        if self.weed is None:
            return LocalStore(self.project.folder / "build")
        os.environ.update(self.weed.environment)
        return S3Store(self.url, S3Settings(endpoint_url=self.weed.endpoint, path_style=True, wait_s=120))

    def start(self) -> None:
        snakemake = self.project.command()[3:]
        environment = self.project.environment
        if self.weed and self.proxy:
            environment |= {**self.weed.environment, "AWS_ENDPOINT_URL": self.proxy.endpoint}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "draftmill", "run", "--attempts", "60", "--", *snakemake],
            cwd=self.project.folder,
            env=environment,
            stdout=self._log,
            stderr=self._log,
        )

    def published(self) -> int:
        """Final objects that were ever seen."""
        keys = (key for key in self.store().list() if not key.startswith((*BESIDE, *UNFINISHED)))
        self.ever |= set(keys)
        return len(self.ever)

    def snakemake(self) -> processes.Process | None:
        assert self.process is not None
        children = (seen for seen in processes.all_processes() if seen.parent == self.process.pid)
        return next((seen.process for seen in children), None)

    def jobs(self) -> list[processes.Process]:
        """Processes that run a job's script."""
        scripts = str(self.project.folder)
        found = []
        for seen in processes.all_processes():
            line = processes.command(seen.pid, 4096) or ""
            if ".snakemake/scripts/" in line and _folder_of(seen.pid) == scripts:
                found.append(seen.process)
        return sorted(found, key=lambda process: process.start)

    def running(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def meet(self, event: Event) -> str:
        """Do what the event says, once its victim is there; says what was done."""
        match event.what:
            case "kill job":
                victim = self._await(lambda: self._choose(event))
                return "missed" if victim is None else self._kill(victim)
            case "kill snakemake":
                victim = self._await(self.snakemake)
                return "missed" if victim is None else self._kill(victim)
            case "kill server":
                assert self.weed is not None
                self.weed.kill()
                time.sleep(event.seconds)
                self.weed.start()
                return f"away for {event.seconds:.0f} s and restarted"
            case _:
                assert self.proxy is not None
                before = self.proxy.refused
                with self.proxy.outage(event.what):
                    time.sleep(event.seconds)
                return f"for {event.seconds:.0f} s, {self.proxy.refused - before} requests refused"

    def _choose(self, event: Event) -> processes.Process | None:
        jobs = self.jobs()
        # Some of a job's seconds pass first: a kill in its first instant would only ever meet imports.
        if not jobs:
            return None
        time.sleep(4 * event.pick)
        jobs = self.jobs()
        return jobs[int(event.pick * len(jobs))] if jobs else None

    def _await(self, find: Callable[[], processes.Process | None]) -> processes.Process | None:
        end = time.monotonic() + PATIENCE_S
        while self.running() and time.monotonic() < end:
            if (found := find()) is not None:
                return found
            time.sleep(0.1)
        return None

    def _kill(self, victim: processes.Process) -> str:
        what = processes.command(victim.pid, 4096) or ""
        what = what.rpartition(".snakemake/scripts/")[2].split(" ")[0] if ".snakemake/scripts/" in what else "snakemake"
        done = processes.signal_process(victim, signal.SIGKILL)
        return f"{what}, pid {victim.pid}" if done else "missed"


def _folder_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def digests(store: Store) -> dict[str, str]:
    """Every object of a build that is a function of its inputs."""
    keys = sorted(key for key in store.list() if not key.startswith((*BESIDE, *UNFINISHED)))
    return {key: sha256(store.get(key)).hexdigest() for key in keys}


def leftovers(bench: Bench) -> list[str]:
    """Journals, claims, unfinished files and uploads that the end of a build should not leave."""
    store = bench.store()
    return [*(key for key in store.list() if key.startswith(UNFINISHED)), *store.remove_unfinished(0.0)]


def disturb(bench: Bench, events: list[Event]) -> int:
    """Let the events happen to the running build, each at its moment; returns how many happened."""
    happened = 0
    for number, event in enumerate(events):
        while bench.running() and bench.published() < event.after:
            time.sleep(0.25)
        if not bench.running():
            break
        met = bench.meet(event)
        happened += met != "missed"
        say(f"{number + 1:3d}. after {event.after} objects ({len(bench.ever)} now): {event.what}: {met}")
    return happened


@contextmanager
def place(keep: Path | None) -> Iterator[Path]:
    """A folder for everything, removed at the end unless it was named."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="draftmill-chaos-") as folder:
        yield Path(folder).resolve()


def undisturbed(bench: Bench, shards: int) -> dict[str, str]:
    """The digests of a build of the same prompts and target in a folder that nobody disturbs."""
    shutil.copytree(bench.project.folder / "target", bench.folder / "undisturbed/target", dirs_exist_ok=True)
    project = Project(bench.folder / "undisturbed", prompts=shards * ROWS_A_SHARD)
    bench.configure(project)
    began = time.monotonic()
    project.build()
    found = digests(LocalStore(project.folder / "build"))
    say(f"undisturbed: {len(found)} objects in {time.monotonic() - began:.0f} s")
    return found


def compare(wanted: dict[str, str], found: dict[str, str], left: list[str]) -> list[str]:
    """What is wrong with the disturbed build, one line each."""
    return [
        *(f"missing: {key}" for key in wanted.keys() - found.keys()),
        *(f"nobody asked for: {key}" for key in found.keys() - wanted.keys()),
        *(f"different: {key}" for key in wanted.keys() & found.keys() if wanted[key] != found[key]),
        *(f"left over: {key}" for key in left),
    ]


def chaos(folder: Path, *, seed: int, shards: int, kills: int, outages: int, remote: bool) -> list[str]:
    """Run the whole; returns what is wrong."""
    with ExitStack() as stack:
        weed = stack.enter_context(Weed(folder / "weed")) if remote else None
        bench = Bench(folder, shards, weed)
        bench.configure(bench.project, bench.url)
        wanted = undisturbed(bench, shards)
        made = sum(key.startswith("prompts/") and key.endswith(".parquet") for key in wanted)
        events = schedule(seed, len(wanted), kills, outages, remote)
        say(f"seed {seed}: {kills} kills and {outages if remote else 0} outages over {made} shards, {bench.url}")
        began = time.monotonic()
        bench.start()
        watchdog = threading.Timer(DEADLINE_S, lambda: bench.process and bench.process.kill())
        watchdog.daemon = True
        watchdog.start()
        assert bench.process is not None
        try:
            happened = disturb(bench, events)
            status = bench.process.wait()
        finally:
            watchdog.cancel()
            bench.process.kill()
        say(f"the build ended with status {status} after {time.monotonic() - began:.0f} s and {happened} events")
        wrong = [] if status == 0 else [f"the build ended with status {status}"]
        wrong += [] if happened == len(events) else [f"only {happened} of {len(events)} events happened"]
        wrong += [] if made >= shards // 2 else [f"only {made} shards were made"]
        return wrong + compare(wanted, digests(bench.store()), leftovers(bench))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=None, help="replays a run; drawn by default")
    parser.add_argument("--shards", type=int, default=28)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--outages", type=int, default=5)
    parser.add_argument("--store", choices=["s3", "folder"], default="s3")
    parser.add_argument("--folder", type=Path, default=None, help="keep everything here")
    given = parser.parse_args()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    say(f"seed {seed} (--seed {seed} does the same again)")
    with place(given.folder) as folder:
        wrong = chaos(
            folder,
            seed=seed,
            shards=given.shards,
            kills=given.kills,
            outages=given.outages,
            remote=given.store == "s3",
        )
        for line in wrong:
            say(line)
        if wrong:
            say((folder / "build.log").read_text(errors="replace")[-4000:])
    say("different" if wrong else "The disturbed build made the same objects and left nothing behind.")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
