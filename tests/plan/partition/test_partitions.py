"""Partitions by local search, against all partitions of small models; and the search over layouts as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.joint import LayoutResult, plan_layout, plan_of_layout
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.partitions import partitions
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.validate import validate

PLACEMENTS = [Placement.linear(3), Placement.v(2), Placement.loop(2, 2), Placement.w(2), Placement.loop(3, 2)]
MAKESPAN = SearchOptions(objective=Objective.MAKESPAN, budget=1e6)


def layer(time: float, *, held: float = 1.0, static: float = 0.0) -> LayerCosts:
    return LayerCosts(
        forward_ms=time,
        backward_ms=time,
        wgrad_ms=time,
        activation_bytes=held,
        after_backward_bytes=held / 2,
        static_bytes=static,
    )


def model_of(random: Random, num_layers: int) -> Model:
    kinds = {"a": layer(1.0), "b": layer(random.uniform(0.5, 2.0)), "embedding": layer(0.1), "head": layer(random.uniform(0, 3))}
    return Model(layers=tuple(random.choice("aab") for _ in range(num_layers)), kinds=kinds)


def all_partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: f"{placement.name}{placement.num_stages}")
def test_the_bottleneck_is_near_the_best_of_all_partitions(placement: Placement) -> None:
    """Within 2 % on average and never more than 12 % of the best partition, with and without empty stages."""
    excess = []
    for seed, allow_empty in itertools.product(range(4), (True, False)):
        model = model_of(Random(seed), 7 if placement.num_stages > 4 else 9)
        found = partitions(model, placement, allow_empty=allow_empty)
        every = [
            counts
            for counts in all_partitions(model.num_layers, placement.num_stages)
            if allow_empty or min(counts[1:-1], default=1) > 0
        ]
        assert set(found) <= set(every)
        best = min(Layout(model=model, placement=placement, per_stage=counts).bottleneck_ms for counts in every)
        mine = Layout(model=model, placement=placement, per_stage=found[0]).bottleneck_ms
        excess.append(mine / best - 1)
    assert max(excess) < 0.12
    assert sum(excess) / len(excess) < 0.02


def test_memory_keeps_layers_away_from_a_full_rank() -> None:
    kinds = {"layer": layer(1.0, static=10.0), "embedding": layer(0.0, held=0.0, static=60.0)}
    model = Model(layers=("layer",) * 8, kinds=kinds)
    free = partitions(model, Placement.linear(2))[0]
    assert free == (4, 4)
    found = plan_layout(model, num_ranks=2, num_microbatches=4, memory_bytes=105.0, options=MAKESPAN, schedule="zb")
    assert found.layout.per_stage[0] < 4
    assert max(found.peak_bytes) <= 105.0 * (1 + 1e-9)


@pytest.mark.parametrize("memory", [None, 26.0])
def test_a_heavy_head_is_worth_a_layout(memory: float | None) -> None:
    """The best layout is faster than the even one with the same search, within its memory, and near its bound."""
    kinds = {"layer": layer(1.0, static=1.0), "embedding": layer(0.05), "head": layer(2.5, static=1.0)}
    model = Model(layers=("layer",) * 12, kinds=kinds, comm_ms=0.05)
    found = plan_layout(model, num_ranks=4, num_microbatches=8, memory_bytes=memory, options=MAKESPAN)
    validate(found.result.simulation.plan)
    even = Layout(model=model, placement=Placement.linear(4), per_stage=(3, 3, 3, 3))
    _, other = plan_of_layout("zb", even, 8, memory, MAKESPAN)
    assert found.result.simulation.makespan_ms < 0.9 * other.simulation.makespan_ms
    assert -1e-9 <= found.result.bound.makespan_gap(found.result.simulation.makespan_ms) < 0.15
    assert memory is None or max(found.peak_bytes) <= memory * (1 + 1e-9)
    assert found.metrics()["peak_bytes"] == found.peak_bytes


def test_the_same_arguments_find_the_same_layout() -> None:
    model = model_of(Random(3), 10)
    options = SearchOptions(objective=Objective.MAKESPAN, budget=Effort.FAST.budget / 100)
    found = [plan_layout(model, num_ranks=2, num_microbatches=4, options=options) for _ in range(2)]
    assert found[0].layout == found[1].layout
    assert found[0].result.simulation.plan == found[1].result.simulation.plan


@pytest.mark.parametrize(
    ("schedule", "placement"), [("zb", "linear"), ("zbv", "V"), ("1f1b-v", "V"), ("interleaved-1f1b", "loop"), ("zb-w", "W")]
)
def test_a_schedule_by_name(schedule: str, placement: str) -> None:
    found = plan_layout(model_of(Random(1), 10), num_ranks=2, num_microbatches=4, schedule=schedule, options=MAKESPAN)
    assert found.layout.placement.name == placement
    assert found.result.name == schedule
    validate(found.result.simulation.plan)


def test_a_model_without_times_is_refused() -> None:
    model = Model(layers=("a",) * 4, kinds={"a": LayerCosts(activation_bytes=1)})
    with pytest.raises(ConfigError, match="no layer takes any time"):
        plan_layout(model, num_ranks=2, num_microbatches=4, options=MAKESPAN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "zbx"}, "unknown schedule 'zbx'"),
        ({"num_chunks": 2}, "auto chooses the number of chunks"),
        ({"schedule": "zbv", "num_chunks": 4}, r"schedule 'zbv' has 2 stage\(s\) per rank, not 4"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"memory_bytes": 5.0}, "no layout that was tried fits devices of 0.00 GiB"),
    ],
)
def test_a_wrong_model_is_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"num_ranks": 2, "num_microbatches": 4, "options": MAKESPAN}
    with pytest.raises(ConfigError, match=message):
        plan_layout(model_of(Random(1), 10), **(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "need"), [("1f1b", "16.00"), ("interleaved-1f1b", "20.00"), ("zb-h1", "18.00")])
def test_a_fixed_order_that_does_not_fit_names_what_it_needs(schedule: str, need: str) -> None:
    """The memory that the message names is enough, and a little less is not."""
    gib = 2.0**30
    kinds = {"layer": layer(1.0, held=gib, static=gib), "head": layer(1.0, held=gib, static=gib)}
    model = Model(layers=("layer",) * 12, kinds=kinds)

    def plan(memory: float) -> LayoutResult:
        return plan_layout(model, num_ranks=2, num_microbatches=8, memory_bytes=memory, options=MAKESPAN, schedule=schedule)

    with pytest.raises(
        ConfigError, match=rf"fits devices of 15\.00 GiB: the one that needs the least, {schedule} with \"E.*L\""
    ) as why:
        plan(15 * gib)
    assert f"takes {need} GiB or more on rank" in str(why.value)
    assert max(plan(float(need) * gib).peak_bytes) <= float(need) * gib * (1 + 1e-9)
    with pytest.raises(ConfigError, match=f"takes {need} GiB or more on rank"):
        plan((float(need) - 0.1) * gib)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 layers are too few for the stages of any placement that was tried"):
        plan_layout(
            model_of(Random(1), 10), num_ranks=4, num_microbatches=4, schedule="zb-w", allow_empty=False, options=MAKESPAN
        )


def test_times_too_small_to_plan_with_are_refused() -> None:
    model = Model(layers=("a",) * 4, kinds={"a": LayerCosts(forward_ms=1e-300)})
    with pytest.raises(ConfigError, match=r"^costs: the largest value of forward_ms, backward_ms, wgrad_ms is 4e-300"):
        plan_layout(model, num_ranks=2, num_microbatches=4, options=MAKESPAN)
