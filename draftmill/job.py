"""What every job of a build needs: its configuration, its log, its GPUs, and an end when its build ends.

A script in scripts/ is `run(snakemake, main)`. Output goes to the rule's log; a user's mistake is one sentence in the
log and on the terminal. A job whose Snakemake died (SIGKILL leaves children running) ends itself at once, so that the
next call finds no rival; nothing is lost, because work is journalled and files are published whole.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftmill import __version__, layout
from draftmill.config import Config, parse
from draftmill.errors import UserError
from draftmill.gpu import gate, processes
from draftmill.progress import Heartbeat
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore

# Inherited by every job of a build: the run's id, and the process whose end ends the jobs.
RUN_VARIABLE, BUILDER_VARIABLE = "DRAFTMILL_RUN", "DRAFTMILL_BUILDER"
_LOOK_SECONDS = 0.5
# What the system says of a full disk, also through libraries that hide the error's number.
_FULL = ("No space left on device", "Disk quota exceeded")


def mark_builder() -> str:
    """The run's id: made by the process that the user started, inherited with that process's identity by all below."""
    if RUN_VARIABLE not in os.environ:
        me = processes.myself()
        os.environ[RUN_VARIABLE] = secrets.token_hex(6)
        os.environ[BUILDER_VARIABLE] = f"{processes.boot_id()} {processes.pid_namespace()} {me.pid} {me.start}"
    return os.environ[RUN_VARIABLE]


def follow_builder(end: Callable[[], None] | None = None) -> None:
    """Call `end` (by default: kill this process group's member, us) as soon as the build's process is gone.

    Does nothing outside a build, or on another host or in another pid namespace than the builder's.
    """
    mark = os.environ.get(BUILDER_VARIABLE, "").split()
    if len(mark) != 4 or mark[:2] != [str(processes.boot_id()), str(processes.pid_namespace())]:
        return
    builder = processes.Process(int(mark[2]), int(mark[3]))
    threading.Thread(target=_follow, args=(builder, end or _end), name="follow-builder", daemon=True).start()


def _follow(builder: processes.Process, end: Callable[[], None]) -> None:
    while processes.alive(builder):
        time.sleep(_LOOK_SECONDS)
    end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Job:
    """One job of a rule: typed access to what Snakemake hands to a script."""

    def __init__(self, snakemake: Any) -> None:
        """Raises UserError if the configuration is wrong."""
        self._snakemake = snakemake
        self.config: Config = parse(snakemake.config)
        self.stage: str = snakemake.params.stage
        self.name: str = snakemake.params.name
        self.provenance: dict[str, Any] = {**snakemake.params.provenance, "versions": versions()}
        self.store = LocalStore(Path(self.config.store))

    def param(self, name: str) -> Any:
        """A parameter of the rule."""
        return self._snakemake.params[name]

    def input(self, name: str) -> Path:
        """The one input file of that name. Raises UserError if it is not in the store yet."""
        paths = self.inputs(name)
        if len(paths) != 1:
            raise UserError(
                f"The job {self.stage} {self.name} needs its {name}, which the store lacks: run `draftmill index`."
            )
        return paths[0]

    def inputs(self, name: str) -> list[Path]:
        """All input files of that name."""
        found = self._snakemake.input.get(name, [])
        return [Path(found)] if isinstance(found, str) else [Path(path) for path in found]

    def output(self, name: str) -> Path:
        """The output file of that name."""
        return Path(self._snakemake.output[name])

    def heartbeat(self, total: int, unit: str = "rows") -> Heartbeat:
        """Progress of this job in the store and in its log."""
        key = layout.progress(self.stage, self.name)
        return Heartbeat(self.store, key, stage=self.stage, name=self.name, total=total, unit=unit)

    def journal(self) -> Journal:
        """Unfinished rows of this job, in the store."""
        return Journal(self.store, layout.journal(self.stage, self.name))

    def journal_folder(self) -> Path:
        """A folder for unfinished work of this job."""
        return self.store.path(layout.journal(self.stage, self.name))

    @contextmanager
    def gpus(self) -> Iterator[gate.Lease]:
        """Hold the GPUs that the rule asks for; import torch only inside, when the visible devices are set.

        Raises UserError if the job's sentinel is of another run, or if the GPUs are not free under the lease.
        """
        config, count = self.config, int(self._snakemake.resources.gpu)
        shard = self._snakemake.params.get("shard")
        run_id = os.environ.get(RUN_VARIABLE)
        for sentinel in self.inputs("gpu"):
            gate.read_sentinel(sentinel, run_id)
        with gate.lease(config.gate, config.device, gpus=count, run_id=run_id, stage=self.stage, shard=shard) as lease:
            os.environ.update(lease.environment())
            if config.device == "cpu":
                os.environ["OMP_NUM_THREADS"] = str(self._snakemake.threads)
            print(f"gpu gate: {lease.verdict.verdict} {' '.join(lease.uuids)}", flush=True)
            yield lease


def versions() -> dict[str, str]:
    """Versions of what computes, for provenance."""
    from importlib.metadata import version

    return {"draftmill": __version__, **{name: version(name) for name in ("torch", "transformers", "pyarrow")}}


def run(snakemake: Any, main: Callable[[Job], None]) -> None:
    """Run a script's `main` with output going to the rule's log. Exits with 1 after a user's mistake or a fault."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    follow_builder()
    terminal = os.dup(2)
    _redirect(Path(snakemake.log[0]))
    try:
        main(Job(snakemake))
    except BaseException as error:
        sentence = _sentence(error)
        if sentence is None:
            traceback.print_exc()
            raise
        print(sentence, flush=True)
        os.write(terminal, f"\ndraftmill: {sentence}\n".encode())
        sys.exit(1)


def _sentence(error: BaseException) -> str | None:
    """What to say of a user's mistake, of Ctrl-C or of a full disk; None for a fault."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted: give the same command again to go on."
    full = any(words in str(error) for words in _FULL)
    return (
        "The disk has run full: free some and give the same command again; nothing finished is lost." if full else None
    )


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
