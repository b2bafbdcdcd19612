"""The plan for a terminal: a table of what is there and what is not, why, what it takes, and whence each rate comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from draftmill.plan.types import Cause, Difference, Edited, Estimate, Plan, Rate, StagePlan

_Show = Callable[[float], str]

_HEAD = ("stage", "there", "new", "changed", "missing", "orphaned")
# Shards and settings named in one sentence; the JSON form has all of them.
_NAMED = 4
_VALUE_LENGTH = 40
_SOURCES = {
    "pilot": "measured by the pilot",
    "history": "measured by {jobs} finished jobs",
    "older history": "measured by {jobs} finished jobs of other settings",
    "default": "assumed; nothing was measured yet (plan: in the configuration)",
}


def lines(plan: Plan) -> Iterator[str]:
    """The plan, line by line."""
    shards = plan.stage("generate").wanted
    yield f"{plan.store}: {plan.prompts:,} prompts in {shards:,} {_noun('shard', shards)}"
    yield ""
    yield from _table([_HEAD, *(_row(stage) for stage in plan.stages)])
    yield from _why(plan)
    if not plan.jobs:
        yield from ("", "Nothing is to be done.")
        return
    yield from _costs(plan)
    yield from _rates(plan)


def _row(stage: StagePlan) -> tuple[str, ...]:
    counts = (stage.exist, stage.new, stage.changed, stage.missing, stage.orphaned.objects)
    return (stage.stage, *(f"{count:,}" if count else "-" for count in counts))


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        numbers = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join((first.ljust(widths[0]), *numbers))


def _why(plan: Plan) -> Iterator[str]:
    reasons = [f"{stage.stage}: {_cause(stage, cause)}" for stage in plan.stages for cause in stage.causes]
    if reasons:
        yield from ("", *reasons)
    for edited in plan.edited[:_NAMED]:
        yield f"shard {edited.shard}: {_edited(edited)}"
    if len(plan.edited) > _NAMED:
        yield f"and {len(plan.edited) - _NAMED:,} more shards with edited prompts (--json names all)"
    orphans = [stage.orphaned for stage in plan.stages] + [plan.orphaned_prompts]
    count = sum(one.objects for one in orphans)
    if count:
        size = _bytes(sum(one.bytes for one in orphans))
        yield f"{count:,} {_noun('object', count)} ({size}) in the store {_be(count)} of no use to this configuration"


def _cause(stage: StagePlan, cause: Cause) -> str:
    count = f"{cause.jobs:,} {_noun('job', cause.jobs)}"
    since = f" (before: fingerprint {cause.since})" if cause.since else ""
    match cause.kind:
        case "new":
            return f"{count}, not made before"
        case "prompts":
            return f"{count}, because prompts changed{since}"
        case "missing":
            return f"{count}, because the {_noun('object', cause.jobs)} made before {_be(cause.jobs)} missing"
        case "removed":
            return f"{count} again, because hidden.policy window removed the states after training"
        case "upstream":
            return f"{count}, because {' and '.join(cause.upstream) or 'an earlier stage'} changed{since}"
    changed = "; ".join(map(_difference, cause.differences[:_NAMED])) or "settings changed"
    more = len(cause.differences) - _NAMED
    return f"{count}, because {changed}{f' and {more} more' if more > 0 else ''}{since}"


def _difference(one: Difference) -> str:
    if one.was is None and one.now is None:
        return f"{one.setting} changed"
    return f"{one.setting} is {_value(one.now)} and was {_value(one.was)}"


def _value(value: object) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[: _VALUE_LENGTH - 1]}…"


def _edited(edited: Edited) -> str:
    old = (
        f"in place of {', '.join(edited.instead_of[:_NAMED])}{' and others' if len(edited.instead_of) > _NAMED else ''}"
    )
    if not edited.new_rows:
        return f"its {edited.rows:,} prompts are known, {old}"
    rows = ", ".join(
        str(start + 1) if stop - start == 1 else f"{start + 1} to {stop}" for start, stop in edited.new[:_NAMED]
    )
    more = " and others" if len(edited.new) > _NAMED else ""
    return f"{edited.new_rows:,} of {edited.rows:,} prompts new or edited ({_noun('row', edited.new_rows)} {rows}{more}), {old}"


def _costs(plan: Plan) -> Iterator[str]:
    generate, extract = plan.stage("generate"), plan.stage("extract")
    yield ""
    for stage in plan.stages:
        if stage.planned and stage.need.rates:
            yield f"{stage.stage}: {_amount(plan, stage)}"
    if generate.planned:
        yield f"completions: {_estimate(generate.need.bytes, _bytes)}"
    if extract.planned:
        yield f"hidden states: {_states(plan)}"
    yield f"in all: {_hours(plan, plan.gpu_hours)}{_money(plan, plan.gpu_hours)}"


def _amount(plan: Plan, stage: StagePlan) -> str:
    need = stage.need
    taken = f", of which at most {need.rows_taken_over:,} are taken over," if need.rows_taken_over else ","
    tokens = _estimate(need.tokens, _count)
    hours = _hours(plan, need.gpu_hours)
    return f"{need.rows:,} {_noun('row', need.rows)}{taken} {tokens} tokens, {hours}{_money(plan, need.gpu_hours)}"


def _states(plan: Plan) -> str:
    states = plan.states
    text = f"{_estimate(states.written, _bytes)} to write, at most {_bytes(states.peak.value)} in the store at once"
    if states.peak.value > states.budget:
        text += f", which is over hidden.budget_gib ({_bytes(states.budget)})"
    if states.extracted_again:
        again = states.extracted_again
        text += (
            f"; {again:,} {_noun('shard', again)} extracted again, because hidden.policy window removed the states when "
            f"they had been trained on: {_estimate(states.again_bytes, _bytes)}, {_hours(plan, states.again_hours)}"
            f"{_money(plan, states.again_hours)}"
        )
    return text


def _rates(plan: Plan) -> Iterator[str]:
    yield ""
    shown: dict[str, None] = {}
    for stage in plan.stages:
        if stage.planned:
            for name, rate in stage.need.rates.items():
                shown[f"{_rate_label(stage.stage, name)}: {_rate(name, rate)}"] = None
    yield from shown


def _rate_label(stage: str, name: str) -> str:
    return {"answer": "answers", "row": "rows, prompt and answer", "bytes": "completions"}.get(name, stage)


def _rate(name: str, rate: Rate) -> str:
    source = _SOURCES[rate.source].format(jobs=rate.jobs)
    source = source.replace("1 finished jobs", "1 finished job")
    if name != "speed":
        return f"{_estimate(rate.estimate, _count)} {rate.unit}, {source}"
    unit = rate.unit.rpartition(" ")[2]
    return f"{_estimate(_inverse(rate.estimate), _count)} {unit}s a second, {source}"


def _inverse(one: Estimate) -> Estimate:
    low, high = (None if not end else 1 / end for end in (one.high, one.low))
    return Estimate(1 / one.value if one.value else 0.0, low, high)


def _hours(plan: Plan, hours: Estimate) -> str:
    unit = "GPU-hours" if plan.device == "cuda" else "hours of jobs"
    return f"{_estimate(hours, _count)} {unit}"


def _money(plan: Plan, hours: Estimate) -> str:
    if plan.price is None:
        return ""
    return f", ${_estimate(hours.times(plan.price), lambda value: f'{value:,.2f}')}"


def _estimate(one: Estimate, show: _Show) -> str:
    middle = show(one.value)
    if one.low is None or one.high is None or one.low == one.high:
        return middle
    return f"{middle} ({show(one.low)} to {show(one.high)})"


def _count(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.2g}"


def _bytes(value: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:.0f} bytes"


def _noun(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"
