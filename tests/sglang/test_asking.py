"""Rows that no server may be asked: SGLang 0.5.17 dies of an id outside the vocabulary."""

import json

from hypothesis import given
from hypothesis import strategies as st

from draftmill.config import parse
from draftmill.stages import asking
from draftmill.stages.asking import Target, sort_rows
from draftmill.stages.rows import RowRules
from tests.tiny import config_values

VOCABULARY = 50


@given(st.lists(st.lists(st.integers(0, 2 * VOCABULARY), min_size=1, max_size=8), min_size=1, max_size=6))
def test_rows_with_an_id_outside_the_vocabulary_are_refused_before_they_are_asked(prompts):
    config = parse(config_values(generate={"engine": "sglang", "samples": 2}))
    target = Target(None, RowRules(config.generate, frozenset({1}), VOCABULARY), 10_000)
    rows = [
        {"prompt_id": f"p{n}", "source": "chat", "record": json.dumps({"messages": [], "n": n})}
        for n in range(len(prompts))
    ]
    kept = asking.render_prompt
    asking.render_prompt = lambda tokenizer, record, template_args: prompts[record["n"]]
    try:
        good, asked, bad = sort_rows(rows, config, target)
    finally:
        asking.render_prompt = kept
    assert good == {}
    assert all(max(item.prompt_ids) < VOCABULARY for item in asked)
    outside = {f"p{n}" for n, ids in enumerate(prompts) if max(ids) >= VOCABULARY}
    assert {key[0] for key in bad} == outside
    assert {row["reason"] for row in bad.values()} <= {"bad_ids"}
    assert len(asked) + len(bad) == 2 * len(prompts)
