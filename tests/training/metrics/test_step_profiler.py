"""--profile: which iterations are profiled, with torch's profiler. nsys needs CUDA: not run on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron.zerobubble.training.config.logging import LoggingConfig
from megatron.zerobubble.training.metrics.step_profiler import StepProfiler


def profiled(folder: Path, *, iterations: int, ranks: tuple[int, ...] = (1,)) -> list[Path]:
    """The traces of a run on rank 1 whose iteration n multiplies matrices of n rows."""
    logs = LoggingConfig(
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=2,
        profile_step_end=4,
        profile_ranks=ranks,
        tensorboard_dir=str(folder),
    )
    profiler = StepProfiler(logs, rank=1)
    for number in range(1, iterations + 1):
        profiler.before(number - 1)
        torch.ones(number, 2) @ torch.ones(2, 2)
        profiler.after(number)
    profiler.close()
    return list(folder.iterdir()) if folder.exists() else []


def multiplied(trace: Path) -> list[int]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::mm"]


def test_the_chosen_iterations_of_the_chosen_rank(tmp_path: Path) -> None:
    (trace,) = profiled(tmp_path / "whole", iterations=6)
    assert trace.name.startswith("rank1.")
    assert multiplied(trace) == [3, 4]


def test_a_run_that_ends_early_and_other_ranks(tmp_path: Path) -> None:
    (trace,) = profiled(tmp_path / "early", iterations=3)
    assert multiplied(trace) == [3]
    assert profiled(tmp_path / "short", iterations=2) == []
    assert profiled(tmp_path / "other", iterations=6, ranks=(0, 2)) == []
