"""The server over real HTTP: what it answers, what it refuses, and that nothing is left running."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.playground.limits import MAX_BODY_BYTES
from tests.playground.conftest import ROOT, Server, end, start

D3_SHA256 = "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1"
JSON = {"content-type": "application/json"}
SMALL = {"num_ranks": 4, "num_microbatches": 8, "schedule": "zbv", "effort": "fast"}
LONG = SMALL | {
    "schedule": "zb",
    "effort": "max",
    "memory_limit": 0.9,
    "times": {"forward_ms": 3, "backward_ms": 4, "wgrad_ms": 2},
}


def ask(
    server: Server, path: str, body: object = None, *, method: str = "POST", headers: dict[str, str] = JSON
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines() if line]


def workers(server: Server) -> int:
    """Processes that answer a request; one that has ended is there until the server notices."""
    number = 0
    for child in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # since they were listed
            number += child.status() != psutil.STATUS_ZOMBIE
    return number


def wait_for_no_workers(server: Server) -> None:
    """Fails where some are left after 20 seconds."""
    deadline = time.monotonic() + 20
    while workers(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers(server) == 0


def test_a_search_tells_what_it_has_as_it_goes(server: Server) -> None:
    status, headers, body = ask(server, "/api/search", SMALL)
    assert status == 200
    assert body.endswith(b"}\n\n"), "complete"
    assert headers["content-type"].startswith("application/x-ndjson")
    best = events(body)
    assert [event["event"] for event in best] == ["best"] * len(best)
    assert (best[0]["spent"], best[-1]["spent"]) == (0.0, 1.0)
    plan = Plan.from_json(next(event for event in reversed(best) if "drawing" in event)["drawing"]["plan"])
    assert (plan.schedule, plan.num_ranks, plan.num_microbatches) == ("zbv", 4, 8)


def test_a_task_answers_in_lines_and_the_last_one_has_a_user_s_mistake(server: Server) -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=3).to_json()
    assert json.loads(ask(server, "/api/open", plan.encode())[2])["kind"] == "plan"
    assert json.loads(ask(server, "/api/show", {"plan": plan})[2])["drawing"]["schedule"] == "zbv"
    assert json.loads(ask(server, "/api/export", {"plan": plan, "form": "svg"})[2])["name"] == "zbv-p2-m3.svg"
    for task, body, message in (
        ("search", SMALL | {"num_ranks": 65}, "num_ranks is 65"),
        ("search", SMALL | {"memory_limit": 0.01}, "too small for any plan"),
        ("open", b"\x89PNG", "not JSON"),
        ("export", {"plan": plan, "form": "exe"}, "choose one of svg, text"),
        ("pareto", SMALL, "memory_limits is empty"),
    ):
        status, _, answer = ask(server, f"/api/{task}", body)
        assert status == 200
        assert events(answer)[-1]["event"] == "error"
        assert message in events(answer)[-1]["message"]


def test_the_page_and_its_files_are_served_and_nothing_else(server: Server) -> None:
    status, headers, body = ask(server, "/", method="GET", headers={})
    assert status == 200
    assert b"<title>" in body
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    assert ask(server, "/js/main.js", method="GET", headers={})[1]["content-type"].startswith("text/javascript")
    library = ask(server, "/vendor/d3.min.js", method="GET", headers={})[2]
    assert hashlib.sha256(library).hexdigest() == D3_SHA256
    for path in (
        "/../server.py",
        "/js/../../server.py",
        "/js/%2e%2e/%2e%2e/server.py",
        "//etc/passwd",
        "/js/",
        "/api/worker",
        "/static/js",
    ):
        assert ask(server, path, method="GET", headers={})[0] == 404, path
    assert ask(server, "/", method="POST", headers=JSON)[0] == 405


def test_the_playground_needs_no_torch() -> None:
    package = "megatron.zerobubble.playground"
    code = f"import sys, {package}.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_file_of_the_page_reaches_into_the_network() -> None:
    files = [
        path for path in (ROOT / "megatron/zerobubble/playground/static").rglob("*") if path.suffix in (".html", ".css", ".js")
    ]
    assert len(files) > 10
    for path in files:
        if path.parent.name != "vendor":
            assert "http://" not in path.read_text().replace("http://www.w3.org", ""), path
            assert "https://" not in path.read_text(), path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example:80"}, 421),
        ({"host": "127.0.0.1@evil.example"}, 421),
        ({"host": ""}, 421),
        ({"host": "LOCALHOST:1"}, 200),
        ({"host": "[::1]:8321"}, 200),
        ({"host": "192.0.2.7"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
    ],
)
def test_other_sites_and_other_names_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=3).to_json()
    assert ask(server, "/api/open", plan.encode(), headers=JSON | headers)[0] == status


def test_too_much_is_refused_before_it_is_read(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = "POST /api/open HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {MAX_BODY_BYTES + 1}\r\n\r\n{{".encode())
        assert b" 413 " in connection.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"POST /api/open HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: x\r\n\r\n"
        )
        assert b" 400 " in connection.recv(4096)


@pytest.mark.parametrize(("path", "headers", "status"), [("open", JSON, 413), ("none", JSON, 404), ("open", {}, 415)])
def test_who_sends_too_much_gets_the_answer(server: Server, path: str, headers: dict[str, str], status: int) -> None:
    """A connection that is closed while the request comes is reset, and the answer lost."""
    body = b" " * (MAX_BODY_BYTES + 2**20)
    assert ask(server, f"/api/{path}", body, headers=headers)[0] == status


def silent(server: Server, count: int, first: bytes = b"") -> list[socket.socket]:
    """Connections that send `first` and then nothing."""
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(count)]
    for connection in connections:
        connection.sendall(first)
    return connections


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nhost: localhost\r\nx-slow: "])
def test_connections_that_send_nothing_do_not_stop_the_page(server: Server, first: bytes) -> None:
    connections = silent(server, 250, first)
    try:
        for _ in range(3):
            assert ask(server, "/", method="GET", headers={})[0] == 200
    finally:
        for connection in connections:
            connection.close()


def test_hanging_up_ends_the_search(server: Server) -> None:
    wait_for_no_workers(server)  # those of other tests
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/api/search", json.dumps(LONG).encode(), JSON)
    response = connection.getresponse()
    assert json.loads(response.readline())["event"] == "best"
    assert workers(server) == 1
    response.close()
    connection.close()
    wait_for_no_workers(server)


def test_an_answer_that_is_cut_off_is_not_complete(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/api/search", json.dumps(LONG).encode(), JSON)
    response = connection.getresponse()
    assert json.loads(response.readline())["event"] == "best"
    for child in psutil.Process(server.pid).children():
        child.kill()
    assert not response.read().endswith(b"\n\n")
    connection.close()


@pytest.fixture
def impatient() -> Iterator[Server]:
    process, running = start("--search-seconds", "1", "--allow-host", "box.lan")
    yield running
    children = psutil.Process(running.pid).children(recursive=True)
    end(process)
    assert psutil.wait_procs(children, timeout=20)[1] == [], "a worker outlived the server"


def test_a_search_has_a_limit_and_a_server_the_names_it_was_given(impatient: Server) -> None:
    found = events(ask(impatient, "/api/search", LONG)[2])
    assert found[-1]["event"] == "stopped"
    assert "limit of 1 s" in found[-1]["message"]
    assert ask(impatient, "/", method="GET", headers={"host": "box.lan:8321"})[0] == 200
