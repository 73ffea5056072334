"""--zero-bubble-balance-stages: the times and the layout that it logs for a recorded iteration."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from megatron.zerobubble.mcore.planning.chunk_advice import chunk_advice
from megatron.zerobubble.mcore.planning.layout_proposal import layout_proposal, measured_parts, recorded_costs
from megatron.zerobubble.plan.communication import links_of
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import build_plan, schedule_spec
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import RankTimeline, Timeline


class _Recorded:
    """Stands in for a schedule that has run a plan exactly as simulated."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        ranks = tuple(RankTimeline(ops=row) for row in simulate(plan, costs).rows)
        self._ran = Timeline(iteration=2, plan=plan, ranks=ranks)
        self.device = torch.device("cpu")

    def timelines(self) -> list[Timeline]:
        return [self._ran]


class _Unrecorded:
    def timelines(self) -> list[Timeline]:
        return []


def thirds(model: Model, layers: StageLayers, placement: Placement) -> CostModel:
    """Costs of stages whose F, B and W take the same time."""
    return Layout(model=model, placement=placement, per_stage=layers.per_stage).costs()


def parts(layer: float, *, embedding: float = 0.0, head: float = 0.0, memory: float = 0.25) -> Model:
    """Equal layers, of the given time for each of F, B and W."""

    def part(time: float, memory: float) -> LayerCosts:
        return LayerCosts.of(time, time, time, memory, memory, 0.0)

    kinds = {"layer": part(layer, memory), "embedding": part(embedding, 0.0), "head": part(head, 0.0)}
    return Model(layers=("layer",) * 16, kinds=kinds, comm_ms=0.1)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["zbv", "1f1b"])
def test_part_times_follow_from_a_recorded_iteration(name: str) -> None:
    """F, B and W apart, and fused."""
    plan = build_plan(name, num_ranks=4, num_microbatches=8)
    layers = StageLayers.spread(16, plan.placement)
    costs = recorded_costs(_Recorded(plan, thirds(parts(2.0, embedding=0.25, head=3.0), layers, plan.placement)))  # type: ignore[arg-type]
    assert costs is not None
    assert measured_parts(("layer",) * 16, layers, plan.placement, costs).startswith(
        "stages: F, B and W of a microbatch take 6.00 ms in a layer, 0.75 ms in the embedding and 9.00 ms in the head; the "
        f"bottleneck rank computes {33.75 if name == 'zbv' else 33.0:.2f} ms"
    )


@pytest.mark.usefixtures("world_of_one")
def test_nothing_recorded() -> None:
    assert recorded_costs(_Unrecorded()) is None  # type: ignore[arg-type]


def test_a_layout_of_all_schedules_is_proposed_with_its_gain() -> None:
    """Profiled costs with a heavy head: another partition, within the memory of the running plan."""
    plan = build_plan("zb", num_ranks=4, num_microbatches=8)
    layers = StageLayers.spread(16, plan.placement)
    costs = thirds(parts(2.0, embedding=0.1, head=5.0), layers, plan.placement)
    line = layout_proposal(plan, ("layer",) * 16, layers, costs, Objective.MAKESPAN)
    now = simulate(plan, costs).makespan_ms
    assert line.startswith(f"layouts: the plan takes {now:.2f} ms per iteration with the synchronous optimizer (makespan)")
    found = re.search(r'--zero-bubble-schedule (\S+) --pipeline-model-parallel-layout "(\S+)", (\d) stage', line)
    assert found is not None
    proposed = StageLayers.parse(found[2])
    assert proposed.num_layers == 16
    assert proposed.num_stages == 4 * int(found[3])
    then = re.search(r"it would take (\S+) ms", line)
    assert then is not None
    assert float(then[1]) < 0.9 * now


def test_other_chunks_are_named_with_what_they_would_take() -> None:
    """1F1B's memory and equal layers: two chunks have a smaller bubble. With one layer per rank there are no other chunks."""
    plan = build_plan("zb-h1", num_ranks=4, num_microbatches=8)
    options = SearchOptions(memory_limit=1.0, objective=Objective.MAKESPAN, budget=1e5)
    layers = StageLayers.spread(16, plan.placement)
    costs = replace(thirds(parts(2.0), layers, plan.placement), comm_ms=0.0)
    line = chunk_advice(plan, layers, costs, options)
    assert line is not None
    found = re.fullmatch(
        r"by the measured times \S+ with 2 model chunks per rank .*\(.*--num-virtual-stages-per-pipeline-rank 2\) would "
        r"take (\S+) of this iteration time \((\S+) instead of (\S+) ms\), its layers spread evenly",
        line,
    )
    assert found is not None
    now = simulate(plan, costs).makespan_ms
    assert float(found[3]) == pytest.approx(now, abs=0.01)
    assert 8 * 24.0 <= float(found[2]) < now
    assert float(found[1]) == pytest.approx(float(found[2]) / now, abs=0.01)
    few = StageLayers.spread(4, plan.placement)
    assert chunk_advice(plan, few, costs, options) is None
    busy = {pair: LinkTime(20.0, 19.0) if set(pair) == {1, 2} else LinkTime(0.1, 0.05) for pair in links_of(plan.placement)}
    slow = costs.with_links(busy, 4)
    assert chunk_advice(plan, layers, slow, options) is None, "twice the messages take 38 ms of every 24"


def test_interleaved_1f1b_above_the_memory_limit_is_named_where_w_is_small() -> None:
    """As with long sequences: attention has no W."""
    plan = build_plan("zbv", num_ranks=4, num_microbatches=8)
    layers = StageLayers.spread(16, plan.placement)
    costs = CostModel.uniform(plan.placement, forward_ms=24.0, backward_ms=40.0, wgrad_ms=6.0)
    line = chunk_advice(plan, layers, costs, SearchOptions(memory_limit=1.0, objective=Objective.MAKESPAN, budget=1e4))
    assert line is not None
    assert re.search(r"with 1\.19 of 1F1B's activation memory interleaved-1f1b with 4 virtual stages .*attention has no W", line)


def test_layers_of_several_kinds_have_costs_of_their_own() -> None:
    """Four dense layers before four with experts, three times as slow: even stages that look alike would hide it."""
    model = Model(
        layers=("dense",) * 4 + ("moe_layer",) * 4,
        kinds={
            "dense": LayerCosts(forward_ms=1, backward_ms=1, wgrad_ms=1, activation_bytes=1, after_backward_bytes=0.5),
            "moe_layer": LayerCosts(forward_ms=3, backward_ms=3, wgrad_ms=3, activation_bytes=1, after_backward_bytes=0.5),
        },
    )
    plan = build_plan("zbv", num_ranks=2, num_microbatches=8)
    even = Layout(model=model, placement=plan.placement, per_stage=(1, 3, 2, 2))
    costs = even.stage_costs(8, None).costs
    line = layout_proposal(plan, model.layers, StageLayers(per_stage=even.per_stage), costs, Objective.SPAN)
    found = re.search(r'--zero-bubble-schedule (\S+) --pipeline-model-parallel-layout "(\S+)", (\d) stage', line)
    then = re.search(r"it would take (\S+) ms", line)
    assert found is not None
    assert then is not None
    placement = schedule_spec(found[1], num_ranks=2, num_chunks=int(found[3])).placement
    proposed = Layout(model=model, placement=placement, per_stage=StageLayers.parse(found[2]).per_stage)
    assert max(proposed.ranks("forward_ms")) == 8.0, "half of the work on each rank, by the true costs"
    assert float(then[1]) == pytest.approx(8 * 24.0, rel=0.1)


def test_the_best_layout_stays() -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=8)
    ones = (1.0,) * 4
    costs = CostModel.of_lists(
        {"forward_ms": ones, "backward_ms": ones, "wgrad_ms": ones, "activation": ones, "activation_after_backward": ones}
    )
    line = layout_proposal(plan, ("layer",) * 4, StageLayers.spread(4, plan.placement), costs, Objective.SPAN)
    assert line.endswith("and no layout was found that is 1 % faster")
