"""Ranks that share one GPU: what their environment says, and that the program is the one that was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.share import variables

SHOWN = "import os, sys; print(sys.argv[1:], os.environ['NCCL_HOSTID'], os.environ['LOCAL_RANK'], __name__)"


def _run(*words: str, rank: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(cwd), str(Path(__file__).parents[2])])
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path}
    command = [sys.executable, "-m", "tools.gpu.share", *words]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", [("shown.py",), ("-m", "shown")])
def test_a_script_or_a_module_runs_as_a_rank_of_its_own_host(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    done = _run(*words, "--flag", "-m", rank=3, cwd=tmp_path)
    assert done.stdout == "['--flag', '-m'] rank-3 0 __main__\n", done.stderr


@pytest.mark.parametrize("words", [(), ("-m",)])
def test_nothing_to_run_is_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = _run(*words, rank=0, cwd=tmp_path)
    assert done.stderr == "tools.gpu.share: give a script, or -m and a module, and its arguments\n"
    assert done.returncode == 1


def test_no_two_ranks_are_on_one_host() -> None:
    assert len({variables(rank)["NCCL_HOSTID"] for rank in range(4)}) == 4
