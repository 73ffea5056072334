"""In a loop of your own a rank that raises or hangs in a pass is named, with the op; what is between two calls takes its time."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.supervision import Supervision
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.runtime.watch import Watch
from tests.support.ranks import RankPool
from tests.support.stock import EXAMPLE, train
from tests.training.launch import ROOT, TIMEOUT_S, command, environment, launch

pytestmark = pytest.mark.claims(
    "Your own script",
    "`zerobubble run`, and `--zero-bubble-watchdog-seconds` in your own loop: a rank that raises or hangs in a pass is named "
    "with op, stage and microbatch, one that is killed or stopped there with its process, and the job ends; a rank that pauses "
    "between two calls is waited for",
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
    flags = megatron.zerobubble.ZeroBubbleConfig(enable_zero_bubble=True, zero_bubble_watchdog_seconds=2.0)
    megatron.zerobubble.install(flags)
    example.train(args)
"""
WATCHED = "--enable-zero-bubble --zero-bubble-watchdog-seconds"
FLAGS = ["--cpu", "--enable-zero-bubble"]


def _failed(script: Path, text: str, fault: str, *flags: str, within_s: float = 30.0) -> str:
    """What a job said that failed within some time of the fault, with torchrun's summary, which names rank 1."""
    script.write_text(text.replace("FAULT", fault))
    given, module = ([*flags, script], "megatron.zerobubble.run") if flags else ([], None)
    done = launch(given, num_ranks=2, script=script, module=module)
    assert done.returncode == 1
    assert script.with_suffix(".when").exists(), done.stderr
    assert time.time() - float(script.with_suffix(".when").read_text()) < within_s, (
        "a few seconds on a machine that does nothing else"
    )
    assert re.search(r"Root Cause.*?(rank +: 1 |rank 1 \(process \d+)", done.stderr, re.DOTALL), done.stderr
    return done.stderr


@pytest.mark.parametrize(("text", "flags"), [(RUN, FLAGS), (INSTALL, [])], ids=["run", "install"])
@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_rank_that_raises_is_named_with_its_op(text: str, flags: list[str], tmp_path: Path) -> None:
    said = _failed(tmp_path / "loop.py", text, "raise ZeroDivisionError('the injected failure')", *flags)
    failure = "rank 1 failed while it runs 1F2, the forward of stage 1, microbatch 2"
    ours, _, summary = said.partition("torch/distributed/elastic")
    assert ours.count("Traceback") == 1, "rank 0 has not failed by itself"
    assert f"{failure}:\nTraceback" in ours
    for line in re.findall("^rank 0 .*", ours, re.MULTILINE):  # none if torchrun ends rank 0 before that says so
        assert re.fullmatch(rf"rank 0 stops while it waits.*: {failure}: ZeroDivisionError: the injected failure", line)
    cause = summary[summary.index("Root Cause") :].splitlines()
    assert cause[-2].strip() == "pipeline rank 1, at 1F2, the forward of stage 1, microbatch 2", "the last words on the screen"


@pytest.mark.sampled(0.07, group="whole jobs")
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
        ("SIGSTOP", r"stuck: rank 1 \(process \d+ on \S+\) is silent: .* heard of, it runs 1F2"),
    ],
)
@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_rank_that_is_killed_or_stopped_is_named(signal: str, line: str, tmp_path: Path) -> None:
    fault = f"import os, signal; os.kill(os.getpid(), signal.{signal})"
    limit = ["--zero-bubble-watchdog-seconds", "3"]
    said = _failed(tmp_path / "loop.py", RUN, fault, *FLAGS, *limit, within_s=70.0)  # torchrun waits 30 s for one that is stopped
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
        train(rank, f"{SIZES} --train-iters 2 {WATCHED} 20 --enable-optimizer-post-validation")
    return seen


def test_waits_of_post_validation_are_known(two_ranks: RankPool) -> None:
    for rank, seen in enumerate(two_ranks.run(_waits)):
        assert f"waits to receive gradient statistics from rank {1 - rank}" in seen


def _watched(rank: int) -> tuple[str, set[str], bool]:
    flags, before = f"{SIZES} --train-iters 1", sys.excepthook
    train(rank, f"{flags} {WATCHED} 20")
    with pytest.raises(ConfigError) as caught:
        train(rank, f"{flags} {WATCHED} 60")
    return str(caught.value), {each.name for each in threading.enumerate()}, sys.excepthook is before


def test_a_limit_above_the_timeout_is_refused_and_uninstall_leaves_nothing(two_ranks: RankPool) -> None:
    for message, threads, is_undone in two_ranks.run(_watched):
        assert message.startswith("--zero-bubble-watchdog-seconds 60 must be less than the timeout of the process groups, 60 s")
        assert not threads & {"watchdog", "store"}
        assert is_undone


PACKAGE = ROOT / ".nvidia-resiliency-ext"
TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 3 --seq-length 8 --clip-grad 1.14"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"
FAULTS = [
    {"in": "end"},
    *({"in": "forward_step", "rank": rank, "call": call} for rank in (0, 1) for call in (2, 9, 11)),
    {"in": "get_megatron_optimizer", "rank": 1, "call": 1},
    *({"in": "loss_function", "call": call} for call in (3, 6)),
]
"""Ten: among them before, at and after the validation of a step, and on a rank whose neighbor has not begun an iteration."""


def _attempts(tmp_path: Path, job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each rank wrote."""
    with socket.socket() as free:
        free.bind(("", 0))
        job |= {"port": free.getsockname()[1], "output": str(tmp_path / "rank")}
    path = os.pathsep.join([str(PACKAGE), environment()["PYTHONPATH"]])
    done = subprocess.run(
        command([json.dumps(job)], num_ranks=2, module="tests.support.restarting"),
        env=environment(PYTHONPATH=path, TORCH_CPP_LOG_LEVEL="error"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"rank.{rank}").read_text()) for rank in range(2)]


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: ten in-process restarts by nvidia-resiliency-ext 0.4.1 after errors on either rank, ZB-H1 with "
    "per-token loss and ZBV, both with post-validation: the losses of an undisturbed run, nothing of a failed attempt stays",
    "works over gloo, bit for bit, on megatron-core 0.16.1; **not run on a GPU**",
)
@pytest.mark.parametrize(
    ("flags", "options"),
    [(f"{TWO} --calculate-per-token-loss", {"schedule": "zb-h1"}), (CHUNKS, {"schedule": "zbv", "seeds": {"dropout": 1}})],
    ids=["zb-h1", "zbv"],
)
@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_restart_in_process_trains_as_an_undisturbed_run(tmp_path: Path, flags: str, options: dict[str, Any]) -> None:
    if not PACKAGE.is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("nvidia-resiliency-ext was not fetched: make resiliency")
    if importlib.util.find_spec("megatron.core.dist_checkpointing.strategies.nvrx") is not None:
        pytest.skip("this megatron-core needs a newer nvidia-resiliency-ext")
    last = 1 if options["schedule"] == "zb-h1" else 0
    faults = [{"rank": last} | fault if fault["in"] == "loss_function" else fault for fault in FAULTS]
    job = {"flags": flags, "options": options | {"optimizer_post_validation": True}, "faults": faults}
    for rank, (first, *others) in enumerate(_attempts(tmp_path, job)):
        assert first["losses"] == others[-1]["losses"]
        assert len(first["losses"]) == (3 if rank == 1 else 0)
        assert [each.get("losses") for each in others[:-1]] == [None] * (len(FAULTS) - 1)
        alive = [{name: value for name, value in each.items() if name != "losses"} for each in others]
        assert alive == [alive[0]] * len(FAULTS)
        assert (alive[0]["models"], alive[0]["status"]) == (0, "None")
