"""What holds for every room's tests."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.tiny import Project

# A shell without job control starts what it runs beside itself deaf to Ctrl-C, and so would be all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on the machine, and no test judges that.
settings.register_profile("draftmill", deadline=None)
settings.load_profile("draftmill")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a real S3 service or a whole build is slow, wherever it stands."""
    for item in items:
        if {"weed", "built"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that was built once, undisturbed, in a folder: for tests that leave its objects alone."""
    project = Project(tmp_path_factory.mktemp("built"))
    project.build()
    return project


@pytest.fixture
def copy_of_built(built: Project, tmp_path: Path) -> Callable[[], Project]:
    """Makes a copy of the built project, with its store, to be changed at will."""

    def copy() -> Project:
        shutil.copytree(built.folder, tmp_path / "copy", symlinks=True)
        return Project(tmp_path / "copy")

    return copy
