"""Small servers as processes, and as the handles that the client knows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from draftmill.errors import UserError

DEADLINE_S = 60.0


def start(record: Path, *options: str, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """A small server's process and port; it ends when this process does."""
    command = [sys.executable, "-m", "tests.sglang.small_server", "--port", str(port), "--record", str(record)]
    process = subprocess.Popen(
        [*command, "--parent", str(os.getpid()), *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait()
        raise OSError("the small server did not start")
    return process, int(line)


class OwnServer:
    """A server of the test's own that can be restarted: a ServerHandle for all its epochs."""

    uuid, host_bytes, began = "GPU-small", 0, 0.0

    def __init__(self, record: Path, *options: str, restarts: int = 5) -> None:
        self.record, self.options, self.left = record, options, restarts
        self.reasons: list[str] = []
        self.epoch = 0
        self.process, self.port = start(record, *options)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def alive(self) -> bool:
        return self.process.poll() is None

    def loaded(self) -> OwnServer:
        return self

    def restart(self, reason: str) -> OwnServer:
        self.reasons.append(reason)
        if not self.left:
            raise UserError(f"The server was restarted too often and is sick again ({reason}).")
        self.left -= 1
        self.kill()
        self.process, self.port = start(self.record, *self.options)
        self.epoch += 1
        return self

    def reference(self) -> dict[str, Any]:
        return {"kind": "fixed", "url": self.url}

    def misbehave(self, mode: str, rows: int | None = None) -> None:
        misbehave(self.url, mode, rows)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def misbehave(url: str, mode: str, rows: int | None = None) -> None:
    body = json.dumps({"mode": mode, "rows": rows}).encode()
    with urllib.request.urlopen(urllib.request.Request(url + "/misbehave", body), timeout=10):
        pass


class Phoenix:
    """A server on one port that somebody starts again whenever it dies: what `urls` may name."""

    def __init__(self, record: Path, *options: str) -> None:
        self._record, self._options = record, options
        self.process, self.port = start(record, *options)
        self.url = f"http://127.0.0.1:{self.port}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._over.wait(0.02):
            if self.process.poll() is not None and not self._over.is_set():
                try:
                    self.process, _ = start(self._record, *self._options, port=self.port)
                except OSError:  # the port is not free yet
                    time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self.process.kill()
        self.process.wait()


def generated(record: Path) -> Counter[tuple[str, int]]:
    """How often each row (prompt digest, seed) was answered, canaries left out; a torn last line is none."""
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return Counter((row["prompt"], row["seed"]) for row in rows if not row["canary"])
