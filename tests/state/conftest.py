"""One made store in memory and one as files, shared because nothing writes into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.store.local import LocalStore
from tests.state.made_store import MadeStore
from tests.state.memory import Memory


@pytest.fixture(scope="session")
def made() -> MadeStore:
    return MadeStore()


@pytest.fixture
def memory(made: MadeStore) -> Memory:
    return Memory(made.objects)


@pytest.fixture(scope="session")
def folder(made: MadeStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("made"))


@pytest.fixture
def local(folder: Path) -> LocalStore:
    return LocalStore(folder)
