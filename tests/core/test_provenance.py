"""What an object says of its making, and a sentence for what says nothing."""

import json

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from draftmill.drafter.checkpoint import save_trainer
from draftmill.errors import UserError
from draftmill.provenance import of_object, read
from draftmill.schemas import write_rows
from draftmill.store.local import LocalStore
from tests.core.conftest import is_one_sentence
from tests.core.objects import write_both


def test_each_format_says_it(tmp_path):
    write_both(tmp_path)
    for name in ("x.parquet", "x.safetensors"):
        assert read(tmp_path / name)["stage"] == {"of": "stage"}
    (tmp_path / "audit.json").write_text(json.dumps({"verdict": "pass", "provenance": {"stage": "audit"}}))
    assert read(tmp_path / "audit.json") == {"stage": "audit"}
    save_trainer(tmp_path / "trainer.safetensors", {"a": torch.zeros(1)}, {"provenance": {"stage": "train"}})
    assert read(tmp_path / "trainer.safetensors") == {"stage": "train"}


def test_a_drafters_weights_are_described_beside_them(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="carries no provenance"):
        read(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"draftmill": {"stage": "train"}}))
    assert read(tmp_path / "model.safetensors") == {"stage": "train"}


@pytest.mark.parametrize("name", ["x.parquet", "x.safetensors", "x.json"])
@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 64, b"[1, 2]", b'{"provenance": 3}'])
def test_a_damaged_or_foreign_file_is_one_sentence(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    refused(tmp_path / name)


def test_what_is_no_object_is_one_sentence(tmp_path):
    assert refused(tmp_path / "absent.json") == f"There is no file {tmp_path / 'absent.json'}."
    assert refused(tmp_path) == f"There is no file {tmp_path}."
    (tmp_path / "page.html").write_text("<html>")
    assert refused(tmp_path / "page.html") == (
        f"{tmp_path / 'page.html'} carries no provenance: it is no object of a store, or it was made by something else."
    )


def refused(path):
    with pytest.raises(UserError) as caught:
        read(path)
    assert is_one_sentence(caught.value)
    return str(caught.value)


class Counted(LocalStore):
    """A folder that counts the bytes that are asked of it."""

    asked = 0

    def get(self, key):
        found = super().get(key)
        self.asked += len(found)
        return found

    def part(self, key, start, stop):
        found = super().part(key, start, stop)
        self.asked += len(found)
        return found


@pytest.mark.parametrize("size", [10, 200_000])
def test_of_a_large_object_only_the_part_that_says_it_is_fetched(tmp_path, size):
    said = {"stage": "generate", "spec": {"long": "x" * size}}
    schema = pa.schema([("n", pa.int64())])
    write_rows(tmp_path / "x.parquet", schema, [{"n": n * 7919 % 1_000_003} for n in range(200_000)], said)
    metadata = {"draftmill": json.dumps({"rows": [], "provenance": said})}
    save_file({"a": torch.zeros(1_000_000)}, tmp_path / "x.safetensors", metadata=metadata)
    for name in ("x.parquet", "x.safetensors"):
        store, whole = Counted(tmp_path), (tmp_path / name).stat().st_size
        assert of_object(store, name, whole) == read(tmp_path / name) == said
        assert size < store.asked < whole / 2
