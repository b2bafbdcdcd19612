"""Completions are hostile text: HTML, script, terminal escapes, direction marks, NULs, a megabyte of one letter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page
from typer.testing import CliRunner

from draftmill.cli import app
from tests.browser.conftest import VIEWS, Served, drawn, holds, settled, show
from tests.state.made_store import MadeStore
from tests.tiny import make_tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["tokenizer", "texts"])
def hostile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """A store with a hostile shard, with and without the tokenizer that its ids are of; and that shard's name."""
    folder = tmp_path_factory.mktemp("hostile")
    model = str(folder / "target") if request.param else "org/model"
    if request.param:
        make_tokenizer(folder / "target")
        (folder / "target/config.json").write_text('{"max_position_embeddings": 512}')
    made = MadeStore(shards=10, phase="finished", changes={"target": {"model": model}})
    with Served(made.write(folder / "store")) as served:
        yield served, made.graph.shards[1]


def test_hostile_rows_are_only_ever_text(page: Page, hostile: tuple[Served, str]) -> None:
    served, shard = hostile
    show(page, served, f"samples?kind=longest&shard={shard}")
    page.wait_for_selector("article.row")
    text = "".join(page.locator("article .text").all_inner_texts())
    assert "<script>document.title='owned'</script>" in text
    assert "⟦U+001B⟧[31mred" in text
    assert "⟦U+202E⟧evil" in text
    assert "⟦U+0000⟧ NUL" in text
    assert "${x} {{y}} {% z %} [bold]rich[/bold]" in text
    assert page.title() == "Samples · draftmill"
    assert page.locator("article img, article script, article b").count() == 0
    raw = page.evaluate("document.body.textContent")
    assert not set(raw) & {"\x1b", "\x00", "\u202e", "\u200b", "\ufeff", "\x07", "\x08"}


def test_a_megabyte_of_one_letter_is_cut_and_shown_on_demand(
    new_page: Callable[..., Page], hostile: tuple[Served, str]
) -> None:
    served, shard = hostile
    page = new_page(width=390)
    show(page, served, f"samples?kind=longest&shard={shard}")
    settled(page, "not shown …")
    assert page.evaluate("document.body.textContent.length") < 60_000
    page.click("article >> nth=0 >> button.more")
    holds(page, "document.body.textContent.length > 60000")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_hostile_messages_and_names_are_text(page: Page, small: Served, big: Served) -> None:
    show(page, big, "overview")
    settled(page, "CUDA out of memory <script>alert(1)</script>")
    show(page, small, "quality")
    drawn(page)
    settled(page, "söurce <b>&amp;")


@pytest.mark.parametrize(
    "address",
    [
        "samples?kind=%3Cscript%3E",
        "samples?shard=%22%3E%3Cimg%20src%3Dx%3E",
        "shards?open=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E",
        "shards?sort=__proto__&page=-5&state=%00",
        "__proto__",
        "constructor?x",
        "lanes?hours=%27",
        "samples?kind=search&text=%E2%80%AE%00",
    ],
)
def test_hostile_addresses_break_nothing(page: Page, small: Served, address: str) -> None:
    page.goto(small.url(address))
    page.wait_for_selector("#main h1")
    assert page.locator("#main img, #main script").count() == 0


def test_a_report_shows_every_view_without_a_server(
    new_page: Callable[..., Page], hostile: tuple[Served, str], tmp_path: Path
) -> None:
    served, _ = hostile
    out = tmp_path / "report.html"
    CliRunner().invoke(app, ["report", "--store", served.store.url, "--out", str(out)], catch_exceptions=False)
    page = new_page(width=390)
    for view in VIEWS:
        page.goto(f"{out.as_uri()}#{view}")
        page.wait_for_selector("#main h1")
        drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert "not in this report" not in page.inner_text("#main")
    page.goto(f"{out.as_uri()}#samples?kind=longest")
    page.wait_for_selector("article.row")
    assert page.title() == "Samples · draftmill"
    page.goto(f"{out.as_uri()}#shards")
    page.locator("tbody th a").first.click()
    settled(page, "completions/")
