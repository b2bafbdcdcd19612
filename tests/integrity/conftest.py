"""One finished toy store a session, and a copy of it for each test to spoil."""

import shutil
from pathlib import Path

import pytest

from tests.integrity.stores import Toy, make_project, make_store


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_project(folder)
        make_store(folder)
    return folder


@pytest.fixture
def toy(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    folder = tmp_path / "project"
    shutil.copytree(pristine, folder)
    monkeypatch.chdir(folder)
    return Toy.open(folder)
