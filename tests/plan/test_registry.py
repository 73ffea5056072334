"""The registry: names, options, and its errors."""

from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.registry import build_plan, known_schedules, parse_max_pending_backward, schedule_info


def test_the_schedules_we_know() -> None:
    hand_written = ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb", "zbv"]
    searched = ["v-half", "v-min", "1f1b-v", "zb-interleaved", "zb-w"]
    assert [info.name for info in known_schedules()] == hand_written + searched
    for info in known_schedules():
        assert info.description
        assert info.reference.startswith("arXiv ")
        plan = build_plan(info.name, num_ranks=3, num_microbatches=4)
        assert plan.schedule == info.name
        assert plan.placement.name == info.placement
        assert plan.placement.num_chunks == info.default_num_chunks


@pytest.mark.parametrize(
    ("given", "closest"), [("zb-v", "zbv"), ("ZBH1", "zb-h1"), ("1F1B", "1f1b"), ("interleaved-1f", "interleaved-1f1b")]
)
def test_an_unknown_name_gets_the_closest(given: str, closest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{closest}'") as caught:
        schedule_info(given)
    for info in known_schedules():
        assert info.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_info("qqqq")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": True}, "num_ranks is True"),
        ({"num_microbatches": -1}, "num_microbatches is -1"),
        ({"num_microbatches": 2.5}, "num_microbatches is 2.5"),
        ({"num_chunks": 0}, "num_chunks is 0"),
        ({"num_chunks": 2}, "'zb' has 1 stage"),
        ({"max_pending_backward": 0}, "max_pending_backward is 0"),
        ({"name": "zb-h1", "max_pending_backward": 4}, "'zb-h1' has a fixed number of pending"),
        ({"name": "zbv", "num_chunks": 1}, "'zbv' has 2 stage"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    name = options.pop("name", "zb")
    arguments = {"num_ranks": 2, "num_microbatches": 4} | options
    with pytest.raises(ConfigError, match=message) as caught:
        build_plan(name, **arguments)
    assert "\n" not in str(caught.value)


def test_num_chunks() -> None:
    assert build_plan("zbv", num_ranks=2, num_microbatches=4, num_chunks=2).placement.num_chunks == 2
    assert build_plan("interleaved-1f1b", num_ranks=2, num_microbatches=4, num_chunks=4).placement.num_chunks == 4


@pytest.mark.parametrize(("text", "value"), [("1p", 8), ("2p", 16), ("2P", 16), (" 5 ", 5), ("1", 1)])
def test_max_pending_backward(text: str, value: int) -> None:
    assert parse_max_pending_backward(text, 8) == value


@pytest.mark.parametrize("text", ["", "p", "0", "0p", "-1", "1.5p", "auto", "2pp"])
def test_max_pending_backward_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="1p or 2p"):
        parse_max_pending_backward(text, 8)
