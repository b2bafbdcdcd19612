"""Debian's Chromium on pages that a real server serves over real folders; any script error fails the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from draftmill.dashboard.app import application
from draftmill.dashboard.board import Board
from draftmill.state.read import Reader
from draftmill.store.local import LocalStore
from tests.state.made_store import MadeStore
from tests.tiny import Project

CHROMIUM = "/usr/bin/chromium"
WAIT_MS = 60_000
VIEWS = ("overview", "quality", "samples", "lanes", "training", "shards")


class Served:
    """A server of one store, as long as it is entered."""

    def __init__(
        self,
        store: Path,
        logs: Path | None = None,
        *,
        port: int = 0,
        token: str | None = None,
        board: Board | None = None,
    ) -> None:
        self.store = LocalStore(store)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.app = application(board or Board(Reader(self.store)), logs=logs, token=token)
        self._config = uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(self._config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()

    def url(self, view: str = "overview") -> str:
        return f"http://127.0.0.1:{self.port}/#{view}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Makes pages of a size and a colour scheme; what goes wrong on them is raised at the end."""
    faults: list[str] = []
    contexts = []

    def make(width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("console", lambda one: faults.append(one.text) if "Content Security" in one.text else None)
        page.on("request", lambda request: None if _own(request.url) else faults.append(f"asked for {request.url}"))
        return page

    yield make
    for context in contexts:
        context.close()
    assert faults == []


def _own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1", "file:", "data:", "blob:"))


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    return new_page()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A made store of 60 shards in training; its times are about now."""
    made = MadeStore(phase="training", now=time.time())
    with Served(made.write(tmp_path_factory.mktemp("small"))) as served:
        yield served


@pytest.fixture(scope="session")
def big_made() -> MadeStore:
    return MadeStore(shards=2000, now=time.time())


@pytest.fixture(scope="session")
def big(big_made: MadeStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A made store of 2,000 shards with failures, generating."""
    with Served(big_made.write(tmp_path_factory.mktemp("big"))) as served:
        yield served


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A store that the real Snakefile built from the toy project, served in its folder's place."""
    project = Project(tmp_path_factory.mktemp("built"), prompts=40)
    # The server runs in another folder than the build, where a relative target would not be found.
    project.configure(target={"model": str(project.folder / "target")})
    project.build()
    with Served(project.folder / "build", logs=project.folder) as served:
        yield served


def holds(page: Page, expression: str, arg: object = None) -> None:
    """Wait until an expression is true; Playwright's own way to wait needs eval, which the page's policy forbids."""
    end = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"not in time: {expression} {arg or ''}"
        page.wait_for_timeout(50)


def show(page: Page, served: Served, view: str) -> None:
    """Open a view and wait until nothing on it is still being read."""
    page.goto(served.url(view))
    page.wait_for_selector("#main h1")
    holds(page, "!/Reading [^⟦]*…/.test(document.getElementById('main').innerText)")


def drawn(page: Page) -> None:
    """Wait until every plot is drawn."""
    holds(page, "[...document.querySelectorAll('.plot')].every((one) => one.querySelector('svg.main-svg'))")


def settled(page: Page, text: str, *, gone: bool = False) -> None:
    """Wait until the page holds a text, or no more."""
    held = "document.body.innerText.includes(text)"
    holds(page, f"(text) => {'!' if gone else ''}{held}", text)
