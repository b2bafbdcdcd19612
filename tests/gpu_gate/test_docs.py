"""docs/gpu-gate.md says what the code does: every reason and every knob, with its default."""

import json
from pathlib import Path

from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.reasons import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "gpu-gate.md").read_text()


def rows(title: str) -> dict[str, list[str]]:
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "| `" in line[:3]
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_reason_is_explained() -> None:
    expected = {
        code: [kind.weighs, "yes" if kind.passing else "no", kind.number, kind.meaning, kind.remedy]
        for code, kind in KINDS.items()
    }
    assert rows("Reasons") == expected


def test_every_knob_is_explained_with_its_default() -> None:
    found = rows("Knobs")
    assert found.keys() == GatePolicy.model_fields.keys()
    for name, field in GatePolicy.model_fields.items():
        default = field.get_default()
        shown = "none" if default is None else json.dumps(list(default) if isinstance(default, tuple) else default)
        assert found[name] == [f"`{shown}`", field.description]
