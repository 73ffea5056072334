"""A playground that listens on a free port, and a browser to look at it with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.playground.pages import SMALL, Open

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT_MS = 60_000
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running playground."""

    address: str
    """Without a slash at the end."""
    port: int
    pid: int


def start(*flags: str) -> tuple[subprocess.Popen[str], Server]:
    """Start one on a free port, as a person would; it listens when this returns."""
    command = [sys.executable, "-m", "megatron.zerobubble.playground", "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().split()[1].rstrip("/")
    return process, Server(address=address, port=int(address.rpartition(":")[2]), pid=process.pid)


def end(process: subprocess.Popen[str]) -> None:
    """Interrupt it, as a person would."""
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The playground as it is started without flags."""
    process, running = start()
    yield running
    end(process)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The machine's own Chromium without a window."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        message = "no chromium on this machine: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers run as root and without user namespaces, where Chromium's sandbox cannot start; it sees our own page only.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, server: Server) -> Open:
    """A page in a context of its own, which fails the test if it logs anything to the console."""

    @contextmanager
    def open_page(query: str = SMALL, script: str = "", **options: Any) -> Iterator[Page]:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True} | options)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.add_init_script(script)
        logged: list[str] = []
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on("console", lambda message: logged.append(message.text))
        page.goto(f"{server.address}/?{query}")
        page.wait_for_selector(".panel .chart")
        yield page
        assert logged == []
        context.close()

    return open_page
