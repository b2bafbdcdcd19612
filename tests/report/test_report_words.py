"""What the numbers mean in words."""

from __future__ import annotations

from typing import Any

import pytest

from draftmill.report import words
from draftmill.report.inputs import Acceptance, Evaluation, Interval


def interval(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "low": low, "high": high}


def decoder(mean: float, low: float, high: float) -> dict[str, Any]:
    return {
        "prompts": 16,
        "tokens": 512,
        "target_forwards": 480,
        "saved_forwards": 32,
        "saved_share": interval(0.0625, 0.05, 0.07),
        "acceptance_length": interval(mean, low, high),
        "by_position": [],
        "by_source": {},
    }


def evaluation(own: dict[str, Any], lookup: dict[str, Any], **values: Any) -> Evaluation:
    base = {"prompts": 16, "identical": 16, "divergences": [], "too_long": 0, "provenance": {}}
    return Evaluation.model_validate({**base, "drafter": own, "prompt_lookup": lookup, **values})


def test_headline() -> None:
    sentences = words.headline(evaluation(decoder(1.07, 1.04, 1.1), decoder(1.5, 1.3, 1.7)))
    assert sentences[0] == (
        "On 16 held-out prompts a verifying forward of the target yields 1.07 tokens with this drafter (95% interval "
        "1.04 to 1.10), so 6.2% of the target's forwards are saved: 480 forwards for 512 tokens."
    )
    assert sentences[1].endswith("Prompt lookup is clearly better than this drafter.")
    assert sentences[2] == (
        "All 16 answers are equal to greedy decoding by the target alone, token for token, with both decoders."
    )


@pytest.mark.parametrize(
    ("own", "lookup", "verdict"),
    [
        ((3.0, 2.8, 3.2), (1.5, 1.3, 1.7), "The drafter is clearly better."),
        ((1.6, 1.4, 1.8), (1.5, 1.3, 1.7), "intervals overlap"),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), "intervals overlap"),
    ],
)
def test_the_verdict_against_prompt_lookup(own: Any, lookup: Any, verdict: str) -> None:
    assert verdict in words.headline(evaluation(decoder(*own), decoder(*lookup)))[1]


def test_a_length_near_one_is_explained_with_the_size_of_the_data() -> None:
    near = Acceptance.model_validate(decoder(1.07, 1.04, 1.1))
    assert "learnt from 195 answers in a set of 9,123 loss tokens" in words.meaning(near, 195, 9123)
    assert words.meaning(Acceptance.model_validate(decoder(2.4, 2.2, 2.6)), 195, 9123) == ""


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (3456, "3.5 kB"), (26641240, "26.6 MB"), (94e12, "94.0 TB")]
)
def test_sizes(count: float, text: str) -> None:
    assert words.size(count) == text


def test_plurals() -> None:
    assert [words.plural(n, "shard") for n in (0, 1, 2000)] == ["0 shards", "1 shard", "2,000 shards"]


def test_interval_text() -> None:
    assert words.bounds(Interval(mean=1.5, low=1.25, high=1.75)) == "1.25 to 1.75"
    assert words.share_bounds(Interval(mean=0.5, low=0.25, high=0.755)) == "25.0% to 75.5%"
