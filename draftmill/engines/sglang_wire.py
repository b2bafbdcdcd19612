"""One connection pool to one server: what is sent and received, with deadlines, and no judgement.

aiohttp, because SGLang itself needs it, so that it is on every host that has the engine, and because it stays cheap with
hundreds of requests in flight. Connections are kept for less time than uvicorn keeps them, so that no request meets one
that the server is just closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from draftmill.engines import sglang_api as api
from draftmill.engines.base import Failure, Key, Result

_CONNECT_S, _ASIDE_S, _KEPT_S = 10.0, 10.0, 2.0
# What this process or host lacks, which says nothing of the server.
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class Wire:
    """Speaks to the server at `url`. Must be made and used inside one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            trust_env=False,
        )

    async def generate(self, key: Key, body: Mapping[str, Any], deadline_s: float) -> Result | Failure:
        """One row, or why there is none. After the deadline the server is told to abort it."""
        try:
            async with asyncio.timeout(deadline_s), self._session.post(self.url + api.GENERATE, json=body) as reply:
                text = await reply.read()
                return api.answer(key, reply.status, _parsed(text))
        except aiohttp.ClientError as error:  # first, because some of them are timeouts too
            return Failure(key, "connection", f"{type(error).__name__}: {error}")
        except TimeoutError:
            await self._abort(str(body["rid"]))
            return Failure(key, "timeout", f"no answer within {deadline_s:.0f} s")
        except OSError as error:
            return Failure(key, "connection", f"{type(error).__name__}: {error}")

    async def reachable(self) -> bool:
        """Whether anything answers at the address, or nothing can be said; not whether it can generate."""
        try:
            async with asyncio.timeout(_ASIDE_S), self._session.get(self.url + api.MODEL_INFO) as reply:
                return reply.status < 500
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return getattr(error, "errno", None) in _NO_FILES

    async def decoded_tokens(self) -> float | None:
        """Tokens decoded since the server's start by its own metrics; None where it has none."""
        try:
            async with asyncio.timeout(_ASIDE_S), self._session.get(self.url + api.METRICS) as reply:
                return api.decoded_tokens(await reply.text()) if reply.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_ASIDE_S), self._session.post(self.url + api.ABORT, json={"rid": rid}):
                pass

    async def close(self) -> None:
        """Close all connections; the server aborts what was in flight."""
        await self._session.close()


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")
