"""The benchmark of verifying checkpoints: both cases and measures of a tiny model, its arithmetic, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training_states import training_state_of
from tools.benchmarks import verify_checkpoint as benchmark

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


@pytest.mark.usefixtures("world_of_one")
def test_a_tiny_run(tmp_path: Path) -> None:
    with training_state_of(0, ["--save", str(tmp_path), "--load", str(tmp_path)]) as (training_state, store):
        cases = benchmark.measure(training_state, store, 1)
    assert list(cases) == list(benchmark.CASES)
    for (row,) in cases.values():
        assert set(row) == {f"{name} {measure}" for name in ("verified", "unverified", "alone") for measure in ("time", "cpu")}
        assert all(seconds > 0 for seconds in row.values())


def test_cpu_times_of_ranks_add_up_and_the_overhead_is_a_ratio_within_a_round() -> None:
    def row(verified: float, unverified: float) -> benchmark.Round:
        return {
            "verified time": verified,
            "unverified time": unverified,
            "verified cpu": verified / 2,
            "unverified cpu": unverified,
            "alone time": unverified / 4,
        }

    ranks = [{"case": [row(1.1, 1.0), row(6.0, 4.0), row(2.0, 2.0)]} for _ in range(2)]
    (rounds,) = benchmark.combined(ranks).values()
    assert [each["verified time"] for each in rounds] == [1.1, 6.0, 2.0]
    assert [each["verified cpu"] for each in rounds] == pytest.approx([1.1, 6.0, 2.0])
    estimate = benchmark.overhead(rounds, "time")
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.1, 0.0, 0.5))
    assert benchmark.alone(rounds, "time").value == pytest.approx(0.25)
    assert benchmark.overhead(rounds, "cpu").value == pytest.approx(0.55 - 1.0)


@pytest.mark.parametrize("flags", [["--num-layers", "3"], ["--hidden-size", "100"], ["--rounds", "0"]])
def test_bad_input_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        benchmark.main(flags)
    assert caught.value.code == 2


def test_the_page_shows_the_recorded_result(capsys: pytest.CaptureFixture[str]) -> None:
    result = DOCS / "data" / "verify_checkpoint.json"
    assert json.loads(result.read_text())["format"] == benchmark.FORMAT
    assert benchmark.main(["--from", str(result)]) == 0
    assert capsys.readouterr().out in (DOCS / "verify_checkpoint.md").read_text()
