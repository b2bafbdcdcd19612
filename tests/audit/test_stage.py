import json

import pytest

from draftmill.audit.tokens import TokenInfo
from draftmill.config import AuditConfig
from draftmill.errors import UserError
from draftmill.schemas import COMPLETIONS, REJECTED, write_rows
from draftmill.stages.audit import audit_set, audit_shard

from .conftest import row

LIMITS, NO_TOKENS = AuditConfig(), TokenInfo()
CAUSE = (
    "thinking used up max_new_tokens, or a reasoning parser kept only `content`, and the chat template rendered an "
    "empty think block"
)


@pytest.fixture
def shard(tmp_path):
    """Writes a shard's files and audits them."""

    def run(rows, rejected=(), name="abc-123", limits=LIMITS, tokens=NO_TOKENS):
        completions, refused = tmp_path / f"{name}.parquet", tmp_path / f"{name}.rejected.parquet"
        write_rows(completions, COMPLETIONS, rows, {})
        write_rows(refused, REJECTED, rejected, {})
        out = tmp_path / "audits" / f"{name}.json"
        failed = tmp_path / "audits" / "failed" / f"{name}.json"
        return audit_shard(
            completions, refused, out, out.with_suffix(".html"), limits, tokens, {"stage": "audit"}, failed=failed
        )

    return run


def healthy(count, first=0):
    return [row(i, [i, *range(200, 230 + i % 90), 92]) for i in range(first, first + count)]


def historic(tokenizer, tokens, count=400, bad=348):
    turn = list(tokens.empty_turn[-6:])
    assert tokenizer.decode(turn) == "<think>\n\n</think>\n\n<|im_end|>\n"
    text = tokenizer.decode(turn)
    return [row(i, turn, text=text) for i in range(bad)] + healthy(count - bad, bad)


def test_the_historic_fault_stops_with_its_sentence(shard, tmp_path, tokenizer, tokens):
    with pytest.raises(UserError) as error:
        shard(historic(tokenizer, tokens), tokens=tokens)
    page = tmp_path / "audits" / "failed" / "abc-123.html"
    assert str(error.value) == (
        f"Shard abc-123 fails its audit: 87.0% of 400 answers have exactly 6 loss tokens (limit 30%); "
        f"most likely {CAUSE}; numbers and examples are in {page} (3 more limits are broken)."
    )
    verdict = json.loads(page.with_suffix(".json").read_text())
    assert verdict["verdict"] == "fail"
    assert [finding["code"] for finding in verdict["findings"]] == ["spike", "empty", "short", "duplicates"]
    assert verdict["findings"][0]["examples"] == [f"p{i:05}/0" for i in range(5)]
    assert verdict["measurements"]["overall"]["template_only"] == 348
    assert verdict["provenance"] == {"stage": "audit"}
    assert not (tmp_path / "audits" / "abc-123.json").exists()
    assert "87.0% of 400 answers have exactly 6 loss tokens" in page.read_text()


def test_the_fault_is_named_without_a_tokenizer_too(shard):
    with pytest.raises(
        UserError, match=r"87\.0% of 400 answers have exactly 6 loss tokens \(limit 30%\); most likely thinking"
    ):
        shard([row(i, [248068, 271, 248069, 271, 248046, 198]) for i in range(348)] + healthy(52, 348))


def test_a_pass_writes_both_files_and_removes_an_older_failure(shard, tmp_path):
    with pytest.raises(UserError, match="1 more limit is broken"):
        shard([row(i, [5] * 60, text="") for i in range(30)], limits=AuditConfig(max_spike=1, max_duplicates=1))
    assert sorted(p.name for p in (tmp_path / "audits").rglob("*.*")) == ["abc-123.html", "abc-123.json"]
    result = shard(healthy(60))
    assert result.verdict == "pass"
    found = sorted(str(p.relative_to(tmp_path / "audits")) for p in (tmp_path / "audits").rglob("*.*"))
    assert found == ["abc-123.html", "abc-123.json"]


def test_a_failure_removes_an_older_pass(shard, tmp_path):
    shard(healthy(60))
    with pytest.raises(UserError):
        shard(healthy(60), limits=AuditConfig(min_mean_loss_tokens=1000))
    assert not (tmp_path / "audits" / "abc-123.json").exists()


def test_rejected_rows_stop_a_shard_with_their_reason(shard):
    refused = [
        {"prompt_id": f"x{i}", "sample": 0, "source": "chat", "reason": "token_run", "detail": ""} for i in range(30)
    ]
    with pytest.raises(UserError, match=r"33\.3% of 90 rows have no answer .* which is token_run \(30 rows\)"):
        shard(healthy(60), refused)


def test_a_demo_shard_cut_at_its_length_passes(shard):
    rows = [row(i, [i, *range(100, 147)], finish_reason="length") for i in range(40)] + healthy(10, 40)
    assert shard(rows).verdict == "pass"


def test_a_shard_without_any_row_fails(shard):
    with pytest.raises(UserError, match="holds no row at all"):
        shard([])


def test_both_files_are_the_same_bytes_again(shard, tmp_path, tokens):
    names = [tmp_path / "audits" / f"abc-123.{kind}" for kind in ("json", "html")]
    shard(healthy(60), tokens=tokens)
    first = [path.read_bytes() for path in names]
    shard(healthy(60), tokens=tokens)
    assert [path.read_bytes() for path in names] == first


def test_a_damaged_shard_is_named(shard):
    rows = healthy(5)
    rows[2]["loss_mask"] = [True]
    with pytest.raises(UserError, match=r"abc-123\.parquet is damaged: the loss mask of row 2"):
        shard(rows)


def test_the_whole_set_is_merged_and_judged(shard, tmp_path):
    for number in range(3):
        shard(healthy(60, 60 * number), name=f"s{number}-1")
    paths = [tmp_path / "audits" / f"s{number}-1.json" for number in (2, 0, 1)]
    page = tmp_path / "whole.html"
    result = audit_set(paths, LIMITS, page)
    assert (result.verdict, result.measurements.overall.rows) == ("pass", 180)
    assert page.read_text().startswith("<!doctype html>")
    assert audit_set(sorted(paths), LIMITS).to_json() == result.to_json()


def test_duplicates_between_shards_break_the_whole_set_only(shard, tmp_path):
    for number in range(4):
        rows = [row(100 * number + i, [i, *range(200, 240 + i)]) for i in range(40)]
        shard(rows, name=f"s{number}-1")
    result = audit_set([tmp_path / "audits" / f"s{n}-1.json" for n in range(4)], LIMITS)
    assert [finding.code for finding in result.findings] == ["duplicates"]


def test_a_file_that_is_no_audit_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"format": 7}')
    with pytest.raises(UserError, match=r"a\.json is not a readable audit \(its format is 7, not 1\)"):
        audit_set([path], LIMITS)
