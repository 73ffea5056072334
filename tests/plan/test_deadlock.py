"""With CUDA_DEVICE_MAX_CONNECTIONS=1 the plans that are run have no cycle; `plan/deadlock.py` has the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.zerobubble.plan.communication import place_communication
from megatron.zerobubble.plan.deadlock import finishes
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.transforms import forward_only


def _plans(name: str) -> Iterator[Plan]:
    for num_ranks in range(2, 7):
        for num_microbatches in (*range(1, 2 * num_ranks + 2), 3 * num_ranks):
            options: list[dict[str, int]] = [{}]
            if name == "zb":
                options = [{"max_pending_backward": k} for k in (1, num_ranks - 1, num_ranks, num_ranks + 1, 2 * num_ranks)]
            for option in options:
                plan = build_plan(
                    name, num_ranks=num_ranks, num_microbatches=num_microbatches, **{k: max(1, v) for k, v in option.items()}
                )
                yield plan
                yield forward_only(plan)


@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
def test_what_is_run_passes_a_single_hardware_queue(name: str) -> None:
    for plan in _plans(name):
        if name == "zb-interleaved" and plan.num_ranks == 2:
            continue  # the next test; such a run is refused
        assert finishes(place_communication(plan), single_queue=True), plan.to_text()


def test_a_plan_that_would_deadlock_is_found() -> None:
    plan = build_plan("zb-interleaved", num_ranks=2, num_microbatches=4)
    assert not finishes(place_communication(plan), single_queue=True)
    assert finishes(place_communication(plan), single_queue=False)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_posting_receives_two_ops_ahead_would_not(name: str) -> None:
    """So the model can fail, and `lookahead` is not free to choose. With independent queues any lookahead is safe."""
    programs = [place_communication(plan, lookahead=2) for plan in _plans(name)]
    assert not all(finishes(program, single_queue=True) for program in programs)
    assert all(finishes(program, single_queue=False) for program in programs)
