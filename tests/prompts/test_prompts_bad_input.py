"""Every kind of bad input, with the exact sentence a user reads."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.digests import DigestCache
from draftmill.errors import UserError
from draftmill.prompts.files import check_unchanged, find
from draftmill.prompts.index import digest_of
from draftmill.prompts.read import read

GOOD = [{"prompt": f"question {number}"} for number in range(40)]
HINT = "correct them or raise prompts.max_bad."


def line(value):
    return json.dumps(value).encode()


BAD_LINES = [
    ("broken_json", b'{"prompt": "x"', "broken JSON (Expecting ',' delimiter at column 15)"),
    ("broken_json", b'{"prompt": NaN}', "broken JSON (NaN is not a JSON value)"),
    (
        "broken_json",
        b"[" * 100_000,
        "broken JSON (it is nested too deeply)",
    ),
    ("wrong_type", b"[1]", "the record is a list instead of an object"),
    ("wrong_type", line({"messages": "[3]"}), "turn 1 is a number instead of an object"),
    ("no_prompt", b"{}", "the record has none of messages, conversations, prompt, instruction"),
    ("empty_turn", line({"messages": [{"role": "user", "content": ""}]}), "turn 1 is empty"),
    ("unknown_role", line({"messages": [{"role": "wizard", "content": "x"}]}), "turn 1 has the unknown role 'wizard'"),
    (
        "assistant_last",
        line({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}),
        "the last turn is the assistant's: set `answers: keep` for this source or drop the turn",
    ),
    ("system_last", line({"messages": [{"role": "system", "content": "x"}]}), "no user turn stands at the end"),
    ("invalid_utf8", b'{"prompt": "\xff"}', "byte 13 (0xff) is not valid UTF-8"),
    ("invalid_utf8", b'{"prompt": "\\ud800"}', "a text holds a byte or half a character that is not valid UTF-8"),
    ("nul_byte", b'{"prompt": "a\0b"}', "a NUL byte stands at byte 14"),
    ("nul_byte", b'{"prompt": "a\\u0000b"}', "a text holds a NUL byte"),
    ("too_long", line({"prompt": "y" * 9000}), "the prompt has 9000 tokens, more than the context leaves (5000)"),
]


@pytest.mark.parametrize(("kind", "content", "reason"), BAD_LINES)
def test_a_bad_line_is_counted_by_kind_with_its_place(build, data, kind, content, reason):
    path = data.lines("a.jsonl", GOOD)
    path.write_bytes(path.read_bytes() + content + b"\n")
    counts = build(path, limit=5000, count=count_characters, max_bad=0.1).counts
    assert (counts.read, counts.train + counts.held_out) == (41, 40)
    assert {name: (bad.count, bad.first) for name, bad in counts.bad.items()} == {
        kind: (1, (f"{path} line 41: {reason}",))
    }


@pytest.mark.parametrize(("kind", "content", "reason"), BAD_LINES)
def test_above_the_limit_the_build_stops(build, data, tmp_path, kind, content, reason):
    path = data.lines("a.jsonl", GOOD)
    path.write_bytes(path.read_bytes() + content + b"\n")
    message = (
        f"1 of 41 prompt records are bad (2.4%), more than prompts.max_bad allows (1.0%): "
        f"{kind} 1 (first: {path} line 41: {reason}); {HINT}"
    )
    with pytest.raises(UserError) as caught:
        build(path, limit=5000, count=count_characters)
    assert str(caught.value) == message
    assert not (tmp_path / "store").exists()


def count_characters(record):
    return len(record["messages"][0]["content"])


def test_a_lower_limit_stops_a_built_index_too(build, data):
    path = data.lines("a.jsonl", [*GOOD, {}])
    build(path, max_bad=0.1)
    with pytest.raises(UserError, match=r"^1 of 41 prompt records are bad \(2.4%\), more than"):
        build(path)


def test_only_the_first_few_places_are_kept(build, data):
    counts = build(data.lines("a.jsonl", [*GOOD, *[{}] * 30]), max_bad=0.5).counts
    assert (counts.bad["no_prompt"].count, len(counts.bad["no_prompt"].first)) == (30, 5)


def test_short_prompts_are_never_tokenised_and_a_counted_one_may_pass(build, data):
    counted = []
    records = [*GOOD, {"prompt": "z" * 6000}]
    counts = build(
        data.lines("a.jsonl", records), limit=5000, count=lambda record: counted.append(record) or 4999
    ).counts
    assert [len(record["messages"][0]["content"]) for record in counted] == [6000]
    assert counts.bad == {}


def test_a_record_that_the_chat_template_refuses_is_one_bad_record(build, data):
    def refuse(record):
        raise UserError("The chat template refused a prompt: roles must alternate.")

    counts = build(data.lines("a.jsonl", [*GOOD, {"prompt": "z" * 6000}]), limit=5000, count=refuse, max_bad=0.5).counts
    assert counts.bad["template"].first == (
        f"{data.folder / 'a.jsonl'} line {len(GOOD) + 1}: The chat template refused a prompt: roles must alternate",
    )


def whole_file(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


LINES = b"".join(line(record) + b"\n" for record in GOOD)
TABLE = "messages, conversations, prompt, instruction"

BAD_FILES = [
    ("empty.jsonl", b"", "{path} is empty: fill it or take it out of prompts.sources."),
    ("blank.jsonl", b"\n\n", "{path} holds no records: fill it or take it out of prompts.sources."),
    ("none.json", b"[]", "{path} holds no records: fill it or take it out of prompts.sources."),
    ("none.jsonl.gz", gzip.compress(b""), "{path} holds no records: fill it or take it out of prompts.sources."),
    ("cut.jsonl.gz", gzip.compress(LINES)[:-20], "{path} is a truncated gzip file: copy or download it again."),
    (
        "not.jsonl.gz",
        LINES,
        "{path} is not a sound gzip file: copy or download it again.",
    ),
    (
        "other.csv",
        b"question,answer\na,b\n",
        f"{{path}} has none of the columns {TABLE} (it has question, answer): "
        "name the prompt's column in this source's `field`.",
    ),
    (
        "header.csv",
        b'"prompt"s,b\nx,y\n',
        "{path} has no sound header: broken CSV (',' expected after '\"'); correct its first line.",
    ),
    ("open.csv", b'prompt\na\n"b\nc\n', "{path} line 3: a quoted cell is never closed; close it."),
    ("cut.json", LINES[:10], "{path} line 1: broken JSON (it ends too early); correct it or copy the file again."),
    (
        "cut2.json",
        b'[{"prompt": "a"},\n {"prompt": "b"}',
        "{path} line 2: broken JSON (it ends too early); correct it or copy the file again.",
    ),
    (
        "odd.json",
        b'[{"prompt": "a"}\n {"prompt": "b"}]',
        "{path} line 2: broken JSON (',' is expected); correct it or copy the file again.",
    ),
    (
        "word.json",
        b'[{"prompt": "a"},\n{"prompt": tru, "more": "much more text"}]',
        "{path} line 2: broken JSON (Expecting value); correct it or copy the file again.",
    ),
    (
        "tail.json",
        b'[{"prompt": "a"}] []',
        "{path} line 1: broken JSON (more text follows the document); correct it or copy the file again.",
    ),
    (
        "text.json",
        b'"hello"',
        "{path} line 1: broken JSON (it is neither a list nor an object); correct it or copy the file again.",
    ),
    ("bare.json", b'{"a": 1}', "{path} holds no list of records: give a list, an object with one, or JSONL."),
    (
        "two.json",
        b'{"a": [{"prompt": "x"}],\n "b": [{"prompt": "y"}]}',
        "{path} holds more than one list of records: keep only one of them (here `b`).",
    ),
    (
        "notes.txt",
        b"hello",
        "{path} has an unknown type: give JSONL, JSON or CSV (each also as .gz), or Parquet, with that suffix.",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_a_fault_of_a_file_stops_at_once(build, data, name, content, message):
    path = whole_file(data.folder, name, content)
    with pytest.raises(UserError) as caught:
        build(path)
    assert str(caught.value) == message.format(path=path)


def test_a_parquet_without_the_column(build, data):
    path = data.folder / "a.parquet"
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), path)
    with pytest.raises(UserError) as caught:
        build(path)
    assert str(caught.value) == (
        f"{path} has none of the columns {TABLE} (it has question, answer): "
        "name the prompt's column in this source's `field`."
    )
    with pytest.raises(UserError) as caught:
        build({"path": str(path), "field": "ask"})
    assert str(caught.value) == f"{path} has no column ask (it has question, answer): correct this source's `field`."


def test_a_broken_parquet(build, data):
    path = data.folder / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=rf"^{path} is not a sound Parquet file \(.+\): copy or download it again\.$"):
        build(path)


def test_a_parquet_whose_column_names_are_damaged(build, data):
    path = data.folder / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 100}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"prompt", b"pr\xffmpt"))
    with pytest.raises(UserError, match=rf"^{path} is not a sound Parquet file \(.+\): copy or download it again\.$"):
        build(path)


def test_a_file_that_is_gone_when_it_is_read(data):
    path = data.prompts("a.jsonl", 3)
    (file,) = find(str(path))
    path.unlink()
    reason = f"{path} cannot be read (No such file or directory): make it readable or take it out of prompts.sources."
    cache = DigestCache(data.folder / "digests.json", write=False)
    for look in (lambda: list(read(file)), lambda: digest_of(file, cache), lambda: check_unchanged([file])):
        with pytest.raises(UserError) as caught:
            look()
        assert str(caught.value) == reason


def test_a_link_to_nowhere(build, data):
    path = data.folder / "a.jsonl"
    path.symlink_to("gone")
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(No such file or directory\)"):
        build(data.folder)


def test_a_missing_path_and_an_empty_match(build, data):
    with pytest.raises(UserError) as caught:
        build(data.folder / "gone.jsonl")
    assert str(caught.value) == (
        f"There is no prompt source {data.folder}/gone.jsonl: correct prompts.sources "
        "(`draftmill fetch demo` brings the demo's prompts)."
    )
    for pattern in (data.folder, data.folder / "*.jsonl"):
        with pytest.raises(UserError) as caught:
            build(pattern)
        assert str(caught.value) == f"{pattern} matches no JSONL, JSON, CSV or Parquet file: correct prompts.sources."


def test_data_packed_in_an_unknown_way_is_not_passed_over(build, data):
    data.prompts("a.jsonl", 30)
    (data.folder / "README.md").write_text("about")
    assert build(data.folder).counts.read == 30
    (data.folder / "b.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UserError) as caught:
        build(data.folder)
    assert str(caught.value) == (
        f"{data.folder}/b.jsonl.zst is packed in a way that cannot be read: unpack it, pack it as .gz or move it away."
    )


def test_no_good_record_at_all(build, data):
    path = data.lines("a.jsonl", [{}, {}])
    with pytest.raises(UserError) as caught:
        build(path, max_bad=1)
    assert str(caught.value) == (
        f"None of the 2 prompt records is good: no_prompt 2 (first: {path} line 1: the record has none of {TABLE})."
    )


def test_an_empty_split(build, data):
    with pytest.raises(UserError) as caught:
        build(data.prompts("a.jsonl", 3), held_out=0.0001)
    assert str(caught.value) == (
        "No prompt of 3 falls to the held_out split at prompts.held_out 0.0001: "
        "give more prompts or change prompts.held_out."
    )


def test_bad_rows_of_tables(build, data):
    rows = [f"{number},question {number}" for number in range(40)]
    path = whole_file(
        data.folder, "a.csv", ("id,prompt\n" + "\n".join([*rows, "1,2,3", "4,"]) + "\n").encode() + b"5,\xff\n"
    )
    bad = build(path, max_bad=0.1).counts.bad
    assert {name: kind.first for name, kind in bad.items()} == {
        "broken_csv": (f"{path} row 41: the row has 3 cells and the header has 2",),
        "no_prompt": (f"{path} row 42: the record has none of {TABLE}",),
        "invalid_utf8": (f"{path} row 43: a text holds a byte or half a character that is not valid UTF-8",),
    }


def test_a_parquet_text_that_is_no_utf8_is_one_bad_row(build, data):
    path = data.folder / "a.parquet"
    texts = pa.array([b"ok %d" % number for number in range(40)] + [b"a\xff"], pa.binary())
    pq.write_table(pa.table({"prompt": pa.Array.from_buffers(pa.string(), 41, texts.buffers())}), path)
    counts = build(path, max_bad=0.1).counts
    assert counts.read == 41
    assert counts.bad["invalid_utf8"].first == (f"{path} row 41: a text holds the byte 0xff, which is not valid UTF-8",)
