"""Which attempt of torchrun this is, and what its attempts share: the id of the job, and a folder on each machine.

When a rank dies, torchrun ends all ranks and starts new ones, up to --max-restarts times. The first attempt writes the id of the
job into a file in host memory (tmpfs), in a folder named after the process that starts the ranks, which lives as long as the job:
torchrun's own on each machine. So a later attempt knows which checkpoints are its own, even in a --save directory with those of
other jobs. Folders of jobs that are gone are removed when the next one starts there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron.zerobubble.files import replace_text
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.machine import process_state
from megatron.zerobubble.training.checkpoint.shared import gathered
from megatron.zerobubble.training.initialize import Job

__all__ = ["MEMORY", "Attempt", "join_attempt", "leave_attempt", "restarts_folder"]

MEMORY = Path("/dev/shm")
"""The tmpfs of the host: files in it are in memory."""
_JOB_FILE = "job"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of torchrun to run the job; the same on all ranks but for the folder."""

    number: int = 0
    """Restarts so far."""
    max_restarts: int = 0
    """Restarts that torchrun allows; 0 without torchrun."""
    job: str
    """Id of the job, the same in all of its attempts."""
    is_known: bool = True
    """Whether it is; a new one is taken where that of earlier attempts is lost, with the machines that knew it."""
    folder: Path | None = None
    """Folder of the job on this machine, which outlives an attempt; None if torchrun restarts nothing."""

    @property
    def is_restart(self) -> bool:
        """Whether an earlier attempt failed."""
        return self.number > 0

    @property
    def text(self) -> str:
        """The attempt in log lines."""
        return f"restart {self.number} of {self.max_restarts}"


def join_attempt(job: Job, *, root: Path | None = None, starter: int | None = None) -> Attempt:
    """This attempt, and the id of the job, which the first one chooses. All ranks must call this.

    Args:
        job: the attempt's ranks and store.
        root: where the folder of the job is; None: host memory, or the directory for temporary files without a tmpfs.
        starter: id of the process that started this rank; None: the parent.
    """
    launch = job.launch
    if not launch.max_restarts:
        return Attempt(job=_new_id(job))
    root = root or (MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
    folder = restarts_folder(root, os.getppid() if starter is None else starter)
    if launch.local_rank == 0:
        _remove_stale(root, folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
    known = _kept_id(folder) if launch.restart_count > 0 else None
    name = known or _new_id(job)
    if launch.local_rank == 0:
        replace_text(folder / _JOB_FILE, name)
    is_known = known is not None or launch.restart_count == 0
    return Attempt(number=launch.restart_count, max_restarts=launch.max_restarts, job=name, is_known=is_known, folder=folder)


def leave_attempt(attempt: Attempt, launch: Launch) -> None:
    """Remove the job's folder on this machine, when the job has ended well."""
    if attempt.folder is not None and launch.local_rank == 0:
        shutil.rmtree(attempt.folder, ignore_errors=True)


def restarts_folder(root: Path, starter: int) -> Path:
    """The folder of the job whose ranks the process `starter` of this machine starts.

    Process ids are used again, and containers that share a tmpfs have their own: so the name has its start time and namespace.
    """
    state = process_state(starter)
    return root / f"{_prefix()}{starter}-{None if state is None else state.start}"


def _prefix() -> str:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"megatron-zerobubble-{os.geteuid()}-{namespace}-"


def _remove_stale(root: Path, own: Path) -> None:
    """Remove folders of jobs of this user whose torchrun is gone."""
    pattern = re.compile(re.escape(_prefix()) + r"(\d+)-(\d+)")
    for path in root.glob(f"{_prefix()}*"):
        found = pattern.fullmatch(path.name)
        if not found or path == own:
            continue
        state = process_state(int(found[1]))
        if state is None or state.start != found[2]:
            shutil.rmtree(path, ignore_errors=True)


def _new_id(job: Job) -> str:
    return job.store.compare_set("restarts/job", "", uuid.uuid4().hex[:16]).decode(errors="replace")


def _kept_id(folder: Path) -> str | None:
    """The id of the job that any machine has kept from earlier attempts."""
    own: str | None = None
    with contextlib.suppress(OSError):
        own = (folder / _JOB_FILE).read_text(encoding="ascii", errors="replace").strip()
    return next((each for each in gathered(own) if each), None)
