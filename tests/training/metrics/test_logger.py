"""Progress lines and JSON lines of iterations."""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from tests.support.megatron_lm import LOGGED

with quiet_third_parties():
    from megatron.zerobubble.training.metrics.json_lines import JsonLines
    from megatron.zerobubble.training.metrics.logger import MetricsLogger
    from megatron.zerobubble.training.metrics.progress_line import IterationRecord
    from megatron.zerobubble.training.step import StepResult

pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.claims(
        "Long runs",
        "metrics, plan file or trace that cannot be written any more: logged once, training goes on",
        "works",
        also=("training/test_plan_files.py",),
    ),
]


FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --mock-data "
)
STEP = StepResult(
    loss=torch.tensor([6.0, 2.0], dtype=torch.float64),
    is_stepped=True,
    grad_norm=0.1,
    lr=1 / 3,
    loss_scale=torch.tensor(1.0),
)


def settings(flags: str = "") -> Settings:
    return settings_from_argv((FLAGS + flags).split(), world_size=1)


def record(iteration: int, **changes: Any) -> IterationRecord:
    return IterationRecord(
        iteration=iteration, consumed_samples=2 * iteration, tokens=32, result=replace(STEP, **changes), elapsed_ms=lambda: 500.0
    )


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "metrics.jsonl"


@pytest.fixture
def logger(jsonl: Path) -> Iterator[MetricsLogger]:
    metrics = MetricsLogger(settings(f"--metrics-jsonl {jsonl}"), rank=0, start_iteration=0)
    yield metrics
    metrics.close()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_per_iteration_in_full_precision(logger: MetricsLogger, jsonl: Path) -> None:
    logger.add(record(1))
    logger.add(record(2, loss=torch.tensor([1.0, 3.0]), grad_norm=1 / 7))
    assert read(jsonl) == [], "written with the next progress line"
    logger.log()
    first, second = read(jsonl)
    assert first == {
        "iteration": 1,
        "loss": 3.0,
        "lr": 1 / 3,
        "grad_norm": 0.1,
        "skipped": False,
        "redone": False,
        "tokens_per_s": 64.0,
        "iteration_ms": 500.0,
        "schedule": "stock",
    }
    assert (second["loss"], second["grad_norm"]) == (1 / 3, 1 / 7)


def test_a_validation_loss_belongs_to_its_iteration(logger: MetricsLogger, jsonl: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger.add(record(1))
    with caplog.at_level(logging.INFO):
        logger.log(validation_loss=2.0, iteration=1)
    logger.log(validation_loss=1.5, iteration=1)
    first, second = read(jsonl)
    assert (first["iteration"], first["loss"], first["validation_loss"]) == (1, 3.0, 2.0)
    assert second == {"iteration": 1, "schedule": "stock", "validation_loss": 1.5}
    assert "validation loss at iteration 1: 2.0000 (ppl 7.39)" in caplog.text


def test_a_progress_line(logger: MetricsLogger, caplog: pytest.LogCaptureFixture) -> None:
    logger.add(record(1))
    logger.add(record(2, loss=torch.tensor([1.0, 1.0]), is_stepped=False, grad_norm=math.inf))
    with caplog.at_level(logging.INFO):
        logger.log()
    (line,) = caplog.messages
    fields = dict(field.split(": ", 1) for field in re.sub(r"^\[.*?\] (iteration) ", r"\1: ", line).rstrip(" |").split(" | "))
    assert {name: value.strip() for name, value in fields.items()} == {
        "iteration": "2/      10",
        "consumed samples": "4",
        "elapsed time per iteration (ms)": "500.0",
        "learning rate": "3.333333E-01",
        "global batch size": "2",
        "lm loss": "3.000000E+00",
        "loss scale": "1.0",
        "grad norm": "inf",
        "number of skipped iterations": "1",
        "number of nan iterations": "0",
        "tokens/s": "64",
        "tokens/s/GPU": "64",
        "time left": "0:00:04",
    }


def test_a_parser_of_megatron_lms_lines_reads_ours(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsLogger(settings(), rank=0, start_iteration=0)
    metrics.add(record(7))
    with caplog.at_level(logging.INFO):
        metrics.log()
    found = LOGGED.findall(caplog.messages[0])
    assert [(int(number), float(loss), float(norm)) for number, loss, norm in found] == [(7, 3.0, 0.1)]


def test_what_is_not_finite_becomes_null(logger: MetricsLogger, jsonl: Path) -> None:
    logger.add(record(1, is_stepped=False, grad_norm=math.inf, loss=torch.tensor([math.nan, 1.0])))
    logger.log()
    (fields,) = read(jsonl)
    assert (fields["loss"], fields["grad_norm"], fields["skipped"]) == (None, None, True)


@pytest.mark.parametrize("changes", [{"grad_norm": math.nan}, {"loss": torch.tensor([math.inf, 1.0])}])
def test_training_stops_when_it_diverges(logger: MetricsLogger, changes: dict[str, Any]) -> None:
    def go() -> None:
        logger.add(record(3, **changes))
        logger.log()

    with pytest.raises(ExecutionError, match=r"of iteration 3 is (nan|inf); training stops"):
        go()


def test_training_continues_where_no_token_counts(logger: MetricsLogger, jsonl: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch may be all padding or masked: that is no divergence. It is logged once."""
    with caplog.at_level(logging.INFO):
        for iteration in (1, 2, 3):
            logger.add(record(iteration, **({} if iteration == 3 else {"loss": torch.zeros(2), "grad_norm": 0.0})))
            logger.log()
    assert [fields["loss"] for fields in read(jsonl)] == [None, None, 3.0]
    said = [line for line in caplog.messages if "no token that counts" in line]
    assert len(said) == 1
    assert said[0].startswith("iteration 1 has no token that counts in the loss, and so no loss; training goes on.")


@pytest.mark.parametrize(("start", "lines"), [(0, 1), (1, 2)])
def test_a_new_run_starts_the_file_and_a_continued_one_appends(jsonl: Path, start: int, lines: int) -> None:
    for start_iteration in (0, start):
        metrics = MetricsLogger(settings(f"--metrics-jsonl {jsonl}"), rank=0, start_iteration=start_iteration)
        metrics.add(record(start_iteration + 1))
        metrics.log()
        metrics.close()
    assert len(read(jsonl)) == lines


def test_only_rank_0_writes(jsonl: Path) -> None:
    metrics = MetricsLogger(settings(f"--metrics-jsonl {jsonl}"), rank=1, start_iteration=0)
    metrics.add(record(1))
    metrics.log()
    assert not jsonl.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rolled_back": ()}, "clipped by post-validation, no rank had stepped"),
        ({"rolled_back": (0,)}, "clipped by post-validation, rolled back and redone on rank 0"),
        ({"rolled_back": (0, 1, 2)}, "clipped by post-validation, rolled back and redone on ranks 0-2"),
        ({"rolled_back": (0, 2, 3, 5)}, "clipped by post-validation, rolled back and redone on ranks 0, 2-3, 5"),
        ({"rolled_back": (0, 1), "is_stepped": False}, "skipped for an overflow by post-validation, rolled back on ranks 0-1"),
    ],
)
def test_a_corrected_step_is_logged(
    logger: MetricsLogger, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    with caplog.at_level(logging.INFO):
        logger.add(record(37, **changes))
    assert caplog.messages == [f"iteration 37: {said}"]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """This process' limit on the size of a file, which a write beyond it meets as it would a full disk: after a part of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_logged_once_and_lines_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(str(path), is_continued=False)
    lines.write([{"iteration": 1}])
    with files_of_at_most(path.stat().st_size + 10):
        for iteration in (2, 3):
            lines.write([{"iteration": iteration, "schedule": "zbv"}])
    lines.write([{"iteration": 4}])
    lines.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    (warning,) = caplog.messages
    assert warning.startswith(f"--metrics-jsonl {path} cannot be written: File too large; training goes on")
