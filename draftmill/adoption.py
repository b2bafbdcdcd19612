"""Which objects of an older version of a stage still stand under its present meaning: one declared rule a version step.

A stage's version is raised when the meaning of its output changes (specs.py), and every object gets another name then. But
most changes touch only some objects: those are made again, and the others can be relabelled (integrity/adopt.py). So
whoever raises a version also says here, in `STEPS`, which old objects are what the new code would make of the same
inputs, and how the spec inside them maps to the new one. A test fails while a step is missing.

A key that is added to a stage's spec needs no step and no new version if the spec leaves it out while it has the value
that means what there was before; a test holds today's specs against recorded older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draftmill.specs import SPEC_VERSIONS

Spec = Mapping[str, Any]
# Pages for people are made anew from what is there within seconds, so nothing is said about old ones.
REMADE = frozenset({"audit_set", "report"})


class Old(Protocol):
    """An object as it stands in the store: what it says of itself, and every object as a local file."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The provenance inside the object."""
        ...

    def file(self, key: str) -> AbstractContextManager[Path]:
        """An object of the store as a local file. Raises KeyError if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """From one version of a stage to the next.

    `why` says what changed. `objection` looks at one object and says why it does not stand, or nothing ("") if it does.
    `spec` makes the new spec of the old one; the version is set by `upgrade`.
    """

    why: str
    objection: Callable[[Old], str]
    spec: Callable[[Spec], Spec] = lambda spec: spec


class NoStepError(Exception):
    """Nothing is declared about a version step."""


def _cut_imports(old: Old) -> str:
    """Only an imported answer that is marked as cut by length is counted otherwise since version 2."""
    import pyarrow.parquet as pq

    try:
        with old.file(str(old.provenance["inputs"]["completions"])) as path:
            rows = pq.read_table(path.absolute(), columns=["origin", "finish_reason"]).to_pylist()
    except KeyError:
        return "its completions are gone, so nobody can say whether short imported answers are among them"
    cut = sum(row["origin"] == "imported" and row["finish_reason"] == "length" for row in rows)
    return f"{cut} imported answers without an end token are counted otherwise now" if cut else ""


STEPS: Mapping[tuple[str, int], Step] = {
    # Stage and the version that an object has.
    ("audit", 1): Step(
        "A short imported answer without its end token no longer counts as cut by length.", _cut_imports
    ),
}


def steps(stage: str, version: int, versions: Mapping[str, int] = SPEC_VERSIONS) -> list[Step]:
    """The steps from a version to the present one. Raises NoStepError if one is not declared."""
    numbers = range(version, versions[stage])
    if version > versions[stage]:
        raise NoStepError(f"version {version} of {stage} is newer than this draftmill, which knows {versions[stage]}")
    for number in numbers:
        if (stage, number) not in STEPS:
            raise NoStepError(f"no rule says what of version {number} of {stage} still stands")
    return [STEPS[stage, number] for number in numbers]


def upgrade(stage: str, spec: Spec, versions: Mapping[str, int] = SPEC_VERSIONS) -> dict[str, Any]:
    """The spec that the present code gives an object of an older spec. Raises NoStepError."""
    for step in steps(stage, int(spec["version"]), versions):
        spec = step.spec(spec)
    return {**spec, "version": versions[stage]}
