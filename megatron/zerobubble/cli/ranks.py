"""Ranks on this machine for commands that train: `--nproc-per-node N` as a command's first argument starts them by torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.error_file import read_error_file
from megatron.zerobubble.job.launch import launcher_environment

__all__ = ["FLAG", "start_ranks", "take_count"]

FLAG = "--nproc-per-node"


def take_count(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number of ranks to start, None where the first argument is not `--nproc-per-node`, and the other arguments.

    Raises:
        ConfigError: it is not a number of ranks.
    """
    if not words or words[0].partition("=")[0] != FLAG:
        return None, list(words)
    _, has_value, value = words[0].partition("=")
    count, others = (value, words[1:]) if has_value else ("".join(words[1:2]), words[2:])
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"{FLAG} is {count!r}; give the number of ranks on this machine")
    return int(count), list(others)


def start_ranks(count: int, module: str, arguments: Sequence[str]) -> int:
    """Run torchrun with `count` ranks of `module` on this machine, and wait for it.

    Why the job failed, in one line, is the last thing printed, below torchrun's summary. SIGTERM is passed on to torchrun.

    Returns:
        torchrun's exit code.
    """
    sys.stdout.flush()
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"{FLAG}={count}", "-m", module)
    with tempfile.TemporaryDirectory(prefix="zerobubble-") as folder:
        error_file = Path(folder) / "error.json"
        process = subprocess.Popen([*launcher, *arguments], env=launcher_environment(error_file))
        code = _wait(process)
        reason = read_error_file(error_file) if code else None
    if reason is not None:
        print(reason, file=sys.stderr)
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for torchrun. An interrupt from a terminal reaches it without this process."""

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
