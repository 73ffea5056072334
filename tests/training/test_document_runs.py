"""Whole jobs on documents: one by one, padded or packed they are the same training, which continues bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.cli.main import main as cli
from megatron.zerobubble.plan.costs.length_model import LengthModel
from tests.support.datasets import random_documents, write_documents
from tests.support.tolerances import OTHER_ORDER
from tests.training.launch import TINY_MODEL, metrics, train

LENGTHS = [2, 5, 9, 17, 32, 33, 34, 65, 100, 3, 8, 20, 30, 12, 7, 7, 4]
"""Tokens of the documents: 22 samples of at most 32 tokens, or 16 rows of several documents."""
NUM_SAMPLES, NUM_ROWS = 22, 16

RUN = [*TINY_MODEL, "--lr", "1e-2", "--lr-decay-style", "constant", "--optimizer", "sgd", "--init-method-std", "0.3"]
RUN += ["--hidden-dropout", "0", "--attention-dropout", "0", "--calculate-per-token-loss", "--log-interval", "1"]
WHOLE_EPOCHS = ["--train-iters", "2", "--eval-iters", "1", "--eval-interval", "2"]
P2 = ["--pipeline-model-parallel-size", "2"]
ROPE = ["--position-embedding-type", "rope"]


def batch(micro: int, size: int) -> list[str]:
    return ["--micro-batch-size", str(micro), "--global-batch-size", str(size)]


ONE_BY_ONE = ["--variable-seq-lengths", *batch(1, NUM_SAMPLES)]
PADDED = ["--variable-seq-lengths", *batch(2, NUM_SAMPLES), *P2]
PACKED = ["--pack-sequences", *batch(1, NUM_ROWS), *P2]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("documents") / "some", 2 * random_documents(LENGTHS))


def numbers(documents: str, folder: Path, flags: list[str]) -> list[float]:
    """Loss and gradient norm of two iterations that read every document once, and the validation loss of all documents."""
    path = folder / "metrics.jsonl"
    data = ["--data-path", documents, "--split", "1,1,0", "--metrics-jsonl", str(path)]
    said = train([*RUN, *WHOLE_EPOCHS, *data, *flags], num_ranks=2 if P2[0] in flags else 1)
    first, second = metrics(path)[1], metrics(path)[2]
    assert "TFLOP" not in said, "FLOPs differ by sample"
    assert sum(LENGTHS) - len(LENGTHS) == round(first["tokens_per_s"] * first["iteration_ms"] / 1000.0)
    return [first["loss"], first["grad_norm"], second["loss"], second["grad_norm"], second["validation_loss"]]


@pytest.mark.claims(
    "Long runs",
    "documents one by one, padded, packed, packed under ZB-H1; learned and rotary positions; stock 1F1B with unequal shapes: "
    "loss, gradient norm and validation loss of two epochs",
    "works, 4e-6",
)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PADDED, [*PACKED, "--enable-zero-bubble"]),
        ([*ONE_BY_ONE, *ROPE], [*PACKED, "--variable-seq-lengths", *ROPE]),
    ],
    ids=["learned", "rope"],
)
@pytest.mark.sampled(0.34)
def test_documents_apart_and_packed_are_the_same_training(
    documents: str, tmp_path: Path, first: list[str], second: list[str]
) -> None:
    """Only the order of the sums differs. Were a document to attend to another one, the loss would differ by nearly 1 %."""
    assert numbers(documents, tmp_path, second) == pytest.approx(numbers(documents, tmp_path, first), rel=OTHER_ORDER)


PROFILED = ["--zero-bubble-pipeline-timers-start-iter", "1", "--zero-bubble-pipeline-timers-end-iter", "1"]


@pytest.mark.claims(
    "Long runs",
    "documents at their own lengths, padded and packed, in whole jobs under ZB-H1 with re-planning, ZBV, ZBV with "
    "post-validation, and ZB-H1 over slices, against megatron-core's own 1F1B; runs under 1F1B and ZBV continued from a "
    "checkpoint",
    "works, 4e-6; continued bit for bit",
)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PADDED, [*PADDED, "--zero-bubble-v-schedule", "--enable-optimizer-post-validation", "--post-validation-patience", "0"]),
        (PADDED, [*PADDED, "--enable-zero-bubble", *PROFILED, "--zero-bubble-planning-seconds", "0.1"]),
        ([*PACKED, *ROPE], [*PACKED, "--variable-seq-lengths", *ROPE, "--zero-bubble-v-schedule"]),
        ([*PADDED, *ROPE], [*PADDED, *ROPE, "--enable-zero-bubble", "--zero-bubble-slices", "4", *PROFILED]),
    ],
    ids=["zbv-post-validation", "zb-h1-replanned", "zbv-packed", "zb-h1-slices"],
)
@pytest.mark.sampled(0.2)
def test_unequal_microbatches_are_the_same_training(
    documents: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], first: list[str], second: list[str]
) -> None:
    """Each iteration in the order planned for its lengths; megatron-core's own 1F1B takes the data as it comes.

    Costs that were fitted to the lengths are in the report, and plan other lengths.
    """
    trace = ["--zero-bubble-trace", str(tmp_path / "trace")]
    assert numbers(documents, tmp_path, [*second, *trace]) == pytest.approx(numbers(documents, tmp_path, first), rel=OTHER_ORDER)
    report = json.loads((tmp_path / "trace" / "report.json").read_text())
    if "--zero-bubble-pipeline-timers-start-iter" not in second:
        assert "costs_by_length" not in report, "nothing was fitted"
        return
    model = LengthModel.from_json(report["costs_by_length"])
    assert all(terms.at(32, 32.0**2) > 0 for terms in (*model.forward_ms, *model.backward_ms, *model.wgrad_ms, *model.activation))
    lengths = ["--num-ranks", "2", "--microbatch-tokens", "8,16,32"]
    assert cli(["plan", "--schedule", "zb-h1", *lengths, "--costs", str(tmp_path / "trace" / "report.json")]) == 0
    assert "costs by length as measured in " in capsys.readouterr().out


def test_a_batch_of_padding_trains_nothing(tmp_path: Path) -> None:
    """Documents of which only the first token is no padding have no token that counts, and training goes on."""
    padding, text = [[5] + [-1] * 6] * 12, random_documents([9] * 4)
    path = write_documents(tmp_path / "padded", [*padding, *text])
    flags = ["--variable-seq-lengths", *batch(1, 2), *P2, "--data-path", path, "--split", "1,0,0", "--eval-iters", "0"]
    flags += ["--zero-bubble-v-schedule", "--enable-optimizer-post-validation", "--train-iters", "8"]
    said = train([*RUN, *flags, "--metrics-jsonl", str(tmp_path / "metrics.jsonl")])
    found = metrics(tmp_path / "metrics.jsonl")
    without = [each for each in found.values() if each["loss"] is None]
    assert sorted(found) == list(range(1, 9))
    assert 4 <= len(without) < 8, "four documents of text are in at most four of eight batches"
    assert all(each["grad_norm"] == 0.0 for each in without)
    assert said.count("no token that counts in the loss") == 1


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        ["--zero-bubble-v-schedule", "--enable-optimizer-post-validation"],
        ["--enable-zero-bubble", "--zero-bubble-slices", "2"],
    ],
    ids=["stock", "zbv", "slices"],
)
@pytest.mark.sampled(0.34)
def test_a_run_on_documents_continues_bit_for_bit(documents: str, schedule: list[str], tmp_path: Path) -> None:
    """Evaluation included, on documents that are held out."""
    run = [*RUN, "--variable-seq-lengths", *batch(2, 8), *P2, "--data-path", documents, "--split", "80,20,0", *schedule]
    run += ["--train-iters", "4", "--eval-iters", "1", "--eval-interval", "2", "--hidden-dropout", "0.1"]
    found: list[dict[int, dict[str, Any]]] = []
    checkpoints = str(tmp_path / "checkpoints")
    for name, more in (
        ("whole", ["--save", checkpoints, "--save-interval", "2"]),
        ("rest", ["--load", checkpoints, "--ckpt-step", "2"]),
    ):
        train([*run, *more, "--metrics-jsonl", str(tmp_path / f"{name}.jsonl")])
        found.append(metrics(tmp_path / f"{name}.jsonl"))
    whole, rest = found
    assert sorted(rest) == [3, 4]
    for iteration in rest:
        for name in ("loss", "grad_norm", "validation_loss"):
            assert rest[iteration].get(name) == whole[iteration].get(name), name
    assert rest[4]["validation_loss"] is not None
