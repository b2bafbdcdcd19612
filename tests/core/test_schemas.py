"""The Parquet contracts: rows come back, a wrong row or a damaged file is refused, and half a file is never there."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill import schemas
from draftmill.errors import UserError
from draftmill.schemas import (
    COMPLETIONS,
    MIXED_COMPLETIONS,
    PROMPTS,
    REJECTED,
    iterate_loss_masks,
    read_completions,
    read_provenance,
    read_rows,
    write_rows,
)
from tests.core.conftest import is_one_sentence
from tests.core.objects import completion


def test_rows_and_provenance_come_back(tmp_path):
    rows = [completion(0), completion(1, loss_mask=[True, False], sample=2), completion(2, output_ids=[], text="")]
    provenance = {"stage": "generate", "spec": {"é": 1}}
    write_rows(tmp_path / "x.parquet", COMPLETIONS, rows, provenance)
    assert read_rows(tmp_path / "x.parquet", COMPLETIONS) == rows
    assert read_provenance(tmp_path / "x.parquet") == provenance
    assert list(iterate_loss_masks(rows)) == [[True], [True, False], []]


@pytest.mark.parametrize("schema", [PROMPTS, COMPLETIONS, REJECTED])
def test_a_file_without_rows_has_its_columns(tmp_path, schema):
    write_rows(tmp_path / "x.parquet", schema, [], {})
    assert read_rows(tmp_path / "x.parquet", schema) == []
    assert pq.read_schema(tmp_path / "x.parquet").names == schema.names


@pytest.mark.parametrize(
    "wrong",
    [{"prompt_ids": ["a"]}, {"prompt_ids": [2**40]}, {"sample": "x"}, {"text": 3}],
    ids=lambda wrong: str(wrong),
)
def test_a_row_of_another_type_publishes_nothing(tmp_path, wrong):
    with pytest.raises((pa.ArrowException, TypeError, OverflowError)):
        write_rows(tmp_path / "x.parquet", COMPLETIONS, [completion(0), completion(1, **wrong)], {})
    assert list(tmp_path.iterdir()) == []


def test_provenance_that_is_no_json_publishes_nothing(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_rows(tmp_path / "x.parquet", COMPLETIONS, [], {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_footer_that_counts_other_rows_publishes_nothing(tmp_path, monkeypatch):
    real = pq.write_table
    monkeypatch.setattr(schemas.pq, "write_table", lambda table, *rest, **more: real(table.slice(1), *rest, **more))
    with pytest.raises(OSError, match="2 rows were written but the footer counts 1"):
        write_rows(tmp_path / "x.parquet", COMPLETIONS, [completion(0), completion(1)], {})
    assert list(tmp_path.iterdir()) == []


def refused(path, schema=COMPLETIONS):
    with pytest.raises(UserError, match="is not a readable prompt_id/") as caught:
        read_rows(path, schema)
    assert str(path) in str(caught.value)
    assert is_one_sentence(caught.value)


@pytest.mark.parametrize("cut", [0, 3, 50, -1, -9])
def test_a_torn_file_is_one_sentence(tmp_path, cut):
    path = tmp_path / "x.parquet"
    write_rows(path, COMPLETIONS, [completion(number) for number in range(4)], {})
    path.write_bytes(path.read_bytes()[:cut])
    refused(path)


def test_a_file_of_another_kind_is_one_sentence(tmp_path):
    refused(tmp_path / "absent.parquet")
    (tmp_path / "text").write_text("no parquet")
    refused(tmp_path / "text")
    write_rows(tmp_path / "prompts", PROMPTS, [], {})
    refused(tmp_path / "prompts")
    pq.write_table(pa.table({name: ["x"] for name in COMPLETIONS.names}), tmp_path / "types")
    refused(tmp_path / "types")


def test_a_null_where_a_value_must_be_is_refused(tmp_path):
    loose = pa.schema([pa.field(field.name, field.type) for field in REJECTED])
    pq.write_table(pa.Table.from_pylist([{"prompt_id": "p"}], schema=loose), tmp_path / "x")
    refused(tmp_path / "x", REJECTED)


def test_a_file_of_something_else_has_no_provenance(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x")
    assert read_provenance(tmp_path / "x") == {}


def test_where_settings_are_mixed_the_group_of_a_row_is_its_source_and_its_setting(tmp_path):
    names = ["thinking", "", "plain"]
    rows = [completion(number) | {"setting": name} for number, name in enumerate(names)]
    write_rows(tmp_path / "mixed.parquet", MIXED_COMPLETIONS, rows, {})
    table = read_completions(tmp_path / "mixed.parquet")
    assert table.schema.equals(COMPLETIONS)
    source = rows[0]["source"]
    assert table["source"].to_pylist() == [f"{source} · thinking", source, f"{source} · plain"]
    assert read_rows(tmp_path / "mixed.parquet", COMPLETIONS) == [completion(number) for number in range(3)]
    write_rows(tmp_path / "plain.parquet", COMPLETIONS, [completion(0)], {})
    assert read_completions(tmp_path / "plain.parquet").to_pylist() == [completion(0)]
