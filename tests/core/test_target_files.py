"""What names a target: all its files for what it says, all but its weights for how it cuts a prompt into ids."""

from pathlib import Path

import pytest

from draftmill.config import TargetConfig
from draftmill.digests import DigestCache
from draftmill.target.files import identity, tokenizer_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "README.md"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def names(model: str, **more: str) -> tuple[str, str]:
    target, cache = TargetConfig(model=model, **more), DigestCache(Path("none"), write=False)
    return identity(target, cache), tokenizer_identity(target, cache)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("tokenizer.json", (True, True)),
        ("chat_template.jinja", (True, True)),
        ("config.json", (True, True)),
        ("model.safetensors", (True, False)),
        ("README.md", (False, False)),
    ],
)
def test_a_file_decides_what_it_is_part_of(folder: Path, name: str, changed: tuple[bool, bool]) -> None:
    before = names(str(folder))
    (folder / name).write_text("{ }")
    assert tuple(old != new for old, new in zip(before, names(str(folder)), strict=True)) == changed


def test_a_moved_folder_is_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    before = names(str(folder))
    moved = folder.rename(tmp_path.with_name("moved"))
    assert names(str(moved)) == before


def test_a_hub_model_is_its_commit() -> None:
    commit = "a" * 40
    assert names("org/model", revision=commit) == (f"org/model@{commit}",) * 2
