"""A server over made stores, asked without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from draftmill.dashboard.app import application
from draftmill.dashboard.board import Board
from draftmill.state.read import Reader
from draftmill.store.local import LocalStore
from tests.state.made_store import MadeStore
from tests.waiting import until

BASE = "http://localhost"


@pytest.fixture(scope="session")
def made() -> MadeStore:
    return MadeStore(phase="training")


@pytest.fixture(scope="session")
def folder(made: MadeStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def board(folder: Path) -> Board:
    return Board(Reader(LocalStore(folder)))


@pytest.fixture(scope="session")
def client(board: Board) -> Iterator[TestClient]:
    with TestClient(application(board), base_url=BASE) as client:
        until(lambda: board.view is not None)
        yield client
