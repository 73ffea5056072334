"""Whether a rank waits for others: by its last report, or by the call its main thread is in, never by the name of a file."""

from __future__ import annotations

import ast
import linecache
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zerobubble import job
from megatron.zerobubble.job import pulse
from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.runtime import turns
from megatron.zerobubble.runtime.watch import Watch

IN_A_WAIT = "def in_a_wait(work):\n    first = 1\n    second = work.wait()\n    return first, second\n"


def _defined(source: str, file: str, module: str) -> Callable[[Any], Any]:
    names: dict[str, Any] = {"__name__": module}
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # as if the file were there
    exec(compile(source, file, "exec"), names)
    return names[next(name for name in names if name.startswith("in_"))]


def _verdict(function: Callable[[Any], Any]) -> bool:
    """Whether a thread counts as waiting while it is in a compiled call, here of a lock, as `Work.wait` of torch is."""
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=function, args=(SimpleNamespace(wait=lock.acquire, acquire=lock.acquire),))
    thread.start()
    while "in_" not in _innermost(thread).f_code.co_name:
        time.sleep(0.01)
    before, frame = -1, _innermost(thread)
    while before != frame.f_lasti:
        before = frame.f_lasti
        time.sleep(0.05)
    seen = pulse._is_waiting(None, frame)
    lock.release()
    thread.join()
    return seen


def _innermost(thread: threading.Thread) -> FrameType:
    return sys._current_frames()[thread.ident or 0]


@pytest.mark.parametrize("file", ["megatron/zerobubble/wgrad/sharing.py", "renamed.py", "torch/distributed/other.py"])
def test_renaming_a_file_changes_no_verdict(file: str) -> None:
    assert _verdict(_defined(IN_A_WAIT, file, "any.module"))
    assert not _verdict(_defined(IN_A_WAIT.replace("wait()", "acquire()"), file, "any.module"))


def test_no_file_is_named_where_the_verdict_is_made() -> None:
    folder = Path(job.__file__).parent
    texts = [
        node.value
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in texts if text.endswith(".py") or text.startswith("megatron")] == []


@pytest.mark.parametrize("module", pulse._TORCH)
def test_torch_has_the_modules_whose_functions_wait(module: str) -> None:
    assert module in sys.modules or __import__(module)
    assert _verdict(_defined(IN_A_WAIT.replace("wait()", "acquire()"), "any.py", module))


def test_a_thread_at_work_does_not_count_as_waiting() -> None:
    """One that waits for another thread of its process neither: that thread may be stuck."""
    assert not pulse._is_waiting(None, sys._getframe())
    assert not pulse._is_waiting(None, None)
    own: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=own.get)
    thread.start()
    time.sleep(0.2)
    assert not pulse._is_waiting(None, _innermost(thread))
    own.put(0)
    thread.join()


def test_a_reported_wait_counts_wherever_the_thread_is() -> None:
    """A transfer may wait for a thread of its own process, which waits for the message."""
    watch = Watch(torch.device("cpu"))
    message = Message(Payload.GRADIENT, 0, 2, 1, 0)
    for report in (watch.awaited, watch.retiring):
        report(message)
        assert pulse._is_waiting(watch.current(), sys._getframe())
    watch.report("makes its gradients final with other ranks", is_shared=True)
    assert not pulse._is_waiting(watch.current(), sys._getframe())


def test_while_a_pass_waits_for_the_other_one_of_its_pair_that_ones_call_counts() -> None:
    """The main thread runs the forward pass, and the backward pass is in a collective, or computes."""
    pair, seen, lock = turns.Turns(torch.device("cpu")), [], threading.Lock()
    in_a_wait = _defined(IN_A_WAIT, "any.py", "any.module")

    def watch() -> None:
        for expected in (True, False):
            until = time.monotonic() + 20.0
            while (found := pulse._is_waiting(None, pulse._main_frame())) != expected and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(found)
            lock.release() if expected else computed.set()

    def backward() -> None:
        in_a_wait(SimpleNamespace(wait=lock.acquire))
        while not computed.is_set():
            pass

    computed = threading.Event()
    lock.acquire()
    watcher = threading.Thread(target=watch)
    watcher.start()
    pair.run(lambda: None, backward)
    watcher.join()
    assert seen == [True, False]
