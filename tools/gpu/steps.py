"""The steps: what each would tell, what is expected, and what a deviation means. docs/benchmarks/gpu.md shows the same table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command and how to read its outcome."""

    name: str
    """Of the step, for people."""
    files: str
    """Name of its files in the report's folder."""
    command: tuple[str, ...]
    """What runs, from the root of the repository. ``{out}`` is the report's folder."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables set for it; ``{out}`` as in `command`."""
    num_gpus: int = 1
    """GPUs that it needs."""
    minutes: int
    """After that long it is ended and counts as failed."""
    expected: str
    """The expected outcome."""
    deviation: str
    """What another outcome means."""


def _pytest(marker: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-m", marker, "-v", *words)


def _tool(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"tools.benchmarks.{name}", *words)


def _job(*words: str) -> tuple[str, ...]:
    return ("bash", "examples/pretrain_zero_bubble.sh", "--exit-duration-in-mins", "10", *words)


def _into(name: str, *switches: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("RUN_DIR", "{out}/" + name), *switches)


_REPLANNED = ("--zero-bubble-pipeline-timers-start-iter", "20", "--zero-bubble-planning-seconds", "5")
_ZB_H1 = (("ENABLE_ZERO_BUBBLE", "1"),)
_STOCK = (("ENABLE_ZERO_BUBBLE", "0"),)
_ZB_H2 = (("ZERO_BUBBLE_MAX_PENDING_BACKWARD", "2p"),)
_V = (("ZERO_BUBBLE_V_SCHEDULE", "1"),)
_INTERLEAVED = (("INTERLEAVED_1F1B", "1"),)
_OPTIMISTIC = "--enable-optimizer-post-validation"

TESTS = (
    Step(
        name="kernels of W",
        files="kernels",
        command=_pytest("gpu", "tests/wgrad/test_gemm.py"),
        minutes=5,
        expected="passes; the log names the kernel: apex where it is installed, else torch addmm with out_dtype",
        deviation="a kernel adds something else than dY^T X: no run can be trusted before it is excluded",
    ),
    Step(
        name="the split linear",
        files="linear",
        command=_pytest("gpu", "tests/wgrad/test_gpu.py"),
        minutes=5,
        expected="gradients within the rounding of the dtype, against float64; W gives back the bytes that B left",
        deviation="wrong gradients: operands of W change between B and W; bytes that stay: something else holds a saved tensor",
    ),
    Step(
        name="transfers through host memory",
        files="staging",
        command=_pytest("gpu", "tests/runtime/test_gpu.py"),
        minutes=15,
        expected="passes for every schedule; on NCCL the host is ahead of the stream",
        deviation="wrong numbers: a copy comes too early; a host that is behind: an op waits for the device",
    ),
    Step(
        name="pipelines on one GPU",
        files="one-gpu",
        command=_pytest("gpu", "tests/mcore/test_gpu.py", "-k", "not 200_iterations"),
        minutes=20,
        expected="ZBV and ZB-H2 equal the model without a pipeline; one rank runs with NCCL",
        deviation="a difference in one dtype only: rounding of a kernel; in all: the split or the order of sums",
    ),
    Step(
        name="memory over 200 iterations",
        files="memory-test",
        command=_pytest("gpu", "tests/mcore/test_gpu.py", "-k", "200_iterations", "-s"),
        minutes=15,
        expected="nothing grows after the 20th iteration; the peak is within 5 % of the plan's; the log has a table of both",
        deviation="growth: a tensor outlives its op; a higher peak: an operand of W is larger than the memory model says",
    ),
    Step(
        name="recorder, watchdog",
        files="others",
        command=_pytest(
            "gpu",
            "tests/profiling/test_recorder.py",
            "tests/job/test_watchdog.py",
        ),
        minutes=10,
        expected="passes",
        deviation="traces or the watchdog cannot be relied on; training itself does not depend on them",
    ),
    Step(
        name="NCCL: order of transfers",
        files="nccl-order",
        command=_pytest("multi_gpu", "tests/runtime/test_gpu.py"),
        num_gpus=2,
        minutes=15,
        expected="every schedule ends under random delays, with every message where it belongs",
        deviation="a hang or another message: the four rules of ADR 3 are wrong about NCCL; send the log before anything else",
    ),
    Step(
        name="NCCL: gradients",
        files="nccl-gradients",
        command=_pytest("multi_gpu", "tests/mcore/test_gpu.py"),
        num_gpus=2,
        minutes=15,
        expected="as on one GPU",
        deviation="as on one GPU, but only here: a buffer is used again before NCCL has read it",
    ),
    Step(
        name="a job: megatron-core's 1F1B",
        files="job-1f1b",
        command=_job("--train-iters", "30"),
        environment=_into("job-1f1b", *_STOCK),
        num_gpus=2,
        minutes=12,
        expected="ends with 30 iterations",
        deviation="the machine or megatron-core, not this package: fix that before going on",
    ),
    Step(
        name="a job: ZB-H1",
        files="job-zb-h1",
        command=_job("--train-iters", "30"),
        environment=_into("job-zb-h1", *_ZB_H1),
        num_gpus=2,
        minutes=12,
        expected="the losses of 1F1B within 1e-2 (bf16; the same weights at the start)",
        deviation="another first loss: another model; losses that diverge: gradients",
    ),
    Step(
        name="a job: ZBV with post-validation",
        files="job-zbv",
        command=_job("--train-iters", "30", _OPTIMISTIC),
        environment=_into("job-zbv", *_V),
        num_gpus=2,
        minutes=12,
        expected="ends; the losses of 1F1B within 1e-2 (bf16; the same weights at the start)",
        deviation="a hang: the log's last line says which rank waits for what; a NaN: gradients",
    ),
)
"""The order: what would make all later steps meaningless comes first."""

BENCHES = (
    Step(
        name="what the split costs",
        files="split",
        command=_tool("split", "--json", "{out}/split.json", "--markdown", "{out}/split.md"),
        minutes=20,
        expected="(B + W) at most 1.02 of the full backward; W at least 0.95 of the plain matmul's rate",
        deviation="a ratio above it is lost in every schedule: compare the kernels of W in the table",
    ),
    Step(
        name="a run of 1F1B (megatron-core)",
        files="run-1f1b",
        command=_job("--train-iters", "120"),
        environment=_into("run-1f1b", *_STOCK),
        num_gpus=2,
        minutes=15,
        expected="ends with 120 iterations: the baseline",
        deviation="the machine or megatron-core, not this package",
    ),
    Step(
        name="a run of interleaved 1F1B (megatron-core)",
        files="run-interleaved",
        command=_job("--train-iters", "120"),
        environment=_into("run-interleaved", *_INTERLEAVED),
        num_gpus=2,
        minutes=15,
        expected="faster than 1F1B",
        deviation="transfers are slow against passes: use larger microbatches for all runs",
    ),
    Step(
        name="a run of ZB-H1",
        files="run-zb-h1",
        command=_job("--train-iters", "120", _OPTIMISTIC, *_REPLANNED),
        environment=_into("run-zb-h1", *_ZB_H1),
        num_gpus=2,
        minutes=15,
        expected="faster than 1F1B; within 5 % of the predicted time",
        deviation="slower than predicted: see the trace for what ranks wait for (docs/reading-the-trace.md)",
    ),
    Step(
        name="a run of ZB-H2",
        files="run-zb-h2",
        command=_job("--train-iters", "120", _OPTIMISTIC, *_REPLANNED),
        environment=_into("run-zb-h2", *_ZB_H2),
        num_gpus=2,
        minutes=15,
        expected="faster than ZB-H1; within 5 % of the predicted time",
        deviation="as ZB-H1",
    ),
    Step(
        name="a run of ZBV",
        files="run-zbv",
        command=_job("--train-iters", "120", _OPTIMISTIC, *_REPLANNED),
        environment=_into("run-zbv", *_V),
        num_gpus=2,
        minutes=15,
        expected="faster than interleaved 1F1B; within 5 % of the predicted time",
        deviation="as ZB-H1",
    ),
)
SUITES = {"test": TESTS, "bench": BENCHES}


def markdown(steps: Iterable[Step]) -> str:
    """The table of docs/benchmarks/gpu.md."""
    rows = [f"| {step.name} | {step.num_gpus} | {step.expected} | {step.deviation} |" for step in steps]
    return "\n".join(["| step | GPUs | expected | otherwise |", "|---|---|---|---|", *rows])
