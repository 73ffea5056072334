"""Ends a rank: for a user error with one line per host and exit code 2, or at once with what it has started."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from megatron.zerobubble.errors import UserError
from megatron.zerobubble.job.error_file import write_error_file
from megatron.zerobubble.machine import children_of

__all__ = ["exit_with_error", "leave_now"]

_GRACE_S = 5.0
"""Seconds that a rank other than 0 waits, after a bad flag, for rank 0 to report it and for torchrun to end the job."""


def leave_now(code: int) -> NoReturn:
    """End this process without exit handlers, which could wait for other ranks, and the processes that it has started.

    Data loaders and writers of checkpoints would otherwise stay, as they are ended by such a handler. Without /proc they do.
    """
    for child in children_of(os.getpid()):
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os._exit(code)


def exit_with_error(
    error: UserError,
    *,
    rank: int,
    is_reporting: bool | None = None,
    prog: str,
    error_file: str | None = None,
    before_exit: Callable[[UserError], None] | None = None,
) -> NoReturn:
    """Print a user error and exit with code 2.

    Args:
        error: its message is printed.
        rank: this process' rank.
        is_reporting: whether this rank prints, as one of each host should; None: rank 0 does. Other ranks wait a few seconds, so
            that it reports before torchrun ends the job.
        prog: program name in front of the message.
        error_file: where torchrun expects the reason of this rank's failure, to show it at the end as the root cause.
        before_exit: called with the error, after it is printed.
    """
    if not (rank == 0 if is_reporting is None else is_reporting):
        if before_exit is not None:
            before_exit(error)
        time.sleep(_GRACE_S)
        write_error_file(error_file, f"{prog}: rank {rank}: error: {error}")  # rank 0 may see other files, and no error
    else:
        write_error_file(error_file, f"{prog}: error: {error}")
        sys.stderr.write(f"{prog}: error: {error}\n")
        sys.stderr.flush()
        if before_exit is not None:
            before_exit(error)
    sys.exit(2)
