"""A pool of servers behind the interface that every engine has, for tests that have one set of rows and wait for them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Collection, Iterator, Sequence

from draftmill.engines.base import Failure, Key, Request, Result
from draftmill.engines.sglang_api import ServerHandle
from draftmill.engines.sglang_pool import Pool
from draftmill.engines.sglang_watch import Asking


class SglangEngine:
    """Generates on SGLang servers."""

    def __init__(self, handles: Sequence[ServerHandle], asking: Asking) -> None:
        self._handles, self._asking = handles, asking

    def run(self, requests: Sequence[Request], done: Collection[Key]) -> Iterator[Result | Failure]:
        """Answer the rows not in `done`, in the order in which they finish. Raises UserError when no server is left."""
        wanted = [request for request in requests if request.key not in done]
        found: queue.SimpleQueue[Result | Failure | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()
        thread = threading.Thread(target=self._drive, args=(wanted, found, stop), name="sglang", daemon=True)
        thread.start()
        try:
            while (outcome := found.get()) is not None:
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            stop.set()
            thread.join()

    def _drive(
        self,
        wanted: Sequence[Request],
        found: queue.SimpleQueue[Result | Failure | BaseException | None],
        stop: threading.Event,
    ) -> None:
        try:
            asyncio.run(self._answer(wanted, found, stop))
        except BaseException as error:
            found.put(error)
        found.put(None)

    async def _answer(
        self,
        wanted: Sequence[Request],
        found: queue.SimpleQueue[Result | Failure | BaseException | None],
        stop: threading.Event,
    ) -> None:
        pool, left = Pool(self._asking), iter(wanted)
        for handle in self._handles:
            pool.add(handle)

        async def work() -> None:
            for request in left:
                if stop.is_set():
                    return
                outcome, _ = await pool.answer(request)
                found.put(outcome)

        lines = min(self._asking.config.in_flight * len(self._handles), len(wanted))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(lines):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await pool.close()
