import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.audit.columns import Ragged
from draftmill.audit.counts import Measurements, merge
from draftmill.audit.limits import check
from draftmill.audit.measure import is_blank, measure
from draftmill.audit.repetition import repeated_ngrams
from draftmill.audit.tokens import TokenInfo
from draftmill.canonical import canonical_json
from draftmill.config import AuditConfig

from .conftest import NO_REJECTIONS, rejections, row, table

OPEN, CLOSE, END, NEWLINE = 90, 91, 92, 93
TOKENS = TokenInfo(
    special_ids=frozenset({END, 94}),
    eos_ids=frozenset({END}),
    think_open=OPEN,
    think_close=CLOSE,
    blank_ids=frozenset({NEWLINE}),
    empty_turn=(94, 50, OPEN, NEWLINE, CLOSE, NEWLINE, END, NEWLINE),
)


def counts(rows, rejected=NO_REJECTIONS):
    return measure(table(rows), rejected, TOKENS).measurements.overall


def test_histogram_keeps_rows_cut_by_length_apart():
    rows = [row(i, [1] * 48, finish_reason="length") for i in range(9)] + [row(9, [1, 2, END])]
    found = counts(rows)
    assert (found.histogram, found.histogram_cut, found.cut) == ({3: 1}, {48: 9}, 9)
    assert found.spike == (3, 1)
    assert found.mean == (9 * 48 + 3) / 10


def test_a_short_imported_answer_without_an_end_token_is_not_excused_as_cut():
    short = [row(i, [1, 2, 3, 4, 5, 6], origin="imported", finish_reason="length") for i in range(87)]
    long = [row(90 + i, list(range(40 + i)), origin="imported", finish_reason="length") for i in range(13)]
    found = counts(short + long)
    assert found.spike == (6, 87)
    assert found.cut == 13


def test_only_tokens_with_loss_are_counted():
    found = counts([row(0, [1, 2, 3, END], loss_mask=[False, True, False, True]), row(1, [1, END])])
    assert found.histogram == {2: 2}


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="loss mask of row 1"):
        counts([row(0, [1, END]), row(1, [1, END], loss_mask=[True])])


@pytest.mark.parametrize(
    ("output", "text", "empty", "template_only"),
    [
        ([], "", 1, 0),
        ([END], "<end>", 1, 0),
        ([NEWLINE, END], "x", 1, 0),
        ([CLOSE, NEWLINE, END], "x", 1, 1),
        ([OPEN, NEWLINE, CLOSE, NEWLINE, END, NEWLINE], "x", 1, 1),
        ([94, 50, OPEN], "x", 1, 1),  # the template's own word between its marks
        ([50], "x", 0, 0),
        ([1, END], "x", 0, 0),
        ([OPEN, 1, CLOSE, END], "x", 0, 0),
        ([1, 2, END], " \n\u200b\u202e", 1, 0),
        ([1, 2, END], "<think>\n\n</think>\n\n", 1, 0),
    ],
)
def test_empty_and_template_only(output, text, empty, template_only):
    found = counts([row(0, output, text=text)])
    assert (found.empty, found.template_only) == (empty, template_only)


def test_a_text_that_begins_with_many_blanks_and_marks_is_not_blank():
    marks = ("<think>", "</think>")
    assert is_blank(" " * 250 + "<think>" + "</think>" * 9, marks)
    assert not is_blank(" " * 250 + "<think>" + "</think>" * 9 + "x", marks)


@pytest.mark.parametrize(
    ("prompt", "output", "finish", "state"),
    [
        ([5], [1, END], "stop", "none"),
        ([5, OPEN], [1, CLOSE, 2, END], "stop", "closed"),
        ([5], [OPEN, 1, CLOSE, END], "stop", "closed"),
        ([5, OPEN], [1, 2], "length", "unclosed_cut"),
        ([5], [OPEN, 2], "length", "unclosed_cut"),
        ([5], [OPEN, 2, END], "stop", "unclosed_ended"),
        ([5], [OPEN, 1, CLOSE, 2, OPEN, END], "stop", "unclosed_ended"),
        ([OPEN, 1, CLOSE, 5], [1, END], "stop", "none"),
    ],
)
def test_thinking_is_closed_unclosed_or_not_there(prompt, output, finish, state):
    found = counts([row(0, output, prompt_ids=prompt, finish_reason=finish)])
    assert found.thinking == {state: 1}


def test_marks_without_ids_are_no_thinking():
    found = measure(table([row(0, [OPEN, 1])]), NO_REJECTIONS, TokenInfo()).measurements.overall
    assert found.thinking == {"none": 1}


def test_a_loop_is_repetitive_and_counting_is_not():
    rows = [row(0, [1, 2, 3] * 20), row(1, list(range(60))), row(2, [7] * 31), row(3, [7] * 32)]
    assert counts(rows).repetitive == 2


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=8))
def test_repeated_ngrams_equal_the_definition(rows):
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    flat = np.array([i for r in rows for i in r], np.int32)
    repeated, total = repeated_ngrams(Ragged(flat, offsets))
    for index, ids in enumerate(rows):
        grams = [tuple(ids[k : k + 4]) for k in range(len(ids) - 3)]
        assert (repeated[index], total[index]) == (len(grams) - len(set(grams)), len(grams))


def test_duplicates_are_equal_answers_to_different_prompts():
    rows = [row(0, [1, END]), row(1, [1, END]), row(2, [2, END])]
    rows += [row(3, [3, END], sample=0), row(3, [3, END], sample=1)]  # two samples of one prompt may agree
    assert counts(rows).duplicates == 2


def test_duplicates_across_sources_and_merged_shards_are_found():
    one = measure(table([row(0, [1, END])]), NO_REJECTIONS, TOKENS).measurements
    other = measure(table([row(1, [1, END], source="code")]), NO_REJECTIONS, TOKENS).measurements
    assert (one.overall.duplicates, other.overall.duplicates) == (0, 0)
    both = merge([one, other])
    assert {source: c.duplicates for source, c in both.by_source.items()} == {"chat": 1, "code": 1}


def test_rejected_rows_are_counted_by_reason_and_source():
    found = measure(table([row(0, [1])]), rejections(3, "code", "timeout"), TOKENS).measurements
    assert found.by_source["code"].rejected == {"timeout": 3}
    assert (found.by_source["code"].rows, found.overall.rejections) == (0, 3)


ROW = st.fixed_dictionaries(
    {
        "ids": st.lists(st.sampled_from([1, 2, OPEN, CLOSE, END, NEWLINE]), max_size=6),
        "masked": st.booleans(),
        "prompt": st.integers(0, 3),
        "source": st.sampled_from(["chat", "code", "<b>"]),
        "finish": st.sampled_from(["stop", "length", "odd"]),
        "text": st.sampled_from(["", "yes", "</think>"]),
    }
)
REFUSED = st.lists(st.tuples(st.sampled_from(["chat", "maths"]), st.sampled_from(["length", "empty"])), max_size=4)


def _tables(drawn, refused):
    rows = [
        row(
            d["prompt"],
            d["ids"],
            source=d["source"],
            finish_reason=d["finish"],
            text=d["text"],
            loss_mask=[k % 2 == 0 for k in range(len(d["ids"]))] if d["masked"] else None,
        )
        for d in drawn
    ]
    return table(rows), pa.concat_tables([rejections(1, s, r) for s, r in refused] or [NO_REJECTIONS])


@given(st.lists(ROW, max_size=12), REFUSED)
def test_counts_conserve_rows_and_shares_are_shares(drawn, refused):
    found = measure(*_tables(drawn, refused), TOKENS)
    overall = found.measurements.overall
    assert overall.rows == len(drawn)
    assert overall.rejections == len(refused)
    for group in (overall, *found.measurements.by_source.values()):
        cut = sum(group.histogram_cut.values())
        assert sum(group.histogram.values()) + cut == group.rows
        assert sum(group.finish.values()) == sum(group.thinking.values()) == group.rows
        assert cut == group.finish.get("length", 0)
        assert group.template_only <= group.empty <= group.rows
        for one in check(group, AuditConfig()):
            assert one.code == "mean_loss_tokens" or 0 <= one.measured <= 1
            assert 0 <= one.count <= one.rows
    assert found.rows.duplicate.sum() == overall.duplicates
    assert found.rows.loss_tokens.sum() == overall.loss_tokens


@given(st.lists(ROW, max_size=12), REFUSED, st.integers(0, 12), st.integers(0, 4))
def test_measuring_together_equals_merging(drawn, refused, at, refused_at):
    whole = measure(*_tables(drawn, refused), TOKENS).measurements
    first = measure(*_tables(drawn[:at], refused[:refused_at]), TOKENS).measurements
    second = measure(*_tables(drawn[at:], refused[refused_at:]), TOKENS).measurements
    assert merge([first, second]) == whole
    assert merge([second, first]) == whole
    read_back = Measurements.from_json(json.loads(canonical_json(whole.to_json())))
    assert read_back == whole


def test_digests_that_do_not_fit_are_refused():
    value = measure(table([row(0, [1])]), NO_REJECTIONS, TOKENS).measurements.to_json()
    value["answers"]["chat"] = ""
    with pytest.raises(ValueError, match="do not fit"):
        Measurements.from_json(value)
