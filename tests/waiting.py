"""How tests wait: for a condition, never for a time."""

import time
from collections.abc import Callable

WAIT_S = 60.0


def until(true: Callable[[], object], what: str = "a condition", timeout_s: float = WAIT_S) -> None:
    """Poll until true; a test that waits in vain says for what."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
