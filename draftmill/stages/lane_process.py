"""The lane as a process: `python -m draftmill.stages.lane_process` with its plan on standard input (lane_link.py).

It ends with its build, on SIGTERM after a last flush, and when no job has needed it for a while. Only one runs at a place:
a lock that dies with its holder decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.config import Config, parse
from draftmill.engines import sglang_api
from draftmill.engines.sglang_watch import Asking
from draftmill.errors import UserError
from draftmill.job import RUN_VARIABLE, follow_builder
from draftmill.schemas import PROMPTS, read_rows
from draftmill.stages.asking import Target, read_target, sort_rows
from draftmill.stages.lane import Lane, Loaded, Order
from draftmill.stages.reuse import Forerunners
from draftmill.stages.rows import Ledger
from draftmill.store.base import Store
from draftmill.store.journal import Journal
from draftmill.store.open import open_store
from draftmill.target.tokenizer import render_prompt

_LINE, _LOOK_S = 2**24, 1.0
# Any prompt does; this one has an answer of more than a few tokens from every model.
_CANARY = {"messages": [{"role": "user", "content": "Count from one to thirty in words."}]}


def asking(config: Config, target: Target) -> Asking:
    """What servers are asked by: the configuration's limits and the target's rules."""
    canary = tuple(render_prompt(target.tokenizer, _CANARY, config.target.chat_template_args))
    stop = tuple(sorted(target.rules.stop_ids))
    return Asking(config.generate.sglang, stop, target.rules.check, canary, config.generate.longest_answer)


class Shards:
    """Reads shards and their journals from the store."""

    def __init__(self, config: Config, target: Target, store: Store, generate: str) -> None:
        """`generate` is the fingerprint of the generate stage."""
        self._config, self._target, self._store, self._generate = config, target, store, generate

    def load(self, shard: str, coming: bool) -> Loaded | None:
        """The rows of a shard that are to be asked, and their ledger; None if it is not there.

        A `coming` one is left alone too if it is finished, or if another build works on it.
        """
        if coming and (self._finished(shard) or self._claimed_elsewhere(shard)):
            return None
        rows = self._prompts(shard)
        if rows is None:
            return None
        _, asked, _ = sort_rows(rows, self._config, self._target)
        ledger = Ledger(
            self._config.generate, Journal(self._store, layout.journal("generate", f"{shard}-{self._generate}"))
        )
        ledger.load()
        mixed = bool(self._config.generate.mix)
        Forerunners(self._store, shard, self._generate, mixed).hand_over(asked, ledger, self._target.rules)
        return Loaded(asked, ledger)

    def _finished(self, shard: str) -> bool:
        return self._store.info(layout.completions(shard, self._generate)) is not None

    def _claimed_elsewhere(self, shard: str) -> bool:
        try:
            claim = json.loads(self._store.get(layout.claim("generate", f"{shard}-{self._generate}")))
            return bool(claim["run"] != os.environ.get(RUN_VARIABLE, ""))
        except (KeyError, ValueError, TypeError):
            return False

    def _prompts(self, shard: str) -> list[dict[str, Any]] | None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.parquet"
            try:
                self._store.fetch(layout.prompts(shard), path)
            except KeyError:
                return None
            return read_rows(path, PROMPTS)


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
            if isinstance(fault, Exception) and not isinstance(fault, OSError):
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
            await _say(writer, {"error": str(error)})


async def _say(writer: asyncio.StreamWriter, news: Mapping[str, Any]) -> None:
    writer.write(json.dumps(news).encode() + b"\n")
    await writer.drain()


def main() -> int:
    """Run a lane; 0 also when one runs at its place already."""
    follow_builder()
    plan = json.load(sys.stdin)
    place = {name: Path(path) for name, path in plan["place"].items()}
    lock = os.open(place["lock"], os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    try:
        config = parse(plan["config"])
        asyncio.run(_run(config, plan["generate"], place["socket"]))
    except UserError as error:
        print(error, flush=True)
        return 1
    return 0


async def _run(config: Config, generate: str, path: Path) -> None:
    target = await asyncio.to_thread(read_target, config)
    shards = Shards(config, target, open_store(config.store, config.s3), generate)
    lane = Lane(config.generate, asking(config, target), shards.load, sglang_api.attach)
    await Server(lane, config.generate.sglang.idle_seconds).serve(path)


if __name__ == "__main__":
    sys.exit(main())
