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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from draftmill import __version__, build_claims, layout, outcomes
from draftmill.catalog import job_name
from draftmill.config import Config, parse
from draftmill.errors import UserError
from draftmill.gpu import gate, processes
from draftmill.gpu.record import Verdict
from draftmill.progress import Heartbeat
from draftmill.records import Work, recording
from draftmill.store.journal import Journal
from draftmill.store.open import open_store
from draftmill.store.settings import S3Settings
from draftmill.store.workplace import Workplace, without_waiting

# Inherited by every job of a build: the run's id, and the process whose end ends the jobs.
RUN_VARIABLE, BUILDER_VARIABLE = outcomes.RUN_VARIABLE, "DRAFTMILL_BUILDER"
_LOOK_SECONDS = 0.5
_SCRATCH = Path(".draftmill/scratch")


def mark_builder() -> str:
    """The run's id: made by the process that the user started, inherited with that process's identity by all below."""
    if RUN_VARIABLE not in os.environ:
        me = processes.myself()
        os.environ[RUN_VARIABLE] = secrets.token_hex(6)
        os.environ[BUILDER_VARIABLE] = f"{processes.boot_id()} {processes.pid_namespace()} {me.pid} {me.start}"
    return os.environ[RUN_VARIABLE]


def is_builder() -> bool:
    """Whether this process is the one that the build's end hangs on, rather than something that it started."""
    me = processes.myself()
    return os.environ.get(BUILDER_VARIABLE, "").split()[2:] == [str(me.pid), str(me.start)]


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
        self.stage: str = snakemake.params.stage
        self.name: str = snakemake.params.name
        outcomes.note("began", job=f"{self.stage} {self.name}")
        self.config: Config = parse(snakemake.config)
        self.provenance: dict[str, Any] = {**snakemake.params.provenance, "versions": versions()}
        self.store = open_store(self.config.store, self.config.s3)
        self.place = Workplace(self.store, _SCRATCH)
        self._held: dict[str, Any] = {}
        self._rival: Callable[[], bool] = lambda: False
        self._beat: Heartbeat | None = None
        self.work = Work(self.stage, self.name, os.environ.get(RUN_VARIABLE, ""), self.provenance["versions"])

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
        self._beat = Heartbeat(
            without_waiting(self.store), key, stage=self.stage, name=self.name, total=total, unit=unit, facts=self._held
        )
        return self._beat

    def fail(self, message: str) -> None:
        """Tell the store that this job has failed, also where it failed before its first or behind its last heartbeat."""
        (self._beat or self.heartbeat(0)).fail(message, self._held)

    def journal(self) -> Journal:
        """Unfinished rows of this job, in the store."""
        return self.place.journal(layout.journal(self.stage, self.name))

    def journal_folder(self) -> tuple[Path, Callable[[Path], None]]:
        """A folder for unfinished work of this job, and what to call for each file written there."""
        return self.place.folder(layout.journal(self.stage, self.name))

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Hold the job's claim inside; False when another build has made the outputs, which are then taken from it."""
        outputs = self._objects(dict(self._snakemake.output.items()))
        if self.stage not in build_claims.STAGES or not outputs:
            # Whether or not, what an earlier try has left must go.
            if outputs:
                self.place.finished(outputs)
            yield True
            return
        claims, claim = build_claims.claims_of(self.store, self.work.run), layout.claim(self.stage, self.name)
        self._rival = claims.rival(claim)

        with claims.claimed(claim, lambda: self.place.finished(outputs)) as todo:
            taken = not todo and self.place.take(outputs)
            if taken:
                print("Another build has finished this job: its outputs are taken.", flush=True)
            yield not taken

    def recorded(self) -> AbstractContextManager[Work]:
        """What runs inside is recorded beside its outputs if it succeeds (records.py)."""
        made, read = self._snakemake.output, self._snakemake.input
        inputs = {name: read[name] for name, _ in read.items() if name not in ("after", "gpu")}
        return recording(self.store, self.work, outputs=self._objects(dict(made.items())), inputs=self._objects(inputs))

    def commit(self) -> None:
        """Publish the outputs where Snakemake has only copies; the journal may go then."""
        self.place.commit(self._objects(dict(self._snakemake.output.items())), self._rival)

    def _objects(self, paths: Mapping[str, Any]) -> dict[str, Path]:
        """Local files of objects by key."""
        each = [one for value in paths.values() for one in ([value] if isinstance(value, str) else value)]
        return {self.place.key(Path(path)): Path(path) for path in each}

    @contextmanager
    def gpus(self, server_spec: str | None = None) -> Iterator[gate.Lease]:
        """Hold the GPUs that the rule asks for; import torch only inside, when the visible devices are set.

        A server of ours with this `server_spec` stays and is the job's to use; any other leaves. Raises UserError if the
        job's sentinel is of another run, or if the GPUs are not free under the lease.
        """
        config, count = self.config, int(self._snakemake.resources.gpu)
        shard = self._snakemake.params.get("shard")
        run_id = os.environ.get(RUN_VARIABLE)
        for sentinel in self.inputs("gpu"):
            gate.read_sentinel(sentinel, run_id)
        try:
            with gate.lease(
                config.gate,
                config.gate_device(self.stage),
                gpus=count,
                run_id=run_id,
                stage=self.stage,
                shard=shard,
                server_spec=server_spec,
            ) as lease:
                os.environ.update(lease.environment())
                if config.device == "cpu":
                    os.environ["OMP_NUM_THREADS"] = str(self._snakemake.threads)
                print(f"gpu gate: {lease.verdict.verdict} {' '.join(lease.uuids)}", flush=True)
                self.work.gpus[:] = lease.uuids
                self._held = _said_of_gpus(lease.verdict, lease.uuids)
                yield lease
        except gate.GateRefused as error:
            self._held = _said_of_gpus(error.verdict, [gpu.uuid for gpu in error.verdict.gpus])
            raise


def _said_of_gpus(found: Verdict, uuids: Sequence[str]) -> dict[str, Any]:
    """What the heartbeats of a job say of its GPUs: which, and what the gate found."""
    reasons = [reason.code for reason in found.reasons]
    return {
        "gpus": list(uuids),
        "gate": {"verdict": found.verdict, "checked_at": found.checked_at, "reasons": reasons},
    }


def tell_refusal(place: Mapping[str, Any], stage: str, subject: str, refused: gate.GateRefused) -> None:
    """Leave the heartbeat of a job that is not begun because its sentinel was refused the GPUs.

    `place` has the `store`, its `s3` settings and the fingerprints `fp`; `subject` is a shard, a window or nothing.
    """
    name = job_name(stage, "" if stage == "evaluate" else subject, place["fp"][stage])
    store = without_waiting(open_store(place["store"], S3Settings(**place["s3"])))
    facts = _said_of_gpus(refused.verdict, [gpu.uuid for gpu in refused.verdict.gpus])
    Heartbeat(store, layout.progress(stage, name), stage=stage, name=name, total=0).fail(str(refused), facts)


def versions() -> dict[str, str]:
    """Versions of what computes, for provenance."""
    from importlib.metadata import version

    return {"draftmill": __version__, **{name: version(name) for name in ("torch", "transformers", "pyarrow")}}


def run(snakemake: Any, main: Callable[[Job], None]) -> None:
    """Run a script's `main` with output going to the rule's log. Exits with 1 after a user's mistake or a fault.

    Whatever ends the job but Ctrl-C is left in its heartbeat too, so that the store tells of it.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    follow_builder()
    terminal = os.dup(2)
    job: Job | None = None
    try:
        _redirect(Path(snakemake.log[0]))
        job = Job(snakemake)
        with job.claimed() as todo:
            if todo:
                with job.recorded():
                    main(job)
                    job.commit()
        outcomes.note("done")
    except BaseException as error:
        kind, sentence = outcomes.verdict(error)
        outcomes.note(kind, sentence or repr(error))
        if job is not None and kind != "interrupted":
            job.fail(sentence or str(error) or type(error).__name__)
        if sentence is None:
            traceback.print_exc()
            raise
        os.write(terminal, f"\ndraftmill: {sentence}\n".encode())
        with suppress(OSError):  # the log may lie on the disk that has run full
            print(sentence, flush=True)
        sys.exit(1)


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
