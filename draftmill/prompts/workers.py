"""Processes that share the reading and writing of large prompt sets.

Parsing JSON holds the interpreter's lock, so threads would not help. Processes are spawned, not forked: a build runs
threads of Snakemake and boto3, which a fork would copy in any state. What a worker is given and gives back is small
(places and ids, not records). A worker ends with the process that started it, however that ended, and at once when the
work is given up: it may be waiting for an S3 that is away, and Ctrl-C must not wait for that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TypeVar

Task = TypeVar("Task")
Done = TypeVar("Done")

# Starting the processes costs about a second, in which one process reads some 50 MB.
WORTH_BYTES = 128 << 20
# The process that collects the results is the limit beyond.
_MOST = 8
# Tasks in flight for each process: one at work and one waiting.
_AHEAD = 2


class Workers:
    """A pool of processes, as many as there are processors."""

    def __init__(self, count: int) -> None:
        self._count, context = count, multiprocessing.get_context("spawn")
        self._theirs, self._ours = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(self._theirs,))

    def map(self, work: Callable[[Task], Done], tasks: Iterable[Task]) -> Iterator[Done]:
        """The results in the tasks' order; a task is drawn only shortly before its turn. Raises what `work` raises."""
        flying: deque[Future[Done]] = deque()
        for task in tasks:
            flying.append(self._pool.submit(work, task))
            if len(flying) >= self._count * _AHEAD:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()

    def abandon(self) -> None:
        """End the processes whatever they are doing."""
        self._ours.close()
        self.close()

    def close(self) -> None:
        """End the processes; tasks that have not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ours.close()
        self._theirs.close()


def with_workers(size: int, work: Callable[[Workers | None], Done]) -> Done:
    """Do `work` with processes if `size` bytes are worth them, else alone.

    It is done again alone if the processes cannot live here (too little memory, a script that cannot be imported), so it
    must bear being cut off.
    """
    count = min(_MOST, len(os.sched_getaffinity(0)))
    if count > 1 and size >= WORTH_BYTES:
        with suppress(BrokenProcessPool):
            return _with(Workers(count), work)
    return work(None)


def _with(workers: Workers, work: Callable[[Workers | None], Done]) -> Done:
    try:
        done = work(workers)
    except BaseException:
        workers.abandon()
        raise
    workers.close()
    return done


def _begin(abandoned: Connection) -> None:
    # Ctrl-C goes to the whole process group; the parent alone decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel, abandoned), daemon=True).start()


def _end_with(parent: int, abandoned: Connection) -> None:
    # The other end of the connection is closed with or by the parent.
    wait([parent, abandoned])
    os._exit(1)
