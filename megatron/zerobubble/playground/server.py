"""The playground's server: the files of the page, and one endpoint per task, whose answer is lines of JSON.

Each connection has a process, forked from the server, which has the imports done. It ends when the page hangs up, even in the
compiled core: so a search is stopped. The server keeps no state between requests.

A server on a loopback address is reachable from any page that the browser has open. Such a page can point a host name of its own
at our address (DNS rebinding): so the Host header must be an address, `localhost`, or a name that was allowed at start. It can
post to us without reading the response (CSRF): so the origin of a request must be our own page, and its body JSON, which another
page cannot send without a CORS preflight. The page itself says that it loads nothing from elsewhere (index.html).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import mimetypes
import os
import re
import resource
import select
import signal
import socket
import threading
from collections.abc import Iterable
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ForkingMixIn
from typing import ClassVar

from megatron.zerobubble.playground import limits
from megatron.zerobubble.playground.choices import choices
from megatron.zerobubble.playground.tasks import TASKS, lines

__all__ = ["Server"]

_STATIC = Path(__file__).parent / "static"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?")
_PIECE, _MOST_DISCARDED = 2**16, 2**30
"""Bytes that are read of a refused request, at once and altogether."""
_HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Server(ForkingMixIn, HTTPServer):
    """Serves the page, with a process per connection.

    Args:
        listener: the listening socket.
        search_seconds: time limit of a task, in seconds; of a search the page keeps its best plan so far.
        allowed_hosts: host names besides `localhost` that browsers may use for this server.
    """

    max_children = 512

    def __init__(self, listener: socket.socket, *, search_seconds: float = 600.0, allowed_hosts: Iterable[str] = ()) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.search_seconds = search_seconds
        self.allowed = frozenset(name.lower() for name in allowed_hosts) | {"localhost"}
        # Only these are served: no request path is used as a file path.
        files = sorted(path for path in _STATIC.rglob("*") if path.is_file())
        self.files = {f"/{path.relative_to(_STATIC).as_posix()}": (path.read_bytes(), _kind(path)) for path in files}
        self.files["/"] = self.files["/index.html"]
        offered = choices(planner="server", num_searches=os.cpu_count() or 1)
        self.files["/choices.json"] = json.dumps(offered).encode(), "application/json"

    def server_close(self) -> None:
        """End all tasks, and stop to listen."""
        for child in self.active_children or ():
            os.kill(child, signal.SIGKILL)
        super().server_close()


def _kind(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "text/plain"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


class _Handler(BaseHTTPRequestHandler):
    """One connection, which ends with its response."""

    server: Server
    timeout: ClassVar[float] = limits.SILENT_SECONDS
    server_version, sys_version = "zerobubble", ""

    def handle(self) -> None:
        """Answer the request; a page that hangs up ends it."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def do_GET(self) -> None:
        """Serve the page, one of its files, or what it offers."""
        if self._is_refused():
            return
        path = self._path
        if path in self.server.files:
            content, kind = self.server.files[path]
            self._begin(200, kind, len(content))
            self.wfile.write(content)
        elif path.removeprefix("/api/") in TASKS:
            self._fail(405, "the task takes a POST")
        else:
            self._fail(404, "there is no such page")

    def do_POST(self) -> None:
        """Run a task."""
        if self._is_refused():
            return
        task = self._path.removeprefix("/api/")
        if task not in TASKS or not self._path.startswith("/api/"):
            known = self._path in self.server.files
            self._fail(405 if known else 404, "the page takes a GET" if known else "there is no such task")
            return
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            self._fail(400, "the request needs a content-length")
            return
        if int(length) > limits.MAX_BODY_BYTES:
            self._fail(413, f"the request is larger than the maximum of {limits.MAX_BODY_BYTES // 2**20} MiB")
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self._fail(400, "the request ended early")
        else:
            self._answer(task, body)

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _answer(self, task: str, body: bytes) -> None:
        """Send the lines of a task, with bounded memory and time, and an empty line: the answer is complete."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # they are for the server, which ends its children
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_AS, (limits.WORKER_BYTES, limits.WORKER_BYTES))
        self._begin(200, "application/x-ndjson")
        sending = threading.Lock()
        threading.Thread(target=self._watch, args=(sending,), daemon=True).start()
        for line in lines(task, body):
            with sending:
                self.wfile.write(line.encode())
        with sending:
            self.wfile.write(b"\n")

    def _watch(self, sending: threading.Lock) -> None:
        """End this process when the page hangs up, or when its time is over."""
        seconds = self.server.search_seconds
        readable, _, _ = select.select([self.connection], [], [], seconds)
        with sending:
            if not readable:
                stopped = {"event": "stopped", "message": f"stopped at the limit of {seconds:g} s"}
                self.wfile.write(json.dumps(stopped).encode() + b"\n\n")
            os._exit(0)

    def _begin(self, status: int, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        if length is not None:
            self.send_header("content-length", str(length))
        self.end_headers()

    def end_headers(self) -> None:
        """End the head of any response, with the security headers."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _fail(self, status: int, message: str) -> None:
        content = json.dumps({"event": "error", "message": message}).encode()
        self._begin(status, "application/json", len(content))
        self.wfile.write(content)
        if self.command == "POST":
            self._discard()

    def _discard(self) -> None:
        """Read the rest of a request that is refused: closing the connection before would reset it, and lose the answer."""
        self.connection.shutdown(socket.SHUT_WR)
        left = _MOST_DISCARDED
        while left > 0 and (taken := len(self.rfile.read1(_PIECE))):
            left -= taken

    def _is_refused(self) -> bool:
        """Refuse what does not come from our own page."""
        refusal = _refusal(self.command, self.headers, self.server.allowed)
        if refusal is not None:
            self._fail(*refusal)
        return refusal is not None

    def log_message(self, *_: object) -> None:
        """Log no request."""


def _refusal(method: str, headers: Message, allowed: frozenset[str]) -> tuple[int, str] | None:
    """Status and message for a request that is not from our own page; None: it is."""
    host = headers.get("host", "")
    if not _is_ours(host, allowed):
        return 421, f"the server does not answer to the name {host[:80]!r}; start it with --allow-host to change that"
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        return 403, f"a page of {origin[:80]!r} may not ask this server"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "a page of another site may not ask this server"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        return 415, f"the content type is {kind[:80]!r}; send application/json"
    return None


def _is_ours(host: str, allowed: frozenset[str]) -> bool:
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].lower()
    if name in allowed:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
