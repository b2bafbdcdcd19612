"""Numbers as text, and the sentences that say what the numbers mean."""

from __future__ import annotations

from draftmill.audit.sentences import percent
from draftmill.report.inputs import Acceptance, Divergence, Evaluation, Interval

# Below this many tokens a forward hardly a proposal is accepted, and a page of plots would hide that.
NEAR_ONE = 1.25


def number(value: int) -> str:
    """A whole number with thousands apart."""
    return f"{value:,}"


def size(count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A counted noun: 1 shard, 2 shards."""
    return f"{number(count)} {noun if count == 1 else many or noun + 's'}"


def bounds(value: Interval) -> str:
    """The interval of an acceptance length."""
    return f"{value.low:.2f} to {value.high:.2f}"


def share_bounds(value: Interval) -> str:
    """The interval of a share."""
    return f"{percent(value.low)} to {percent(value.high)}"


def headline(evaluation: Evaluation) -> list[str]:
    """What was measured, in sentences: the drafter, prompt lookup beside it, and the equality of the texts."""
    own, lookup = evaluation.drafter, evaluation.prompt_lookup
    return [
        f"On {plural(evaluation.prompts, 'held-out prompt')} a verifying forward of the target yields "
        f"{own.acceptance_length.mean:.2f} tokens with this drafter (95% interval {bounds(own.acceptance_length)}), so "
        f"{percent(own.saved_share.mean)} of the target's forwards are saved: {number(own.target_forwards)} forwards "
        f"for {number(own.tokens)} tokens.",
        f"Prompt lookup, which needs no drafter, yields {lookup.acceptance_length.mean:.2f} tokens on the same prompts "
        f"({bounds(lookup.acceptance_length)}) and saves {percent(lookup.saved_share.mean)} of the forwards "
        f"({share_bounds(lookup.saved_share)}). {_versus(own, lookup)}",
        _equality(evaluation),
    ]


def _versus(own: Acceptance, lookup: Acceptance) -> str:
    mine, other = own.acceptance_length, lookup.acceptance_length
    if mine.low > other.high:
        return "The drafter is clearly better."
    if mine.high < other.low:
        return "Prompt lookup is clearly better than this drafter."
    return "The two intervals overlap: take more held-out prompts to tell the two apart."


def _equality(evaluation: Evaluation) -> str:
    total = evaluation.prompts
    if not evaluation.divergences:
        answers = "The one answer is" if total == 1 else f"All {number(total)} answers are"
        return f"{answers} equal to greedy decoding by the target alone, token for token, with both decoders."
    widest = max(found.gap for found in evaluation.divergences)
    return (
        f"With the drafter {number(evaluation.identical)} of {plural(total, 'answer')} equal greedy decoding by the "
        f"target alone, token for token. {plural(len(evaluation.divergences), 'answer')} of either decoder left it, "
        f"where the target's two best logits were at most {gap(widest)} apart."
    )


def gap(value: float) -> str:
    """A difference of logits."""
    return f"{value:.3g}"


def decoder(found: Divergence) -> str:
    """A decoder's name for people."""
    return found.decoder.replace("_", " ")


def meaning(own: Acceptance, rows: int, loss_tokens: int) -> str:
    """What a length near 1 means, with the size of the data; empty where drafting works."""
    if own.acceptance_length.mean >= NEAR_ONE:
        return ""
    return (
        "An acceptance length of 1 means that no proposal is accepted and nothing is saved; "
        f"{own.acceptance_length.mean:.2f} is near that. This drafter learnt from {plural(rows, 'answer')} in a set of "
        f"{plural(loss_tokens, 'loss token')}; useful drafters learn from hundreds of thousands of answers. So the "
        "figure shows that the whole path works, not what a drafter can do: more prompts, longer answers and more "
        "epochs are what raises it."
    )
