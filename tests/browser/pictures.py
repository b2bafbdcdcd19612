"""Takes the pictures that docs/dashboard.md shows, anew: of a made store of 400 shards with failures, generating.

python -m tests.browser.pictures [docs/img]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.conftest import CHROMIUM, Served, drawn, settled, show
from tests.state.made_store import MadeStore
from tests.tiny import make_tokenizer

WIDTH = 1100


def _page(browser: Browser, height: int, scheme: Literal["light", "dark"] = "light") -> Page:
    page = browser.new_context(viewport={"width": WIDTH, "height": height}, color_scheme=scheme).new_page()
    page.set_default_timeout(60_000)
    return page


def take(browser: Browser, served: Served, folder: Path) -> None:
    """Write dashboard-overview.png, dashboard-quality.png and dashboard-samples.png."""
    page = _page(browser, 820)
    show(page, served, "overview")
    page.screenshot(path=folder / "dashboard-overview.png")

    page = _page(browser, 820, "dark")
    show(page, served, "quality")
    drawn(page)
    settled(page, "The most common exact number of loss tokens is")
    page.screenshot(path=folder / "dashboard-quality.png")

    page = _page(browser, 620)
    show(page, served, "samples")
    page.get_by_label("Rows").select_option(label="holding a text")
    page.get_by_role("textbox", name="Text").fill("thinking")
    page.get_by_role("button", name="Show").click()
    settled(page, "12 rows from")
    page.screenshot(path=folder / "dashboard-samples.png")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/img").resolve()
    changes = {"target": {"model": "target"}, "resources": {"gpu_hour_price": 2.5}}
    made = MadeStore(shards=400, rows=24, broken_audits=40, failures=1, now=time.time(), changes=changes)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name), sync_playwright() as playwright:
        make_tokenizer(Path("target"))
        Path("target/config.json").write_text('{"max_position_embeddings": 512}')
        with Served(made.write(Path("build"))) as served:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            take(browser, served, folder)
            browser.close()


if __name__ == "__main__":
    main()
