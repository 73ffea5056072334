"""Ratios, intervals and verdicts."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.bench.comparison_report import markdown, summary, to_json, write
from megatron.zerobubble.bench.speed_ups import Idle, Outcome, Table, interval, rounds_to_decide, speed_up
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.playground.opened_files import open_file

MIB = 2**20


def table(*outcomes: Outcome, baseline: str = "stock-1f1b", **more: Any) -> Table:
    """A comparison of a job with 1000 tokens per iteration on two ranks."""
    sizes = {"tokens": 1000, "num_ranks": 2, "num_cores": None, "pipeline_size": 2}
    return Table(outcomes=outcomes, baseline=baseline, **(sizes | more))


def outcome(name: str, *seconds: float, **more: Any) -> Outcome:
    """A contender with one block per round."""
    losses = dict.fromkeys(range(len(seconds)), 2.5)
    return Outcome(name=name, seconds=dict(enumerate(seconds)), losses=losses, **more)


def test_the_interval_is_students_on_a_logarithmic_scale() -> None:
    """Two measurements: t(0.975, 1) = 12.706 and their standard error is half of their distance."""
    found = interval([2.0, 8.0])
    assert found.value == pytest.approx(4.0)
    half = 12.706 * math.log(2.0)
    assert (found.low, found.high) == pytest.approx((4.0 * math.exp(-half), 4.0 * math.exp(half)))


def test_one_measurement_has_no_interval() -> None:
    assert interval([3.0]).low is None
    assert not interval([3.0]).is_above_one


@pytest.mark.parametrize("count", [2, 5, 40])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """With noise of 10 % on every block, 95 % of the intervals hold the true ratio."""
    generator = random.Random(count)
    held = 0
    for _ in range(2000):
        found = interval([1.3 * math.exp(generator.gauss(0.0, 0.1)) for _ in range(count)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1.3 <= found.high
    assert 0.93 <= held / 2000 <= 0.97


def test_a_speed_up_compares_blocks_of_the_same_round() -> None:
    """A machine that is twice as slow in the second round slows both, and the ratio does not change."""
    found = speed_up({0: 1.2, 1: 2.4, 2: 1.2}, {0: 1.0, 1: 2.0, 3: 9.0})
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.2, 1.2, 1.2))
    assert speed_up({0: 1.0}, {1: 1.0}) is None


def test_exposed_all_to_alls_are_a_line_where_they_were_measured() -> None:
    base, fast = outcome("stock-1f1b", 2.0, exposed_ms=31.25), outcome("auto", 1.6, exposed_ms=4.0, ran="zbv")
    line = "Exposed all-to-alls of experts, ms of the recorded iteration on the mean rank: stock-1f1b 31.25, auto (zbv) 4."
    found = table(base, fast, outcome("v-half", 1.8))
    assert line in summary(found)
    assert line in markdown(found, {})
    assert to_json(found, {})["contenders"][1]["exposed_ms"] == 4.0
    assert "xposed" not in summary(table(outcome("stock-1f1b", 2.0), outcome("zbv", 1.6)))


def test_rates_and_shares() -> None:
    base = outcome("stock-1f1b", 2.0, 2.0, predicted_ms=1900.0, state_bytes=6 * MIB, activation_bytes=2 * MIB)
    fast = outcome("zbv", 1.6, 1.6, predicted_ms=1500.0, state_bytes=6 * MIB, activation_bytes=4 * MIB)
    row = table(base, fast).rows[1]
    assert row.outcome.ms is not None
    assert row.speed_up is not None
    assert row.outcome.ms.value == pytest.approx(1600.0)
    assert row.speed_up.value == pytest.approx(1.25)
    assert row.predicted_speed_up == pytest.approx(1900 / 1500)
    assert row.reached == pytest.approx(0.25 / (1900 / 1500 - 1.0))
    assert row.tokens_per_s == pytest.approx(625.0)
    assert row.tokens_per_s_per_rank == pytest.approx(312.5)
    assert row.memory_ratio == pytest.approx(10 / 8)


def test_memory_is_that_of_the_allocator_where_it_is_known() -> None:
    base = outcome("stock-1f1b", 1.0, allocated_bytes=80 * MIB, state_bytes=1, activation_bytes=1)
    assert table(base, outcome("zbv", 1.0, allocated_bytes=60 * MIB)).rows[1].memory_ratio == pytest.approx(0.75)


QUIET = (2.0, 2.01, 1.99)


@pytest.mark.parametrize(("spread", "wanted"), [(0.02, 3), (0.1, 11), (2.0, None)])
def test_rounds_that_would_decide_are_those_of_students_interval(spread: float, wanted: int | None) -> None:
    found = interval([1.1 * math.exp(spread), 1.1 * math.exp(-spread)])
    assert rounds_to_decide(found, 2) == wanted


def test_the_verdict_names_the_fastest_with_its_memory() -> None:
    base = outcome("stock-1f1b", *QUIET, state_bytes=8 * MIB, activation_bytes=2 * MIB)
    fast = outcome("zbv", *(each / 1.25 for each in QUIET), state_bytes=8 * MIB, activation_bytes=1 * MIB)
    slow = outcome("v-half", *(each / 1.1 for each in QUIET))
    wanted = "zbv is 1.25 times as fast as stock-1f1b, with 9 MiB on the fullest rank in place of 10 MiB"
    assert table(base, slow, fast).verdict() == f"{wanted}."
    fast.use = "--zero-bubble-schedule zbv"
    assert table(base, slow, fast).verdict() == f"{wanted}. use: --zero-bubble-schedule zbv"


def test_a_gain_that_is_proven_counts_more_than_a_larger_one_that_is_not() -> None:
    base, noisy = (
        outcome("stock-1f1b", *QUIET),
        outcome("zb-h1", *(each / by for each, by in zip(QUIET, (1.02, 1.15, 1.22), strict=True))),
    )
    proven = outcome("zbv", *(each / 1.05 for each in QUIET))
    assert table(base, noisy).verdict().startswith("zb-h1 was 1.13 times as fast as stock-1f1b, but the interval contains 1")
    assert table(base, noisy, proven).verdict() == "zbv is 1.05 times as fast as stock-1f1b."


def test_the_verdict_is_also_over_1f1b_without_its_wait() -> None:
    base, fast = outcome("stock-1f1b", *QUIET), outcome("zbv", *(each / 1.25 for each in QUIET))
    fair = outcome("stock-1f1b:no-sync", *(each / 1.05 for each in QUIET))
    wanted = "zbv is 1.25 times as fast as stock-1f1b, and 1.19 times as fast as stock-1f1b:no-sync."
    assert table(base, fair, fast).verdict() == wanted
    assert table(base, fair).verdict() == "stock-1f1b:no-sync is 1.05 times as fast as stock-1f1b."


def failed(name: str) -> Outcome:
    return Outcome(name=name, failure="y")


BASE = outcome("stock-1f1b", *QUIET, predicted_bubble=0.03)
SAME = outcome("zbv", 1.99, 2.0, 2.01)
NO_GAIN = "^No contender is measurably faster than stock-1f1b.*"
NO_BASELINE = [failed("stock-1f1b"), outcome("zbv", 1.0), outcome("zb-h1", 1.0)]


@pytest.mark.parametrize(
    ("outcomes", "more", "verdict"),
    [
        ([BASE, SAME], {"pipeline_size": 1}, f"{NO_GAIN}with one pipeline rank there is no bubble to fill"),
        ([BASE, SAME], {"num_cores": 1}, f"{NO_GAIN}2 ranks share one CPU core, so a waiting rank lends its core to another"),
        ([BASE, SAME], {}, f"{NO_GAIN}only 3.0% of its passes are bubble"),
        (
            [outcome("stock-1f1b", *QUIET, predicted_bubble=0.187), SAME],
            {},
            f"{NO_GAIN}although 18.7% of its passes are bubble: messages and the host take what a schedule would gain.",
        ),
        (
            [outcome("stock-1f1b", 2.0, 2.2), outcome("zbv", 1.7, 2.0)],
            {},
            "^zbv was 1.14 times as fast as stock-1f1b, but the interval contains 1: about --rounds 3 would decide, if times "
            "vary as they did.$",
        ),
        ([outcome("stock-1f1b", 2.0), outcome("zbv", 1.0)], {}, "no evidence yet"),
        ([outcome("stock-1f1b", 1.0, 2.0), outcome("zbv", 1.5, 1.5)], {}, "which was not quiet.$"),
        ([failed("stock-1f1b"), failed("zbv")], {}, "^No contender ran.$"),
        ([outcome("stock-1f1b", 1.0), failed("zbv")], {}, "^Only stock-1f1b ran; there is nothing to compare.$"),
        (NO_BASELINE, {}, "^The baseline stock-1f1b did not run; there are no speed-ups.$"),
    ],
)
def test_a_verdict_without_a_winner_says_why(outcomes: list[Outcome], more: dict[str, Any], verdict: str) -> None:
    assert re.search(verdict, table(*outcomes, **more).verdict())


def test_a_machine_that_is_not_quiet_is_named() -> None:
    found = table(outcome("stock-1f1b", 1.0, 2.0), outcome("zbv", 1.5, 1.5))
    assert "stock-1f1b took 2.0 times as long in one round as in another" in found.noise()
    assert table(outcome("stock-1f1b", *QUIET)).noise() == ""


def test_losses_are_compared_after_the_same_iterations() -> None:
    base, other = outcome("stock-1f1b", 1.0, 1.0), outcome("zbv", 1.0, 1.0)
    assert "All contenders have the same loss" in table(base, other).same_losses()
    other.losses = {0: 2.5 * (1 + 1e-7), 1: 9.0}  # a later block is shorter: only the first ones compare
    assert "agree to 1e-07" in table(base, other).same_losses()
    other.losses = {0: 2.6}
    apart = "differ by 4.0e-02: stock-1f1b 2.500000, zbv 2.600000"
    assert f"{apart}. They begin with weights drawn by name, on the same samples" in table(base, other).same_losses()
    alone = table(base, other, losses_compare=False)
    assert f"{apart}. Not compared: the script has dropout" in alone.same_losses()
    assert [table(base, other).rows[1].has_same_loss, alone.rows[1].has_same_loss] == [False, None]
    other.losses = {0: 2.5 * (1 + 2e-3)}
    assert [table(base, other, is_fp32=each).rows[1].has_same_loss for each in (True, False)] == [False, True]


def test_a_faster_schedule_with_another_loss_is_not_recommended() -> None:
    base, fast = outcome("stock-1f1b", *QUIET), outcome("zbv", *(each / 1.25 for each in QUIET), use="--flag")
    fast.losses = {0: 2.6}
    wanted = (
        "zbv is 1.25 times as fast as stock-1f1b. Do not use it yet: its loss is 2.600000 where stock-1f1b has 2.500000, from "
    )
    assert table(base, fast).verdict() == f"{wanted}the same weights and samples."
    assert table(base, fast, losses_compare=False).verdict().endswith("use: --flag")


def test_a_terminal_gets_eight_columns_and_the_verdict_last() -> None:
    idle = Idle(share=0.2, imbalance=0.12, schedule=0.05, waiting=0.03)
    fast = outcome("zbv", 1.0, 1.01, 0.99, state_bytes=3 * MIB, activation_bytes=2 * MIB, idle=idle, use="--flag")
    text = summary(table(outcome("stock-1f1b", *QUIET), fast))
    rows = [re.split(r"  +", line) for line in text.splitlines()[:3]]
    assert rows[0] == ["contender", "ms", "speed-up [95 %]", "plan", "tok/s", "MiB", "idle", "loss"]
    assert rows[2] == ["zbv", "1000", "2.00 [1.98, 2.03]", "-", "500", "5", "20%", "yes"]
    longest = [replace(each, name=each.name.ljust(18, "x")) for each in (outcome("stock-1f1b", *QUIET), fast)]
    wide = summary(table(*longest, baseline=longest[0].name))
    assert max(map(len, wide.splitlines()[:6])) <= 80
    assert "Under zbv the mean rank is idle for 12% of the passes" in text
    assert text.endswith("use: --flag\n")


def test_the_report_has_the_verdict_on_top_and_opens_in_the_playground(tmp_path: Path) -> None:
    costs = CostModel.uniform(Placement.v(2), forward_ms=2.0, backward_ms=2.0, wgrad_ms=1.0, comm_ms=0.5)
    found = table(outcome("stock-1f1b", *QUIET), outcome("zbv", 1.0, 1.01, 0.99), num_microbatches=6)
    files = write(tmp_path, replace(found, costs=costs.to_json()), {"device": "CPU"}, title="Compared")
    text = (tmp_path / "bench.md").read_text()
    assert text.startswith("# Compared\n\nzbv is 2.00 times as fast as stock-1f1b")
    opened = open_file((tmp_path / "bench.json").read_bytes())
    assert (opened["kind"], opened["num_ranks"], opened["num_microbatches"]) == ("costs", 2, 6)
    assert files == [tmp_path / "bench.md", tmp_path / "bench.json"]


def test_the_table_names_failures() -> None:
    text = markdown(table(outcome("stock-1f1b", *QUIET), Outcome(name="zbv", failure="CUDA out of memory")), {"date": "today"})
    lines = text.splitlines()
    assert [cell.strip() for cell in lines[5].split("|")[1:3]] == ["zbv", "failed"]
    assert "zbv: CUDA out of memory" in lines
    assert "- date: today" in lines


def test_json_holds_every_round() -> None:
    body = json.loads(json.dumps(to_json(table(outcome("stock-1f1b", 2.0, 2.5), outcome("zbv", 1.0)), {"device": "CPU"})))
    assert body["format"] == "zerobubble-bench/1"
    assert body["contenders"][0]["seconds"] == {"0": 2.0, "1": 2.5}
    assert body["contenders"][1]["speed_up"] == {"value": 2.0, "low": None, "high": None}
