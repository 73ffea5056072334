"""What a run writes is tried at start: one line for each target that cannot be written, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings

pytestmark = pytest.mark.claims(
    "Long runs",
    "files and directories that cannot be written (`--save`, `--metrics-jsonl` and "
    "others): one line at start, nothing left behind; missing permissions only as a user other than root",
    "rejected",
)

BASE = (
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 --train-iters 10 "
    "--mock-data --pipeline-model-parallel-size 2 --zero-bubble-v-schedule "
)
DIRECTORIES = ("--save", "--zero-bubble-trace")
FILES = ("--metrics-jsonl", "--zero-bubble-save-plan")


def settings(flag: str, value: object, *more: str, rank: int = 0) -> Settings:
    return settings_from_argv([*BASE.split(), flag, str(value), *more], world_size=2, rank=rank)


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "inside").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    return tmp_path


@pytest.mark.parametrize("flag", [*DIRECTORIES, *FILES])
@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_empty_name_is_refused(flag: str, value: str, rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} '{value}' is empty; give the (file|directory) to write, or leave it out"):
        settings(flag, value, rank=rank)


IN_DIRECTORIES = {
    "file": "is a file; give a directory",
    "link": "is a file; give a directory",
    "file/below": "/file is not a writable directory: it is a file",
    "file/below/that": "/file is not a writable directory: it is a file",
    "/dev/full": "is a file; give a directory",
    "/dev/null/x": "/dev/null is not a writable directory",
    "/proc/no/such": "/proc is not a writable directory",
    "n" * 300: "cannot be written: File name too long",
    **dict.fromkeys(["directory", "new", "new/deep", "directory/new"], ""),
}
IN_FILES = {
    "directory": "is a directory; give the file to write in it",
    "file/below": "/file is not a writable directory",
    "/dev/full": "cannot be written: No space left on device|is a device or a pipe, which cannot be replaced",
    "/proc/metrics": "/proc is not a writable directory",
    "n" * 300: "cannot be written: File name too long",
    "file": "",
    "new": "",
}
METRICS = dict.fromkeys(["link", "new/deep/file", "/dev/null"], "")
PLANS = {"new/plan.json": "new is not a writable directory: it does not exist; make it first"}
TARGETS = [
    *((flag, *each) for flag in DIRECTORIES for each in IN_DIRECTORIES.items()),
    *((flag, *each) for flag in FILES for each in IN_FILES.items()),
    *(("--metrics-jsonl", *each) for each in METRICS.items()),
    *(("--zero-bubble-save-plan", *each) for each in PLANS.items()),
]
"""(flag, value, why it is refused, or "")"""


@pytest.mark.parametrize(("flag", "value", "message"), TARGETS)
def test_a_target_is_tried_and_left_as_it_was(folder: Path, flag: str, value: str, message: str) -> None:
    before = content(folder)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext() as refused:
        settings(flag, folder / value)
    if refused is not None:
        assert str(refused.value).startswith(f"{flag} ")
        assert "\n" not in str(refused.value)
    assert content(folder) == before


def test_a_pipe_that_nobody_reads_is_not_opened(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    settings("--metrics-jsonl", folder / "pipe")
    with pytest.raises(ConfigError, match="is a device or a pipe, which cannot be replaced"):
        settings("--zero-bubble-save-plan", folder / "pipe")


def test_other_ranks_try_nothing(folder: Path) -> None:
    settings("--save", folder / "file", rank=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("flag", [*DIRECTORIES, *FILES])
def test_a_directory_without_permission(folder: Path, flag: str) -> None:
    locked = folder / "locked"
    locked.mkdir(mode=0o500)
    value = locked / "name" if flag in FILES else locked
    with pytest.raises(ConfigError, match="locked is not a writable directory: Permission denied"):
        settings(flag, value)
