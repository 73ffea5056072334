"""What the playground accepts from a page, and with what words it refuses the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError, UserError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import AUTO_MEMORY_LIMIT
from megatron.zerobubble.plan.search.search_options import Effort
from megatron.zerobubble.playground.problem import read_problem
from megatron.zerobubble.playground.tasks import run_task

GOOD: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 8, "schedule": "zbv"}
STAGES = CostModel.uniform(Placement.v(4), forward_ms=3.0, comm_ms=0.5).to_json()


def read(**changes: Any) -> Any:
    return read_problem(json.dumps(GOOD | changes).encode())


def test_a_request_becomes_a_problem() -> None:
    problem = read(
        memory_limit=0.75,
        objective="makespan",
        effort="fast",
        times={"forward_ms": 2, "comm_ms": 0.1, "activation_after_backward": 0.5},
    )
    assert (problem.num_ranks, problem.num_microbatches, problem.schedule) == (4, 8, "zbv")
    assert (problem.memory_limit, problem.objective, problem.effort) == (0.75, Objective.MAKESPAN, Effort.FAST)
    assert problem.costs_of(Placement.v(4)).forward_ms == (1.0,) * 8
    assert read().effort is None
    assert read(schedule="zb", max_pending_backward="2p").max_pending_backward == 8
    assert read(memory_limits=[2, 0.5, 2]).memory_limits == (0.5, 2.0)


def test_slices_of_a_model_have_equal_work_and_others_equal_parts() -> None:
    *_, done = (event for event in run_task("search", json.dumps(GOOD | {"num_slices": 4})) if "drawing" in event)
    assert done["drawing"]["costs"]["slices"]["forward_ms"] == [[0.125] * 4] * 8
    model = {"seq_length": 65536}
    whole, cut = (read(model=model, num_slices=n).costs_of(Placement.v(4), n) for n in (1, 4))
    lengths = cut.table.tokens
    assert sum(lengths) == 65536
    assert lengths[0] > 1.3 * lengths[3]
    assert min(row[0] for row in cut.table.keys) > 0
    assert cut.forward_ms == pytest.approx(whole.forward_ms)
    assert cut.whole.activation == pytest.approx(whole.activation)


def test_plans_over_slices_are_compared_with_those_of_whole_microbatches() -> None:
    for more in ({"times": {"comm_ms": 0.6}}, {"model": {"seq_length": 65536}}):
        request = GOOD | more | {"num_slices": 4}
        cut, whole = (
            next(event["drawing"]["problem"] for event in run_task("search", json.dumps(request | slices)) if "drawing" in event)
            for slices in ({}, {"num_slices": 1})
        )
        assert cut.keys() == whole.keys()
        assert all(value == pytest.approx(whole[name], rel=1e-9) for name, value in cut.items()), cut


def test_a_table_gives_no_costs_of_more_stages_than_it_has() -> None:
    problem = read(stages=STAGES)
    assert problem.costs_of(Placement.v(4)) == CostModel.from_json(STAGES)
    with pytest.raises(PlanError, match="for 8 stages and the plan has 16"):
        problem.costs_of(Placement.loop(4, 4))


def test_costs_of_a_v_s_2p_stages_give_those_of_p_stages() -> None:
    uneven = STAGES | {"forward_ms": [float(stage) for stage in range(8)], "activation": [0.25, 0.75] * 4}
    problem = read(stages=uneven)
    derived = problem.costs_of(Placement.linear(4))
    assert derived.forward_ms == (1.0, 5.0, 9.0, 13.0)
    assert derived.activation == (1.0,) * 4
    assert derived.comm_ms == 0.5
    assert (problem.derived_from(Placement.linear(4)), problem.derived_from(Placement.v(4))) == (8, None)
    assert read().derived_from(Placement.linear(4)) is None


def test_defaults_are_those_of_a_run() -> None:
    assert ZeroBubbleConfig().enable_optimizer_post_validation is False
    assert read().objective is Objective.MAKESPAN
    assert read(schedule="auto").memory_limit == AUTO_MEMORY_LIMIT == 1.0
    assert read(schedule="auto", memory_limit=0.5).memory_limit == 0.5
    assert read().memory_limit is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 65}, r"num_ranks is 65; the playground takes whole numbers from 1 to 64"),
        ({"num_ranks": True}, "num_ranks is True"),
        ({"num_microbatches": 513}, "from 1 to 512"),
        ({"num_microbatches": 8.0}, "num_microbatches is 8.0"),
        ({"num_chunks": 9}, "num_chunks is 9"),
        ({"num_slices": 17}, "num_slices is 17; the playground takes whole numbers from 1 to 16"),
        ({"num_slices": 16, "num_microbatches": 33}, "are 528 slices; the playground takes at most 512: give fewer slices"),
        ({"schedule": "zvb"}, "did you mean"),
        ({"schedule": "x" * 10_000}, "unknown schedule"),
        ({"schedule": None}, "unknown schedule 'None'"),
        ({"effort": "huge"}, "choose one of fast, default, max"),
        ({"objective": ["span"]}, "choose one of span, makespan"),
        ({"memory_limit": -0.1}, "memory_limit is -0.1; give a number from 0 to 64"),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
        ({"memory_limits": list(range(13))}, "at most 12"),
        ({"max_pending_backward": "p2"}, "give 1p or 2p"),
        ({"max_pending_backward": "1025"}, "at most 1024"),
        ({"times": {"forward_ms": "1"}}, "forward_ms is '1'"),
        ({"times": {"activation_after_backward": 65}}, "from 0 to 64"),
        ({"times": {"f": 1}}, "times must be an object with some of forward_ms"),
        ({"step": {"optimizer_ms": -1}}, "optimizer_ms is -1"),
        ({"step": {"forward_ms": 1}}, "step must be an object with some of reduce_ms, gather_ms, optimizer_ms, snapshot_ms"),
        ({"stages": {"forward_ms": [1] * 513}}, "has 513 values"),
        ({"stages": STAGES | {"wgrad_ms": [1, "2"]}}, "wgrad_ms of stage 1 is '2'"),
        ({"stages": STAGES | {"wgrad_ms": None}}, "'wgrad_ms' must be a list"),
        ({"stages": STAGES | {"comm_ms": 1e9}}, "comm_ms is"),
        ({"file": "/etc/passwd"}, r"the request has 'file'; known are all_to_all, effort"),
        ({"all_to_all": 1.5}, "all_to_all is"),
    ],
)
def test_an_impossible_value_is_refused_by_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(**changes)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_request_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ConfigError, match="the request is"):
        read_problem(body)
