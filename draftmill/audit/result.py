"""An audit's result: measurements, checks, verdict, sentences, examples; as one JSON and back.

One shape for a shard, for the whole set and for data from elsewhere, so that one page and one reader serve all three.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from draftmill.audit import examples as shown
from draftmill.audit import sentences
from draftmill.audit.counts import Measurements, merge
from draftmill.audit.examples import Example
from draftmill.audit.limits import Check, broken, check
from draftmill.audit.measure import measure
from draftmill.audit.text import visible
from draftmill.audit.tokens import TokenInfo
from draftmill.config import AuditConfig
from draftmill.errors import UserError, reason

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken limit as a person reads it: what was measured, what is most likely wrong, rows to look at."""

    code: str
    limit: float
    measured: float
    sentence: str
    likely: str
    examples: list[str]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The audit of some rows."""

    name: str
    measurements: Measurements
    checks: list[Check]
    examples: list[Example]
    limits: AuditConfig
    provenance: Mapping[str, Any]

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """Whether every limit is kept and there is a row at all."""
        return "fail" if broken(self.checks) or not self.measurements.by_source else "pass"

    @property
    def findings(self) -> list[Finding]:
        """The broken limits, the most telling first."""
        counts, short = self.measurements.overall, self.limits.short_tokens
        return [
            Finding(
                one.code,
                one.limit,
                one.measured,
                _sentence(sentences.finding(one, short)),
                _sentence(sentences.cause(one, counts, short)),
                [example.row for example in self.examples if one.code in example.codes],
            )
            for one in broken(self.checks)
        ]

    def failure(self, page: str) -> str:
        """The one sentence of a failed audit; `page` is where its numbers are."""
        over = broken(self.checks)
        if not over:
            return f"{visible(self.name)} fails its audit: it holds no row at all; see {page}."
        return sentences.failure(visible(self.name), over, self.measurements.overall, self.limits.short_tokens, page)

    def to_json(self, *, pairs: bool = True) -> dict[str, Any]:
        """A JSON value; without `pairs` it cannot be merged with others (Measurements.to_json)."""
        return {
            "format": FORMAT,
            "name": self.name,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [asdict(one) for one in self.checks],
            "limits": self.limits.model_dump(mode="json"),
            "measurements": self.measurements.to_json(pairs=pairs),
            "examples": [example.model_dump(mode="json") for example in self.examples],
            "provenance": dict(self.provenance),
        }


def _sentence(clause: str) -> str:
    return clause[0].upper() + clause[1:] + "."


def judge(
    name: str,
    measurements: Measurements,
    examples: list[Example],
    limits: AuditConfig,
    provenance: Mapping[str, Any] | None = None,
) -> AuditResult:
    """Hold measurements against the limits."""
    return AuditResult(name, measurements, check(measurements.overall, limits), examples, limits, provenance or {})


def audit_tables(
    name: str,
    completions: pa.Table,
    rejected: pa.Table,
    limits: AuditConfig,
    tokens: TokenInfo,
    provenance: Mapping[str, Any] | None = None,
    boundary_moved: Sequence[bool] | None = None,
) -> AuditResult:
    """Measure tables (measure.measure), judge them and choose examples. Raises ValueError like measure()."""
    measured = measure(completions, rejected, tokens, boundary_moved)
    checks = check(measured.measurements.overall, limits)
    chosen = shown.choose(measured.rows, checks, limits)
    return judge(
        name, measured.measurements, shown.build(completions, chosen, measured.rows, tokens), limits, provenance
    )


def read_result(path: Path) -> AuditResult:
    """A shard's audit JSON. Raises UserError if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']}, not {FORMAT}")
        limits = AuditConfig.model_validate(value["limits"])
        examples = [Example.model_validate(example) for example in value["examples"]]
        measurements = Measurements.from_json(value["measurements"])
        return judge(str(value["name"]), measurements, examples, limits, value["provenance"])
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} is not a readable audit ({reason(error)}): delete it and build again.") from None


def combine(
    name: str, parts: Sequence[AuditResult], limits: AuditConfig, provenance: Mapping[str, Any] | None = None
) -> AuditResult:
    """The audit of all parts together, held against the same limits."""
    examples = shown.pool([part.examples for part in parts], max(limits.examples, 1))
    return judge(name, merge(part.measurements for part in parts), examples, limits, provenance)
