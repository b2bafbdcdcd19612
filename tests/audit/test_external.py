import gzip
import json
import random
import string

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from draftmill.audit import foreign
from draftmill.audit.external import audit_path, settings, write_source
from draftmill.audit.token_rows import TokenRows
from draftmill.audit.tokens import TokenInfo
from draftmill.commands.audit import register
from draftmill.errors import UserError
from draftmill.prompts.files import find
from draftmill.prompts.read import read
from draftmill.prompts.record import parse_answered
from draftmill.schemas import COMPLETIONS, REJECTED, write_rows

from .conftest import row

app = typer.Typer()
register(app)
SPIKE = "87.0% of 400 answers have exactly 6 loss tokens (limit 30%)."
CAUSE = "Most likely: thinking used up max_new_tokens, or a reasoning parser kept only `content`"


def command(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def conversation(number, answer, **over):
    return {
        "messages": [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": answer} | over,
        ]
    }


def good_answer(number):
    letters = random.Random(number).choices(string.ascii_lowercase, k=30 + number % 40)
    return f"Answer {number} is: {''.join(letters)}"


def historic(empty):
    return [conversation(i, empty if i % 100 < 87 else good_answer(i)) for i in range(400)]


@pytest.mark.parametrize("empty", ["", None, "  \n"])
def test_the_historic_fault_in_messages_has_exactly_six_loss_tokens(tmp_path, tokenizer_folder, empty):
    path = lines(tmp_path / "set.jsonl", historic(empty))
    result = command("audit", path, "--tokenizer", tokenizer_folder, "--html", tmp_path / "page.html")
    assert result.exit_code == 1, result.output
    out = " ".join(result.output.split())
    assert "fail: 400 answers" in out
    assert f"- {SPIKE} {CAUSE}" in out
    assert SPIKE in (tmp_path / "page.html").read_text()


def test_the_historic_fault_in_parquet_and_in_an_answer_column(tmp_path, tokenizer_folder):
    chosen = settings(str(tokenizer_folder), None)
    pq.write_table(pa.Table.from_pylist(historic(None)), tmp_path / "set.parquet")
    rows = [{"prompt": f"Question {i}?", "response": "" if i % 100 < 87 else good_answer(i)} for i in range(400)]
    lines(tmp_path / "set.jsonl", rows)
    for name in ("set.parquet", "set.jsonl"):
        found = audit_path(str(tmp_path / name), chosen)
        assert found.findings[0].sentence == SPIKE
        assert found.measurements.overall.template_only == 348


def token_record(ids, start):
    return {"input_ids": ids, "loss_mask": [0] * start + [1] * (len(ids) - start)}


def historic_tokens():
    turn = [248068, 271, 248069, 271, 248046, 198]
    bad = [token_record([9, *range(i + 1), *turn], i + 2) for i in range(348)]
    return bad + [token_record([9, i, *range(300, 340 + i)], 2) for i in range(52)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_historic_fault_in_input_ids_needs_no_tokenizer(tmp_path, kind):
    path = tmp_path / f"set.{kind}"
    if kind == "jsonl":
        lines(path, historic_tokens())
    else:
        pq.write_table(pa.Table.from_pylist(historic_tokens()), path)
    result = command("audit", path)
    assert result.exit_code == 1, result.output
    assert f"{SPIKE} {CAUSE}" in " ".join(result.output.split())
    assert "No tokenizer was given" in result.output


def test_reasoning_is_an_answer(tmp_path, tokenizer_folder):
    rows = [conversation(i, "", reasoning_content=good_answer(i)) for i in range(40)]
    found = audit_path(str(lines(tmp_path / "set.jsonl", rows)), settings(str(tokenizer_folder), None))
    counts = found.measurements.overall
    assert (counts.empty, counts.thinking, counts.finish) == (0, {"closed": 40}, {"stop": 40})
    assert found.verdict == "pass"


def test_a_prompt_that_is_no_prefix_is_a_finding(tmp_path, tokenizer_folder):
    path = lines(tmp_path / "set.jsonl", [conversation(i, good_answer(i)) for i in range(40)])
    config = tmp_path / "limits.yaml"
    config.write_text(f"target:\n  model: {tokenizer_folder}\n  chat_template_args: {{think_in_prompt: true}}\n")
    found = audit_path(str(path), settings(None, config))
    assert [finding.code for finding in found.findings] == ["boundary_moved"]
    assert (
        "100.0% of 40 answers do not begin where the prompt's rendering ends (limit 2%)" in found.findings[0].sentence
    )
    assert found.examples[0].row.endswith("set.jsonl line 1")


def test_a_config_with_limits_alone_and_its_mistakes(tmp_path):
    path, config = lines(tmp_path / "set.jsonl", historic_tokens()), tmp_path / "limits.yaml"
    config.write_text("audit: {max_spike: 1, max_short: 1, max_duplicates: 1, min_mean_loss_tokens: 0}")
    assert command("audit", path, "--config", config).exit_code == 0
    config.write_text("audit: {max_spikes: 1}")
    with pytest.raises(UserError, match=r"audit\.max_spikes is not a known key"):
        settings(None, config)
    with pytest.raises(UserError, match="There is no configuration file"):
        settings(None, tmp_path / "absent.yaml")


def test_messages_need_a_tokenizer(tmp_path):
    path = lines(tmp_path / "set.jsonl", [conversation(0, "yes")])
    with pytest.raises(UserError, match=r"set\.jsonl line 1 holds messages, .* --tokenizer"):
        audit_path(str(path), settings(None, None))


def test_bad_records_are_counted_and_limited(tmp_path, tokenizer_folder):
    records = [conversation(i, good_answer(i)) for i in range(60)]
    path = lines(tmp_path / "set.jsonl", records)
    with path.open("a") as stream:
        stream.write("{broken\n" * 20 + json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n")
        stream.write(json.dumps({"prompt": "?"}) + "\n")
    found = audit_path(str(path), settings(str(tokenizer_folder), None))
    assert found.measurements.overall.rejected == {"broken_json": 20, "no_answer": 2}
    assert found.findings[0].code == "rejected"
    assert found.findings[0].likely == "What their most common reason says, which is broken_json (20 rows)."


def test_bad_token_rows_are_refused_one_by_one(tmp_path, tokens):
    good = token_record([1, 2, 3], 1)
    bad = [
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, "x"], "loss_mask": [1, 1]},
        {"input_ids": [1, 2], "loss_mask": [1, 2]},
        {"input_ids": [1, 2]},
        {"input_ids": [], "loss_mask": []},
        {"input_ids": [1, 2**40], "loss_mask": [1, 1]},
        {"input_ids": [1, -5], "loss_mask": [1, 1]},
    ]
    path = lines(tmp_path / "set.jsonl", [good, *bad, {"input_ids": [1, 2], "loss_mask": [False, True]}])
    (chunk,) = foreign.chunks(str(path), foreign.Reading())
    assert chunk.completions["place"].to_pylist() == [f"{path} line 1", f"{path} line 9"]
    assert chunk.rejected.num_rows == len(bad)
    assert "set.jsonl line 2: `input_ids` has 2 entries and `loss_mask` has 1" in chunk.rejected["detail"][0].as_py()
    pq.write_table(
        pa.Table.from_pylist([good, bad[0], {"input_ids": None, "loss_mask": None}]), tmp_path / "set.parquet"
    )
    (chunk,) = foreign.chunks(str(tmp_path / "set.parquet"), foreign.Reading())
    assert (chunk.completions.num_rows, chunk.rejected.num_rows) == (1, 2)


def test_ids_outside_the_vocabulary_are_refused(tmp_path, tokens):
    path = lines(tmp_path / "set.jsonl", [token_record([1, 2, 3], 1), token_record([1, 2, 5000], 1)])
    (chunk,) = foreign.chunks(str(path), foreign.Reading(tokens=tokens))
    assert chunk.rejected["reason"].to_pylist() == ["bad_ids"]
    assert chunk.completions.num_rows == len(chunk.moved) == 1


@pytest.mark.parametrize(
    ("output", "given", "reason"),
    [([1, 2], None, "length"), ([1, 92], None, "stop"), ([1, 92, 93], None, "stop"), ([1, 92, 1], None, "length")],
)
def test_how_an_answer_ended_is_seen_at_its_end(output, given, reason):
    known = TokenInfo(eos_ids=frozenset({92}), blank_ids=frozenset({93}))
    rows = TokenRows("chat", known)
    rows.add_record(token_record([5, *output], 1), "row 1")
    # An end token behind the loss, and padding, say the same.
    rows.add_record({"input_ids": [5, 1, 92, 0, 0], "loss_mask": [0, 1, 0, 0, 0]}, "row 2")
    assert rows.tables()[0]["finish_reason"].to_pylist() == [reason, "stop"]


def test_a_given_finish_reason_is_believed(tmp_path):
    records = [token_record([1, 2, 3], 1) | {"finish_reason": "length"}, token_record([1, 2, 3], 1)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "set.parquet")
    for path in (tmp_path / "set.parquet", lines(tmp_path / "set.jsonl", records)):
        (chunk,) = foreign.chunks(str(path), foreign.Reading())
        assert chunk.completions["finish_reason"].to_pylist() == ["length", "unknown"]


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=6))
def test_a_row_is_split_at_its_first_loss_token(drawn):
    rows = TokenRows("chat", TokenInfo())
    for pairs in drawn:
        rows.add_record({"input_ids": [i for i, _ in pairs], "loss_mask": [int(b) for _, b in pairs]}, "x")
    for found, pairs in zip(rows.tables()[0].to_pylist(), drawn, strict=True):
        bits = [bit for _, bit in pairs]
        start = bits.index(True) if True in bits else len(bits)
        assert found["prompt_ids"] + found["output_ids"] == [i for i, _ in pairs]
        assert len(found["prompt_ids"]) == start
        assert found["loss_mask"] == bits[start:]


def test_our_own_completions_and_rejections_in_a_folder(tmp_path):
    rows = [row(i, [i, *range(100, 140 + i)]) for i in range(50)]
    write_rows(tmp_path / "a-1.parquet", COMPLETIONS, rows, {})
    refused = [
        {"prompt_id": f"x{i}", "sample": 0, "source": "chat", "reason": "empty", "detail": ""} for i in range(30)
    ]
    write_rows(tmp_path / "a-1.rejected.parquet", REJECTED, refused, {})
    found = audit_path(str(tmp_path), settings(None, None))
    assert (found.measurements.overall.rows, found.measurements.overall.rejected) == (50, {"empty": 30})
    assert [finding.code for finding in found.findings] == ["rejected"]
    rows_written, _ = write_source(str(tmp_path / "a-1.parquet"), tmp_path / "out.jsonl", None)
    assert rows_written == 50
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert first["loss_mask"] == [0, 0] + [1] * 41


def test_many_chunks_and_packed_files_are_one_set(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "CHUNK_ROWS", 7)
    plain = lines(tmp_path / "set.jsonl", historic_tokens())
    whole = audit_path(str(plain), settings(None, None))
    (tmp_path / "packed").mkdir()
    with gzip.open(tmp_path / "packed" / "set.jsonl.gz", "wb") as stream:
        stream.write(plain.read_bytes())
    pieces = audit_path(str(tmp_path / "packed"), settings(None, None))
    monkeypatch.undo()
    assert pieces.measurements == whole.measurements == audit_path(str(plain), settings(None, None)).measurements


def test_the_whole_audit_as_json(tmp_path):
    path = lines(tmp_path / "set.jsonl", historic_tokens())
    value = json.loads(command("audit", path, "--json").stdout)
    assert (value["verdict"], value["checks"][0]["count"]) == ("fail", 348)
    assert "answers" not in value["measurements"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_import_writes_a_source_that_reads_back(tmp_path, tokenizer_folder, kind):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    records = [conversation(i, good_answer(i)) | ({"tools": tools} if i == 3 else {}) for i in range(40)]
    path, out = lines(tmp_path / "set.jsonl", records), tmp_path / f"out.{kind}"
    result = command("import", path, "--out", out, "--tokenizer", tokenizer_folder)
    assert result.exit_code == 0, result.output
    assert "40 rows were written" in result.output
    assert f'- {{path: "{out}", answers: keep}}' in result.output
    (file,) = find(str(out))
    back = [parse_answered(raw.decode()).prompt_id for raw in read(file)]
    assert back == [parse_answered(record).prompt_id for record in records]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_import_of_token_ids_reads_back(tmp_path, kind):
    records = [token_record([9, i, *range(300, 340 + i)], 2) for i in range(52)]
    out = tmp_path / f"out.{kind}"
    assert command("import", lines(tmp_path / "set.jsonl", records), "--out", out).exit_code == 0
    (file,) = find(str(out))
    assert [parse_answered(raw.decode()).record for raw in read(file)] == records


def test_import_refuses_a_bad_set_unless_forced(tmp_path, tokenizer_folder):
    path, out = lines(tmp_path / "set.jsonl", historic("")), tmp_path / "out.jsonl"
    refused = command("import", path, "--out", out, "--tokenizer", tokenizer_folder)
    assert refused.exit_code == 1
    assert "Nothing was imported" in refused.output
    assert not out.exists()
    forced = command("import", path, "--out", out, "--tokenizer", tokenizer_folder, "--force")
    assert "52 rows were written" in forced.output
    assert "348 were left out" in forced.output
    with pytest.raises(UserError, match=r"must end in \.jsonl or \.parquet"):
        write_source(str(path), tmp_path / "out.csv", None)
