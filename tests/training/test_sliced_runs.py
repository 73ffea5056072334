"""Whole jobs whose microbatches are cut into slices learn what others learn, resume bit for bit, re-plan, and report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from megatron.zerobubble.training.check import check_settings

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from tests.support.traces import check_trace_files
from tests.training.test_arguments import settings
from tests.training.test_runs import LAYER, NO_DROPOUT, Job, close

pytestmark = pytest.mark.claims(
    "Parallelism",
    "whole jobs with slices of microbatches: one loss curve for 1, 2, 4 and 8 slices, a checkpoint that resumes bit for bit with "
    "dropout, re-planning, trace and report, evaluation",
    "works, losses as of whole microbatches within 4e-6, after steps of Adam in proportion to them",
)

OPTIMISTIC = ["--enable-optimizer-post-validation", "--post-validation-patience", "0", "--clip-grad", "0.5"]
MEASURING = ["--zero-bubble-pipeline-timers-start-iter", "2", "--zero-bubble-pipeline-timers-end-iter", "3"]
MEASURING += ["--zero-bubble-planning-seconds", "0.1"]


def _losses(job: Job) -> dict[str, float]:
    return {
        f"{name} {number}": fields[name]
        for number, fields in job.metrics.items()
        for name in ("loss", "validation_loss")
        if name in fields
    }


@pytest.mark.sampled(0.07, group="whole jobs")
def test_one_curve_for_all_numbers_of_slices(corpus: str, tmp_path: Path) -> None:
    _check_curves(corpus, tmp_path, ["--train-iters", "6"], numbers=(2, 8))


@pytest.mark.slow
def test_one_curve_for_all_numbers_of_slices_over_50_iterations(corpus: str, tmp_path: Path) -> None:
    _check_curves(corpus, tmp_path, ["--train-iters", "50", "--lr", "3e-3", "--seq-length", "64"], numbers=(2, 4, 8))


def _check_curves(corpus: str, folder: Path, flags: list[str], *, numbers: tuple[int, ...]) -> None:
    flags = [*NO_DROPOUT, *LAYER, "--disable-bias-linear", "--data-path", corpus, *flags]
    whole = _losses(Job(folder / "whole", [*flags, "--enable-zero-bubble"]))
    for number in numbers:
        schedule = ["--zero-bubble-v-schedule", *OPTIMISTIC[:1]] if number == 4 else ["--enable-zero-bubble"]
        job = Job(folder / str(number), [*flags, *schedule, "--zero-bubble-slices", str(number)])
        assert f"tokens in {number} slices" in job.said
        assert _losses(job) == close(whole)


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_checkpoint_resumes_bit_for_bit(corpus: str, tmp_path: Path) -> None:
    """ZBV with optimistic steps and dropout, which is drawn slice by slice; then the planner's files."""
    flags = ["--data-path", corpus, "--zero-bubble-v-schedule", "--zero-bubble-slices", "4", *OPTIMISTIC]
    files = ["--zero-bubble-trace", str(tmp_path / "trace"), "--zero-bubble-save-plan", str(tmp_path / "plan.json"), *MEASURING]
    saves = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "3"]
    whole = Job(tmp_path / "whole", [*flags, *files, *saves])
    continued = Job(tmp_path / "continued", [*flags, "--load", str(tmp_path / "checkpoints"), "--ckpt-step", "3"])
    expected = {name: value for name, value in _losses(whole).items() if int(re.sub(r"\D", "", name)) > 3}
    assert _losses(continued) == expected
    _check_files(tmp_path)


@pytest.mark.sampled(0.07, group="whole jobs")
def test_the_number_of_slices_follows_from_what_is_measured(corpus: str, tmp_path: Path) -> None:
    """Whatever it is on this machine, the losses are those of whole microbatches."""
    flags = [*NO_DROPOUT, *LAYER, "--disable-bias-linear", "--data-path", corpus, "--enable-zero-bubble"]
    auto = ["--zero-bubble-slices", "auto", "--zero-bubble-planning-seconds", "0.1"]
    whole = Job(tmp_path / "whole", flags)
    chosen = Job(tmp_path / "chosen", [*flags, *auto, "--zero-bubble-save-plan", str(tmp_path / "plan.json")])
    assert _losses(chosen) == close(_losses(whole))
    assert "tokens in slices" in chosen.said
    found = re.search(
        r"microbatches are cut into slices of ([\d, ]+) tokens; chosen in .* 1: [\d.]+, 2: [\d.]+, 4: ", chosen.said
    )
    assert found is not None
    lengths = [int(each) for each in found[1].split(",")]
    assert sum(lengths) == 32
    assert Plan.from_json((tmp_path / "plan.json").read_text()).num_slices == len(lengths)


def _check_files(folder: Path) -> None:
    body = json.loads((folder / "plan.json").read_text())
    plan, costs = Plan.from_json(json.dumps(body)), CostModel.from_json(body["costs"])
    assert plan.num_slices == 4
    assert costs.table.tokens == (8, 8, 8, 8)
    assert min(row[0] for row in costs.table.keys) > 0
    for memory in body["metrics"]["peak_memory"]:
        assert 0 < memory < 2
    report = json.loads((folder / "trace" / "report.json").read_text())
    assert report["iterations"][-1]["num_slices"] == 4
    for rank in report["memory"]:
        assert rank["predicted_bytes"] == pytest.approx(rank["measured_bytes"], rel=0.05)
    others = ["layers.json"]
    check_trace_files(folder / "trace", "zbv", num_ranks=2, num_microbatches=4, iterations=[4], others=others)


P2 = "--pipeline-model-parallel-size 2 --enable-zero-bubble --zero-bubble-slices "
TP = "--tensor-model-parallel-size 2 --sequence-parallel "
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
REFUSED = [
    (f"{P2} 128", r"--zero-bubble-slices 128 with --seq-length 64: a sequence of 64 tokens .* too few for 128 slices"),
    (f"{P2} 64 {TP}", r"a sequence of 64 tokens has 32 parts of 2 tokens, which is too few for 64 slices"),
    (f"{P2} 2 --context-parallel-size 2", "--context-parallel-size above 1: both cut sequences"),
    (f"{P2} 2 --mtp-num-layers 1 --position-embedding-type rope --calculate-per-token-loss", "weighted by the tokens of a slice"),
    (f"{P2} 2 {EXPERTS}", "global_aux_loss: its counts are a mean over the calls so far"),
    (f"{P2} 2 --zero-bubble-balance-stages", "does not go with --zero-bubble-balance-stages"),
    (f"{P2} auto --zero-bubble-planning-seconds 0", "--zero-bubble-slices auto needs profiled iterations"),
    ("--zero-bubble-schedule 1f1b --zero-bubble-slices auto", "--zero-bubble-slices auto needs profiled iterations"),
    (f"{P2} auto --seq-length 4", "a sequence of 4 tokens has 4 tokens, which is too few for 8 slices"),
    (f"{P2} many", "--zero-bubble-slices is 'many'; give a number from 1 to 1,024, or auto"),
    (f"{P2} {'9' * 5000}", "give a number from 1 to 1,024, or auto"),
    (f"{P2} 0", "--zero-bubble-slices is '0'; give a number from 1 to 1,024, or auto"),
    ("--zero-bubble-slices 2", "schedule stock has no order of slices"),
    ("--zero-bubble-schedule zb-w --zero-bubble-slices 2", "schedule zb-w has no order of slices"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_slices_do_not_go_with_is_refused_at_the_start(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(settings(flags, world_size=4))
