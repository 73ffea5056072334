"""In a loop of your own a rank that raises or hangs in a pass is named, with the op; what is between two calls takes its time."""

from __future__ import annotations

import re
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.supervision import Supervision
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.runtime.watch import Watch
from tests.support.ranks import RankPool
from tests.support.stock import EXAMPLE, train
from tests.training.launch import launch

pytestmark = pytest.mark.claims(
    "Your own script",
    "`zerobubble run`, and `install(watchdog_seconds=...)`: a rank that raises or hangs in a pass is named with op, stage and "
    "microbatch, one that is killed or stopped there with its process, and the job ends; a rank that pauses between two calls is "
    "waited for",
    "works; **not run on a GPU**",
)

SIZES = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 16 --num-attention-heads 2"
LOOP = f"""
import importlib.util, pathlib, sys, time
import torch.distributed as dist
import megatron.zerobubble
from megatron.zerobubble.mcore.cpu.scripts import script_device
from megatron.zerobubble.job.launch import read_launch

spec = importlib.util.spec_from_file_location("example", {str(EXAMPLE)!r})
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
forward_step, schedule, calls = example.forward_step, example.get_forward_backward_func, [0]

def failing(*given):
    calls[0] += 1
    if dist.get_rank() == 1 and calls[0] == 11:  # microbatch 2 of iteration 3
        pathlib.Path(__file__).with_suffix(".when").write_text(str(time.time()))
        FAULT
    return forward_step(*given)

def pausing():
    if dist.get_rank() == 0 and calls[0] == 8:  # rank 1 waits in the passes of iteration 3
        time.sleep(6.0)
    return schedule()

example.forward_step, example.get_forward_backward_func = failing, pausing
args = example.parse({SIZES!r}.split())
"""
RUN = f"{LOOP}\nexample.train(args)\n"
INSTALL = f"""{LOOP}
with script_device(read_launch(), on_cpu=True):
    megatron.zerobubble.install(schedule="zb-h1", watchdog_seconds=2.0)
    example.train(args)
"""
FLAGS = ["--cpu", "--enable-zero-bubble"]


def _failed(script: Path, text: str, fault: str, *flags: str) -> str:
    """What a job said that failed within half a minute of the fault, with torchrun's summary."""
    script.write_text(text.replace("FAULT", fault))
    given, module = ([*flags, script], "megatron.zerobubble.run") if flags else ([], None)
    done = launch(given, num_ranks=2, script=script, module=module)
    assert done.returncode == 1
    assert script.with_suffix(".when").exists(), done.stderr
    assert time.time() - float(script.with_suffix(".when").read_text()) < 30.0, (
        "a few seconds on a machine that does nothing else"
    )
    assert re.search(r"Root Cause.*?rank +: 1 ", done.stderr, re.DOTALL), done.stderr
    return done.stderr


@pytest.mark.parametrize(("text", "flags"), [(RUN, FLAGS), (INSTALL, [])], ids=["run", "install"])
@pytest.mark.sampled(0.5, group="whole jobs")
def test_a_rank_that_raises_is_named_with_its_op(text: str, flags: list[str], tmp_path: Path) -> None:
    said = _failed(tmp_path / "loop.py", text, "raise ZeroDivisionError('the injected failure')", *flags)
    failure = "rank 1 failed while it runs 1F2, the forward of stage 1, microbatch 2"
    ours, _, summary = said.partition("torch/distributed/elastic")
    assert ours.count("Traceback") == 1, "rank 0 has not failed by itself"
    assert f"{failure}:\nTraceback" in ours
    assert re.search(rf"^rank 0 stops while it waits.*: {failure}: ZeroDivisionError: the injected failure$", ours, re.MULTILINE)
    cause = summary[summary.index("Root Cause") :].splitlines()
    assert cause[-2].strip() == "pipeline rank 1, at 1F2, the forward of stage 1, microbatch 2", "the last words on the screen"


@pytest.mark.sampled(0.5, group="whole jobs")
def test_a_rank_that_hangs_in_a_pass_is_named_and_one_that_pauses_between_calls_is_not(tmp_path: Path) -> None:
    said = _failed(tmp_path / "loop.py", RUN, "time.sleep(10_000)", *FLAGS, "--zero-bubble-watchdog-seconds", "2")
    stuck = [line for line in said.splitlines() if line.startswith("stuck: ")]
    assert stuck[0].startswith("stuck: rank 1 makes no progress: it runs 1F2, the forward of stage 1, microbatch 2, for ")
    assert "(in failing, loop.py:" in stuck[0]
    assert re.match("stuck: rank 0 waits, before 0B[0-3], to receive the gradient for stage 0", min(stuck[1:])), stuck


@pytest.mark.parametrize(
    ("signal", "line"),
    [
        (  # or torchrun ends rank 0 before that says so, and names rank 1 itself
            "SIGKILL",
            r"(rank 0 stops while it waits, .*: rank 1 \(process \d+ on \S+\) is gone, ended from outside|  trace.*: Signal 15)",
        ),
        ("SIGSTOP", r"stuck: rank 1 \(process \d+ on \S+\) has said nothing for \d"),
    ],
)
@pytest.mark.sampled(0.5, group="whole jobs")
def test_a_rank_that_is_killed_or_stopped_is_named(signal: str, line: str, tmp_path: Path) -> None:
    fault = f"import os, signal; os.kill(os.getpid(), signal.{signal})"
    said = _failed(tmp_path / "loop.py", RUN, fault, *FLAGS, "--zero-bubble-watchdog-seconds", "3")
    assert re.search(f"^{line}", said, re.MULTILINE), said


def _supervised(rank: int) -> list[str | None]:
    supervision, seen = Supervision(20.0), []
    with HostDevice().on_host():
        with pytest.raises(ZeroDivisionError), supervision.during("fails"):
            raise ZeroDivisionError
        seen.append(supervision.watch and supervision.watch.last().text)
        with supervision.during("goes on"):
            seen.append(supervision.watch and supervision.watch.last().text)
        supervision.close()
    return seen


def test_it_ends_with_an_exception_and_begins_again_with_the_next_call(two_ranks: RankPool) -> None:
    assert two_ranks.run(_supervised) == [[None, "goes on"]] * 2


def _waits(rank: int) -> list[str]:
    seen, waits = [], Watch.waits

    def noted(watch: Watch, text: str, peer: int | None = None) -> AbstractContextManager[None]:
        seen.append(text)
        return waits(watch, text, peer)

    with mock.patch.object(Watch, "waits", noted):
        train(rank, f"{SIZES} --train-iters 2", schedule="zb-h1", watchdog_seconds=20.0, optimizer_post_validation=True)
    return seen


def test_waits_of_post_validation_are_known(two_ranks: RankPool) -> None:
    for rank, seen in enumerate(two_ranks.run(_waits)):
        assert f"waits to receive gradient statistics from rank {1 - rank}" in seen


def _watched(rank: int) -> tuple[str, set[str], bool]:
    flags, before = f"{SIZES} --train-iters 1", sys.excepthook
    train(rank, flags, schedule="zb-h1", watchdog_seconds=20.0)
    with pytest.raises(ConfigError) as caught:
        train(rank, flags, schedule="zb-h1", watchdog_seconds=60.0)
    return str(caught.value), {each.name for each in threading.enumerate()}, sys.excepthook is before


def test_a_limit_above_the_timeout_is_refused_and_uninstall_leaves_nothing(two_ranks: RankPool) -> None:
    for message, threads, is_undone in two_ranks.run(_watched):
        assert message.startswith("--zero-bubble-watchdog-seconds 60 must be less than the timeout of the process groups, 60 s")
        assert not threads & {"watchdog", "beats"}
        assert is_undone
