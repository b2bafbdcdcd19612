"""A job's end of the lane: find it, start it if there is none, hand over a shard, and wait until it is written.

The lane listens on a Unix socket in a folder that only this user can enter, named by store, settings and run, so that no
job ever meets the lane of another build. Both sides send JSON lines. A lane that dies is started again: nothing but
what it had not flushed is lost, so the job only asks once more.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftmill.canonical import fingerprint
from draftmill.config import Config
from draftmill.errors import Kind, UserError
from draftmill.gpu import groups
from draftmill.progress import Heartbeat

_START_S, _LOOK_S, _SILENT_S = 180.0, 0.05, 120.0
# Between two lanes that are started: the first may load still, or the disk be full for a moment.
_AGAIN_S = 1.0
# Lanes that die one after another without a row in between will not do better.
_TRIES = 5
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class LanePlace:
    """Where a build's lane is: `socket`, `lock` and `log`."""

    socket: Path
    lock: Path
    log: Path


def lane_place(config: Config, generate: str, run_id: str, log: Path) -> LanePlace:
    """The place of the lane of a store, the fingerprint of its generate stage, and a run. Raises UserError if unsafe."""
    folder = Path(tempfile.gettempdir()) / f"draftmill-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise UserError(f"The folder {folder} is open to others, so nothing may listen there: remove it or set TMPDIR.")
    store = config.store if "://" in config.store else str(Path(config.store).absolute())
    name = fingerprint([store, generate, run_id, config.generate.sglang.model_dump(mode="json")])
    return LanePlace(folder / f"lane-{name}.sock", folder / f"lane-{name}.lock", log)


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """What a job asks for (lane.Order), and what a new lane needs: the configuration and generate's fingerprint.

    `outputs` are the paths `completions` and `rejected`, and the `provenance` that is written into them.
    """

    config: Config
    generate: str
    shard: str
    ahead: Sequence[str]
    outputs: Mapping[str, Any]


class Told(UserError):
    """What the lane says that it cannot mend, with the kind that it gives."""

    def __init__(self, sentence: str, kind: Kind) -> None:
        super().__init__(sentence)
        self.kind = kind


class LaneLink:
    """Waits for one shard of one job."""

    def __init__(self, order: LaneOrder, place: LanePlace) -> None:
        self._order, self._place = order, place

    def begin(self) -> None:
        """Start a lane if none listens, so that it loads while the job gets its server."""
        if not self._place.socket.exists():
            self._start()

    def wait(self, servers: Sequence[Mapping[str, Any]], beat: Heartbeat) -> None:
        """Return when the shard is written; `servers` are what the job brings.

        Raises UserError for what the lane cannot mend.
        """
        done, tries = -1, 0
        while True:
            try:
                for news in self._talk(servers):
                    if "error" in news:
                        raise Told(news["error"], news["kind"])
                    if news.get("finished"):
                        return
                    if "waiting" in news:
                        continue
                    if news["done"] > done:
                        done, tries = news["done"], 0
                    _tell(beat, news)
            except OSError as error:
                tries += 1
                print(f"the lane is gone ({error}); starting another", flush=True)
            if tries >= _TRIES:
                raise UserError(f"The process that asks the SGLang servers ended {tries} times; see {self._place.log}.")
            time.sleep(_AGAIN_S)

    def _talk(self, servers: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """What the lane says of our shard. Raises OSError when it is gone."""
        order = self._order
        ask = {"shard": order.shard, "ahead": list(order.ahead), "servers": list(servers), "outputs": order.outputs}
        with self._connect() as link, link.makefile("rwb") as stream:
            stream.write(json.dumps(ask).encode() + b"\n")
            stream.flush()
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                yield json.loads(line)
        raise ConnectionResetError("it closed the connection")

    def _connect(self) -> socket.socket:
        end, started, again = time.monotonic() + _START_S, None, 0.0
        while time.monotonic() < end:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(_SILENT_S)
            try:
                link.connect(str(self._place.socket))
                return link
            except (FileNotFoundError, ConnectionRefusedError):
                link.close()
            if started is None and time.monotonic() >= again:
                started = self._start()
            elif started is not None and (status := started.poll()) is not None:
                if status < 0:
                    raise ConnectionAbortedError(f"it was ended by signal {-status} while it started")
                if status > 0:
                    raise UserError(f"The process that asks the SGLang servers did not start: {self._end_of_log()}")
                # Another one holds the lock: it loads, or ends.
                started, again = None, time.monotonic() + _AGAIN_S
            time.sleep(_LOOK_S)
        raise UserError(f"The process that asks the SGLang servers does not answer; see {self._place.log}.")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a lane; it ends at once, with status 0, if another one holds the lock already."""
        plan = {
            "config": self._order.config.model_dump(mode="json"),
            "generate": self._order.generate,
            "place": {name: str(path) for name, path in asdict(self._place).items()},
        }
        # It uses no GPU, outlives this job's lease, and must not look as if it belonged to it.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        environment = {k: v for k, v in os.environ.items() if k != groups.MARKER} | hidden
        self._place.log.parent.mkdir(parents=True, exist_ok=True)
        with self._place.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "draftmill.stages.lane_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert child.stdin is not None
        with child.stdin as stdin:
            stdin.write(json.dumps(plan).encode())
        return child

    def _end_of_log(self) -> str:
        lines = self._place.log.read_text(errors="replace")[-_TAIL:].strip().splitlines()
        return f"{lines[-1] if lines else 'it said nothing'} (all of it: {self._place.log})"


def _tell(beat: Heartbeat, news: Mapping[str, Any]) -> None:
    servers = news["servers"]
    facts = {
        name: news[name]
        for name in ("found", "useful", "rejected", "failures", "retries", "tokens_1m", "tokens_per_second", "lane")
    }
    known = {**facts, "server": servers[0] if servers else None}
    beat.report(news["done"], news["tokens"], news["resumed"], known, news["total"])
