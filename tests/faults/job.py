"""The training job of the fault laboratory: `zerobubble run` of examples/stock_megatron_core.py, in which one rank fails.

`python -m tests.faults.job FLAGS` is one rank. The environment has the fault, a JSON object, and the name that the process gives
its host.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT, HOST = "ZB_TEST_FAULT", "ZB_TEST_HOST"
"""Environment variables."""
PLACES = {
    "start": "initialize",
    "build": "build_model",
    "pass": "forward_step",
    "step": "step",
    "between": "get_forward_backward_func",
}
"""Where a rank fails -> the function at whose call number `Fault.call` it does."""


def _fail(kind: str, note: str) -> None:
    Path(note).write_text(str(time.time()))
    if kind == "raise":
        raise ZeroDivisionError("the injected failure")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10_000.0)


def _failing(function: Callable[..., Any], fault: dict[str, Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault["call"]:
            _fail(fault["kind"], fault["note"])
        return function(*given, **named)

    return call


def spoil(example: Any, fault: dict[str, Any]) -> None:
    """Let this rank fail in the example, if the fault is its own."""
    if fault["rank"] != int(os.environ["RANK"]):
        return
    name = PLACES[fault["place"]]
    if name != "step":
        setattr(example, name, _failing(getattr(example, name), fault))
        return
    make = example.get_megatron_optimizer

    def made(*given: Any, **named: Any) -> Any:
        optimizer = make(*given, **named)
        optimizer.step = _failing(optimizer.step, fault)
        return optimizer

    example.get_megatron_optimizer = made


def main() -> None:
    """Run the example as one rank."""
    from megatron.zerobubble.cli import run

    if HOST in os.environ:
        socket.gethostname = lambda: os.environ[HOST]
    run.main(["--cpu", str(Path(__file__).with_name("loop.py")), *sys.argv[1:]])


def fault_of_job() -> dict[str, Any] | None:
    """The fault in the environment."""
    text = os.environ.get(FAULT)
    return None if text is None else json.loads(text)


if __name__ == "__main__":
    main()
