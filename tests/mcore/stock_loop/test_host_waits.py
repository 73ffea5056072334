"""Whole jobs on the fake CUDA: the bits of the CPU, and where the host waits for the device in an iteration."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.launch import ROOT, launch_warm

pytestmark = pytest.mark.claims(
    "Long runs",
    "whole jobs on a double of `torch.cuda` (ZB-H1, ZBV; fp32, bf16, fp16; tensor parallel; post-validation; NCCL's groups "
    "served by gloo): the losses and norms of the CPU; under a schedule the host waits for the device where the loop and the "
    "optimizer step do, and never in the passes; names and parameters are those of the installed torch",
    "works, bit for bit; kernels are the CPU's; **not run on a GPU**; [the "
    "waits](benchmarks/gpu.md#how-often-the-host-waits-for-the-device)",
    also=("support/test_fake_cuda.py",),
)

SCRIPT = ROOT / "tests" / "support" / "fake_cuda" / "run_example.py"
ITERATIONS = 4
RUN = ["--pipeline-model-parallel-size", "2", "--num-layers", "4", "--train-iters", ITERATIONS]
ZB_H1 = ["--enable-zero-bubble"]
ZBV = ["--virtual-pipeline-model-parallel-size", "2", "--zero-bubble-v-schedule"]
POST_VALIDATION = ["--enable-optimizer-post-validation", "--clip-grad", "1000"]
CASES = {
    "zb-h1": ZB_H1,
    "zbv": ZBV,
    "zb-h1, bf16, optimistic": [*ZB_H1, "--bf16", *POST_VALIDATION],
    "zbv, bf16": [*ZBV, "--bf16", "--use-distributed-optimizer"],
    "zbv, optimistic": [*ZBV, *POST_VALIDATION],
    "zb-h1, per token, optimistic": [*ZB_H1, "--calculate-per-token-loss", *POST_VALIDATION],
    "zb-h1, fp16": [*ZB_H1, "--fp16"],
    "zb-h1, tensor parallel": [*ZB_H1, "--tensor-model-parallel-size", "2"],
}
IN_STEP = {
    "core/utils.py in local_multi_tensor_l2_norm",  # megatron-core's norm without apex and Transformer Engine, and its one read
    "optimizer/clip_grads.py in get_grad_norm_fp32",
}
IN_THE_LOOP = {
    "profiling/marks.py in synchronize",  # before the first op of a recorded iteration
    "examples/stock_megatron_core.py in batches",  # the loop uploads its data
}


class FakeRun:
    """A job on the fake CUDA that succeeded: what it logged, and where its ranks waited for the device."""

    def __init__(self, folder: Path, flags: list[Any]) -> None:
        self.losses = losses_of(flags, folder)
        self.syncs = [json.loads((folder / f"syncs_{rank}.json").read_text()) for rank in range(num_ranks_of(flags))]

    def waits(self, rank: int, part: str | None = None) -> list[str]:
        """Calls that waited after the first iteration, outside of other threads, in one part of the iterations or in all."""
        return [
            f"{sync['call']} at {sync['place']} ({re.sub(':[0-9]+', '', sync['caller'])})"
            for sync in self.syncs[rank]
            if sync["iteration"] > 1 and (sync["part"] == part or (part is None and not sync["part"].startswith("<")))
        ]

    def in_passes(self, rank: int) -> list[str]:
        """Those in the passes, but for the loop's own: its forward step uploads data and the number of tokens."""
        return [wait for wait in self.waits(rank, "passes") if "(examples/stock_megatron_core.py in " not in wait]

    def in_other_threads(self, rank: int) -> list[str]:
        return [sync["call"] for sync in self.syncs[rank] if sync["iteration"] > 1 and sync["part"].startswith("<")]


def num_ranks_of(flags: list[Any]) -> int:
    """Two, and twice as many where they share a stage."""
    return 4 if "--tensor-model-parallel-size" in flags else 2


def start(flags: list[Any], folder: Path | str = "cpu") -> Any:
    return launch_warm([folder, *RUN, *flags], num_ranks=num_ranks_of(flags), script=SCRIPT)


def losses_of(flags: list[Any], folder: Path | str = "cpu") -> list[Any]:
    done = start(flags, folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a case on the fake CUDA, once."""
    return functools.cache(lambda name: FakeRun(tmp_path_factory.mktemp("fake"), CASES[name]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(0.5, group="long loops")
def test_a_run_on_the_fake_device_has_the_bits_of_the_cpu(run: Any, name: str) -> None:
    assert run(name).losses == losses_of(CASES[name])
    assert len(run(name).losses) == ITERATIONS


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(0.5, group="long loops")
def test_the_host_waits_where_the_loop_and_the_optimizer_do(run: Any, name: str) -> None:
    """Never in the passes, and with post-validation once per step, in place of megatron-core's reads of the norm."""
    found = run(name)
    for rank in range(num_ranks_of(CASES[name])):
        assert found.in_passes(rank) == []
        reads = [wait for wait in found.waits(rank) if "post_validation/optimizer.py" in wait and "in prepare" in wait]
        assert len(reads) == (ITERATIONS - 1 if "optimistic" in name else 0)


@pytest.mark.sampled(0.5, group="long loops")
def test_results_travel_to_the_last_rank_of_a_v_without_a_wait(run: Any) -> None:
    """`install` in the example's loop: the host waits where megatron-core's optimizer and the loop do, and nowhere else."""
    zb_h1, zbv = run("zb-h1"), run("zbv")
    assert [each["losses"] for each in zb_h1.losses] == [each["losses"] for each in zbv.losses]
    for rank in range(2):
        waits = {wait.partition("(")[2].removesuffix(")") for wait in zbv.waits(rank)}
        own = "<listcomp>" if rank == 1 else "loss_function"  # reads the losses; uploads the number of tokens
        assert waits == {*IN_STEP, *IN_THE_LOOP, f"examples/stock_megatron_core.py in {own}"}
        assert zbv.in_other_threads(rank) == ["Event.synchronize"] * (ITERATIONS - 1 if rank == 0 else 0)
        assert zb_h1.in_other_threads(rank) == []


FAULTS = {
    "threads without device": "calls Event.query and has not called torch.cuda.set_device",
    "unknown name": "torch.cuda.graph_pool_handle is used, and the fake does not define it",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(0.4)
def test_a_fault_fails_the_job(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZB_FAKE_CUDA_FAULT", fault)
    # Long enough for the watchdog, which looks once a second; what it was refused fails the job at its end.
    done = start([*ZB_H1, "--train-iters", "40", "--zero-bubble-watchdog-seconds", "60"], tmp_path)
    assert done.returncode != 0
    assert FAULTS[fault] in done.stdout + done.stderr


@pytest.mark.parametrize(("fault", "call"), [("synchronize", "torch.cuda.synchronize"), ("item", "Tensor.item")])
def test_a_wait_in_a_pass_is_noticed_with_its_place(
    fault: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZB_FAKE_CUDA_FAULT", fault)
    found = FakeRun(tmp_path, ZB_H1)
    for rank in range(2):
        waits = found.in_passes(rank)
        assert len(waits) == (ITERATIONS - 1) * 4, "in each of four forwards"
        assert all(wait.startswith(f"{call} at runtime/executor.py") for wait in waits)
