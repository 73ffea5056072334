"""How the playground writes names and numbers."""

from __future__ import annotations

import re

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.playground.words import headline, measures, milliseconds, number, percent, title


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2127.1534, "2127"),
        (12.0, "12.00"),
        (0.62504, "0.6250"),
        (1.375, "1.375"),
        (-3.14159, "-3.142"),
        (9.9999, "10.00"),
        (1e-13, "0"),
        (0.0, "0"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_times_and_shares() -> None:
    assert [milliseconds(value) for value in (0.5273, 9999.0, 12345.6)] == ["0.5273 ms", "9999 ms", "12.35 s"]
    assert [percent(share) for share in (0.2430, 0.0403, 0.0047, 0.9996, 1e-17)] == ["24.3 %", "4.03 %", "0.47 %", "100 %", "0 %"]


def test_schedules_are_named_as_in_their_papers() -> None:
    titles = {info.name: title(info.name) for info in known_schedules()}
    assert {"1f1b": "1F1B", "zb-h1": "ZB-H1", "zbv": "ZBV", "v-half": "V-Half", "1f1b-v": "1F1B-V"}.items() <= titles.items()
    assert title("a name out of a file") == "a name out of a file"


def test_lines_about_a_plan_have_no_long_numbers() -> None:
    plan = build_plan("zbv", num_ranks=3, num_microbatches=7)
    simulation = simulate(plan, CostModel.uniform(plan.placement, forward_ms=18.12345, comm_ms=0.61))
    assert headline(plan).startswith("ZBV: 3 pipeline ranks (PP), 7 microbatches")
    assert all(len(digits.replace(".", "").lstrip("0")) <= 4 for digits in re.findall(r"[\d.]+", measures(simulation)))
