"""The bound over all layouts: against all assignments of layers, and plans of all partitions and placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.layout_bound import bound_over_layouts
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, check_memory_limit
from megatron.zerobubble.plan.simulate import simulate

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "the parts of the bound over all layouts are reached by plans; the layer file of a profiled run: equal layers, dense and "
    "MoE, patterns",
    "works",
    also=("mcore/planning/test_layers_file.py", "training/test_runs.py"),
)


def part(forward: float, backward: float, wgrad: float, *, held: float = 4, kept: float = 2, static: float = 0) -> LayerCosts:
    return LayerCosts(
        forward_ms=forward,
        backward_ms=backward,
        wgrad_ms=wgrad,
        activation_bytes=held,
        after_backward_bytes=kept,
        static_bytes=static,
    )


def random_model(random: Random, num_layers: int, *, comm_ms: float = 0.0) -> Model:
    """Whole milliseconds, so that sums are often equal."""

    def cost() -> LayerCosts:
        return part(*(random.randint(1, 3) for _ in range(3)))

    kinds = {"a": cost(), "b": cost(), "embedding": part(1, 0, 1, held=0, kept=0), "head": part(*[random.randint(1, 6)] * 3)}
    return Model(layers=tuple(random.choice("ab") for _ in range(num_layers)), kinds=kinds, comm_ms=comm_ms)


def all_partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


def placements(num_ranks: int) -> list[Placement]:
    return [Placement.linear(num_ranks), Placement.loop(num_ranks, 2), Placement.v(num_ranks)]


@pytest.mark.parametrize("seed", range(12))
def test_the_steady_state_is_the_best_of_all_assignments(seed: int) -> None:
    """The span's bound with many microbatches, against every assignment of the layers to ranks."""
    random = Random(seed)
    num_ranks, num_layers = random.choice([(2, 7), (3, 6), (4, 5)])
    model = random_model(random, num_layers)
    best = math.inf
    for head in (0, num_ranks - 1):
        for ranks in itertools.product(range(num_ranks), repeat=num_layers):
            loads = [0.0] * num_ranks
            loads[0] += model.first.work_ms
            loads[head] += model.last.work_ms
            for rank, layer in zip(ranks, model.costs, strict=True):
                loads[rank] += layer.work_ms
            best = min(best, max(loads))
    bound = bound_over_layouts(model, num_ranks, 1000)
    assert bound.span_ms == pytest.approx(1000 * best, rel=1e-5)
    assert bound.span_ms <= 1000 * best
    assert bound.span_ms <= bound.makespan_ms


def test_more_than_three_kinds_are_divisible() -> None:
    kinds = {f"k{i}": part(1 + i, 1 + i, 1 + i) for i in range(5)}
    model = Model(layers=tuple(kinds), kinds=kinds)
    assert bound_over_layouts(model, 3, 100).span_ms == pytest.approx(100 * 15.0, rel=1e-5)  # 45 / 3, and the longest is 15
    assert bound_over_layouts(model, 5, 100).span_ms == pytest.approx(100 * 15.0, rel=1e-5)


def best_plan_ms(layout: Layout, m: int, memory: float | None, objective: Objective) -> float:
    stages = layout.stage_costs(m, memory)
    options = SearchOptions(memory_limit=stages.memory_limit, objective=objective, budget=1e5)
    return objective.of(simulate(search("any", layout.placement, m, stages.costs, options), stages.costs))


@pytest.mark.parametrize(("num_ranks", "start"), [(2, 1 + 1), (3, 1 + 1 + 2 * 1)])
def test_the_starts_of_ranks_are_reached(num_ranks: int, start: float) -> None:
    """A plan whose last rank starts as early as the bound says, and is never idle: any later start would be wrong."""
    kinds = {"layer": part(1, 1, 4), "embedding": part(1, 1, 1), "head": part(0, 0, 3)}
    layers = num_ranks - 1
    model = Model(layers=("layer",) * layers, kinds=kinds, comm_ms=1.0)
    layout = Layout(model=model, placement=Placement.v(num_ranks), per_stage=(0, *[1] * layers, *[0] * num_ranks))
    found = best_plan_ms(layout, 8, None, Objective.MAKESPAN)
    assert found == start + 8 * 6
    assert found - 1e-3 <= bound_over_layouts(model, num_ranks, 8).makespan_ms <= found


def test_memory_times_time_is_reached() -> None:
    """Weights fill the second rank, and the first holds one microbatch, until it is back from the second."""
    kinds = {"a": part(1, 1, 0, held=4, kept=0), "b": part(1, 1, 0, held=0, kept=0, static=4)}
    model = Model(layers=("a", "b"), kinds=kinds)
    layout = Layout(model=model, placement=Placement.linear(2), per_stage=(1, 1))
    m = 5
    found = best_plan_ms(layout, m, 4 + 1e-6, Objective.SPAN)
    assert found == 4 * m
    assert found * (1 - 1e-5) <= bound_over_layouts(model, 2, m, 4 + 1e-6).span_ms <= found
    assert bound_over_layouts(model, 2, m).span_ms == pytest.approx(2 * m, rel=1e-5), "without a limit"


@pytest.mark.parametrize("objective", Objective)
def test_the_path_of_one_microbatch_is_reached(objective: Objective) -> None:
    kinds = {"layer": part(2, 3, 1), "embedding": part(1, 0, 2), "head": part(1, 1, 0)}
    model = Model(layers=("layer",) * 2, kinds=kinds, comm_ms=0.5)
    layout = Layout(model=model, placement=Placement.linear(3), per_stage=(0, 1, 1))
    found = best_plan_ms(layout, 1, None, objective)
    assert found == (1 + 4 + 1) + (1 + 6) + 2 + 2 * 2 * 0.5
    bound = bound_over_layouts(model, 3, 1)
    assert objective.of(bound) == pytest.approx(found)


def test_memory_moves_layers() -> None:
    """Weights that fill a device keep the layers away from it, although time would allow them."""
    kinds = {"layer": part(1, 1, 1, static=10), "embedding": part(0, 0, 0, static=90, held=0, kept=0)}
    model = Model(layers=("layer",) * 4, kinds=kinds)
    assert bound_over_layouts(model, 2, 100).span_ms == pytest.approx(600.0, rel=1e-5)
    assert bound_over_layouts(model, 2, 100, 100).span_ms == pytest.approx(1200.0, rel=1e-5)


def test_a_model_that_fits_no_layout_is_refused() -> None:
    model = Model(layers=("layer",) * 4, kinds={"layer": part(1, 1, 1, static=2**30)})
    with pytest.raises(
        ConfigError, match=r"no layout of 4 layers on 2 ranks fits devices of 1.00 GiB: .* take 4.00 GiB in all; take"
    ):
        bound_over_layouts(model, 2, 8, 2**30 + 8)


def test_a_part_that_no_device_holds_is_named() -> None:
    model = Model(layers=("layer",) * 4, kinds={"layer": part(1, 1, 1), "head": part(1, 1, 1, static=2**31)})
    message = "take 2.00 GiB in all, and the kind head alone 2.00 GiB; divide it over more tensor-parallel ranks"
    with pytest.raises(ConfigError, match=message):
        bound_over_layouts(model, 8, 8, 2**30)


def test_three_kinds_that_do_not_fit_together_are_refused() -> None:
    """Any two of three layers exceed a device, whatever the time."""
    model = Model(layers=tuple("abc"), kinds={kind: part(1, 1, 1 + i, static=6, held=0) for i, kind in enumerate("abc")})
    with pytest.raises(ConfigError, match="no layout of 3 layers on 2 ranks fits"):
        bound_over_layouts(model, 2, 8, 10)
    assert bound_over_layouts(model, 3, 8, 10).span_ms > 0


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_found_is_below_the_bound(seed: int) -> None:
    """All partitions of a small model on all placements, with short searches, and under a memory limit for odd seeds."""
    random = Random(100 + seed)
    model = random_model(random, 4, comm_ms=random.choice((0.0, 0.5)))
    m, memory = random.choice((2, 4)), 30.0 if seed % 2 else None
    bound = bound_over_layouts(model, 2, m, memory)
    least = dict.fromkeys(Objective, math.inf)
    for placement in placements(2):
        for counts in all_partitions(4, placement.num_stages):
            layout = Layout(model=model, placement=placement, per_stage=counts)
            stages = layout.stage_costs(m, memory)
            try:
                check_memory_limit(placement, m, stages.costs, stages.memory_limit)
            except ConfigError:
                continue
            for objective in Objective:
                options = SearchOptions(memory_limit=stages.memory_limit, objective=objective, budget=0.0)
                found = simulate(search("any", placement, m, stages.costs, options), stages.costs)
                least[objective] = min(least[objective], objective.of(found))
    assert bound.span_ms <= least[Objective.SPAN]
    assert bound.makespan_ms <= least[Objective.MAKESPAN]
    assert bound.makespan_ms >= 0.7 * least[Objective.MAKESPAN]  # a bound of nothing would pass, too
