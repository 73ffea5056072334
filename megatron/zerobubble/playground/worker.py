"""A process that does one task and ends (`python -m megatron.zerobubble.playground.worker`): ending it stops the task.

Standard input: the task's name in a line, then the request's body to the end. Standard output: an event a line.
"""

from __future__ import annotations

import contextlib
import resource
import sys

from megatron.zerobubble.playground.limits import WORKER_BYTES
from megatron.zerobubble.playground.tasks import encode, run_task


def main() -> None:
    """Limit the process, then do what it is told."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    name = sys.stdin.buffer.readline().decode().strip()
    if not name:
        return  # the server has ended while this process was spare
    body = sys.stdin.buffer.read()
    for event in run_task(name, body):
        sys.stdout.buffer.write(encode(event))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
