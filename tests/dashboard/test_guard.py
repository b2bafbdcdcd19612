"""Who is let in, and what every answer forbids the browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from draftmill.cli import app as command_line
from draftmill.commands.dashboard import address, checked
from draftmill.dashboard.app import application
from draftmill.dashboard.board import Board
from draftmill.dashboard.guard import LOOPBACK, host_name, is_loopback
from draftmill.errors import UserError
from draftmill.state.read import Reader
from draftmill.store.local import LocalStore
from tests.dashboard.conftest import BASE

TOKEN = "a-token-of-some-length"
PATHS = ("/", "/static/main.js", "/api/state", "/metrics", "/plotly.js", "/nothing")


@pytest.fixture
def closed(folder: Path) -> TestClient:
    """A server that asks for a token; its board does not run."""
    return TestClient(
        application(Board(Reader(LocalStore(folder))), token=TOKEN, names=None),
        base_url="http://gpu-host:8550",
        follow_redirects=False,
    )


@pytest.mark.parametrize("name", ["localhost", "localhost:8550", "127.0.0.1:1", "[::1]:9", "LOCALHOST"])
def test_loopback_names_are_answered(client: TestClient, name: str) -> None:
    assert client.get("/", headers={"host": name}).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "localhost.evil.example", "evil.example:8550", "", "127.0.0.1.nip.io", "[::2]"]
)
def test_another_name_that_points_here_is_refused(client: TestClient, name: str) -> None:
    for path in PATHS:
        answer = client.get(path, headers={"host": name})
        assert answer.status_code == 421
        assert "state" not in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_is_told(closed: TestClient, path: str) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"cookie": "draftmill="},
        {"cookie": "draftmill=é;;;"},
    ):
        answer = closed.get(path, headers={key: value.encode() for key, value in headers.items()})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
    assert closed.get(f"{path}?token=wrong").status_code == 401
    assert closed.get(f"{path}?token=%00%C3%A9").status_code == 401


def test_the_token_opens_by_header_and_by_cookie(closed: TestClient) -> None:
    assert closed.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    moved = closed.get(f"/?token={TOKEN}&x=1")
    assert moved.status_code == 303
    assert moved.headers["location"] == "/?x=1", "the token does not stay in the address"
    cookie = moved.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert closed.get("/").status_code == 200


@pytest.mark.parametrize("before", ['grafana={"a":1}; ', "x=[1,2]; ", 'y="; ', "é=ü; ", "=; ; ", "a b=c; "])
def test_the_cookie_is_found_among_those_of_other_sites(closed: TestClient, before: str) -> None:
    cookie = closed.get(f"/?token={TOKEN}").headers["set-cookie"].split(";")[0]
    closed.cookies.clear()
    for text in (before + cookie, f"{cookie}; {before}", f"{cookie.split('=')[0]}=wrong; {before}{cookie}"):
        assert closed.get("/", headers={"cookie": text.encode()}).status_code == 200
    assert closed.get("/", headers={"cookie": before.encode()}).status_code == 401


def test_two_dashboards_of_one_host_have_their_own_cookies(folder: Path) -> None:
    """Cookies know hosts and no ports: a second dashboard must not take the first one's away."""
    browser: dict[str, str] = {}
    dashboards = [
        TestClient(
            application(Board(Reader(LocalStore(folder))), token=token, names=None),
            base_url="http://gpu-host:8550",
            follow_redirects=False,
        )
        for token in (TOKEN, "another-token-of-some-length")
    ]
    for dashboard, token in zip(dashboards, (TOKEN, "another-token-of-some-length"), strict=True):
        name, _, value = dashboard.get(f"/?token={token}").headers["set-cookie"].split(";")[0].partition("=")
        browser[name] = value
    header = "; ".join(f"{name}={value}" for name, value in browser.items())
    for dashboard in dashboards:
        dashboard.cookies.clear()
        assert dashboard.get("/", headers={"cookie": header}).status_code == 200


def test_the_redirect_stays_on_this_host(closed: TestClient) -> None:
    for path in ("//evil.example/", "/%5Cevil.example/", "/%2F%2Fevil.example"):
        location = closed.get(f"http://gpu-host:8550{path}?token={TOKEN}").headers["location"]
        assert location.startswith("/")
        assert not location.startswith(("//", "/\\"))


def test_nothing_can_be_sent(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/state").status_code == 405


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_carries_the_policy(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.4", False),
        ("gpu-host", False),
    ],
)
def test_only_loopback_is_open_without_a_token(host: str, own: bool) -> None:
    assert is_loopback(host) is own


@pytest.mark.parametrize(
    ("header", "name"), [("a:1", "a"), ("a", "a"), ("[::1]:8550", "::1"), ("[::1]", "::1"), ("A", "a")]
)
def test_host_name(header: str, name: str) -> None:
    assert host_name(header) == name


def test_the_address_that_is_printed() -> None:
    assert address("127.0.0.1", 8550, None) == "http://127.0.0.1:8550/"
    assert address("::1", 8550, TOKEN) == f"http://[::1]:8550/?token={TOKEN}"
    assert "0.0.0.0" not in address("0.0.0.0", 8550, TOKEN)


@pytest.mark.parametrize("token", ["short", "with space and more", "semi;colon-and-more", "é" * 20])
def test_a_bad_token_is_refused(token: str) -> None:
    with pytest.raises(UserError, match="--token"):
        checked(token)


def test_a_bound_port_is_said(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        result = CliRunner().invoke(command_line, ["dashboard", "--store", str(folder), "--port", str(port)])
    assert isinstance(result.exception, UserError)
    assert "give another --port" in str(result.exception)


def test_loopback_names_are_few() -> None:
    assert set(LOOPBACK) == {"localhost", "127.0.0.1", "::1"}
    assert BASE.endswith("localhost")
