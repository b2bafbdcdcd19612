"""The lane as a process: `python -m draftmill.stages.lane_process` with its plan on standard input (lane_link.py).

It ends with its build, on SIGTERM after a last flush, and when no job has needed it for a while. Only one runs at a place:
a lock that dies with its holder decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from draftmill.config import Config, parse
from draftmill.engines import server
from draftmill.engines.open_files import raise_file_limit
from draftmill.engines.sglang_api import FixedServer, ServerHandle
from draftmill.errors import UserError, reason
from draftmill.job import follow_builder
from draftmill.stages.generate import Outputs
from draftmill.stages.lane import Lane, Order
from draftmill.stages.lane_helper import Helper
from draftmill.stages.lane_shard import Loaded
from draftmill.stages.rows import Asked, Ledger
from draftmill.stages.shards import journal_of
from draftmill.store.base import Store
from draftmill.store.open import open_store

_LINE, _LOOK_S = 2**24, 1.0
# Shards whose rows are kept for the job that will come.
_KEPT = 32


class Loader:
    """Loads shards for the lane: rows from a helper, answers from the journal."""

    def __init__(self, config: Config, store: Store, generate: str) -> None:
        """`generate` is the fingerprint of the generate stage."""
        self._config, self._store, self._generate = config, store, generate
        # Two, so that a shard that is being written keeps no server waiting for the next one.
        self.reader, self._writer = Helper(config, generate), Helper(config, generate)
        self._rows: dict[str, Sequence[Asked]] = {}

    def load(self, shard: str, coming: bool) -> Loaded | None:
        """The rows of a shard that are to be asked, and their ledger; None if there is nothing to do (Shards.read)."""
        rows = self._rows.get(shard)
        if rows is None or coming:
            rows = self.reader.read(shard, coming)
        if rows is None:
            return None
        # They are a function of the shard; a job takes it over soon after it was read ahead.
        self._rows = dict(list({**self._rows, shard: rows}.items())[-_KEPT:])
        ledger = Ledger(self._config.generate, journal_of(self._store, shard, self._generate))
        ledger.load()
        return Loaded(rows, ledger)

    def write(self, shard: str, outputs: Mapping[str, Any]) -> None:
        """Publish a shard under the paths `completions` and `rejected`, with its `provenance`."""
        places = Outputs(Path(outputs["completions"]), Path(outputs["rejected"]))
        self._writer.write(shard, places, outputs["provenance"])
        self._rows.pop(shard, None)

    def prepare(self) -> None:
        """Have the writer load what it needs before the first shard is finished."""
        self._writer.asking()

    def close(self) -> None:
        """End the helpers."""
        self.reader.close()
        self._writer.close()


class Server:
    """The lane's socket, and when the lane ends."""

    def __init__(self, lane: Lane, idle_s: float) -> None:
        self._lane, self._idle_s, self._jobs = lane, idle_s, 0

    async def serve(self, path: Path) -> None:
        """Answer jobs until nobody has come for a while or SIGTERM came."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        work = asyncio.create_task(self._lane.run())
        work.add_done_callback(lambda _: stop.set())
        # The last lane's socket may lie there; nobody can listen on it, for we hold the lock.
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._job, str(path), limit=_LINE)
        while not stop.is_set() and not self._idle():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)
        path.unlink(missing_ok=True)
        server.close()
        failed = work.done()
        work.cancel()
        await self._lane.close()
        if failed:
            await work

    def _idle(self) -> bool:
        return not self._jobs and time.monotonic() - self._lane.idle_since > self._idle_s

    async def _job(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._jobs += 1
        try:
            asked = json.loads(await reader.readline())
            serving = asyncio.create_task(self._serve(Order(**asked), writer))
            # A job sends nothing more: that its end can be read means that it is gone.
            gone = asyncio.create_task(reader.read())
            await asyncio.wait({serving, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, gone):
                task.cancel()
            fault, _ = await asyncio.gather(serving, gone, return_exceptions=True)
            if isinstance(fault, Exception) and not isinstance(fault, _JobGone):
                traceback.print_exception(fault)
        except (OSError, ValueError, TypeError):
            pass  # not a job of ours, or gone before it asked
        finally:
            self._jobs -= 1
            writer.close()

    async def _serve(self, order: Order, writer: asyncio.StreamWriter) -> None:
        try:
            async with contextlib.aclosing(self._lane.serve(order)) as beats:
                async for beat in beats:
                    await _say(writer, beat)
            await _say(writer, {"finished": True})
        except UserError as error:
            await _say(writer, {"error": str(error), "kind": error.kind})
        except OSError as error:
            words = f"The process that asks the SGLang servers cannot read or write a file ({reason(error)})"
            await _say(writer, {"error": f"{words}: mend it and give the same command again.", "kind": "full"})


class _JobGone(Exception):
    """Nobody listens any more."""


async def _say(writer: asyncio.StreamWriter, news: Mapping[str, Any]) -> None:
    try:
        writer.write(json.dumps(news).encode() + b"\n")
        await writer.drain()
    except OSError as error:
        raise _JobGone from error


class Log(io.TextIOWrapper):
    """What the lane says: on a full disk its words are lost, and not the lane, which has rows in memory."""

    def write(self, text: str, /) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        """Bring it out if it can be."""
        with contextlib.suppress(OSError):
            super().flush()

    @staticmethod
    def install() -> None:
        """Make it what this process prints to."""
        sys.stdout = sys.stderr = Log(os.fdopen(1, "wb", 0, closefd=False), encoding="utf-8", write_through=True)


def main() -> int:
    """Run a lane; 0 also when one runs at its place already."""
    Log.install()
    follow_builder()
    raise_file_limit()
    plan = json.load(sys.stdin)
    place = {name: Path(path) for name, path in plan["place"].items()}
    lock = os.open(place["lock"], os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    try:
        config = parse(plan["config"])
        # Not asyncio.run(), which waits for its threads: one may be in a server's restart for half an hour, and the lock
        # that is held meanwhile keeps every other lane from starting.
        asyncio.new_event_loop().run_until_complete(_run(config, plan["generate"], place["socket"]))
    except UserError as error:
        print(error, flush=True)
        return 1
    return 0


async def _run(config: Config, generate: str, path: Path) -> None:
    loader = Loader(config, open_store(config.store, config.s3), generate)
    try:
        asking = await asyncio.to_thread(loader.reader.asking)
        # A writer that cannot warm up says so when it is needed.
        warming = asyncio.gather(asyncio.to_thread(loader.prepare), return_exceptions=True)
        lane = Lane(config.generate, asking, loader.load, _attach, loader.write)
        await Server(lane, config.generate.sglang.idle_seconds).serve(path)
        warming.cancel()
    finally:
        loader.close()


def _attach(reference: Mapping[str, Any]) -> ServerHandle:
    """The handle that `ServerHandle.reference()` described."""
    fixed = reference["kind"] == "fixed"
    return FixedServer(str(reference["url"])) if fixed else server.attach(reference)


def _leave(work: Callable[[], int]) -> NoReturn:
    """End the process with what `work` returns, whatever its threads still wait for."""
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main)
