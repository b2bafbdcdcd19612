"""Who writes a file, as a part of its name, so that an unfinished file of a dead process can be told from one at work.

A mark names the boot, the pid namespace, the process and its start, which no two processes share. Of a process of another
host or namespace nothing is known.
"""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def mark() -> str:
    """The mark of this process: four parts without a dash or a slash."""
    pid = os.getpid()
    return f"{_here()}.{pid}.{_start(pid)}"


def dead(found: str) -> bool:
    """Whether the process of a mark has certainly ended; False for what is no mark."""
    here, _, process = found.rpartition(".")[0].rpartition(".")
    start = found.rpartition(".")[2]
    return process.isdigit() and here == _here() and start != _start(int(process))


def _here() -> str:
    try:
        return f"{_BOOT.read_text()[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Without a name for this host nothing counts as dead.
        return f"unknown.{os.urandom(4).hex()}"


def _start(pid: int) -> str:
    """When a process started, in clock ticks after boot; "" for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZXx" else fields[19]
