"""A process that runs one task and exits (`python -m megatron.zerobubble.playground.worker`); killing it stops the task.

Standard input: one line with the name of the task, then the request's body up to the end. Standard output: one event per line.
"""

from __future__ import annotations

import contextlib
import resource
import sys

from megatron.zerobubble.playground.limits import WORKER_BYTES
from megatron.zerobubble.playground.tasks import encode, run_task


def main() -> None:
    """Limit the memory of the process, then run the task."""
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
