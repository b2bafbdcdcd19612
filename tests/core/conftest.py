"""Small stores, and what a sentence for a person looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def is_one_sentence(error: BaseException | str) -> bool:
    """Whether a message stands in one line and ends as a sentence does."""
    text = str(error)
    return "\n" not in text and text.endswith((".", ")")) and not text.endswith("..") and "Traceback" not in text
