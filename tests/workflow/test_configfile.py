"""A configuration given on the command line stands alone; without one it is config/config.yaml."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiny import Project

pytestmark = pytest.mark.slow


@pytest.fixture
def default(tmp_path: Path) -> Path:
    """The default configuration's place, beside a whole project."""
    (tmp_path / "config").mkdir()
    return tmp_path / "config/config.yaml"


def test_a_given_configuration_takes_nothing_from_the_default_one(tmp_path: Path, default: Path) -> None:
    project = Project(tmp_path)
    default.write_text("pilot: 1000\n")
    assert project.plan()["pilot"] == 1


def test_without_a_given_configuration_the_default_one_is_read(tmp_path: Path, default: Path) -> None:
    project = Project(tmp_path)
    given = tmp_path / "config.yaml"
    shutil.move(given, default)
    command = [part for part in project.command("-n") if part not in ("--configfile", str(given))]
    result = subprocess.run(command, cwd=tmp_path, env=project.environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rule generate" in result.stdout + result.stderr
