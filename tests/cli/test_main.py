"""The command `zerobubble`: which command runs, what is missing, and training without a checkout's pretrain_gpt.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zerobubble.cli import plan
from megatron.zerobubble.cli.main import _NAMES, _WITH_OWN_PARSER, build_parser, main
from tests.training.launch import ROOT, TIMEOUT_S, TINY_BATCH, TINY_MODEL, environment


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    listed = capsys.readouterr().out
    assert sorted(_NAMES) == sorted({*plan.COMMANDS, *_WITH_OWN_PARSER})
    for command in _NAMES:
        assert f"\n    {command} " in listed


def test_env_says_what_is_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("megatron-zerobubble ")
    for text in ("torch ", "megatron-core ", "apex: not installed", "no GPU", "NCCL_DEBUG=INFO"):
        assert any(line.startswith(text) for line in lines), text


@pytest.mark.parametrize("command", ["plan --schedule zbv -p 8 -m 64", "env"])
def test_a_reader_that_has_ended_is_no_error(command: str) -> None:
    program = f"{sys.executable} -m megatron.zerobubble {command} | exec true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode in (0, 141), done.stderr) == (True, "")


@pytest.mark.parametrize("argv", [[], ["pla"], ["plan", "--schedule"], ["playground", "--port", "x"]], ids=" ".join)
def test_usage_errors_are_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert "zerobubble" in lines[-1]
    assert ("Exchange:" in lines) == (not argv), "the help, where nothing was asked for"


@pytest.mark.parametrize(("typed", "meant"), [("pla", "plan"), ("rnu", "run"), ("exprot", "export"), ("xyz", "")])
def test_a_command_that_is_not_there(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([typed])
    expected = f"did you mean {meant}?" if meant else "give one of run, train, "
    assert f"there is no command '{typed}'; {expected}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["show"], ["export", "--torch-csv", "-"], ["import"]])
def test_a_file_that_is_not_there_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([words[0], "nofile", *words[1:]]) == 2
    assert capsys.readouterr().err == "zerobubble: error: nofile: No such file or directory\n"


@pytest.mark.parametrize("command", plan.COMMANDS)
def test_every_planning_command_has_examples_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert len(shown) == 2
    assert all(f"zerobubble {command} " in line for line in shown)
    for words in (shlex.split(part)[1:] for line in shown for part in line.split("|")):
        build_parser().parse_args(words)


def _train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`zerobubble train` on two ranks, for two iterations, as a user types it in `folder`."""
    start = [sys.executable, "-m", "megatron.zerobubble.cli.main", "train", "--nproc-per-node", "2"]
    return subprocess.run(
        [*start, *TINY_MODEL, *TINY_BATCH, "--mock-data", "--train-iters", "2", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        cwd=folder,
    )


@pytest.mark.sampled(0.07, group="whole jobs")
def test_train_starts_its_ranks_and_trains(tmp_path: Path) -> None:
    done = _train(tmp_path, "--eval-iters", "0", "--pipeline-model-parallel-size", "2", "--zero-bubble-v-schedule")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "training with zbv: 2 ranks" in done.stdout
    assert done.stdout.count("| consumed samples:") == 2


@pytest.mark.sampled(0.07, group="whole jobs")
def test_the_reason_of_a_failed_job_is_the_last_line(tmp_path: Path) -> None:
    """torchrun's summary above names it as the root cause."""
    done = _train(tmp_path, "--pipeline-model-parallel-size", "3")
    assert done.returncode != 0
    which = "zerobubble train: (rank 1: )?error: "  # on a busy machine rank 0 comes after the others have waited for it
    line = f"{which}2 ranks do not divide by the tensor-, pipeline- and context-parallel sizes, together 3"
    assert re.match(line, done.stderr.splitlines()[-1]), done.stderr
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(line, cause)
