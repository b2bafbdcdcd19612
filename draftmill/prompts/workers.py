"""Processes that share the reading and writing of large prompt sets.

Parsing JSON holds the interpreter's lock, so threads would not help. Processes are spawned, not forked: a build runs
threads of Snakemake and boto3, which a fork would copy in any state. What a worker is given and gives back is small
(places and ids, not records). A worker ends with the process that started it, however that ended.
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
from contextlib import closing
from multiprocessing.connection import wait
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
        self._count = count
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_begin)

    def map(self, work: Callable[[Task], Done], tasks: Iterable[Task]) -> Iterator[Done]:
        """The results in the tasks' order; a task is drawn only shortly before its turn. Raises what `work` raises."""
        flying: deque[Future[Done]] = deque()
        for task in tasks:
            flying.append(self._pool.submit(work, task))
            if len(flying) >= self._count * _AHEAD:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()

    def close(self) -> None:
        """End the processes; tasks that have not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def with_workers(size: int, work: Callable[[Workers | None], Done]) -> Done:
    """Do `work` with processes if `size` bytes are worth them, else alone.

    It is done again alone if the processes cannot live here (too little memory, a script that cannot be imported), so it
    must bear being cut off.
    """
    count = min(_MOST, len(os.sched_getaffinity(0)))
    if count > 1 and size >= WORTH_BYTES:
        try:
            with closing(Workers(count)) as workers:
                return work(workers)
        except BrokenProcessPool:
            pass
    return work(None)


def _begin() -> None:
    # Ctrl-C goes to the whole process group; the parent alone decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(parent: int) -> None:
    wait([parent])
    os._exit(1)
