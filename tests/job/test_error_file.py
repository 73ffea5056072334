"""The reason of a failure, where torchrun looks for it. torchrun's own classes read the files here."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.error_file import read_error_file, write_error_file
from megatron.zerobubble.job.exit import exit_with_error
from megatron.zerobubble.job.failure import JobGuard
from megatron.zerobubble.job.launch import launcher_environment, read_launch

pytestmark = pytest.mark.claims(
    "Long runs",
    "the reason of a failure as the root cause in torchrun's summary, before and after the process group exists",
    "works",
    also=("cli/test_main.py",),
)


def summary(*files: Path) -> str:
    """What torchrun prints about ranks with these error files that failed now."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=2, error_file=str(file)) for rank, file in enumerate(files)
    }
    return str(ChildFailedError("pretrain_gpt.py", failures))


def test_the_root_cause_is_our_line(tmp_path: Path) -> None:
    """Rank 0, which fails because of rank 1 within the same second, has no file."""
    with pytest.raises(SystemExit):
        exit_with_error(
            ConfigError("--lr 2 is too large"), rank=0, prog="pretrain_gpt.py", error_file=str(tmp_path / "1" / "error.json")
        )
    printed = summary(tmp_path / "0" / "error.json", tmp_path / "1" / "error.json")
    cause = printed[printed.index("Root Cause") :]
    assert "pretrain_gpt.py: error: --lr 2 is too large" in cause
    assert "rank      : 1" in cause


def test_a_rank_that_raises_leaves_its_traceback(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    store = torch.distributed.HashStore()
    with pytest.raises(IndexError), JobGuard(store, 3, leave=lambda code: None, stream=io.StringIO(), error_file=str(file)):
        raise IndexError("list index out of range")
    assert read_error_file(file) == "rank 3 failed: IndexError: list index out of range"
    printed = summary(file)
    assert "Traceback (most recent call last):" in printed
    assert "IndexError: list index out of range" in printed
    other = tmp_path / "other.json"
    with (
        pytest.raises(ConnectionError),
        JobGuard(store, 4, leave=lambda code: None, stream=io.StringIO(), error_file=str(other), pause=lambda _: None),
    ):
        raise ConnectionError("reset")
    assert not other.exists(), "rank 3 failed first"


def test_a_rank_that_is_ended_while_it_writes_leaves_no_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the other ranks when it sees the first exit, and would itself end with an error of its JSON parser."""
    file = tmp_path / "error.json"

    def die(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:10].encode())
        os.kill(os.getpid(), signal.SIGTERM)

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        monkeypatch.setattr(Path, "write_text", die)
        write_error_file(str(file), "a line")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert "exitcode  : 2" in summary(file)


def test_without_torchrun_there_is_no_file(tmp_path: Path) -> None:
    write_error_file(None, "a line")
    write_error_file(str(tmp_path / "file" / "error.json"), "a line")
    (tmp_path / "broken").write_text("{")
    assert read_error_file(tmp_path / "file" / "error.json") == "a line"
    assert read_error_file(tmp_path / "broken") is None
    assert read_error_file(tmp_path / "missing") is None


def test_the_file_is_torchruns(tmp_path: Path) -> None:
    environment = launcher_environment(tmp_path / "error.json")
    assert read_launch(environment).error_file == str(tmp_path / "error.json")
    assert read_launch({}).error_file is None
