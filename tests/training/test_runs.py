"""Whole jobs of the reference trainer by torchrun, on real text: schedules change no result, layouts and precisions train.

The trainer is a loop for stock megatron-core, so these jobs show at the same time that `install` runs such a loop.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.simulate import simulate
from tests.support.tolerances import curve
from tests.support.traces import check_trace_files
from tests.training.launch import LR, PRETRAIN, ROOT, TINY_BATCH, TINY_MODEL, environment, launch, metrics, train

P2 = ("--pipeline-model-parallel-size", "2")
RUN = [
    *TINY_MODEL,
    *TINY_BATCH,
    "--train-iters",
    "6",
    "--eval-iters",
    "0",
    "--split",
    "90,10,0",
    "--zero-bubble-weights-seed",
    "1",
]
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
UNCLIPPED = (*NO_DROPOUT, "--clip-grad", "0")
"""The gradient norm is a sum in another order where stages are others."""
V = "--zero-bubble-v-schedule"
H1 = "--enable-zero-bubble"
OPTIMISTIC = ("--enable-optimizer-post-validation", "--post-validation-patience", "0")
LAYER = ("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear")
LAYER += ("--group-query-attention", "--num-query-groups", "2")
EXPERTS = ("--num-experts", "4", "--moe-layer-freq", "[0]+[1]*3", "--moe-ffn-hidden-size", "16", "--moe-token-dispatcher-type")
EXPERTS += ("alltoall", "--expert-model-parallel-size", "2", "--moe-aux-loss-coeff", "0.01", "--mtp-num-layers", "1", *LAYER)
EXPERTS += ("--untie-embeddings-and-output-weights",)

Flags = tuple[object, ...]
Logged = Callable[..., dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def logged(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """(flags) -> the metrics of a job on two ranks, or `num_ranks`, by iteration. Each job runs once."""
    known: dict[tuple[int, Flags], dict[int, dict[str, Any]]] = {}

    def of(*flags: object, num_ranks: int = 2) -> dict[int, dict[str, Any]]:
        if (num_ranks, flags) not in known:
            file = tmp_path_factory.mktemp("job") / "metrics.jsonl"
            train([*RUN, *flags, "--data-path", corpus, "--metrics-jsonl", file], num_ranks=num_ranks)
            known[num_ranks, flags] = metrics(file)
        return known[num_ranks, flags]

    return of


def losses(found: dict[int, dict[str, Any]]) -> list[float]:
    return [fields["loss"] for _, fields in sorted(found.items())]


@pytest.mark.smoke
def test_a_run_learns_and_logs(corpus: str, tmp_path: Path) -> None:
    """Started cold, with a trace of megatron-core's own 1F1B."""
    flags = [*RUN, *P2, "--data-path", corpus, "--eval-interval", "4", "--eval-iters", "1", "--log-interval", "3"]
    flags += ["--metrics-jsonl", tmp_path / "metrics.jsonl"]
    said = train(flags, is_cold=True)
    found = metrics(tmp_path / "metrics.jsonl")
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert abs(losses(found)[0] - math.log(256)) < 0.3, "it starts from a guess among 256 bytes"
    assert losses(found)[-1] < losses(found)[0] - 0.5
    for fields in found.values():
        assert fields["schedule"] == "stock"
        assert fields["tokens_per_s"] == pytest.approx(8 * 32 / (fields["iteration_ms"] / 1000.0))
        assert fields["grad_norm"] > 0.0
        assert fields["skipped"] is False
    assert {iteration for iteration, fields in found.items() if "validation_loss" in fields} == {4, 6}
    for part in (
        "training with stock: 2 ranks = 2 pipeline x 1 tensor x 1 context x 1 data, 4 microbatches of 2 x 32 tokens, fp32 on CPU",
        "iteration        6/       6 | consumed samples:           48 | elapsed time per iteration (ms): ",
        f"validation loss at iteration 6: {found[6]['validation_loss']:.4f} (ppl ",
        "done: 6 iterations",
    ):
        assert part in said, said


SCHEDULES: dict[str, tuple[int, Flags]] = {
    "zbv": (2, (*P2, V)),
    "interleaved 1f1b": (2, (*P2, "--num-layers-per-virtual-pipeline-stage", "1")),
    "zb-h1": (2, (*P2, H1)),
    "zb-h2": (2, (*P2, "--zero-bubble-max-pending-backward", "2p")),
    "zbv on four ranks": (4, ("--pipeline-model-parallel-size", "4", V, "--num-layers", "8")),
    "v-half": (2, (*P2, V, "--zero-bubble-v-schedule-mem-setup", "half")),
    "auto": (2, (*P2, "--zero-bubble-schedule", "auto", "--zero-bubble-planning-seconds", "0.1")),
}


@pytest.mark.claims(
    "Planning and measuring",
    "whole jobs with the same `--zero-bubble-weights-seed` under stock 1F1B, interleaved, ZB-H1, ZB-H2, ZBV, V-Half, auto, p 2 "
    "and 4: the same losses",
    "works, bit for bit",
)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.sampled(0.3, group="whole jobs")
def test_every_schedule_has_the_losses_of_stock_1f1b(name: str, logged: Logged) -> None:
    num_ranks, flags = SCHEDULES[name]
    stock = ("--num-layers", "8") if num_ranks == 4 else ()
    found = logged(*flags, *UNCLIPPED, num_ranks=num_ranks)
    assert losses(found) == losses(logged(*P2, *stock, *UNCLIPPED))
    assert losses(found)[-1] < losses(found)[0] - 0.3


def test_optimistic_steps_change_no_result(logged: Logged) -> None:
    """Every step is clipped, and redone; with dropout."""
    synchronous, optimistic = (logged(*P2, V, "--clip-grad", "0.5", *steps) for steps in ((), OPTIMISTIC))
    assert losses(optimistic) == curve(losses(synchronous), LR)
    assert min(fields["grad_norm"] for fields in optimistic.values()) > 0.5
    for iteration, fields in optimistic.items():
        assert fields["grad_norm"] == pytest.approx(synchronous[iteration]["grad_norm"], rel=1e-5), "a sum in another order"
        assert fields["lr"] == synchronous[iteration]["lr"]


LAYOUTS: dict[str, tuple[int, Flags, Flags]] = {
    "zbv, tp 2, sequence parallel": (4, (*P2, V, *LAYER, "--tensor-model-parallel-size", "2", "--sequence-parallel"), LAYER),
    "zb-h1, dp 2, distributed optimizer, overlapping": (
        4,
        (*P2, H1, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        (),
    ),
    "zb-h1, uneven layers": (2, (*P2, H1, "--pipeline-model-parallel-layout", "Ettt|tL"), ()),
    "zbv in slices": (2, (*P2, V, *LAYER, "--zero-bubble-slices", "4"), LAYER),
    "zbv, recomputation": (2, (*P2, V, "--recompute-granularity", "full", "--recompute-method", "uniform"), ()),
}


@pytest.mark.claims(
    "Parallelism",
    "whole jobs with tensor and sequence parallelism, data parallelism with the distributed optimizer and overlapping, layers of "
    "a layout, recomputation, slices: the losses of one rank",
    "works, losses within 4e-6, after steps of Adam in proportion to them",
)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(0.3, group="whole jobs")
def test_every_layout_has_the_losses_of_one_rank(name: str, logged: Logged) -> None:
    num_ranks, flags, alone = LAYOUTS[name]
    more = ("--recompute-num-layers", "1") if "recompute" in str(flags) else ()
    assert losses(logged(*flags, *more, *NO_DROPOUT, num_ranks=num_ranks)) == curve(
        losses(logged(*alone, *NO_DROPOUT, num_ranks=1)), LR
    )


PRECISIONS: dict[str, Flags] = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--initial-loss-scale", "65536"),
    "experts and an MTP layer": EXPERTS,
}


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.sampled(0.3, group="whole jobs")
def test_zbv_trains_as_stock_1f1b_does(name: str, logged: Logged) -> None:
    """In other precisions, and with experts on two ranks; steps are optimistic, and some are redone or skipped."""
    flags, num_ranks = (*P2, *PRECISIONS[name], *NO_DROPOUT), 4 if name.startswith("experts") else 2
    stock, found = logged(*flags, num_ranks=num_ranks), logged(*flags, V, *OPTIMISTIC, num_ranks=num_ranks)
    assert losses(found) == curve(losses(stock), LR)
    assert [fields["skipped"] for fields in found.values()] == [fields["skipped"] for fields in stock.values()]
    assert [fields["lr"] for fields in found.values()] == [fields["lr"] for fields in stock.values()]


@pytest.mark.sampled(0.3, group="whole jobs")
def test_replanning_changes_no_result_and_the_plan_is_saved_and_loaded(corpus: str, tmp_path: Path) -> None:
    """With dropout, optimistic steps and a new plan every second iteration; then a run with its last plan from the start."""
    flags = [*RUN, *P2, "--data-path", corpus, V, *OPTIMISTIC, "--clip-grad", "0.5"]
    measuring = ["--zero-bubble-pipeline-timers-start-iter", "2", "--zero-bubble-pipeline-timers-end-iter", "3"]
    measuring += ["--zero-bubble-replan-interval", "2", "--zero-bubble-planning-seconds", "0.1", "--zero-bubble-balance-stages"]
    files = ["--zero-bubble-save-plan", tmp_path / "plan.json", "--zero-bubble-trace", tmp_path / "trace"]
    said = train([*flags, *measuring, *files, "--metrics-jsonl", tmp_path / "measured.jsonl"])
    assert said.count("re-planned with profiled timings") >= 1
    body = json.loads((tmp_path / "plan.json").read_text())
    plan, costs = Plan.from_json(json.dumps(body)), CostModel.from_json(body["costs"])
    assert body["metrics"] == simulate(plan, costs).metrics(), "what it promises for what was measured"
    load = ["--zero-bubble-load-plan", tmp_path / "plan.json", "--zero-bubble-save-plan", tmp_path / "again.json"]
    said = train([*flags, *load, "--metrics-jsonl", tmp_path / "loaded.jsonl"])
    assert "re-planned with profiled timings" not in said
    assert Plan.from_json((tmp_path / "again.json").read_bytes()) == plan, "what ran"
    assert losses(metrics(tmp_path / "loaded.jsonl")) == losses(metrics(tmp_path / "measured.jsonl"))


@pytest.mark.sampled(0.3, group="whole jobs")
def test_a_trace_is_written_at_the_end(corpus: str, tmp_path: Path) -> None:
    """After the loop has ended, whose process groups must still be there."""
    flags = [
        *RUN,
        *P2,
        "--data-path",
        corpus,
        V,
        "--zero-bubble-trace",
        tmp_path / "trace",
        "--zero-bubble-trace-iterations",
        "3,6",
    ]
    train(flags)
    check_trace_files(tmp_path / "trace", "zbv", num_ranks=2, num_microbatches=4, iterations=[3, 6])


@pytest.mark.sampled(0.3, group="whole jobs")
def test_one_process_needs_no_torchrun() -> None:
    """Started by pretrain_gpt.py, where megatron-core has no training loop."""
    stands_in = importlib.util.find_spec("megatron.training") is None
    script = ROOT / "pretrain_gpt.py" if stands_in else PRETRAIN
    flags = [*TINY_MODEL, *TINY_BATCH, "--mock-data", "--train-iters", "2", "--eval-iters", "0"]
    done = subprocess.run(
        [sys.executable, str(script), *flags], capture_output=True, text=True, check=False, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "training with stock: 1 ranks" in done.stdout
    assert ("so the reference trainer runs: Megatron-LM's loop comes with megatron-core" in done.stdout) == stands_in
    assert "Warning" not in done.stderr


BAD = {
    "--bogus --num-layer 3": "error: unrecognized arguments: --num-layer (did you mean --num-layers?), --bogus, which",
    "--fp16 --bf16": "error: megatron-core refuses these flags: ",
}


@pytest.mark.parametrize(("flags", "line"), BAD.items())
@pytest.mark.sampled(0.3, group="whole jobs")
def test_a_bad_flag_is_one_line(flags: str, line: str) -> None:
    done = launch([*RUN, "--mock-data", *P2, V, *flags.split()], num_ranks=2)
    assert done.returncode != 0
    own = done.stderr.split("Traceback")[0].strip().splitlines()
    assert [each for each in own if line in each] != [], done.stderr
