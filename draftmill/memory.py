"""How much memory a process of this host may take: what is available now, and the limit of its control groups."""

from __future__ import annotations

from pathlib import Path

_GROUPS, _OWN_GROUPS, _MEMORY = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")


def available_memory() -> int | None:
    """Bytes that new processes can take now without swapping; None where the kernel does not say."""
    found = [line.split()[1] for line in _lines(_MEMORY) if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def memory_limit() -> int | None:
    """The least limit in bytes of this process's control groups, version 1 or 2; None where there is none."""
    found: list[int] = []
    for line in _lines(_OWN_GROUPS):
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (_GROUPS / "memory", "memory.limit_in_bytes") if controllers else (_GROUPS, "memory.max")
        group = top / own.lstrip("/")
        places = [place for place in (group, *group.parents) if place.is_relative_to(top)]
        found += [int(text) for place in places for text in _lines(place / name) if text.isdigit()]
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
