"""Taking one GPU out of a running build, and giving it back.

A pause is a small file beside the lease. A job that runs keeps its GPU to the end of its shard; a job that looks for a
GPU passes over paused ones, and waits for them rather than fail when there is no other.
"""

import json
import os
from pathlib import Path
from typing import Any

from draftmill.errors import UserError
from draftmill.gpu import processes
from draftmill.gpu.lease import now


def path(folder: Path, uuid: str) -> Path:
    """The mark of a paused GPU."""
    return folder / f"{uuid}.paused"


def is_paused(folder: Path, uuid: str) -> bool:
    """Whether the GPU is taken out now."""
    return path(folder, uuid).exists()


def paused(folder: Path) -> tuple[str, ...]:
    """UUIDs of all paused GPUs."""
    return tuple(sorted(file.name.removesuffix(".paused") for file in folder.glob("*.paused")))


def who(folder: Path, uuid: str) -> dict[str, Any] | None:
    """By whom and since when, or None when the GPU is not paused."""
    try:
        found = json.loads(path(folder, uuid).read_text())
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def pause(folder: Path, uuid: str) -> bool:
    """Take the GPU out; False when it already was."""
    note = json.dumps({"by": processes.user_name(os.getuid()), "since": now()})
    try:
        with open(path(folder, uuid), "x") as file:
            file.write(note + "\n")
    except FileExistsError:
        return False
    return True


def resume(folder: Path, uuid: str) -> bool:
    """Give the GPU back; False when it was not paused. Raises UserError when another user paused it."""
    try:
        path(folder, uuid).unlink()
    except FileNotFoundError:
        return False
    except PermissionError:
        by = (who(folder, uuid) or {}).get("by", "another user")
        raise UserError(f"GPU {uuid} was paused by {by}; only they or root can resume it.") from None
    return True
