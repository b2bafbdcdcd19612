"""Who may look, and what a browser may do with what it got.

Bound to loopback, the page answers only to loopback names: another site's name that was made to point here (DNS
rebinding) is refused by its Host header. Bound elsewhere, or where a token was asked for, every request carries the
token: in a cookie that only this site gets, or in a header. Completions are hostile text: the content security policy
lets nothing run but our own files, whatever a text holds.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
SAFE = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
# Plotly writes its style sheet by script; no text from outside ever becomes a style.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def is_loopback(host: str) -> bool:
    """Whether a name or address to bind to is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if ":" in name else name


def cookie_name(token: str) -> str:
    """The cookie that holds a token: cookies know hosts and no ports, so each dashboard of a host has its own."""
    return f"draftmill-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, token: str | None = None, names: tuple[str, ...] | None = LOOPBACK) -> None:
        """`token` is asked of every request if given; `names` are the hosts that are answered to, None for any."""
        self._app, self._token, self._names = app, token, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SAFE)
                headers.setdefault("content-security-policy", POLICY)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, safely)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._names is not None and host_name(headers.get("host", "")) not in self._names:
            return PlainTextResponse("This page answers to loopback names only, such as localhost.\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page can only be looked at.\n", 405, {"allow": "GET, HEAD"})
        return None if self._token is None else self._asked(scope, headers, self._token)

    def _asked(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token")
        if given is not None and _same(given, token):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # A path that begins with two slashes would lead to another host.
            path = "/" + scope["path"].lstrip("/\\")
            answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            answer.set_cookie(cookie_name(token), token, httponly=True, samesite="strict", path="/")
            return answer
        if any(_same(one, token) for one in _carried(headers, cookie_name(token))):
            return None
        return PlainTextResponse("Open the address with the token that `draftmill dashboard` printed.\n", 401)


def _carried(headers: Headers, cookie: str) -> list[str]:
    """The tokens that a request's header and cookie hold.

    Cookies are parted by hand: http.cookies gives up all of them for one of another site's that it cannot read.
    """
    kind, _, value = headers.get("authorization", "").partition(" ")
    bearer = [value.strip()] if kind.lower() == "bearer" else []
    pairs = (pair.partition("=") for header in headers.getlist("cookie") for pair in header.split(";"))
    return bearer + [value.strip().strip('"') for name, _, value in pairs if name.strip() == cookie]


def _same(given: str, token: str) -> bool:
    """Compared in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
