"""That a schedule runs can be seen: one line at the start and after re-planning, the same as data, its name, and traces."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.stock_loop import patches
from megatron.zerobubble.mcore.stock_loop.status import Status
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.registry import build_plan
from tests.support.ranks import RankPool
from tests.support.stock import example, train
from tests.support.traces import check_trace_files
from tests.training.launch import ROOT, launch

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: one line on stderr at the first iteration and after re-planning, `status()`, a warning at exit if "
    "nothing ran, `ZERO_BUBBLE=0`",
    "works",
)


SIZES = "--num-layers 4 --hidden-size 32"
ZBV = f"{SIZES} --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --zero-bubble-v-schedule"
REPLANNED = (
    f"{SIZES} --pipeline-model-parallel-size 4 --num-microbatches 6 --train-iters 4 --zero-bubble-max-pending-backward 5 "
    "--zero-bubble-pipeline-timers-start-iter 3 --zero-bubble-pipeline-timers-end-iter 3 --zero-bubble-planning-seconds 0.1"
)


def _seen(rank: int, flags: str) -> tuple[str, str, Status | None, Status | None]:
    """What the example wrote to stderr, the name of the schedule, and the status before and after training.

    Without what megatron-core itself writes there, from 0.19 on.
    """
    loop, written, seen = example(), io.StringIO(), list[Any]()
    original = loop.train

    def watched(args: Any) -> Any:
        before = megatron.zerobubble.status()
        history = original(args)
        seen.extend((get_forward_backward_func().__qualname__, before, megatron.zerobubble.status()))
        return history

    with contextlib.redirect_stderr(written), mock.patch.object(loop, "train", watched):
        train(rank, flags)
    assert megatron.zerobubble.status() is None, "nothing is installed any more"
    own = [line for line in written.getvalue().splitlines(keepends=True) if "GPTModel IS DEPRECATED" not in line]
    return "".join(own), *seen


def test_a_line_at_the_first_iteration(four_ranks: RankPool) -> None:
    """From rank 0 only, though there are two pipelines, and only once."""
    (text, name, before, status), *others = four_ranks.run(_seen, f"{ZBV} --num-microbatches 4 --train-iters 2")
    assert text == (
        "zero bubble: zbv, p = 2, m = 4: predicted bubble 4.0% (1F1B: 20.0%) for F = B = W, 0.83 of 1F1B's iteration time and "
        "1.00 of its activation memory; ZERO_BUBBLE=0 in the environment or megatron.zerobubble.uninstall() turns it off\n"
    )
    assert "zbv" in name
    assert before is None
    assert status is not None
    assert (status.schedule, status.num_ranks, status.num_microbatches) == ("zbv", 2, 4)
    assert status.bubble_rate_1f1b == pytest.approx(1 / 5)
    assert status.forward_ms is status.measured_bubble_rate is None
    assert all((text, after) == ("", status) for text, _, _, after in others)


def test_a_line_after_replanning(four_ranks: RankPool) -> None:
    (text, _, _, status), *others = four_ranks.run(_seen, REPLANNED)
    first, second = text.splitlines()
    assert first.startswith("zero bubble: zb, p = 4, m = 6: predicted bubble ")
    assert second.startswith("zero bubble: zb re-planned, p = 4, m = 6: predicted bubble ")
    assert status is not None
    assert status.measured_bubble_rate is not None
    assert 0 < status.measured_bubble_rate < 1
    assert f"measured before: {status.measured_bubble_rate:.1%})" in second
    for times in (status.forward_ms, status.backward_ms, status.wgrad_ms):
        assert times is not None
        assert len(times) == 4
        assert all(time > 0 for time in times)
    assert "F " in second.partition(" for measured ")[2]
    assert [after for _, _, _, after in others] == [status] * 3


AUTO = (
    f"{SIZES} --pipeline-model-parallel-size 4 --num-microbatches 6 --train-iters 6 --zero-bubble-schedule auto "
    "--zero-bubble-planning-seconds 0.1 --zero-bubble-balance-stages"
)
IN_A_V = f"{AUTO} --num-layers 8 --virtual-pipeline-model-parallel-size 2 --zero-bubble-v-schedule"


@pytest.mark.claims(
    "Your own script",
    "`--zero-bubble-schedule auto` among the orders of a loop's chunks, `--zero-bubble-balance-stages`, "
    "`--zero-bubble-save-plan`: the plan that runs has the loop's placement; losses are those of the named schedule",
    "works, bit for bit",
)
@pytest.mark.parametrize(("flags", "placement", "named"), [(AUTO, "linear", "zb"), (IN_A_V, "V", "zbv")])
@pytest.mark.sampled(0.5, group="long loops")
def test_auto_takes_the_best_order_of_the_loops_chunks(
    four_ranks: RankPool, tmp_path: Path, flags: str, placement: str, named: str
) -> None:
    (text, name, _, status), *others = four_ranks.run(_seen, f"{flags} --zero-bubble-save-plan {tmp_path}/plan.json")
    lines = text.splitlines()
    assert lines[0].startswith("zero bubble: auto, p = 4, m = 6: predicted bubble ")
    assert lines[-1].startswith("zero bubble: auto re-planned, p = 4, m = 6: predicted bubble ")
    assert sum(line.startswith("zero bubble: stages: F, B and W of a microbatch take ") for line in lines) == 1
    assert sum(line.startswith("zero bubble: layouts: the plan takes ") for line in lines) == 1
    assert name.endswith("zero_bubble_auto")
    assert status is not None
    assert status.forward_ms is not None
    assert [after for _, _, _, after in others] == [status] * 3
    assert all(text == "" for text, *_ in others)
    assert Plan.from_json((tmp_path / "plan.json").read_bytes()).placement.name == placement
    plain = flags.replace("--zero-bubble-v-schedule", "").replace("auto", named)
    assert four_ranks.run(train, plain) == four_ranks.run(train, flags)


def test_a_status_says_what_the_optimizer_makes_of_the_plan() -> None:
    """ZB-H2 has no bubble with post-validation; else each rank idles for p-1 passes. V-Half keeps less."""
    plan = build_plan("zb-h2", num_ranks=4, num_microbatches=12)
    costs = CostModel.uniform(plan.placement)
    waits, steps_early = (
        Status.of(plan, costs, schedule="zb-h2", objective=each) for each in (Objective.MAKESPAN, Objective.SPAN)
    )
    assert steps_early.bubble_rate == 0
    assert waits.bubble_rate == pytest.approx(3 / (36 + 3))
    assert waits.relative_time == pytest.approx((36 + 3) / (36 + 9))
    assert steps_early.relative_time == pytest.approx(36 / (36 + 9))
    assert waits.relative_memory == pytest.approx(2 - 1 / 4)
    half = build_plan("v-half", num_ranks=8, num_microbatches=24)
    costs = CostModel.uniform(half.placement)
    assert Status.of(half, costs, schedule="v-half", objective=Objective.MAKESPAN).relative_memory < 0.7


_NEVER_RUN = """
import megatron.zerobubble
megatron.zerobubble.install(schedule="zb-h1")
"""


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_script_that_never_runs_the_schedule_is_warned() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _NEVER_RUN], capture_output=True, text=True, check=True)
    assert done.stderr.endswith(
        "schedule zb-h1 is installed and was never run: the script made no iteration through megatron-core's "
        "get_forward_backward_func() in a pipeline\n"
    )


@pytest.mark.parametrize(("rank", "calls"), [("0", ["register", "unregister"]), ("1", ["unregister"])])
def test_rank_0_warns_until_uninstall(rank: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with mock.patch.object(patches, "atexit") as atexit:
        megatron.zerobubble.install(schedule="zb-h1")
        megatron.zerobubble.uninstall()
    assert [name for name, _, _ in atexit.mock_calls] == calls


def test_zero_bubble_0_in_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With flags that were parsed, too: the loop runs megatron-core's schedules, and nothing is expected any more."""
    monkeypatch.setenv("ZERO_BUBBLE", "0")
    names = [name for name in vars(schedules) if name.startswith("forward_backward_")]
    originals = [getattr(schedules, name) for name in names]
    args = megatron.zerobubble.add_zero_bubble_args(ArgumentParser()).parse_args(["--enable-zero-bubble"])
    with caplog.at_level(logging.INFO, logger="megatron.zerobubble"):
        megatron.zerobubble.install(args)
    assert [getattr(schedules, name) for name in names] == originals
    assert caplog.messages == ["ZERO_BUBBLE=0 in the environment: no schedule is installed, megatron-core's own runs"]
    assert megatron.zerobubble.status() is None


def test_another_value_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_BUBBLE", "off")
    with pytest.raises(ConfigError, match="ZERO_BUBBLE is 'off'; 0 turns zero bubble off, 1 leaves it on"):
        megatron.zerobubble.install(schedule="zb-h1")


FOUR = "--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 32 --num-microbatches 6"
CHUNKS = f"{FOUR} --virtual-pipeline-model-parallel-size 2"
OPTIMISTIC = "--enable-optimizer-post-validation --post-validation-patience 0 --clip-grad 0.01"
PROFILED = (
    "--zero-bubble-schedule zb --zero-bubble-pipeline-timers-start-iter 1 --zero-bubble-pipeline-timers-end-iter 2 "
    "--zero-bubble-planning-seconds 0.01"
)
TRACED: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 6}


def _train_without_end(rank: int, flags: str, folder: Path) -> list[str]:
    """Train with these flags; the files of `folder` when the last iteration begins, before `uninstall`."""
    loop, seen = example(), []
    original = loop.get_forward_backward_func

    def function() -> Any:
        run = original()

        def before_it(**given: Any) -> Any:
            result = run(**given)
            seen[:] = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
            return result

        return before_it

    with mock.patch.object(loop, "get_forward_backward_func", function):
        train(rank, flags)
    return seen


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: `--zero-bubble-trace`: trace, report, plans and timelines as in the reference trainer, and "
    "`layers.json` where iterations are profiled; ZB-H1, ZBV, planned ZB with profiled memory, post-validation",
    "works",
)
@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("zb-h1", f"{FOUR} --enable-zero-bubble"),
        ("zbv", f"{CHUNKS} --zero-bubble-v-schedule {OPTIMISTIC}"),
        ("zb", f"{FOUR} {PROFILED}"),
    ],
)
def test_chosen_iterations_are_written_when_they_have_run(
    four_ranks: RankPool, tmp_path: Path, schedule: str, flags: str
) -> None:
    folder = tmp_path / "made" / "trace"
    traced = f"{flags} --train-iters 5 --zero-bubble-trace {folder} --zero-bubble-trace-iterations 2,4"
    seen = four_ranks.run(_train_without_end, traced, folder)
    others = ["layers.json"] * (schedule == "zb")
    entries = check_trace_files(folder, schedule, iterations=[2, 4], others=others, **TRACED)
    assert seen[0] == sorted(path.name for path in folder.iterdir()), "before the loop ends"
    assert all(0.0 <= entry["measured"]["bubble_rate"] < 1.0 for entry in entries)
    if schedule == "zb":
        assert all(sum(entry["costs"]["activation"]) > 0.0 for entry in entries), "profiled"
        model = Model.from_json((folder / "layers.json").read_text())
        assert model.layers == ("layer",) * 8
        assert model.kinds["layer"].forward_ms > 0


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_the_losses_are_the_same_and_what_did_not_run_is_left_out(four_ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    flags = f"{CHUNKS if schedule == 'zbv' else FOUR} --train-iters 3"
    plain = four_ranks.run(functools.partial(train, schedule=schedule), flags)
    traced = f"{flags} --zero-bubble-schedule {schedule} --zero-bubble-trace {tmp_path} --zero-bubble-trace-iterations 2,3,9"
    assert four_ranks.run(train, traced) == plain
    check_trace_files(tmp_path, schedule, iterations=[2, 3], **TRACED)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    megatron.zerobubble.uninstall()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_bubble_trace": "/dev/null/x"}, "--zero-bubble-trace /dev/null/x: /dev/null is not a writable directory"),
        ({"zero_bubble_trace": __file__}, "is a file; give a directory"),
        ({"zero_bubble_trace": ""}, "'' is empty; give the directory"),
        ({"zero_bubble_trace_iterations": "3"}, "--zero-bubble-trace-iterations needs --zero-bubble-trace DIR"),
        ({"zero_bubble_trace": ".", "zero_bubble_trace_iterations": "0"}, "'0' must be iterations from 1 on"),
        ({"zero_bubble_schedule": "stock", "zero_bubble_trace": "."}, "--zero-bubble-trace needs a schedule of this package"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron.zerobubble.install(ZeroBubbleConfig(**{"zero_bubble_schedule": "zb-h1"} | options))


_SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import stock_megatron_core as example
example.train(example.parse(None))
"""


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_script_that_ends_leaves_its_last_recorded_iteration(tmp_path: Path) -> None:
    """Under `zerobubble run`, from a script that uninstalls nothing."""
    script, folder = tmp_path / "script.py", tmp_path / "trace"
    script.write_text(_SCRIPT.format(folder=str(ROOT / "examples")))
    own = "--distributed-backend gloo --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 4"
    ours = ["--cpu", "--enable-zero-bubble", "--zero-bubble-trace", folder, "--zero-bubble-save-plan", tmp_path / "plan.json"]
    done = launch([*ours, script, *own.split()], num_ranks=2, module="megatron.zerobubble.run")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["plan-4.json", "report.json", "timeline-4.svg", "trace.json"]
    assert Plan.from_json((tmp_path / "plan.json").read_bytes()).schedule == "zb-h1"
