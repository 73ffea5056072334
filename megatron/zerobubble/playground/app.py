"""The playground's server: one page, its static files, and one endpoint per task. It keeps no state between requests.

A search streams a line of JSON whenever it has a better plan; the page stops it by closing the connection. All planning and
parsing happens in worker processes.
"""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import AUTO, AUTO_MEMORY_LIMIT
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.render.svg import COLORS, SPAN_COLORS
from megatron.zerobubble.plan.search.core import PythonCore
from megatron.zerobubble.plan.search.search import best_core
from megatron.zerobubble.plan.search.search_options import Effort
from megatron.zerobubble.playground import limits
from megatron.zerobubble.playground.drawing import KINDS
from megatron.zerobubble.playground.guard import Guard
from megatron.zerobubble.playground.pool import Busy, Pool, is_error, num_searches
from megatron.zerobubble.playground.tasks import SEARCHES, TASKS
from megatron.zerobubble.version import __version__

_STATIC = Path(__file__).parent / "static"
_TICK = b'{"event":"tick"'
_STARTING = b'{"event":"tick","state":"running"'


def create_app(*, search_seconds: float = 600.0, allowed_hosts: Sequence[str] = ()) -> Starlette:
    """Create the ASGI application; its `state.pool` is the `Pool` of its workers.

    Args:
        search_seconds: time limit of a search, in seconds; the page keeps its best plan so far.
        allowed_hosts: host names besides `localhost` that browsers may use for this server.
    """

    pool = Pool(search_seconds=search_seconds)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await pool.prepare()
        yield
        await pool.close()

    routes = [Route("/api/choices", _choices, methods=["GET"])]
    routes += [Route(f"/api/{task}", partial(_task, task), methods=["POST"]) for task in TASKS]
    routes += [Route(address, _serve(file), methods=["GET"]) for address, file in _files()]
    app = Starlette(routes=routes, lifespan=lifespan, middleware=[Middleware(Guard, allowed_hosts=allowed_hosts)])
    app.state.pool = pool
    return app


def _files() -> list[tuple[str, Path]]:
    """Every URL path of the page and its file. Only these are served: no request path is used as a file path."""
    found = sorted(path for path in _STATIC.rglob("*") if path.is_file())
    return [("/", _STATIC / "index.html"), *((f"/{path.relative_to(_STATIC).as_posix()}", path) for path in found)]


def _serve(file: Path) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that serves one file, read at start."""
    content, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "text/plain"

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


async def _choices(request: Request) -> Response:
    """The schedules, objectives, efforts, colors and limits that the page offers."""
    schedules = [
        {
            "name": info.name,
            "title": info.title,
            "placement": info.placement,
            "num_chunks": info.num_chunks,
            "is_searched": info.is_searched,
            "takes_max_pending_backward": info.takes_max_pending_backward,
            "description": info.description,
        }
        for info in known_schedules()
    ]
    auto = {
        "name": AUTO,
        "title": AUTO,
        "placement": "",
        "num_chunks": 0,
        "is_searched": True,
        "takes_max_pending_backward": False,
        "description": "the best of all schedules within the memory limit, 1F1B's if none is given, as in a run",
    }
    objectives = [
        {"name": objective.value, "label": objective.label.removeprefix("with ").removeprefix("the ")}
        for objective in reversed(Objective)
    ]
    return JSONResponse(
        {
            "version": __version__,
            "schedules": [*schedules, auto],
            "objectives": objectives,
            "auto_memory_limit": AUTO_MEMORY_LIMIT,
            "num_searches": num_searches(),
            "efforts": ["drawn", *(effort.value for effort in Effort)],
            "kinds": [{"name": kind.value, "colors": COLORS[kind]} for kind in KINDS],
            "spans": {activity.value: color for activity, color in SPAN_COLORS.items()},
            "is_compiled": best_core() is not PythonCore,
            "limits": {
                "ranks": limits.MAX_RANKS,
                "microbatches": limits.MAX_MICROBATCHES,
                "chunks": limits.MAX_STAGES_PER_RANK,
                "body_bytes": limits.MAX_BODY_BYTES,
            },
        }
    )


async def _task(task: str, request: Request) -> Response:
    try:
        async with asyncio.timeout(limits.BODY_SECONDS):
            body = await _body(request)
    except TimeoutError:
        return _error(408, f"the request did not arrive within {limits.BODY_SECONDS:.0f} s")
    except ClientDisconnect:
        return _error(400, "the request ended early")
    if body is None:
        return _error(413, f"the request is larger than the maximum of {limits.MAX_BODY_BYTES // 2**20} MiB")
    events = request.app.state.pool.events(task, body)
    try:
        return await (_stream(events) if task in SEARCHES else _answer(events))
    except Busy:
        return _error(503, "too many searches are waiting; stop one in another page, or wait")


async def _body(request: Request) -> bytes | None:
    """The request's body; None if it is too large, whatever its content-length header claims."""
    if int(request.headers.get("content-length", "0")) > limits.MAX_BODY_BYTES:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.MAX_BODY_BYTES:
            return None
    return bytes(body)


async def _stream(events: AsyncGenerator[bytes, None]) -> Response:
    """Stream the lines of a search. An error in the request is the worker's first event, and becomes an HTTP status."""
    first = await anext(events, b"")
    while first.startswith(_STARTING):
        first = await anext(events, b"")
    if not first or is_error(first):
        await events.aclose()
        return Response(first, status_code=400, media_type="application/json")

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(events):
            yield first
            async for line in events:
                yield line

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _answer(events: AsyncGenerator[bytes, None]) -> Response:
    """The single answer of a short task."""
    async with aclosing(events):
        async for line in events:
            if not line.startswith(_TICK):
                done = line.startswith(b'{"event":"done"')
                return Response(line, status_code=200 if done else 400, media_type="application/json")
    return _error(500, "the worker process ended without an answer")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"event": "error", "message": message}, status_code=status)
