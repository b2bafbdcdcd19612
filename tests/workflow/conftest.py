from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import Project


@pytest.fixture
def project(built: Project) -> Iterator[Project]:
    """The built project; whatever a test changes in configuration and prompts is undone."""
    kept = {path: path.read_bytes() for path in (built.folder / "config.yaml", built.folder / "prompts.jsonl")}
    yield built
    for path, data in kept.items():
        Path(path).write_bytes(data)
