"""Whole jobs on the fake CUDA: the bits of the CPU, and how often the host waits for the device in an iteration."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.launch import ROOT, TINY_BATCH, TINY_MODEL, launch_warm, metrics

pytestmark = pytest.mark.claims(
    "Long runs",
    "whole jobs on a double of `torch.cuda` (ZB-H1, ZBV; fp32, bf16, fp16; sequence and context parallelism, recomputation, "
    "experts; post-validation; NCCL's groups served by gloo; checkpoints, "
    "evaluation, traces, re-planning): the losses and norms of the CPU; in an iteration the host waits for the device once, in "
    "the step, and never in the passes, but for F of experts; names and parameters are those of the installed torch",
    "works, bit for bit; kernels are the CPU's; **not run on a GPU**; [the "
    "waits](benchmarks/gpu.md#how-often-the-host-waits-for-the-device)",
    also=("support/test_fake_cuda.py",),
)

SCRIPT = ROOT / "tests" / "support" / "fake_cuda" / "pretrain.py"
ITERATIONS = 4
RUN = [*TINY_MODEL, *TINY_BATCH, "--pipeline-model-parallel-size", "2", "--mock-data", "--eval-iters", "0"]
RUN += ["--hidden-dropout", "0", "--attention-dropout", "0", "--log-interval", ITERATIONS]
RUN += ["--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]  # kernels that the CPU path does not use

POST_VALIDATION = ["--enable-optimizer-post-validation", "--clip-grad", "1000"]
CASES = {
    "zb-h1": ["--enable-zero-bubble"],
    "zb-h1, bf16, optimistic": ["--enable-zero-bubble", "--bf16", *POST_VALIDATION],
    "zbv, bf16": ["--zero-bubble-v-schedule", "--bf16", "--use-distributed-optimizer"],
    "zbv, optimistic": ["--zero-bubble-v-schedule", *POST_VALIDATION],
    "zb-h1, per token, optimistic": ["--enable-zero-bubble", "--calculate-per-token-loss", *POST_VALIDATION],
    "zb-h1, fp16": ["--enable-zero-bubble", "--fp16", "--initial-loss-scale", "1024"],
    "zb-h1, recomputation": [
        *("--enable-zero-bubble", "--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    ],
    "zb-h1, sequence parallel": ["--enable-zero-bubble", "--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "zbv, context parallel": ["--zero-bubble-v-schedule", "--context-parallel-size", "2"],
    "zb-h1, experts": ["--enable-zero-bubble", "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"],
}


IN_EXPERTS = {"moe/token_dispatcher.py in dispatch_postprocess)", "moe/moe_utils.py in permute)"}
"""Where F of megatron-core's experts, with the all-gather dispatcher, reads how many tokens each expert has."""


class FakeRun:
    """A job on the fake CUDA that succeeded: what it logged, and where its ranks waited for the device."""

    def __init__(self, folder: Path, flags: list[Any]) -> None:
        self.metrics = metrics_of(folder, flags, is_fake=True)
        self.num_ranks = num_ranks_of(flags)
        self.syncs = [sync for rank in range(self.num_ranks) for sync in json.loads((folder / f"syncs_{rank}.json").read_text())]

    def waits(self, part: str, iteration: int | None = None) -> list[str]:
        """Calls that waited in one part of the iterations, with their places."""
        return [
            f"{sync['call']} at {sync['place']} ({sync['caller']})"
            for sync in self.syncs
            if sync["part"] == part and sync["iteration"] > 0 and iteration in (None, sync["iteration"])
        ]


def num_ranks_of(flags: list[Any]) -> int:
    """Two, and twice as many where they share a stage."""
    return 4 if {"--tensor-model-parallel-size", "--context-parallel-size"} & set(flags) else 2


def start(folder: Path, flags: list[Any], *, is_fake: bool) -> Any:
    arguments = [*RUN, "--train-iters", ITERATIONS, *flags, "--metrics-jsonl", folder / "metrics.jsonl"]
    given, num_ranks = {"script": SCRIPT} if is_fake else {}, num_ranks_of(flags)
    return launch_warm([folder, *arguments] if is_fake else arguments, num_ranks=num_ranks, **given)  # type: ignore[arg-type]


def metrics_of(folder: Path, flags: list[Any], *, is_fake: bool) -> list[tuple[float, float]]:
    done = start(folder, flags, is_fake=is_fake)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [(fields["loss"], fields["grad_norm"]) for _, fields in sorted(metrics(folder / "metrics.jsonl").items())]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a case on the fake CUDA, once."""
    return functools.cache(lambda name: FakeRun(tmp_path_factory.mktemp("fake"), CASES[name]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(0.15)
def test_a_run_on_the_fake_device_has_the_bits_of_the_cpu(run: Any, name: str, tmp_path: Path) -> None:
    assert run(name).metrics == metrics_of(tmp_path, CASES[name], is_fake=False)
    assert len(run(name).metrics) == ITERATIONS


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(0.15)
def test_the_host_waits_once_in_an_iteration_and_never_in_the_passes(run: Any, name: str) -> None:
    """Once per rank, in the step. One more begins the recording of an iteration, and one is for the progress line."""
    found = run(name)
    places = {re.sub(r":\d+", "", wait.partition("(")[2]) for wait in found.waits("passes")}
    assert places <= IN_EXPERTS
    assert bool(places) == ("experts" in name)
    assert found.waits("validation") == []
    for iteration in range(1, 1 + ITERATIONS):
        waits = found.waits("step", iteration)
        reads = [wait for wait in waits if "post_validation/optimizer.py" in wait and "in prepare" in wait]
        assert len(reads) == found.num_ranks
        assert len(waits) == len(reads), waits
        extra = found.waits("around the passes", iteration)
        assert len(extra) == (found.num_ranks if iteration in (2, 4) else 0), extra
        assert all("marks.py" in wait for wait in extra)
    line = found.waits("between")
    assert len(line) == found.num_ranks * (2 if "fp16" in name else 1), (
        "one progress line on each rank; it shows the loss scale, too"
    )
    assert all("mean_losses" in wait or "progress_line" in wait for wait in line)


IN_THE_LOOP = {
    "core/utils.py in local_multi_tensor_l2_norm",  # megatron-core's norm without apex and Transformer Engine, and its one read
    "optimizer/clip_grads.py in get_grad_norm_fp32",
    "profiling/marks.py in synchronize",  # before the first op of a recorded iteration
    "examples/stock_megatron_core.py in batches",  # the loop uploads its data
}


@pytest.mark.sampled(0.5)
def test_results_travel_to_the_last_rank_of_a_v_without_a_wait(tmp_path: Path) -> None:
    """`install` in the example's loop: the host waits where megatron-core's optimizer and the loop do, and nowhere else."""
    flags = ["example", "--pipeline-model-parallel-size", "2", "--num-layers", "4", "--train-iters", "3"]
    logged = []
    for schedule in (["--enable-zero-bubble"], ["--virtual-pipeline-model-parallel-size", "2", "--zero-bubble-v-schedule"]):
        done = launch_warm([tmp_path, *flags, *schedule], num_ranks=2, script=SCRIPT)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        logged.append([json.loads(line)["losses"] for line in done.stdout.splitlines() if line.startswith("{")])
    assert logged[0] == logged[1]
    assert len(logged[0]) == 3
    for rank in range(2):
        syncs = [sync for sync in json.loads((tmp_path / f"syncs_{rank}.json").read_text()) if sync["iteration"] > 1]
        waits = {re.sub(r":\d+", "", sync["caller"]) for sync in syncs if not sync["part"].startswith("<")}
        own = "<listcomp>" if rank == 1 else "loss_function"  # reads the losses; uploads the number of tokens
        assert waits == {*IN_THE_LOOP, f"examples/stock_megatron_core.py in {own}"}
        assert [sync["call"] for sync in syncs if sync["part"].startswith("<")] == ["Event.synchronize"] * (2 - 2 * rank)


def test_no_other_thread_waits_for_the_device(run: Any) -> None:
    assert not [sync for sync in run("zbv, bf16").syncs if sync["part"].startswith("<")]


def test_everything_around_the_iterations_runs_too(tmp_path: Path) -> None:
    """Checkpoints, snapshots in pinned memory, evaluation, traces, re-planning, recomputation."""
    flags = ["--enable-zero-bubble", "--bf16", *POST_VALIDATION, "--post-validation-snapshot", "host"]
    flags += ["--save", tmp_path / "saved", "--save-interval", "2", "--eval-iters", "1", "--eval-interval", "2"]
    flags += ["--zero-bubble-replan-interval", "3", "--zero-bubble-memory-limit", "auto"]
    flags += ["--zero-bubble-trace", tmp_path / "traces", "--zero-bubble-trace-iterations", "4"]
    flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    found = FakeRun(tmp_path, flags)
    assert len(found.metrics) == ITERATIONS
    assert found.waits("passes") == []
    assert len(found.waits("step")) == 2 * ITERATIONS
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == f"{ITERATIONS}\n"
    assert [*(tmp_path / "traces").iterdir()]


FAULTS = {
    "threads without device": "calls Event.query and has not called torch.cuda.set_device",
    "unknown name": "torch.cuda.graph_pool_handle is used, and the fake does not define it",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(0.4)
def test_a_fault_fails_the_job(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZB_FAKE_CUDA_FAULT", fault)
    # Long enough for the watchdog, which looks once a second; what it was refused fails the job at its end.
    done = start(tmp_path, [*CASES["zb-h1"], "--train-iters", "40"], is_fake=True)
    assert done.returncode != 0
    assert FAULTS[fault] in done.stdout + done.stderr


@pytest.mark.parametrize(("fault", "call"), [("synchronize", "torch.cuda.synchronize"), ("item", "Tensor.item")])
def test_a_wait_in_a_pass_is_noticed_with_its_place(
    fault: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZB_FAKE_CUDA_FAULT", fault)
    found = FakeRun(tmp_path, CASES["zb-h1"])
    assert len(found.waits("passes")) == 2 * ITERATIONS * 4, "each of two ranks in each of four forwards"
    assert all(wait.startswith(f"{call} at runtime/executor.py") for wait in found.waits("passes"))
