"""A metrics file that cannot be written any more is logged once, and has no torn line."""

from __future__ import annotations

import json
import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

with quiet_third_parties():
    from megatron.zerobubble.training.metrics.json_lines import JsonLines

pytestmark = pytest.mark.claims(
    "Long runs",
    "metrics, plan file or trace that cannot be written any more: logged once, training goes on",
    "works",
    also=("training/test_plan_files.py",),
)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """This process' limit on the size of a file, which a write beyond it meets as it would a full disk: after a part of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_logged_once_and_leaves_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(str(path), is_continued=False)
    lines.write([{"iteration": 1}])
    with files_of_at_most(path.stat().st_size + 10):
        for iteration in (2, 3):
            lines.write([{"iteration": iteration, "schedule": "zbv"}])
    lines.write([{"iteration": 4}])
    lines.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 4]
    (warning,) = caplog.messages
    assert warning.startswith(f"--metrics-jsonl {path} cannot be written: File too large; training goes on")


def test_a_device_that_is_full_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = JsonLines("/dev/full", is_continued=True)
    lines.write([{"iteration": 1}])
    lines.write([{"iteration": 2}])
    lines.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "--metrics-jsonl /dev/full cannot be written: No space left on device" in caplog.text
