"""Whole jobs, started as a user starts them: they learn, stop, continue bit for bit, change schedule, and log a summary.

Every job costs seconds, so jobs are shared: one job writes checkpoints that several tests continue. The first job, and those
that are killed or signalled, start cold; the others from a process that has imported torch (`warm_start.py`).
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.partition.joint import plan_layout
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from tests.support.tolerances import after_steps, curve
from tests.support.traces import check_trace_files
from tests.training.launch import (
    LR,
    PRETRAIN,
    ROOT,
    TINY_BATCH,
    TINY_MODEL,
    command,
    environment,
    launch,
    launch_warm,
    metrics,
    train,
)

P2 = ["--pipeline-model-parallel-size", "2"]
RUN = [*TINY_MODEL, *TINY_BATCH, *P2, "--train-iters", "6", "--eval-interval", "4", "--eval-iters", "1", "--split", "90,10,0"]
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


class Job:
    """A finished job: its output and the files that it wrote."""

    def __init__(self, folder: Path, flags: list[str], *, num_ranks: int = 2, is_cold: bool = False) -> None:
        self.checkpoints = folder / "checkpoints"
        self.jsonl = folder / "metrics.jsonl"
        self.said = train([*RUN, *flags, "--metrics-jsonl", self.jsonl], num_ranks=num_ranks, is_cold=is_cold)

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        return metrics(self.jsonl)


@pytest.fixture(scope="module")
def stock(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """megatron-core's own 1F1B with dropout; checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("stock")
    flags = ["--data-path", corpus, "--save", str(folder / "checkpoints"), "--save-interval", "3"]
    flags += ["--zero-bubble-trace", str(folder / "trace")]
    return Job(folder, flags, is_cold=True)


@pytest.fixture(scope="module")
def zb_h1(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """ZB-H1 without dropout on a modern layer, two layers before four, distributed optimizer; checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("zb_h1")
    layout = ["--pipeline-model-parallel-layout", "Ett|t*4L"]
    return Job(folder, [*ZB_H1, *layout, "--data-path", corpus, "--save", str(folder / "checkpoints"), "--save-interval", "3"])


LAYER = [
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2"),
]
ZB_H1 = ["--enable-zero-bubble", "--use-distributed-optimizer", "--disable-bias-linear", *LAYER, *NO_DROPOUT]
ZB_H1 += ["--num-layers", "6"]


BALANCE = r"stages: F, B and W of a microbatch take \d+\.\d\d ms in a layer, .* in the head; the bottleneck rank computes"


def close(curves: dict[str, float]) -> dict[str, Any]:
    """What losses and norms by name and iteration, "loss 3", are compared with, where sums have another order."""
    steps = {name: int(name.split()[1]) - (not name.startswith("validation")) for name in curves}
    return {name: pytest.approx(value, rel=after_steps(steps[name], LR)) for name, value in curves.items()}


def losses(job: Job, first: int = 1) -> list[float]:
    return [fields["loss"] for iteration, fields in sorted(job.metrics.items()) if iteration >= first]


def test_a_run_learns_and_logs(stock: Job) -> None:
    assert sorted(stock.metrics) == [1, 2, 3, 4, 5, 6]
    assert abs(losses(stock)[0] - math.log(256)) < 0.3, "it starts from a guess among 256 bytes"
    assert losses(stock)[-1] < losses(stock)[0] - 0.5
    for fields in stock.metrics.values():
        assert fields["schedule"] == "stock"
        assert fields["tokens_per_s"] == pytest.approx(8 * 32 / (fields["iteration_ms"] / 1000.0))
        assert fields["grad_norm"] > 0.0
        assert fields["skipped"] is False
    assert {iteration for iteration, fields in stock.metrics.items() if "validation_loss" in fields} == {4, 6}
    for part in (
        "training with megatron-core's own 1F1B schedule: 2 ranks = 2 pipeline x 1 tensor x 1 data, 4 microbatches",
        "iteration        6/       6 | consumed samples:           48",
        f"validation loss at iteration 6: {stock.metrics[6]['validation_loss']:.4f} (ppl ",
        "done: 6 iterations, schedule: megatron-core's own 1F1B schedule",
        "of the span of iteration 4 (",
    ):
        assert part in stock.said, stock.said


@pytest.mark.claims(
    "Planning and measuring",
    "measured activation memory in a run's `report.json`, `plan-N.json` and `trace.json`",
    "works",
    also=("profiling", "playground"),
)
def test_the_baseline_is_traced_and_drawn(stock: Job) -> None:
    folder = stock.checkpoints.parent / "trace"
    assert {path.name for path in folder.iterdir()} == {"trace.json", "report.json", "timeline-4.svg", "plan-4.json"}
    plan = Plan.from_json((folder / "plan-4.json").read_text())
    assert (plan.schedule, plan.num_ranks, plan.num_microbatches) == ("1f1b", 2, 4)
    (entry,) = json.loads((folder / "report.json").read_text())["iterations"]
    assert f"bubble: {entry['measured']['bubble_rate']:.1%} of the span of iteration 4 (" in stock.said
    assert all(rank["measured"]["optimizer_ms"] > 0.0 for rank in entry["ranks"])
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") in ("F", "BW") for event in events) == 2 * 2 * 4


def test_a_checkpoint_is_complete_before_it_is_the_latest(stock: Job) -> None:
    assert (stock.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    assert {path.name for path in stock.checkpoints.iterdir()} == {
        "iter_0000003",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    }


@pytest.mark.smoke
def test_a_continued_run_is_bit_for_bit_the_same(stock: Job, corpus: str, tmp_path: Path) -> None:
    """With dropout: weights, optimizer, learning rate, order of samples and generators all continue where they were."""
    shutil.copytree(stock.checkpoints, tmp_path / "checkpoints")
    continued = Job(tmp_path, ["--data-path", corpus, "--load", str(tmp_path / "checkpoints"), "--ckpt-step", "3"])
    assert sorted(continued.metrics) == [4, 5, 6]
    for iteration, fields in continued.metrics.items():
        for name in ("loss", "grad_norm", "lr", "validation_loss"):
            assert fields.get(name) == stock.metrics[iteration].get(name), (iteration, name)


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_checkpoint_continues_with_another_schedule_and_optimizer_sharding(zb_h1: Job, corpus: str, tmp_path: Path) -> None:
    """ZB-H1 -> ZBV: other stages on other ranks, where three layers per rank make stages of two and of one; the same losses up to
    the order of additions."""
    flags = ["--data-path", corpus, "--load", str(zb_h1.checkpoints), "--ckpt-step", "3", *ZB_H1[1:]]
    flags += ["--zero-bubble-balance-stages", "--zero-bubble-planning-seconds", "0.01"]
    flags += ["--zero-bubble-trace", str(tmp_path / "trace")]
    flags += ["--zero-bubble-pipeline-timers-start-iter", "1", "--zero-bubble-pipeline-timers-end-iter", "1"]
    continued = Job(tmp_path, [*flags, "--zero-bubble-v-schedule"])
    assert "training with the ZBV schedule" in continued.said
    assert "the layout differs from the checkpoint's: dropout continues with newly seeded generators" in continued.said
    assert len(re.findall(BALANCE, continued.said)) == 2, "when an iteration was recorded, and at the end"
    (seen,) = _check_trace(tmp_path / "trace", iterations=[5], is_profiled=True)
    kept, held = (sum(seen["costs"][name]) for name in ("activation_after_backward", "activation"))
    assert kept < 0.95 * held, "measured in iteration 4, the first of the job"
    assert json.loads((tmp_path / "trace" / "plan-5.json").read_text())["costs"] == seen["costs"]
    _check_layers(tmp_path / "trace", num_layers=6)
    measured = seen["measured"]
    assert f"bubble: {measured['bubble_rate']:.1%} of the span of iteration 5 ({measured['work_ms']:.0f} of " in continued.said
    assert f"  span {measured['span_ms']:.1f} ms, predicted {seen['predicted']['span_ms']:.1f}; " in continued.said
    assert losses(continued) == curve(losses(zb_h1, first=4), LR)
    assert continued.metrics[6]["validation_loss"] == pytest.approx(zb_h1.metrics[6]["validation_loss"], rel=after_steps(3, LR))


def _check_trace(folder: Path, *, iterations: list[int], is_profiled: bool = False) -> list[dict[str, Any]]:
    """The files of a trace of ZBV: each iteration's plan ran, and the parts of the report, which is returned, add up."""
    others = ("layers.json",) if is_profiled else ()
    return check_trace_files(folder, "zbv", num_ranks=2, num_microbatches=4, iterations=iterations, others=others)


def _check_layers(folder: Path, *, num_layers: int) -> None:
    """The layers of the measured run, which the planner takes: their times and bytes are those of the report."""
    model = Model.from_json((folder / "layers.json").read_text())
    report = json.loads((folder / "report.json").read_text())
    assert model.layers == ("layer",) * num_layers
    assert min(model.kinds["layer"].work_ms, model.kinds["head"].work_ms) > 0
    held = sum(rank["state_bytes"] for rank in report["memory"])
    words = model.total.static_bytes - held
    assert 0 <= words < 0.5 * held, "tied word embeddings count twice"
    found = plan_layout(model, num_ranks=2, num_microbatches=4, options=SearchOptions(budget=0.0))
    assert StageLayers.parse(found.layout.text).num_layers == num_layers


@pytest.mark.sampled(0.07, group="whole jobs")
def test_replanning_changes_no_result_and_the_plan_can_be_saved(corpus: str, tmp_path: Path) -> None:
    """With dropout, optimistic steps and a new plan every second iteration; then a run with its last
    plan from the start."""
    flags = ["--data-path", corpus, "--zero-bubble-v-schedule", "--enable-optimizer-post-validation"]
    flags += ["--post-validation-patience", "0", "--clip-grad", "1e-2"]
    timed = ["--zero-bubble-pipeline-timers-start-iter", "2", "--zero-bubble-pipeline-timers-end-iter", "3"]
    measuring = [*timed, "--zero-bubble-replan-interval", "2", "--zero-bubble-planning-seconds", "0.1"]
    measuring += ["--zero-bubble-balance-stages"]
    (tmp_path / "measured").mkdir()
    measured = Job(tmp_path / "measured", [*flags, *measuring, "--zero-bubble-save-plan", str(tmp_path / "plan.json")])
    assert measured.said.count("re-planned with profiled timings") == 2, "after iterations 3 and 5"
    assert len(re.findall(BALANCE, measured.said)) == 3, "when times were measured, and at the end"
    assert measured.said.count("layouts: the plan takes ") == 1, "when times were measured first"
    body = json.loads((tmp_path / "plan.json").read_text())
    kept, costs = Plan.from_json(json.dumps(body)), CostModel.from_json(body["costs"])
    assert body["metrics"] == simulate(kept, costs).metrics(), "what it promises for what was measured"
    assert min(costs.forward_ms + costs.backward_ms + costs.wgrad_ms) > 0
    keeps = ["--zero-bubble-save-plan", str(tmp_path / "again.json")]
    loaded = Job(tmp_path, [*flags, "--zero-bubble-load-plan", str(tmp_path / "plan.json"), *keeps])
    assert Plan.from_json((tmp_path / "again.json").read_bytes()) == kept, "what ran"
    assert "re-planned with profiled timings" not in loaded.said
    assert losses(loaded) == losses(measured)
    assert measured.said.count("clipped by post-validation") == 6, "forwards of timed iterations run again"
    for fields in measured.metrics.values():
        assert fields["tokens_per_s"] * fields["iteration_ms"] / 1000 / 32 == pytest.approx(8)
    for iteration in (4, 6):
        assert loaded.metrics[iteration]["validation_loss"] == measured.metrics[iteration]["validation_loss"]


KILLED = """
import os, signal
from tests.training import reference_trainer
from megatron.zerobubble.training import loop, step

class Killed(step.Trainer):
    def iterate(self, data_iterator):
        results = super().iterate(data_iterator)
        self.iteration = getattr(self, "iteration", 0) + 1
        if self.iteration == 5 and self._training_state.post_validation.is_unvalidated and int(os.environ["RANK"]) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return results

if __name__ == "__main__":
    loop.Trainer = Killed
    reference_trainer.run(reference_trainer.model_provider, reference_trainer.forward_step_provider)
"""
"""Rank 0 is killed after its step of iteration 5, which is not validated yet. A process of its own that outlived it would keep
the job's output open, and the test would wait for its end."""


@pytest.mark.sampled(0.07, group="whole jobs")
def test_optimistic_steps_change_no_result(corpus: str, tmp_path: Path) -> None:
    """ZBV with dropout, clipped in every step; progress lines, checkpoints and an evaluation between steps and their validation,
    and a kill there."""
    flags = ["--data-path", corpus, "--zero-bubble-v-schedule", "--clip-grad", "0.5", "--log-interval", "4"]
    synchronous = Job(tmp_path / "synchronous", flags)
    early = [*flags, "--enable-optimizer-post-validation", "--post-validation-patience", "0"]
    folder, script = tmp_path / "early", tmp_path / "killed.py"
    script.write_text(KILLED)
    save = ["--save", folder / "checkpoints", "--save-interval", "3", "--metrics-jsonl", folder / "metrics.jsonl"]
    done = launch_warm([*RUN, *early, *save], num_ranks=2, script=script)
    assert done.returncode != 0
    assert "Signal 9" in done.stderr or "ended from outside" in done.stderr, "torchrun sees it first, or rank 1 does"
    logged = metrics(folder / "metrics.jsonl")
    _same_metrics(logged, synchronous.metrics, [1, 2, 3, 4])
    assert [fields["redone"] for fields in logged.values()] == [True, True, True, True]
    assert re.findall(r"iteration (\d+): clipped by post-validation", done.stdout)[:4] == ["1", "2", "3", "4"]
    assert "| corrected steps: 4 |" in done.stdout
    trace = ["--zero-bubble-trace", str(tmp_path / "trace"), "--zero-bubble-trace-iterations", "4,6"]
    continued = Job(tmp_path / "continued", [*early, "--load", str(folder / "checkpoints"), *trace])
    _same_metrics(continued.metrics, synchronous.metrics, [4, 5, 6])
    assert [continued.metrics[i]["redone"] for i in (4, 5, 6)] == [continued.metrics[i]["grad_norm"] > 0.5 for i in (4, 5, 6)]
    for entry in _check_trace(tmp_path / "trace", iterations=[4, 6]):
        rewound = entry["iteration"] == 6 and continued.metrics[5]["redone"]  # what 5 did wrong is found out in 6
        assert [rank["measured"]["rewind_ms"] > 0 for rank in entry["ranks"]] == [rewound, False]


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_signal_ends_a_run_with_a_checkpoint(corpus: str, tmp_path: Path) -> None:
    """With every step optimistic and clipped by post-validation; the last one before it is saved."""
    flags = [*RUN, "--data-path", corpus, "--enable-zero-bubble", "--exit-signal-handler", "--clip-grad", "1e-3"]
    flags += ["--enable-optimizer-post-validation", "--post-validation-patience", "0", "--log-interval", "1000000"]
    flags += ["--train-iters", "100000", "--eval-interval", "100000", "--lr-decay-iters", "6", "--save", str(tmp_path)]
    options: dict[str, Any] = {"text": True, "env": environment(PYTHONUNBUFFERED="1"), "cwd": ROOT}
    with subprocess.Popen(command(flags, num_ranks=2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as job:
        assert job.stdout is not None
        said = ""
        for line in job.stdout:
            said += line
            if line.startswith("iteration 4: clipped by post-validation"):
                job.terminate()
    (left,) = re.findall(r"exiting at iteration (\d+) \(on SIGTERM\)", said)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == left
    assert said.index(f"iteration {left}: clipped by post-validation") < said.index("saved "), "what is saved has been validated"
    assert f"validation loss at iteration {left}" not in said, "there may be little time"


def _same_metrics(actual: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]], iterations: list[int]) -> None:
    assert sorted(actual) == iterations
    for iteration, fields in actual.items():
        for name in ("loss", "grad_norm", "lr", "validation_loss", "skipped"):
            assert fields.get(name) == expected[iteration].get(name), (iteration, name)


def test_a_checkpoint_of_another_model_is_an_error(stock: Job, corpus: str) -> None:
    flags = ["--data-path", corpus, "--load", str(stock.checkpoints), "--hidden-size", "64"]
    done = launch_warm([*RUN, *flags], num_ranks=2)
    assert done.returncode != 0
    assert "was saved with --hidden-size 32, this run has 64" in done.stderr
    assert done.stderr.count("error: ") == 2, "ours, and torchrun's summary of the root cause"


def test_one_process_needs_no_torchrun() -> None:
    flags = [*TINY_MODEL, *TINY_BATCH, "--mock-data", "--train-iters", "2", "--eval-iters", "0"]
    done = subprocess.run(
        [sys.executable, str(PRETRAIN), *flags], capture_output=True, text=True, check=False, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "training with no pipeline: 1 ranks" in done.stdout
    assert "Warning" not in done.stderr


def test_a_bad_flag_is_one_line_before_anything_starts() -> None:
    done = launch([*RUN, "--mock-data", "--zero-bubble-v-schedule", "--num-layers", "5"], num_ranks=2)
    assert done.returncode != 0
    assert done.stdout == ""
    own_lines = done.stderr.split("Traceback")[0].strip().splitlines()
    assert [line for line in own_lines if "pretrain_gpt.py: error:" in line] == [
        "pretrain_gpt.py: error: --num-layers 5: 5 layers do not divide over 4 stages (V placement); 4 or 6 would. "
        "--pipeline-model-parallel-layout sets the layers of each stage"
    ]
