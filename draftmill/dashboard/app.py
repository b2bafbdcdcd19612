"""The pages' server: static files of our own, plotly from its installed package, JSON by view, and a stream of states."""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from draftmill.dashboard import parts
from draftmill.dashboard.board import Board, View
from draftmill.dashboard.detail import Details
from draftmill.dashboard.guard import LOOPBACK, Guard
from draftmill.dashboard.page import STATIC, page
from draftmill.dashboard.samples import Query, Samples
from draftmill.dashboard.shards_with import KINDS
from draftmill.dashboard.tables import Tables
from draftmill.dashboard.wire import to_bytes
from draftmill.errors import UserError
from draftmill.state.metrics import CONTENT_TYPE, metrics

_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_TEXT, _NUMBER = 200, 2**31
_TICK_S, _LOOK_S = 5.0, 0.2
_READERS = 4


class Server:
    """The routes over one board."""

    def __init__(self, board: Board, *, logs: Path | None = None) -> None:
        """`logs` is the folder that the build runs in, if it is this one."""
        self.board = board
        self._details = Details(board.reader.store, logs)
        self._samples = Samples(Tables(board.reader.store))
        # Reading rows may take as long as the store does; a few at once, and the rest of the page goes on.
        self._limiter: anyio.CapacityLimiter | None = None

    def routes(self) -> list[Route]:
        """Every route; all are GET."""
        return [
            Route("/", self._page),
            Route("/static/{name}", self._static),
            Route("/plotly.js", self._plotly),
            Route("/events", self._events),
            Route("/metrics", self._metrics),
            Route("/api/state", self._state),
            Route("/api/quality", self._part("quality", parts.quality_part)),
            Route("/api/lengths", self._lengths),
            Route("/api/shards", self._part("shards", parts.shards_part)),
            Route("/api/training", self._part("training", partial(parts.training_part, reader=self.board.reader))),
            Route("/api/lanes", self._lanes),
            Route("/api/shard/{name}", self._shard),
            Route("/api/samples", self._find),
            Route("/api/row", self._row),
        ]

    # Pages -----------------------------------------------------------------------------------------------------------

    async def _page(self, _request: Request) -> Response:
        return Response(page(), media_type="text/html; charset=utf-8")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return PlainTextResponse("There is no such file.\n", 404)
        data = STATIC[name]
        return _kept(request, data, _TYPES[Path(name).suffix])

    async def _plotly(self, request: Request) -> Response:
        packed, tag = await anyio.to_thread.run_sync(plotly)
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        headers = {"etag": tag, "cache-control": "private, max-age=86400"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(packed, media_type=_TYPES[".js"], headers=headers)
        return Response(gzip.decompress(packed), media_type=_TYPES[".js"], headers=headers)

    # State -----------------------------------------------------------------------------------------------------------

    def _message(self) -> dict[str, Any]:
        """What a page is told again and again."""
        view, problem = self.board.view, self.board.problem()
        return {
            "number": view.number if view else 0,
            "revision": view.revision if view else 0,
            "at": time.time(),
            "problem": {"since": problem.since, "message": problem.message} if problem else None,
            "state": view.state.to_json() if view else None,
        }

    async def _state(self, _request: Request) -> Response:
        self.board.watched()
        return _json(to_bytes(self._message()))

    async def _events(self, _request: Request) -> Response:
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        sent: tuple[int, bool] | None = None
        told = 0.0
        yield b"retry: 1000\n\n"
        while True:
            self.board.watched()
            view, problem = self.board.view, self.board.problem()
            now = (view.number if view else 0, problem is not None)
            if now != sent or time.monotonic() - told > _TICK_S:
                sent, told = now, time.monotonic()
                yield b"event: state\ndata: " + to_bytes(self._message()) + b"\n\n"
            await anyio.sleep(_LOOK_S)

    async def _metrics(self, _request: Request) -> Response:
        self.board.watched()
        view = self.board.view
        if view is None or self.board.problem() is not None:
            return PlainTextResponse("The store cannot be read.\n", 503)
        return Response(metrics(view.state), media_type=CONTENT_TYPE)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _part(self, name: str, make: Callable[[View], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return await self._of_view(request, lambda view: view.part(name, make))

        return answer

    async def _of_view(self, _request: Request, work: Callable[[View], bytes | None]) -> Response:
        """Something of the last view, computed or read in a thread."""
        self.board.watched()
        view = self.board.view
        if view is None:
            return JSONResponse({"error": "The store has not been read yet."}, 503)
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(_READERS)
        try:
            found = await anyio.to_thread.run_sync(lambda: work(view), limiter=self._limiter)
        except (UserError, OSError) as error:
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse({"error": "There is none."}, 404) if found is None else _json(found)

    async def _lanes(self, request: Request) -> Response:
        hours = _number(request, "hours", 1)
        hours = hours if hours in parts.HOURS else 1

        def work(view: View) -> bytes:
            found = parts.lanes_part(view, hours)
            history = self.board.history.to_json(lane["id"] for lane in found["lanes"])
            return to_bytes(found | {"history": history})

        return await self._of_view(request, work)

    async def _lengths(self, request: Request) -> Response:
        return await self._of_view(request, lambda view: to_bytes(self._samples.lengths(view)))

    async def _shard(self, request: Request) -> Response:
        name = request.path_params["name"]
        return await self._of_view(request, lambda view: _found(self._details.of(view, name)))

    async def _find(self, request: Request) -> Response:
        text = request.query_params.get("text", "")[:_TEXT]
        kind = request.query_params.get("kind", "random")
        if kind not in KINDS or (kind == "search" and not text):
            return JSONResponse({"error": "Say what to look for."}, 400)
        query = Query(
            kind=kind,
            shard=request.query_params.get("shard") or None,
            source=request.query_params.get("source") or None,
            text=text,
            seed=_number(request, "seed", 0),
            start=_number(request, "start", 0),
            skip=_number(request, "skip", 0),
        )
        return await self._of_view(request, lambda view: to_bytes(self._samples.find(view, query)))

    async def _row(self, request: Request) -> Response:
        shard, row = request.query_params.get("shard", ""), _number(request, "row", 0)
        rejected = request.query_params.get("rejected") == "true"
        return await self._of_view(request, lambda view: _found(self._samples.row(view, shard, row, rejected=rejected)))


def application(
    board: Board, *, token: str | None = None, names: tuple[str, ...] | None = LOOPBACK, logs: Path | None = None
) -> Starlette:
    """The whole application; it starts and closes the board. `token` and `names` are those of guard.Guard."""

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        board.start()
        yield
        board.close()

    guard = Middleware(Guard, token=token, names=names)
    return Starlette(
        routes=Server(board, logs=logs).routes(),
        middleware=[guard, Middleware(GZipMiddleware, minimum_size=2000, compresslevel=5)],
        lifespan=life,
    )


@lru_cache(maxsize=1)
def plotly() -> tuple[bytes, str]:
    """Plotly's script from its own package, packed, and its tag."""
    data = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    return gzip.compress(data, 6, mtime=0), f'"{hashlib.sha256(data).hexdigest()[:20]}"'


def _kept(request: Request, data: bytes, kind: str) -> Response:
    """A file that the browser keeps and asks again for."""
    tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _found(value: Any) -> bytes | None:
    return None if value is None else to_bytes(value)


def _number(request: Request, name: str, default: int) -> int:
    try:
        return min(max(int(request.query_params.get(name, default)), 0), _NUMBER)
    except ValueError:
        return default
