"""Files of every type and place give the same records, and each record can be found again."""

import csv
import gzip
import json
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.errors import UserError
from draftmill.prompts import json_list
from draftmill.prompts.bad import BadRecord
from draftmill.prompts.files import Format, SourceFile, find
from draftmill.prompts.read import location, read, read_at
from draftmill.prompts.record import Rules, parse, parse_answered

TOOLS = [{"type": "function", "function": {"name": "f"}}]
RECORDS = [
    {
        "messages": [{"role": "user", "content": f'Grüße {n}, "quoted"\nsecond line'}],
        **({"tools": TOOLS} if n % 2 else {}),
    }
    for n in range(30)
]
TEXTS = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def to_csv(path):
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["messages", "tools"])
        writer.writeheader()
        for record in RECORDS:
            writer.writerow({name: json.dumps(value) for name, value in record.items()})


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(TEXTS),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + TEXTS.replace(b"\n", b"\r\n") + b"\n"),
    "unended.ndjson": lambda path: path.write_bytes(TEXTS[:-1]),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(TEXTS)),
    "lines.json": lambda path: path.write_bytes(TEXTS),
    "list.json": lambda path: path.write_text(json.dumps(RECORDS)),
    "object.json": lambda path: path.write_text(
        json.dumps({"about": {"rows": [1]}, "data": RECORDS, "end": []}, indent=2)
    ),
    "list.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(RECORDS).encode())),
    "a.parquet": lambda path: pq.write_table(
        pa.table({name: [r.get(name) for r in RECORDS] for name in ("messages", "tools")}), path
    ),
    "a.csv": to_csv,
}


def only(path):
    (file,) = find(str(path))
    return file


def ids(raws):
    return [parse(raw.decode(), Rules()).prompt_id for raw in raws]


EXPECTED = [parse(record, Rules()).prompt_id for record in RECORDS]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_records_and_finds_them_again(tmp_path, name):
    WRITERS[name](tmp_path / name)
    file = only(tmp_path / name)
    raws = list(read(file))
    assert ids(raws) == EXPECTED
    picked = [0, 1, 7, 28]
    again = read_at(file, [raws[number].position for number in picked])
    assert ids(again) == [EXPECTED[number] for number in picked]


def test_a_parquet_of_many_batches_and_a_string_column(tmp_path):
    pq.write_table(
        pa.table({"q": [f"question {n}" for n in range(2000)], "other": [None] * 2000}), tmp_path / "a.parquet"
    )
    file = only(tmp_path / "a.parquet")
    raws = list(read(file, "q"))
    assert [raw.decode() for raw in raws] == [{"q": f"question {n}"} for n in range(2000)]
    assert [raw.decode() for raw in read_at(file, [3, 1999], "q")] == [{"q": "question 2"}, {"q": "question 1998"}]


def test_places_are_named_as_people_count(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": "y"}\n')
    (tmp_path / "b.csv").write_text('prompt\n"x\nx"\ny\n')
    lines, rows = only(tmp_path / "a.jsonl"), only(tmp_path / "b.csv")
    assert [location(lines, raw) for raw in read(lines)] == [f"{lines.path} line 1", f"{lines.path} line 3"]
    assert [location(rows, raw) for raw in read(rows)] == [f"{rows.path} row 1", f"{rows.path} row 2"]


def test_one_record_alone_in_a_json_file_is_a_line(tmp_path):
    (tmp_path / "a.json").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    assert len(list(read(only(tmp_path / "a.json")))) == 1


def test_bytes_read_are_told(tmp_path):
    for name in ("a.jsonl", "a.parquet", "a.jsonl.gz"):
        WRITERS[name](tmp_path / name)
        told = []
        list(read(only(tmp_path / name), on_bytes=told.append))
        assert 0 < max(told) <= only(tmp_path / name).size


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
objects = st.dictionaries(st.text(), values, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(objects, min_size=1), st.sampled_from([None, 0, 3]), st.booleans(), st.integers(1, 30))
def test_a_json_document_read_in_small_pieces_is_what_the_parser_says(tmp_path_factory, items, indent, escaped, chunk):
    path = tmp_path_factory.getbasetemp() / "pieces.json"
    for document in (items, {"first": [1, 2], "data": items, "last": {"a": []}}):
        path.write_text(
            json.dumps(document, indent=indent, ensure_ascii=escaped), encoding="utf-8", errors="surrogatepass"
        )
        with pytest.MonkeyPatch.context() as patch, path.open("rb") as stream:
            patch.setattr(json_list, "_CHUNK", chunk)
            assert list(json_list.records_of_json("x", stream)) == items


def test_folders_and_globs_in_order_and_with_labels(tmp_path):
    for name in ("b/z.jsonl", "b/deep/x.CSV", "a.jsonl.gz", "b/README.md", "b/_SUCCESS", "b/.hidden.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find(str(tmp_path))
    assert [(file.path.removeprefix(f"{tmp_path}/"), file.label, file.format, file.gzipped) for file in found] == [
        ("a.jsonl.gz", "a", Format.JSONL, True),
        ("b/deep/x.CSV", "x", Format.CSV, False),
        ("b/z.jsonl", "z", Format.JSONL, False),
    ]
    assert [file.path for file in find(f"{tmp_path}/b/*")] == [f"{tmp_path}/b/z.jsonl"]
    assert [file.label for file in find(f"{tmp_path}/**/*.jsonl", "mine")] == ["mine"]


def test_a_name_with_glob_signs_is_a_file_first(tmp_path):
    (tmp_path / "a[1].jsonl").write_text("x")
    assert isinstance(only(tmp_path / "a[1].jsonl"), SourceFile)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([name for name in WRITERS if "parquet" not in name]), st.data())
def test_damaged_files_give_sentences_and_reasons_only(tmp_path_factory, name, data):
    """Whatever is cut, flipped or put in: a UserError for the file or a BadRecord for the record, nothing else."""
    path = tmp_path_factory.getbasetemp() / f"damaged-{name}"
    WRITERS[name](path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        end = place + data.draw(st.sampled_from([0, 1, 5, 10**6]))
        content[place:end] = data.draw(st.binary(max_size=4) | st.sampled_from([b'"', b"\\", b"[", b"{", b"\n", b"\0"]))
    path.write_bytes(content)
    with suppress(UserError):
        for raw in read(only(path)):
            with suppress(BadRecord):
                parse(raw.decode(), Rules())


def test_token_rows_of_a_table_keep_their_masks(tmp_path):
    table = pa.table({"input_ids": [[1, 2, 3], [4]], "loss_mask": [[False, True, True], [True]]})
    pq.write_table(table, tmp_path / "a.parquet")
    records = [parse_answered(raw.decode()).record for raw in read(only(tmp_path / "a.parquet"))]
    assert records == [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1]}]
