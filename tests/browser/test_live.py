"""What moves: a build at work, heartbeats, a store that goes and comes back, a server that goes and comes back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page

from tests.browser.conftest import Served, holds, settled, show
from tests.state.made_store import MadeStore
from tests.tiny import Project


def test_a_heartbeat_is_seen(page: Page, big: Served, big_made: MadeStore) -> None:
    show(page, big, "overview")
    rows = page.locator("table tbody tr", has_text="GPU-00000001").locator("td").nth(4)
    before = rows.inner_text()
    big_made.tick(big.store)
    holds(
        page,
        "(before) => [...document.querySelectorAll('tbody tr')].some((row) => row.innerText.startsWith('GPU-00000001') "
        "&& row.children[5].innerText !== before)",
        before,
    )


def test_the_numbers_move_while_a_real_build_runs(page: Page, tmp_path: Path) -> None:
    project = Project(tmp_path / "project", prompts=40)
    with Served(project.folder / "build", logs=project.folder) as served, (tmp_path / "log").open("w") as log:
        page.goto(served.url())
        settled(page, "holds nothing yet")
        build = subprocess.Popen(project.command(), cwd=project.folder, env=project.environment, stdout=log, stderr=log)
        try:
            page.wait_for_selector(".pipeline li[data-key=generate]", timeout=300_000)
            seen = set()
            while build.poll() is None:
                seen.add(page.inner_text(".pipeline"))
                time.sleep(0.3)
            assert build.returncode == 0, (tmp_path / "log").read_text()[-3000:]
            settled(page, "Finished")
            assert len(seen) >= 4, "the picture changed while it was built"
        finally:
            build.kill()
            build.wait()


def test_a_store_that_vanishes_is_told_and_comes_back(page: Page, tmp_path: Path) -> None:
    MadeStore(shards=20, now=time.time()).write(tmp_path / "store")
    with Served(tmp_path / "store") as served:
        show(page, served, "overview")
        (tmp_path / "store").rename(tmp_path / "away")
        settled(page, "The store cannot be read since")
        assert page.locator("[role=alert]").count() == 1
        assert page.locator(".pipeline li").count() == 8, "what was read before stays"
        page.click("nav a[href='#shards']")
        settled(page, "of 20 shards")
        (tmp_path / "away").rename(tmp_path / "store")
        settled(page, "The store cannot be read since", gone=True)


def test_a_server_that_ends_is_told_and_found_again(new_page: Callable[..., Page], tmp_path: Path) -> None:
    MadeStore(shards=20, now=time.time()).write(tmp_path / "store")
    page = new_page()
    with Served(tmp_path / "store") as served:
        show(page, served, "overview")
    settled(page, "There is no connection to the dashboard")


def test_focus_selection_and_open_details_survive_updates(page: Page, big: Served, big_made: MadeStore) -> None:
    show(page, big, "lanes")
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    number = page.inner_text(".tools .dim")
    for _ in range(3):
        big_made.tick(big.store)
        holds(page, "(old) => document.querySelector('.tools .dim').innerText !== old", number)
        number = page.inner_text(".tools .dim")
    assert page.locator("details[open]").count() == 1
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
