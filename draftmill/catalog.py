"""What a key of the store is: layout.py read backwards.

Whoever looks through a store (verify, gc, adopt) must know of every object what made it and what belongs to it, and
must leave alone what it does not know; so there is one table of patterns, and no other place that takes keys apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from draftmill import layout
from draftmill.layout import DRAFTER_FILES

Kind = Literal[
    "index",
    "history",
    "prompts",
    "completions",
    "rejected",
    "audit",
    "audit_page",
    "audit_set",
    "failed_audit",
    "hidden",
    "pilot",
    "drafter",
    "evaluation",
    "report",
    "journal",
    "progress",
    "record",
    "claim",
    "quarantine",
]
# What a build is for; everything else in a store serves the building.
OBJECTS: frozenset[Kind] = frozenset(
    {
        "prompts",
        "completions",
        "rejected",
        "audit",
        "audit_page",
        "audit_set",
        "failed_audit",
        "hidden",
        "pilot",
        "drafter",
        "evaluation",
        "report",
    }
)
QUARANTINE = "quarantine/"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key: its kind, the stage and name of the job that makes it ("" if no job does), and the parts of its name."""

    key: str
    kind: Kind
    stage: str = ""
    name: str = ""
    shard: str = ""
    fp: str = ""

    @property
    def job(self) -> tuple[str, str] | None:
        """Stage and name of the job behind this key; None for what no job makes."""
        return (self.stage, self.name) if self.stage else None


_HEX = r"[0-9a-f]{12}"
_SHARD = rf"(?P<shard>{_HEX})"
_FP = rf"(?P<fp>{_HEX})"
_DRAFTER = "|".join(re.escape(file) for file in DRAFTER_FILES)
_STAGE = r"(?P<stage>[a-z_]+)"

_PATTERNS: tuple[tuple[Kind, str, str], ...] = (
    # Kind, stage, pattern of the key.
    ("index", "", re.escape(layout.INDEX)),
    ("history", "", "|".join(map(re.escape, (layout.HISTORY, layout.KIN)))),
    ("prompts", "", rf"prompts/{_SHARD}\.parquet"),
    ("completions", "generate", rf"completions/{_SHARD}-{_FP}\.parquet"),
    ("rejected", "generate", rf"completions/{_SHARD}-{_FP}\.rejected\.parquet"),
    ("audit", "audit", rf"audits/{_SHARD}-{_FP}\.json"),
    ("audit_page", "audit", rf"audits/{_SHARD}-{_FP}\.html"),
    ("failed_audit", "", rf"audits/failed/{_SHARD}-{_FP}\.(?:json|html)"),
    ("audit_set", "audit_set", rf"audits/set-{_FP}\.html"),
    ("hidden", "extract", rf"hidden/(?:held-out/)?{_SHARD}-{_FP}\.safetensors"),
    ("pilot", "pilot", rf"pilot/{_FP}\.json"),
    ("drafter", "train", rf"drafter/{_FP}/window-(?P<window>[0-9]+)/(?:{_DRAFTER})"),
    ("evaluation", "evaluate", rf"eval/{_FP}\.json"),
    ("report", "report", rf"report/{_FP}\.html"),
    ("journal", "", rf"journal/{_STAGE}/(?P<name>[0-9a-f-]+)/.+"),
    ("progress", "", rf"progress/{_STAGE}/(?P<name>[0-9a-f-]+)\.json"),
    ("record", "", rf"records/{_STAGE}/(?P<name>[0-9a-f-]+)\.json"),
    ("claim", "", rf"claims/{_STAGE}/(?P<name>[0-9a-f-]+)\.json"),
    ("quarantine", "", rf"{QUARANTINE}.+"),
)
_COMPILED = tuple((kind, stage, re.compile(pattern)) for kind, stage, pattern in _PATTERNS)


def identify(key: str) -> Entry | None:
    """What a key is; None for what no part of draftmill writes."""
    for kind, stage, pattern in _COMPILED:
        found = pattern.fullmatch(key)
        if found is not None:
            return _entry(key, kind, stage, found.groupdict())
    return None


def _entry(key: str, kind: Kind, stage: str, parts: dict[str, str]) -> Entry:
    shard, fp, window = (parts.get(part, "") for part in ("shard", "fp", "window"))
    if not stage:
        return Entry(key, kind, parts.get("stage", ""), parts.get("name", ""), shard, fp)
    name = f"{fp}-{window}" if window else f"{shard}-{fp}" if shard else fp
    return Entry(key, kind, stage, name, shard, fp)


def outputs(stage: str, name: str) -> list[list[str]]:
    """The keys a job makes, as alternatives: a shard's hidden states lie in one of two places. Empty if unknown."""
    first, _, second = name.partition("-")
    known: dict[str, list[list[str]]] = {
        "generate": [[layout.completions(first, second), layout.rejected(first, second)]],
        "audit": [[layout.audit(first, second), layout.audit_page(first, second)]],
        "audit_set": [[layout.audit_set(first)]],
        "extract": [[layout.hidden(first, second)], [layout.held_out_hidden(first, second)]],
        "pilot": [[layout.pilot(first)]],
        "train": [[f"{layout.drafter(first, second)}/{file}" for file in DRAFTER_FILES]],
        "evaluate": [[layout.evaluation(first)]],
        "report": [[layout.report(first)]],
    }
    return known.get(stage, [])


def finished(stage: str, name: str, present: frozenset[str]) -> bool:
    """Whether a job's outputs are all there."""
    return any(all(key in present for key in keys) for keys in outputs(stage, name))
