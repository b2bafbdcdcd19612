"""How fast the dashboard is with 2,000 shards: first paint, an update after a heartbeat, each view, weights.

    python benchmarks/dashboard.py [--shards 2000] [--s3] [--repeat 7]

The server is a process of its own, the browser Debian's Chromium (`make browser` installs what is needed). First paint is
from the request of the page until the pipeline is in it; `update` from the end of the write of a heartbeat until the page
shows it; both with an empty browser cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent.parent))

from playwright.sync_api import Browser, Page, sync_playwright

from draftmill.dashboard.page import STATIC, page
from draftmill.store.base import Store
from draftmill.store.local import LocalStore
from draftmill.store.open import open_store
from tests.state.made_store import MadeStore

VIEWS = {
    "quality": "#plot-time-rejected svg.main-svg",
    "samples": "article.row",
    "lanes": ".span",
    "training": "#plot-acceptance svg.main-svg",
    "shards": "tbody tr",
}
PORT = 8559


@contextmanager
def served(url: str) -> Iterator[str]:
    command = [sys.executable, "-m", "draftmill", "dashboard", "--store", url, "--port", str(PORT)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{PORT}/"
    try:
        begun = time.perf_counter()
        while not _ready(address):
            assert process.poll() is None
            time.sleep(0.05)
        print(f"  {'start until the first view':<34} {time.perf_counter() - begun:7.2f} s")
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _ready(address: str) -> bool:
    try:
        with urlopen(f"{address}api/state") as answer:
            return b'"state":null' not in answer.read()
    except OSError:
        return False


def report(name: str, times: list[float]) -> None:
    print(f"  {name:<34} {statistics.median(times):7.2f} s   worst of {len(times)}: {max(times):.2f} s", flush=True)


def first_paint(browser: Browser, address: str, repeat: int) -> None:
    times, contentful = [], []
    for _ in range(repeat):
        context = browser.new_context()
        shown = context.new_page()
        begun = time.perf_counter()
        shown.goto(address)
        shown.wait_for_selector(".pipeline li")
        times.append(time.perf_counter() - begun)
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        contentful.append(shown.evaluate(paint) / 1000)
        context.close()
    report("first paint (pipeline shown)", times)
    report("first contentful paint", contentful)


def updates(shown: Page, address: str, store: Store, made: MadeStore, repeat: int) -> None:
    shown.goto(address)
    shown.wait_for_selector(".pipeline li")
    key = next(key for key, _, _ in made._running())
    subject = key.split("/")[-1].split("-")[0]
    row = shown.locator("tbody tr", has_text=subject).locator("td").nth(4)
    times = []
    for step in range(min(repeat, made.rows // 2 - 1)):
        before = row.inner_text()
        # At any moment of the board's own rhythm.
        time.sleep(1.0 + 0.37 * step)
        made.tick(store)
        begun = time.perf_counter()
        while row.inner_text() == before:
            assert time.perf_counter() - begun < 60
            time.sleep(0.01)
        times.append(time.perf_counter() - begun)
    report("update after a heartbeat", times)


def views(browser: Browser, address: str, repeat: int) -> None:
    for name, what in VIEWS.items():
        times = []
        for _ in range(repeat):
            context = browser.new_context()
            shown = context.new_page()
            begun = time.perf_counter()
            shown.goto(f"{address}#{name}")
            shown.wait_for_selector(what)
            times.append(time.perf_counter() - begun)
            context.close()
        report(f"view: {name}", times)


def measure(store: Store, made: MadeStore, repeat: int) -> None:
    with served(store.url) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        first_paint(browser, address, repeat)
        updates(browser.new_page(), address, store, made, repeat)
        views(browser, address, 3)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--s3", action="store_true", help="Measure a store on SeaweedFS too.")
    arguments = parser.parse_args()
    print(f"page, scripts and styles: {(len(page()) + sum(map(len, STATIC.values()))) / 1000:.0f} kB")
    made = MadeStore(shards=arguments.shards, rows=24, now=time.time())
    with tempfile.TemporaryDirectory() as name:
        print(f"{arguments.shards} shards, {len(made.objects)} objects, a folder")
        measure(LocalStore(made.write(Path(name) / "store")), made, arguments.repeat)
        if arguments.s3:
            _measure_s3(made, Path(name), arguments.repeat)


def _measure_s3(made: MadeStore, folder: Path, repeat: int) -> None:
    from draftmill.store.settings import S3Settings
    from tests.s3.weed import Weed

    with Weed(folder / "weed") as weed:
        os.environ.update(weed.environment)
        store = open_store(weed.url("made"), S3Settings(path_style=True))
        made.upload(store)
        print(f"{made.shards} shards, {len(made.objects)} objects, SeaweedFS on loopback")
        measure(store, made, repeat)


if __name__ == "__main__":
    main()
