"""Security checks on every request, and security headers on every response.

A server on a loopback address is reachable from any page that the browser has open. Such a page can point a host name of its own
at our address (DNS rebinding): so the Host header must be an address, `localhost`, or a name that was allowed at start. It can
post to us without reading the response (CSRF): so the origin of a request must be our own page, and its body JSON, which another
page cannot send without a CORS preflight. Our own page runs no scripts from elsewhere (Content-Security-Policy).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?")
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: the application behind it.
        allowed_hosts: host names besides `localhost` that browsers may use for this server.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_hosts) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or reject it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope["method"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await refusal(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            return _refuse(
                421, f"the server does not answer to the name {host[:80]!r}; start it with --allow-host to change that"
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host}".lower():
            return _refuse(403, f"a page of {origin[:80]!r} may not ask this server")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _refuse(403, "a page of another site may not ask this server")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return _refuse(415, f"the content type is {kind[:80]!r}; send application/json")
        return None

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].lower()
        if name in self._allowed:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def _refuse(status: int, message: str) -> JSONResponse:
    return JSONResponse({"event": "error", "message": message}, status_code=status)
