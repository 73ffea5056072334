"""--zero-bubble-trace in a loop written for megatron-core, which does not say when it ends."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.partition.layer_costs import Model
from tests.support.ranks import RankPool
from tests.support.stock import example, train
from tests.support.traces import check_trace_files
from tests.training.launch import ROOT, launch

FOUR = "--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 32 --num-microbatches 6"
CHUNKS = f"{FOUR} --virtual-pipeline-model-parallel-size 2"
OPTIMISTIC = "--enable-optimizer-post-validation --post-validation-patience 0 --clip-grad 0.01"
PROFILED = (
    "--zero-bubble-schedule zb --zero-bubble-pipeline-timers-start-iter 1 --zero-bubble-pipeline-timers-end-iter 2 "
    "--zero-bubble-planning-seconds 0.01"
)
SIZES: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 6}


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
    "in a loop of your own: `--zero-bubble-trace`: trace, report, plans and timelines as in `pretrain_gpt.py`, and "
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
    entries = check_trace_files(folder, schedule, iterations=[2, 4], others=others, **SIZES)
    assert seen[0] == sorted(path.name for path in folder.iterdir()), "before the loop ends"
    assert all(0.0 <= entry["measured"]["bubble_rate"] < 1.0 for entry in entries)
    if schedule == "zb":
        assert all(sum(entry["costs"]["activation"]) > 0.0 for entry in entries), "profiled"
        model = Model.from_json((folder / "layers.json").read_text())
        assert model.layers == ("layer",) * 8
        assert model.kinds["layer"].forward_ms > 0


def test_by_default_the_last_recorded_iteration_replaces_others(four_ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{FOUR} --enable-zero-bubble --zero-bubble-trace {tmp_path}"
    seen = four_ranks.run(_train_without_end, f"{flags} --train-iters 4", tmp_path)
    assert seen[0] == ["plan-2.json", "report.json", "timeline-2.svg", "trace.json"]
    check_trace_files(tmp_path, "zb-h1", iterations=[4], **SIZES)  # `uninstall` wrote it


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_the_losses_are_the_same_and_what_did_not_run_is_left_out(four_ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    flags = f"{CHUNKS if schedule == 'zbv' else FOUR} --train-iters 3"
    plain = four_ranks.run(functools.partial(train, schedule=schedule), flags)
    traced = functools.partial(train, schedule=schedule, trace=tmp_path, trace_iterations=(2, 3, 9))
    assert four_ranks.run(traced, flags) == plain
    check_trace_files(tmp_path, schedule, iterations=[2, 3], **SIZES)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    megatron.zerobubble.uninstall()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb-h1", "trace": "/dev/null/x"}, "--zero-bubble-trace /dev/null/x: /dev/null is not a writable directory"),
        ({"schedule": "zb-h1", "trace": __file__}, "is a file; give a directory"),
        ({"schedule": "zb-h1", "trace": ""}, "'' is empty; give the directory"),
        ({"schedule": "zb-h1", "trace_iterations": [3]}, "--zero-bubble-trace-iterations needs --zero-bubble-trace DIR"),
        ({"schedule": "zb-h1", "trace": ".", "trace_iterations": [0]}, "'0' must be iterations from 1 on"),
        ({"schedule": "stock", "trace": "."}, "--zero-bubble-trace needs a schedule of this package"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron.zerobubble.install(**options)


_SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import stock_megatron_core as example
example.train(example.parse(None))
"""


@pytest.mark.sampled(0.5, group="whole jobs")
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
