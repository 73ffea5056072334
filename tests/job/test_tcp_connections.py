"""Which connection gets no answer."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import ExitStack

import pytest

from megatron.zerobubble.job.tcp_connections import own_connections
from tests.faults.inject import drop_all


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cut_connection_is_seen_and_others_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        ends = []
        for is_cut in (True, False):
            ours = stack.enter_context(socket.create_connection(server.getsockname()))
            theirs = stack.enter_context(server.accept()[0])
            if is_cut:
                drop_all(ours.fileno())
            theirs.sendall(b"data")
            ends.append(f"0100007F:{ours.getsockname()[1]:04X}")
        until = time.monotonic() + 20.0
        while ends[0] not in own_connections().unanswered and time.monotonic() < until:
            time.sleep(0.1)
        seen = own_connections()
    assert ends[0] in seen.unanswered
    assert ends[1] not in seen.unanswered
    assert set(ends) <= set(seen.local)
