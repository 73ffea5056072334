"""This process' TCP connections, as Linux shows them: which of them get no answer. Elsewhere nothing is known.

When all ranks wait in a collective, none of them knows which message is missing. But a connection whose packets are not
acknowledged shows between which two ranks the network is cut. It shows so for what uses TCP: gloo, and NCCL without InfiniBand.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Connections", "own_connections"]

_ESTABLISHED = "01"
_RETRANSMITS = 3


@dataclass(frozen=True)
class Connections:
    """Addresses, as the kernel writes them: in hexadecimal digits, with the port."""

    local: tuple[str, ...] = ()
    """Of this process' ends."""
    unanswered: tuple[str, ...] = ()
    """Of the other ends of those connections on which data was sent again several times, and never acknowledged."""


def own_connections() -> Connections:
    """The established connections of this process."""
    own = _sockets()
    local, unanswered = [], []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, source, target, state, queues, _, retransmits, _, _, inode, *_ = line.split()
                if state == _ESTABLISHED and inode in own:
                    local.append(source)
                    if int(queues.partition(":")[0], 16) > 0 and int(retransmits, 16) >= _RETRANSMITS:
                        unanswered.append(target)
    return Connections(tuple(local), tuple(sorted(set(unanswered))))


def _sockets() -> set[str]:
    """Inodes of this process' sockets."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
