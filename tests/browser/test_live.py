"""What moves: a build at work, heartbeats, a store that goes and comes back, a server that goes and comes back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, Route

from tests.browser.conftest import WAIT_MS, Served, holds, settled, show
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
        show(page, served, "samples?kind=longest")
        page.wait_for_selector("article.row")
    settled(page, "There is no connection to the dashboard")
    page.select_option("select[name=kind]", "shortest")
    settled(page, "Rows: no connection to the dashboard.")
    with Served(tmp_path / "store", port=served.port):
        settled(page, "There is no connection to the dashboard", gone=True)
        # What was asked for in vain is asked for again by itself.
        page.wait_for_selector("article.row")
        settled(page, "4 trained")


def test_an_answer_that_is_no_json_is_told_as_what_it_is_and_asked_for_again(page: Page, small: Served) -> None:
    """As of a proxy before the dashboard, or of one that was started again with another token."""
    answers = [(500, "text/plain", "Internal Server Error"), (401, "text/html", "<h1>Who are you?</h1>")]

    def refuse(route: Route) -> None:
        if answers:
            status, kind, body = answers.pop()
            route.fulfill(status=status, content_type=kind, body=body)
        else:
            route.continue_()

    page.route("**/api/samples?**", refuse)
    page.goto(small.url("samples"))
    settled(page, "Rows: the dashboard answers with status 401.")
    settled(page, "Rows: the dashboard answers with status 500.")
    page.wait_for_selector("article.row")


def test_show_reads_rows_anew_with_unchanged_fields(page: Page, tmp_path: Path) -> None:
    made = MadeStore(shards=20, now=time.time())
    made.write(tmp_path / "store")
    with Served(tmp_path / "store") as served:
        show(page, served, "samples?kind=search&text=fathoms")
        page.wait_for_selector("article.row")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/api/samples" in request.url else None)
        for number in (1, 2):
            page.click("button:has-text('Show') >> nth=0")
            holds_here(page, lambda number=number: len(asked) == number)
    assert len(set(asked)) == 1


def holds_here(page: Page, true: Callable[[], bool]) -> None:
    """Wait until something is true on this side; the page's events come meanwhile."""
    end = time.monotonic() + WAIT_MS / 1000
    while not true():
        assert time.monotonic() < end
        page.wait_for_timeout(50)


def test_a_page_that_nobody_sees_holds_no_connection(page: Page, small: Served) -> None:
    """A browser opens six connections to a server, and each stream is one."""
    show(page, small, "overview")
    streams: list[str] = []
    page.on("request", lambda request: streams.append("opened") if request.url.endswith("/events") else None)
    page.on("requestfailed", lambda request: streams.append("closed") if request.url.endswith("/events") else None)
    for hidden in (True, False):
        page.evaluate(
            "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true }); "
            "document.dispatchEvent(new Event('visibilitychange')); }",
            hidden,
        )
        holds_here(page, lambda hidden=hidden: streams == (["closed"] if hidden else ["closed", "opened"]))
    number = page.inner_text(".tools .dim")
    holds(page, "(old) => document.querySelector('.tools .dim').innerText !== old", number)


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
