"""The page as one file, and the modules that it is joined from."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from draftmill.cli import app
from draftmill.dashboard.page import STATIC, joined

MODULES = {name: data.decode() for name, data in STATIC.items() if name.endswith(".js")}


def test_a_report_holds_everything_and_fetches_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", "--store", str(folder), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    text = out.read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">([^<]*)</script>', text)[1])
    assert {"api/state", "api/quality", "api/shards", "api/training", "api/samples?kind=longest"} <= set(data)
    head = text[: text.index("<style>")]
    assert "connect-src" not in head
    assert "default-src 'none'" in head
    assert 'src="' not in text.replace(text[text.index("<script>") :], "")
    assert "alert(1)" not in text.replace("alert(1)\\u003c/script>", "").split('id="data"')[0]


def test_a_report_that_cannot_be_written_or_read_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    calls = [
        ["report", "--store", str(folder), "--out", str(tmp_path / "file" / "x.html")],
        ["report", "--store", str(tmp_path / "none"), "--out", str(tmp_path / "x.html")],
    ]
    for call in calls:
        result = CliRunner().invoke(app, call)
        assert type(result.exception).__name__ == "UserError", result.exception


def test_modules_can_be_joined() -> None:
    for module, text in MODULES.items():
        for line in text.splitlines():
            assert not re.match(r"import (?!\{[^}]*\} from \"\./\w+\.js\";$)", line), f"{module}: {line}"
            assert not line.startswith(("export default", "export {", "export class", "export let")), (
                f"{module}: {line}"
            )
    assert not re.search(r"^(import|export) ", joined(), re.M)


def test_no_module_makes_html_from_text() -> None:
    for module, text in MODULES.items():
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "srcdoc",
            "http://",
            "https://",
        ):
            assert way not in text, f"{module} uses {way}"
