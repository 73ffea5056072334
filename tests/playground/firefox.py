"""Firefox without a window, over Marionette: the protocol that it speaks itself, messages of JSON on a socket."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WAIT_S = 90
_IN_TIME = """const done = arguments[0];
const look = () => {
  const found = CONDITION;
  if (found) done(found);
  else setTimeout(look, 50);
};
look();"""


class Firefox:
    """One window. Answers of the browser that are errors raise RuntimeError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers = connection.makefile("rb")
        self._count = 0
        self._read()  # it introduces itself
        self.command("WebDriver:NewSession", capabilities={})
        self.command("WebDriver:SetTimeouts", script=1000 * _WAIT_S, pageLoad=1000 * _WAIT_S)

    def command(self, name: str, **parameters: object) -> Any:
        """Send a command and wait for its answer."""
        self._count += 1
        body = json.dumps([0, self._count, name, parameters]).encode()
        self._connection.sendall(b"%d:%s" % (len(body), body))
        _, _, error, answer = self._read()
        if error:
            raise RuntimeError(f"{name}: {error['error']}: {error['message']}")
        return answer

    def open(self, address: str) -> None:
        """Load a page."""
        self.command("WebDriver:Navigate", url=address)

    def until(self, condition: str) -> Any:
        """Wait until an expression of the page is true, and return its value."""
        return self.command("WebDriver:ExecuteAsyncScript", script=_IN_TIME.replace("CONDITION", condition), args=[])["value"]

    def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a function in the page."""
        return self.command("WebDriver:ExecuteScript", script=script, args=list(arguments))["value"]

    def _read(self) -> Any:
        length = b""
        while (character := self._answers.read(1)) != b":":
            if not character:
                raise RuntimeError("Firefox has ended")
            length += character
        return json.loads(self._answers.read(int(length)))


def path() -> str | None:
    """The machine's own Firefox; None: there is none."""
    return shutil.which("firefox-esr") or shutil.which("firefox")


@contextmanager
def firefox(profile: Path) -> Iterator[Firefox]:
    """Start it with an empty profile."""
    program = path()
    assert program is not None
    profile.mkdir()
    (profile / "user.js").write_text('user_pref("marionette.port", 0);\n')
    command = [program, "--headless", "--marionette", "--no-remote", "--profile", str(profile)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port, end = profile / "MarionetteActivePort", time.monotonic() + _WAIT_S
        while not (port.exists() and port.read_text()):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{program} does not listen; its exit code is {process.poll()}")
            time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", int(port.read_text())), timeout=2 * _WAIT_S) as connection:
            yield Firefox(connection)
    finally:
        process.terminate()
        process.wait(timeout=30)
