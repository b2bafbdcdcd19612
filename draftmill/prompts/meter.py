"""What a person sees while a large prompt set is read: nothing for a few seconds, then a bar or a line now and then."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SILENT_S = 3.0
_LINE_EVERY_S = 15.0
_SAYS = {"reading": "reading prompts", "writing": "writing prompt shards"}


class Meter(AbstractContextManager["Meter"]):
    """Hears of progress as `bring_up_to_date` tells it and shows it on standard error if it takes long."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._due = time.monotonic() + _SILENT_S
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show how far a phase has got: `done` of `total` bytes or rows."""
        if self._bar is None and time.monotonic() < self._due:
            return
        if self._stream.isatty():
            self._draw(phase, done, total)
        else:
            share = f"{done / total:.0%}" if total else "done"
            print(f"draftmill: {_SAYS.get(phase, phase)}: {share}", file=self._stream, flush=True)
            self._due = time.monotonic() + _LINE_EVERY_S

    def _draw(self, phase: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(file=self._stream), transient=True)
            self._bar.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(_SAYS.get(phase, phase), total=total)
        self._bar.update(self._tasks[phase], completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
