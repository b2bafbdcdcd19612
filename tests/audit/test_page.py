import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.audit.counts import Counts
from draftmill.audit.histogram import HEIGHT, histogram
from draftmill.audit.page import render
from draftmill.audit.result import audit_tables, combine
from draftmill.audit.text import visible
from draftmill.audit.tokens import TokenInfo
from draftmill.canonical import canonical_json
from draftmill.config import AuditConfig

from .conftest import NO_REJECTIONS, rejections, row, table

HOSTILE = "</pre><script>alert(1)</script>\x1b[31mred\x00\u202eevil\u2066<img src=x onerror=y>&amp;{{ 7*7 }}"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


NO_TOKENS, LIMITS = TokenInfo(), AuditConfig()


def page_of(rows, tokens=NO_TOKENS, limits=LIMITS, rejected=NO_REJECTIONS, name="Shard x"):
    result = audit_tables(name, table(rows), rejected, limits, tokens, {"spec": HOSTILE})
    return render(result), result


def test_hostile_text_is_only_text():
    rows = [
        row(i, [i, 2, 3], text=HOSTILE, source=HOSTILE, prompt_id=f"{HOSTILE}{i}", finish_reason=HOSTILE)
        for i in range(9)
    ]
    page, result = page_of(rows, name=HOSTILE, rejected=rejections(3, HOSTILE, HOSTILE))
    tags = Tags()
    tags.feed(page)
    assert not {"script", "img", "iframe", "link"}.intersection(tags.names)
    assert not [name for name in tags.attributes if name.startswith("on") or name == "src"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", page)
    assert "⟦U+001B⟧[31mred⟦U+0000⟧⟦U+202E⟧evil" in page
    assert "{{ 7*7 }}" in page
    shown = canonical_json([e.model_dump() for e in result.examples]) + result.failure("page")
    assert not re.search(r"[\x00-\x08\x1b\u202e\u2066]", shown)


def test_a_hostile_tokenizer_text_is_only_text_too():
    page, _ = page_of([row(0, [1, 2])], TokenInfo(decode=lambda ids: HOSTILE))
    assert "<script" not in page
    assert "\x1b" not in page


def test_the_loss_mask_is_shown():
    tokens = TokenInfo(decode=lambda ids: "".join(f"[{i}]" for i in ids))
    page, result = page_of([row(0, [1, 2, 3, 4], loss_mask=[True, True, False, True])], tokens)
    segments = [(s.kind, s.text) for s in result.examples[0].segments]
    assert segments == [("prompt", "[1000][7]"), ("answer", "[1][2]"), ("masked", "[3]"), ("answer", "[4]")]
    assert '<span class="masked">[3]</span>' in page


def test_a_long_answer_is_shown_by_both_ends():
    tokens = TokenInfo(decode=lambda ids: " ".join(map(str, ids)))
    _, result = page_of([row(0, list(range(5000)))], tokens)
    kinds = [s.kind for s in result.examples[0].segments]
    assert kinds == ["prompt", "answer", "left_out", "answer"]
    assert result.examples[0].segments[-1].text.endswith(" 4999")
    assert len(canonical_json(result.examples[0].model_dump())) < 8000


def test_a_decoder_that_fails_leaves_numbers():
    def decode(ids):
        raise OverflowError("no such id")

    _, result = page_of([row(0, [1, 2])], TokenInfo(decode=decode))
    assert result.examples[0].segments[1].text == "1 2"


@pytest.mark.parametrize("rows", [[], [row(0, [])], [row(i, [1] * (7 * i)) for i in range(300)]])
def test_a_page_is_there_for_any_rows(rows):
    page, _ = page_of(rows)
    assert "</html>" in page
    assert "http://" not in page
    assert "https://" not in page
    assert len(page) < 200_000


def test_a_page_without_examples_and_one_of_a_set():
    page, result = page_of([row(0, [1, 2])], limits=AuditConfig(examples=0))
    assert result.examples == []
    assert "</html>" in render(combine("set", [result, result], AuditConfig()))
    assert "None were asked for" in page


def test_limits_are_drawn_in():
    rows = [row(i, [i, *range(100, 140 + (i % 20 if i > 50 else 0))]) for i in range(100)]
    page, result = page_of(rows)
    assert "limit for one exact value" in page
    assert re.search(r"fails from \d+ rows", page)
    assert result.verdict == "fail"


@given(
    st.dictionaries(st.integers(0, 5000), st.integers(1, 9), max_size=60),
    st.dictionaries(st.integers(0, 5000), st.integers(1, 9), max_size=5),
)
def test_the_histogram_conserves_rows(whole, cut):
    counts = Counts(rows=sum(whole.values()) + sum(cut.values()), histogram=whole, histogram_cut=cut)
    plot = histogram(counts, 0.3)
    if plot is None:
        assert counts.rows == 0
        return
    assert sum(bar.whole + bar.cut for bar in plot.bars) == counts.rows
    assert len(plot.bars) <= 48
    for bar in plot.bars:
        assert 0 <= bar.cut_y <= bar.whole_y <= bar.mode_y <= HEIGHT


@given(st.text())
def test_visible_text_has_no_control_left_and_letters_stay(text):
    shown = visible(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]", shown)
    shown.encode()
    assert visible("Grüße, 你好 🙂\n\tx") == "Grüße, 你好 🙂\n\tx"
