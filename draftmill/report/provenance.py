"""What decided the run, for reading: fingerprints, settings by stage and versions by object, as rows of text.

Settings come from the stage specs, because these are exactly what decides the result. Threads, the gate and audit
limits are not among them and could differ between two builds of one report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftmill.report.inputs import Run

STAGES = ("generate", "extract", "train", "evaluate")
"""The stages whose specs decide a report; its own holds only the counts, which the page shows anyway."""

Rows = list[tuple[str, str]]


def settings(specs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Rows]]:
    """Each stage's settings as (dotted key, value)."""
    return [(stage, [(key, _text(value)) for key, value in _leaves(specs[stage])]) for stage in STAGES]


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " · ".join(_text(part).replace(" · ", " ") for part in value) or "none"
    return json.dumps(value, ensure_ascii=False)


def versions(run: Run, own: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Package names, and for each stage the versions that made its objects; several where they differ."""
    made: list[tuple[str, Sequence[Mapping[str, Any]]]] = [
        ("audit", run.audits.provenance),
        ("train", [window.provenance for window in run.windows]),
        ("evaluate", [run.evaluation.provenance]),
        ("report", [own]),
    ]
    packages = sorted({name for _, objects in made for one in objects for name in one.get("versions", {})})
    return packages, [(stage, [_distinct(objects, package) for package in packages]) for stage, objects in made]


def _distinct(objects: Sequence[Mapping[str, Any]], package: str) -> str:
    found = {str(one["versions"][package]) for one in objects if package in one.get("versions", {})}
    return ", ".join(sorted(found)) or "unknown"
