"""What a key of the store is: layout.py read backwards.

Whoever looks through a store (verify, gc, adopt) must know of every object what made it and what belongs to it, and
must leave alone what it does not know; so there is one table of patterns, and one function that takes the names of
jobs apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from draftmill import layout
from draftmill.layout import DRAFTER_FILES

Object = Literal[
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
]
"""What a build is for; everything else in a store serves the building."""
Kind = Object | Literal["index", "history", "journal", "progress", "record", "claim", "probe", "quarantine"]
OBJECTS: frozenset[Kind] = frozenset(get_args(Object))
QUARANTINE = "quarantine/"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key: its kind, the stage and name of the job behind it ("" if there is none), and the parts of its name."""

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


class Parts(NamedTuple):
    """What a job's name is made of: its shard or window ("" if it has neither) and its stage's fingerprint."""

    part: str
    fp: str


def parts(stage: str, name: str) -> Parts:
    """A job's name taken apart."""
    first, _, second = name.partition("-")
    return Parts(second, first) if stage == "train" or not second else Parts(first, second)


def job_name(stage: str, part: str, fp: str) -> str:
    """The name that a job's record, claim and heartbeat carry; `part` is its shard or window, or nothing."""
    return fp if not part else f"{fp}-{part}" if stage == "train" else f"{part}-{fp}"


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
    ("probe", "", r"progress/\.probe-[0-9a-f]+"),
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


def _entry(key: str, kind: Kind, stage: str, groups: dict[str, str]) -> Entry:
    shard, fp, window = (groups.get(part, "") for part in ("shard", "fp", "window"))
    if "name" in groups:
        return _of_job(key, kind, groups["stage"], groups["name"])
    return Entry(key, kind, stage, job_name(stage, shard or window, fp) if stage else "", shard, fp)


def _of_job(key: str, kind: Kind, stage: str, name: str) -> Entry:
    part, fp = parts(stage, name)
    return Entry(key, kind, stage, name, "" if stage == "train" else part, fp)


def outputs(stage: str, name: str) -> list[list[str]]:
    """The keys a job makes, as alternatives: a shard's hidden states lie in one of two places. Empty if unknown."""
    part, fp = parts(stage, name)
    known: dict[str, list[list[str]]] = {
        "generate": [[layout.completions(part, fp), layout.rejected(part, fp)]],
        "audit": [[layout.audit(part, fp), layout.audit_page(part, fp)]],
        "audit_set": [[layout.audit_set(fp)]],
        "extract": [[layout.hidden(part, fp)], [layout.held_out_hidden(part, fp)]],
        "pilot": [[layout.pilot(fp)]],
        "train": [[f"{layout.drafter(fp, part)}/{file}" for file in DRAFTER_FILES]],
        "evaluate": [[layout.evaluation(fp)]],
        "report": [[layout.report(fp)]],
    }
    return known.get(stage, [])


def finished(stage: str, name: str, present: frozenset[str]) -> bool:
    """Whether a job's outputs are all there."""
    return any(all(key in present for key in keys) for keys in outputs(stage, name))
