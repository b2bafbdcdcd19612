"""Run a short command under a deadline that holds even when the command cannot be killed.

A process that waits inside a broken driver sits in uninterruptible sleep: SIGKILL does not end it and waiting for it
never returns. So the reader here works against the clock, and after the kill it waits briefly once and walks away.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_AFTER_KILL_S = 1.0
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Answer:
    """What a command said. `exit_code` is None unless `status` is "exited"; `elapsed_s` is wall time in seconds."""

    status: Literal["exited", "hung", "missing", "flooded"]
    exit_code: int | None
    out: str
    err: str
    elapsed_s: float


class Running:
    """A command in flight, so that two sensors can be read at the same time."""

    def __init__(self, argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> None:
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileNotFoundError, PermissionError):
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else dict(env),
                start_new_session=True,
            )

    def answer(self) -> Answer:
        """Everything the command printed, or what kept it from an answer; returns at the deadline at the latest."""
        if self._process is None:
            return Answer("missing", None, "", "", 0.0)
        out, err, complete = self._read()
        code = self._exit_code() if complete else None
        if code is None:
            self._abandon()
        status: Literal["exited", "hung", "flooded"] = "exited" if code is not None else "hung"
        if len(out) > _MOST_BYTES:
            status = "flooded"
        elapsed = time.monotonic() - self._began
        return Answer(status, code, out.decode(errors="replace"), err.decode(errors="replace"), elapsed)

    def _read(self) -> tuple[bytes, bytes, bool]:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        chunks: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for stream in (self._process.stdout, self._process.stderr):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
                chunks[stream.fileno()] = b""
            flooded, ready = False, True
            # Past the deadline what is there already is still read: the caller may have waited for another child.
            while selector.get_map() and not flooded and (ready or time.monotonic() < self._deadline):
                events = selector.select(max(0.0, self._deadline - time.monotonic()))
                ready = bool(events)
                for key, _ in events:
                    data = os.read(key.fd, 1 << 16)
                    chunks[key.fd] += data
                    flooded = len(chunks[key.fd]) > _MOST_BYTES
                    if not data:
                        selector.unregister(key.fileobj)
            complete = not selector.get_map()
        out, err = (chunks[s.fileno()] for s in (self._process.stdout, self._process.stderr))
        return out, err, complete

    def _exit_code(self) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def _abandon(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_AFTER_KILL_S)
        # Popen warns about a child that is still there when it is collected; this one may be beyond anybody's reach.
        if self._process.returncode is None:
            self._process.returncode = -signal.SIGKILL

    def close(self) -> None:
        """Release the pipes; the command must have been answered or is abandoned."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._abandon()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def ask(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run `argv` and return its answer within `timeout_s` seconds plus at most one."""
    running = Running(argv, timeout_s, env)
    try:
        return running.answer()
    finally:
        running.close()
