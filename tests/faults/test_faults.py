"""The fault laboratory: faults at random moments of real jobs, and what docs/reliability.md promises of them.

`make test` runs a few, drawn by ZB_TEST_SEED; `make test-faults` runs all NUM of them and prints a table.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults import lab

NUM = int(os.environ.get("ZB_TEST_FAULTS_NUM", "30"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals and reads /proc"),
    pytest.mark.claims(
        "Long runs",
        "a rank that is stopped, stuck, killed, cut off or slow, in any phase: it is named first, the others log their op, "
        "message or phase, and the job ends (`make test-faults`: [the fault laboratory](reliability.md))",
        "works",
        also=("job",),
    ),
]


@pytest.mark.parametrize("number", range(NUM))
@pytest.mark.sampled(1 / NUM)
def test_a_fault_at_a_random_moment(number: int, tmp_path: Path) -> None:
    """The culprit is named, nothing of the job is left, and it goes on from its newest checkpoint as if nothing had happened."""
    trial = lab.drawn(f"{os.environ['ZB_TEST_SEED']} {number}")
    outcome = lab.run(trial, tmp_path)
    if outcome is None:
        pytest.skip(f"the job was over before the moment of {trial}")
    lab.record(outcome)
    assert outcome.is_as_promised, outcome
    if "ZB_TEST_FAULTS" in os.environ:  # a time is not asserted where other tests run beside
        assert outcome.seconds <= lab.PROMISED_S, outcome


@pytest.mark.slow
def test_a_rank_that_is_stopped_when_the_others_are_done_is_named(tmp_path: Path) -> None:
    outcome = lab.run(lab.Trial("stop", "leaves", "zb-h1-p2", rank=0, after_ms=0.0), tmp_path)
    assert outcome is not None
    assert outcome.is_as_promised, outcome


@pytest.mark.slow
def test_a_slow_rank_is_named_and_not_ended(tmp_path: Path) -> None:
    num_ranks, flags = lab.LAYOUTS["zb-h1-p2"]
    fault = lab.Fault("slow", 1, "passes", 0.0, str(tmp_path / "note"))
    many = [*lab.flags_of(tmp_path, flags, num_ranks), "--train-iters", "60", "--save-interval", "1000"]
    done = lab.started(many, num_ranks, fault)
    assert done.returncode == 0, done.stderr
    assert "rank 1 (" in done.stdout
    assert "is slow: its passes take" in done.stdout
