"""The audit as one static HTML page: the verdict first, then the histogram, the limits, the sources, the examples.

Everything is inline and nothing is fetched. Texts are escaped by the template engine and were made visible before
(examples.visible), so hostile completions are only ever text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from draftmill.audit import sentences
from draftmill.audit.counts import Counts
from draftmill.audit.histogram import HEIGHT, WIDTH, histogram
from draftmill.audit.limits import Check, check
from draftmill.audit.result import AuditResult
from draftmill.audit.text import visible
from draftmill.canonical import canonical_json

_LABELS = {
    "spike": "one exact number of loss tokens",
    "empty": "empty answers",
    "short": "short answers",
    "unclosed_thinking": "thinking never closed",
    "repetitive": "repetitive answers",
    "duplicates": "another prompt's answer",
    "cut": "cut off by length",
    "boundary_moved": "answer not where the prompt ends",
    "rejected": "rows that failed",
    "mean_loss_tokens": "mean loss tokens",
    "typical": "typical answers",
}


@dataclass(frozen=True, slots=True)
class CheckLine:
    """A check as a line of the table."""

    label: str
    measured: str
    rows: str
    limit: str
    note: str
    over: bool


def render(result: AuditResult) -> str:
    """The page of an audit."""
    counts = result.measurements.overall
    return _template().render(
        result=result,
        name=visible(result.name),
        counts=counts,
        lines=[_line(one) for one in result.checks],
        sources=_sources(result),
        histogram=histogram(counts, result.limits.max_spike),
        plot={"width": WIDTH, "height": HEIGHT},
        tallies=_tallies(counts),
        groups=_groups(result),
        provenance=visible(canonical_json(dict(result.provenance))),
    )


def environment(package: str) -> Environment:
    """How every page of ours is rendered, with the templates of a package: escaped, and failing on an unknown name."""
    found = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["percent"] = sentences.percent
    return found


@lru_cache(maxsize=1)
def _template() -> Template:
    return environment("draftmill.audit").get_template("audit.html.jinja")


def _line(one: Check) -> CheckLine:
    label = _LABELS[one.code] + (f": {one.value}" if one.code == "spike" else "")
    if one.code == "mean_loss_tokens":
        return CheckLine(label, f"{one.measured:.1f}", f"{one.rows}", f"at least {one.limit:g}", "", one.over)
    note = "cannot fail" if one.fails_from is None else f"fails from {one.fails_from} rows"
    limit = f"at most {sentences.bound(one.limit)}"
    return CheckLine(label, sentences.percent(one.measured), f"{one.count} of {one.rows}", limit, note, one.over)


def _sources(result: AuditResult) -> list[tuple[str, Counts, dict[str, Check]]]:
    """Each source with its checks; they mark the table and decide nothing, for a small source is often peculiar."""
    return [
        (visible(source), counts, {one.code: one for one in check(counts, result.limits)})
        for source, counts in result.measurements.by_source.items()
    ]


def _tallies(counts: Counts) -> list[tuple[str, list[tuple[str, int]]]]:
    groups = {"Finish reason": counts.finish, "Thinking": counts.thinking, "Rejected": counts.rejected}
    return [
        (title, [(visible(name).replace("_", " "), count) for name, count in group.items()])
        for title, group in groups.items()
    ]


def _groups(result: AuditResult) -> list[tuple[str, list[object]]]:
    """Examples by what they stand for: broken limits first, then typical answers, then the rest."""
    over = [one.code for one in result.checks if one.over]
    kept = [one.code for one in result.checks if not one.over]
    groups = [
        (_LABELS[code], [example for example in result.examples if code in example.codes])
        for code in [*over, "typical", *kept]
    ]
    return [(label, list(examples)) for label, examples in groups if examples]
