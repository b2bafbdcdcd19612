"""`draftmill run`: Snakemake, started again for as long as nothing but time is wanting.

A build of days meets stores that are away, GPUs that others took, and kills. Everything that was finished or journalled
is kept, so the remedy is always the same command again; this gives it. It starts again after what may pass (outcomes.py
tells why a build ended) and never after a mistake, which would only be made twice. Pauses grow from seconds to minutes
and begin anew when a job was finished in between. The first Ctrl-C or SIGTERM lets all processes end in order, the
second kills them; if this process is killed, the kernel ends Snakemake and its jobs follow.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from draftmill import outcomes, supervise_locks
from draftmill.gpu.processes import all_processes, dying_with_parent, wait_until
from draftmill.outcomes import Outcome

_WORDS = {
    "late": "the store did not answer",
    "expired": "the credentials have expired",
    "busy": "the GPUs are in use",
    "changed": "the plan is out of date",
    "killed": "a process was killed",
    "fault": "a job failed without saying why",
    "unknown": "Snakemake failed without saying why",
}
# What shows no cause may be a fault that repeats itself: so many starts without a finished job, whatever the limits.
_BLIND_STARTS = 3
_SETTLE_S, _USAGE = 30.0, 2


@dataclass(frozen=True)
class Limits:
    """When to give up: starts in a row without a finished job, and seconds in all; and how the pauses grow."""

    attempts: int = 20
    for_s: float = float("inf")
    first_s: float = 5.0
    most_s: float = 300.0

    def pause(self, fruitless: int, chance: float) -> float:
        """Seconds before the next start after so many without progress; `chance` in [0, 1) shortens by up to a half."""
        return min(self.most_s, self.first_s * 2.0 ** min(max(fruitless - 1, 0), 32)) * (1.0 - 0.5 * chance)


@dataclass(frozen=True)
class Ending:
    """How one Snakemake ended: done, stop (a person must act), or again, with the reason as a sentence's part."""

    what: Literal["done", "stop", "again", "blind"]
    why: str = ""
    progress: bool = False


def judge(status: int, told: Sequence[Outcome]) -> Ending:
    """What to do after a Snakemake with that exit status (negative: killed by a signal), whose processes told this."""
    progress = any(one.kind == "done" for one in told)
    if status == 0:
        return Ending("done", progress=progress)
    failed = [one for one in told if one.kind not in ("began", "done", "interrupted")]
    for one in failed:
        if one.kind in ("mistake", "full"):
            return Ending("stop", one.sentence, progress)
    for kind in ("expired", "late", "busy", "changed"):
        if said := [one.sentence for one in failed if one.kind == kind]:
            return Ending("again", f"{_WORDS[kind]}: {said[0]}", progress)
    if status < 0:
        return Ending("again", f"Snakemake was killed by {signal.Signals(-status).name}", progress)
    if failed:
        return Ending("blind", f"{_WORDS['fault']}: {failed[0].sentence}", progress)
    ended = {one.pid for one in told if one.kind != "began"}
    if killed := [one.job for one in told if one.kind == "began" and one.pid not in ended]:
        return Ending("again", f"{_WORDS['killed']}: {killed[0]}", progress)
    if status == _USAGE:
        return Ending("stop", "Snakemake refuses these arguments: see what it says above", progress)
    return Ending("blind", f"{_WORDS['unknown']} (status {status})", progress)


@dataclass
class Supervisor:
    """Runs one Snakemake after another until one of them ends the matter."""

    arguments: Sequence[str]
    limits: Limits = Limits()
    say: Callable[[str], None] = lambda text: print(f"draftmill run: {text}", file=sys.stderr, flush=True)
    program: Sequence[str] = (sys.executable, "-m", "snakemake")
    chance: Callable[[], float] = random.random
    runs: set[str] = field(default_factory=set)
    _child: subprocess.Popen[bytes] | None = None
    _asked: threading.Event = field(default_factory=threading.Event)
    _signals: int = 0

    @property
    def folder(self) -> Path:
        """The working directory that Snakemake will have."""
        words = list(self.arguments)
        for place, word in enumerate(words):
            if word in ("--directory", "-d") and place + 1 < len(words):
                return Path(words[place + 1])
            if word.startswith("--directory="):
                return Path(word.partition("=")[2])
        return Path()

    def run(self) -> int:
        """The exit status for the caller: Snakemake's own, 130 after Ctrl-C, 1 when it was not started again."""
        began, fruitless, blind = time.monotonic(), 0, 0
        with self._signals_passed_on():
            while True:
                status, told = self._once()
                if self._signals:
                    self.say("Stopped as asked; give the same command again to go on.")
                    return 130
                ending = self._seen(judge(status, told))
                if ending.what in ("done", "stop"):
                    return self._end(ending)
                fruitless = 0 if ending.progress else fruitless + 1
                blind = 0 if ending.progress or ending.what == "again" else blind + 1
                if ending.what == "blind" and supervise_locks.locked(self.folder):
                    if not self._unlock():
                        return 1
                elif blind >= _BLIND_STARTS or fruitless >= self.limits.attempts:
                    return self._give_up(f"{_starts(fruitless)} finished no job", ending)
                pause = self.limits.pause(fruitless, self.chance())
                if time.monotonic() - began + pause > self.limits.for_s:
                    return self._give_up(f"the time of {self.limits.for_s:.0f} s is over", ending)
                count = f" ({_starts(fruitless)} finished no job)" if fruitless else ""
                self.say(f"{_sentence(ending.why)} Starting again in {pause:.0f} s{count}.")
                if self._asked.wait(pause):
                    return 130

    def _seen(self, ending: Ending) -> Ending:
        """The ending, where nobody said why, as the disk of the working directory shows it: Snakemake writes there too."""
        refused = outcomes.refusal(self.folder) if ending.what == "blind" else ""
        return Ending("stop", refused, ending.progress) if refused else ending

    def _end(self, ending: Ending) -> int:
        if ending.what == "stop":
            self.say(f"Not started again, because a person must act: {_sentence(ending.why)}")
        return 0 if ending.what == "done" else 1

    def _give_up(self, limit: str, ending: Ending) -> int:
        self.say(f"Given up, {limit}. The last end: {_sentence(ending.why)} Nothing finished is lost.")
        return 1

    def _unlock(self) -> bool:
        """Remove a lock of a dead Snakemake of ours; False, with a sentence, where it may be somebody's."""
        if not supervise_locks.stale(self.folder):
            self.say(
                f"The folder {self.folder.resolve()} is locked by Snakemake and no dead run of ours is known to have "
                "done it: if nothing works there, run `snakemake --unlock` with the same arguments."
            )
            return False
        self.say("The lock of a killed Snakemake is removed.")
        return subprocess.run([*self.program, *self.arguments, "--unlock"], check=False).returncode == 0

    def _once(self) -> tuple[int, list[Outcome]]:
        """One Snakemake from start to end, and all its processes with it."""
        with outcomes.listening() as place:
            status = self._supervised(place)
            told = list(outcomes.read(place))
        self.runs |= {one.run for one in told if one.run}
        return status, told

    def _supervised(self, told: Path) -> int:
        # Each Snakemake is a run of its own: it must not inherit the mark of another.
        kept = {name: value for name, value in os.environ.items() if name not in ("DRAFTMILL_RUN", "DRAFTMILL_BUILDER")}
        self._child = subprocess.Popen(
            [*self.program, *self.arguments],
            env={**kept, outcomes.VARIABLE: str(told)},
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=dying_with_parent(),
        )
        supervise_locks.remember(self.folder, self._child.pid)
        if self._signals:  # asked for between two starts
            self._pass_on(signal.SIGINT)
        status = self._child.wait()
        self._settle(self._child.pid)
        return status

    def _settle(self, group: int) -> None:
        """Wait for the jobs of a dead Snakemake, which end by themselves; kill what does not."""
        if not wait_until(lambda: not _lives(group), _SETTLE_S):
            _signal(group, signal.SIGKILL)
            wait_until(lambda: not _lives(group), _SETTLE_S)

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        # What is ignored stays so: under nohup the end of a session ends nothing.
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._signalled) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._asked.set()
        # Snakemake answers SIGTERM by waiting for its jobs, which may be hours: everybody gets what Ctrl-C sends.
        self._pass_on(signal.SIGINT if self._signals == 1 else signal.SIGKILL)

    def _pass_on(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.poll() is None:
            _signal(self._child.pid, number)


def _starts(count: int) -> str:
    return "1 start" if count == 1 else f"{count} starts in a row"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!")) else f"{text}."


def _lives(group: int) -> bool:
    # A zombie that nobody reaps counts for os.killpg and holds nothing.
    return any(seen.group == group for seen in all_processes())


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
