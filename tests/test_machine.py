"""What this machine says about processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron.zerobubble.machine import process_state

NAMED = r"open('/proc/self/comm', 'wb').write(b'\xff) Z 1'); print(flush=True); input()"
"""A process may give itself any name, of any bytes."""


@pytest.fixture
def named() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield other
        if other.poll() is None:
            other.communicate(b"\n")


def test_a_process_with_a_name_of_any_bytes_is_found(named: subprocess.Popen[bytes]) -> None:
    own, other = process_state(os.getpid()), process_state(named.pid)
    assert own is not None
    assert other is not None
    assert int(other.start) >= int(own.start)
    assert not other.is_zombie


def test_a_zombie_is_told_from_a_process_that_is_gone(named: subprocess.Popen[bytes]) -> None:
    named.kill()
    os.waitid(os.P_PID, named.pid, os.WEXITED | os.WNOWAIT)
    state = process_state(named.pid)
    assert state is not None
    assert state.is_zombie
    named.wait()
    assert process_state(named.pid) is None
