"""--zero-bubble-balance-stages: the times and the layout that it logs for a recorded iteration."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.planning import stage_contents
from megatron.zerobubble.mcore.planning.chunk_advice import chunk_advice
from megatron.zerobubble.mcore.planning.layers_file import static_bytes, write_layers_file
from megatron.zerobubble.mcore.planning.layout_proposal import layout_proposal, measured_parts, proposal
from megatron.zerobubble.mcore.planning.measured_layers import measured_model
from megatron.zerobubble.mcore.planning.stage_contents import StageContents
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.balance import PartTimes
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.part_costs import PartCosts
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import build_plan, schedule_spec
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import RankTimeline, Timeline
from megatron.zerobubble.profiling.report import RankMemory


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


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["zbv", "1f1b"])
def test_part_times_follow_from_a_recorded_iteration(name: str) -> None:
    """F, B and W apart, and fused; from a recorded iteration, and from costs."""
    plan = build_plan(name, num_ranks=4, num_microbatches=8)
    layers = StageLayers.spread(16, plan.placement)
    expected = PartTimes(layer_ms=6.0, embedding_ms=0.75, head_ms=9.0)
    third = tuple(time / 3 for time in expected.stages_ms(layers))
    costs = CostModel(
        forward_ms=third,
        backward_ms=third,
        wgrad_ms=third,
        activation=(1.0,) * layers.num_stages,
        activation_after_backward=(1.0,) * layers.num_stages,
    )
    for given in (None, costs):
        found = measured_parts(_Recorded(plan, costs), layers, given)  # type: ignore[arg-type]
        assert found is not None
        assert vars(found) == pytest.approx(vars(expected))


@pytest.mark.usefixtures("world_of_one")
def test_nothing_recorded() -> None:
    layers = StageLayers.spread(4, Placement.linear(2))
    assert measured_parts(_Unrecorded(), layers, None) is None  # type: ignore[arg-type]


def test_a_proposal_states_its_gain() -> None:
    placement = Placement.linear(4)
    line = proposal(PartTimes(layer_ms=10.0, head_ms=21.0), StageLayers.spread(16, placement), placement)
    assert line == (
        "stages: F, B and W of a microbatch take 10.00 ms in a layer, 0.00 ms in the embedding and 21.00 ms in the head; the "
        'bottleneck rank computes 61.00 ms; with --pipeline-model-parallel-layout "Et*5|t*5|tttt|ttL" it would be 50.00 ms, '
        "1.22 times as fast in the steady state"
    )


def test_a_layout_of_all_schedules_is_proposed_with_its_gain() -> None:
    """Profiled costs with a heavy head: another partition, within the memory of the running plan."""
    plan = build_plan("zb", num_ranks=4, num_microbatches=8)
    layers = StageLayers.spread(16, plan.placement)
    parts = PartTimes(layer_ms=2.0, embedding_ms=0.1, head_ms=5.0)
    memory = tuple(PartTimes(layer_ms=0.25, head_ms=0.1).stages_ms(layers))
    third = tuple(parts.stages_ms(layers))
    costs = CostModel(
        forward_ms=third, backward_ms=third, wgrad_ms=third, activation=memory, activation_after_backward=memory, comm_ms=0.1
    )
    line = layout_proposal(plan, ("layer",) * 16, layers, costs, Objective.MAKESPAN)
    now = simulate(plan, costs).makespan_ms
    assert line.startswith(f"layouts: the plan takes {now:.2f} ms per iteration with the synchronous optimizer (makespan)")
    found = re.search(r'--zero-bubble-schedule (\S+) --pipeline-model-parallel-layout "(\S+)", (\d) stage', line)
    assert found is not None
    proposed = StageLayers.parse(found[2])
    assert proposed.num_layers == 16
    assert proposed.num_stages == 4 * int(found[3])
    then, least = re.search(r"it would take (\S+) ms, .* no layout takes less than (\S+) ms", line).groups()  # type: ignore[union-attr]
    assert float(least) <= float(then) < 0.9 * now


def test_other_chunks_are_named_with_what_they_would_take() -> None:
    """1F1B's memory and equal layers: two chunks have a smaller bubble. With one layer per rank there are no other chunks."""
    times, memory = PartTimes(layer_ms=2.0), PartTimes(layer_ms=0.25)
    kinds = ("forward_ms", "backward_ms", "wgrad_ms")
    by_kind = dict.fromkeys(kinds, times) | dict.fromkeys(("activation", "activation_after_backward"), memory)
    parts = PartCosts(by_kind=by_kind, comm_ms=0.0)
    plan = build_plan("zb-h1", num_ranks=4, num_microbatches=8)
    options = SearchOptions(memory_limit=1.0, objective=Objective.MAKESPAN, budget=1e5)
    layers = StageLayers.spread(16, plan.placement)
    line = chunk_advice(plan, layers, parts.costs(layers), options)
    assert line is not None
    found = re.fullmatch(
        r"by the measured times \S+ with 2 model chunks per rank .*\(.*--num-virtual-stages-per-pipeline-rank 2\) would "
        r"take (\S+) of this iteration time \((\S+) instead of (\S+) ms\), its layers spread evenly",
        line,
    )
    assert found is not None
    now = simulate(plan, parts.costs(layers)).makespan_ms
    assert float(found[3]) == pytest.approx(now, abs=0.01)
    assert 8 * 24.0 <= float(found[2]) < now
    assert float(found[1]) == pytest.approx(float(found[2]) / now, abs=0.01)
    few = StageLayers.spread(4, plan.placement)
    assert chunk_advice(plan, few, parts.costs(few), options) is None


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
    costs = CostModel(forward_ms=ones, backward_ms=ones, wgrad_ms=ones, activation=ones, activation_after_backward=ones)
    line = layout_proposal(plan, ("layer",) * 4, StageLayers.spread(4, plan.placement), costs, Objective.SPAN)
    assert "and no layout was found that is 1 % faster; no layout takes less than 48.00 ms" in line


def test_the_best_layout_is_not_changed() -> None:
    layers, placement = StageLayers(per_stage=(2, 1)), Placement.linear(2)
    line = proposal(PartTimes(layer_ms=10.0, head_ms=9.0), layers, placement)
    assert line.endswith("and no layout reduces that (now Ett|tL)")
    assert "(estimated: with two stages, one is assumed to hold layers only)" in line


def layer(scale: float) -> LayerCosts:
    return LayerCosts(
        forward_ms=scale,
        backward_ms=2 * scale,
        wgrad_ms=scale / 2,
        activation_bytes=1000 * scale,
        after_backward_bytes=400 * scale,
        static_bytes=3000 * scale,
    )


EMBEDDING = LayerCosts(forward_ms=0.5, wgrad_ms=0.25, activation_bytes=64, static_bytes=700)
HEAD = LayerCosts(forward_ms=2, backward_ms=3, wgrad_ms=4, activation_bytes=800, after_backward_bytes=200, static_bytes=900)
ENDS = {"embedding": EMBEDDING, "head": HEAD}
EVEN = Model(layers=("layer",) * 8, kinds=ENDS | {"layer": layer(2.0)}, comm_ms=0.3)
MIXED = Model(layers=("dense",) * 3 + ("moe_layer",) * 5, kinds=ENDS | {"dense": layer(2.0), "moe_layer": layer(3.0)})
LAYOUTS = [
    Layout(model=EVEN, placement=Placement.v(2), per_stage=(1, 3, 2, 2)),
    Layout(model=EVEN, placement=Placement.linear(4), per_stage=(2, 2, 2, 2)),
    Layout(model=MIXED, placement=Placement.linear(4), per_stage=(2, 3, 2, 1)),
    Layout(model=MIXED, placement=Placement.v(3), per_stage=(1, 1, 1, 2, 2, 1)),
]


def found_in(one: Layout) -> Model:
    """The model that follows from what a profile of a layout has: costs in units of activation memory, and static bytes."""
    stages = one.stage_costs(one.placement.num_ranks, None)
    (unit,) = {each / one.placement.num_ranks for each in stages.bytes_per_unit}
    layers = StageLayers(per_stage=one.per_stage)
    return measured_model(one.model.layers, layers, stages.costs, unit_bytes=unit, static_bytes=one.stages("static_bytes"))


@pytest.mark.parametrize("one", LAYOUTS, ids=lambda one: f"{one.placement.name}-{one.text}")
def test_the_parts_follow_from_the_stages(one: Layout) -> None:
    found = found_in(one)
    assert (found.layers, found.comm_ms) == (one.model.layers, one.model.comm_ms)
    assert set(found.kinds) == set(one.model.kinds)
    for kind, costs in one.model.kinds.items():
        assert vars(found.kinds[kind]) == pytest.approx(vars(costs), abs=1e-6), kind


def test_stages_that_are_too_alike_are_refused() -> None:
    """Two stages, and unknown are two kinds, the embedding and the head."""
    with pytest.raises(ConfigError, match=r"the layers of 2 stages \(4, 4\) do not distinguish dense, moe_layer, the embedding"):
        found_in(Layout(model=MIXED, placement=Placement.linear(2), per_stage=(4, 4)))


def test_the_state_of_a_rank_is_divided_by_weights() -> None:
    """Rank 0 of a V has the embedding and the head, the others two equal layers."""
    weights = [300, 100, 100, 100, 100, 100, 100, 500]
    found = static_bytes(weights, [1000.0, 60.0, 70.0, 80.0], Placement.v(4))
    assert found == [375.0, 30.0, 35.0, 40.0, 40.0, 35.0, 30.0, 625.0]
    state = [300.0, 100.0, 100.0, 500.0]
    assert static_bytes([3, 1, 1, 5], state, Placement.linear(4)) == pytest.approx(state)


class Layer:
    """A decoder layer with these parts, or without."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update({"self_attention": IdentityOp(), "mlp": IdentityOp()} | parts)


class Experts(BaseMoELayer):
    def forward(self, hidden_states: Any) -> Any:
        """Never called."""


def test_kinds_of_layers() -> None:
    """As megatron-core builds them: a transformer layer has both parts, a layer of a hybrid model one."""
    attention, mlp, experts = object(), object(), Experts.__new__(Experts)
    stages = ((Layer(self_attention=attention, mlp=mlp),) * 3, (Layer(self_attention=attention, mlp=experts),) * 5)
    assert kinds(*stages) == ("dense",) * 3 + ("moe_layer",) * 5
    assert kinds(stages[1], stages[1]) == ("layer",) * 10
    hybrid = (Layer(mixer=object()), Layer(self_attention=attention), Layer(mlp=mlp), Layer(mlp=experts))
    assert kinds(hybrid) == ("mamba", "attention", "mlp", "moe")
    assert StageContents(kinds=((), ()), weights=(1, 1)).layer_kinds == ()


def kinds(*stages: Any) -> tuple[str, ...]:
    chunks = [SimpleNamespace(decoder=SimpleNamespace(layers=stage)) for stage in stages]
    contents: Any = [stage_contents._kinds(chunk) for chunk in chunks]  # type: ignore[arg-type]
    return StageContents(kinds=tuple(contents), weights=(1,) * len(stages)).layer_kinds


def contents_of(one: Layout) -> StageContents:
    ends = itertools.accumulate(one.per_stage)
    kinds = tuple(one.model.layers[end - count : end] for end, count in zip(ends, one.per_stage, strict=True))
    return StageContents(kinds=kinds, weights=tuple(map(round, one.stages("static_bytes"))))


def replanner_of(one: Layout) -> Any:
    stages = one.stage_costs(one.placement.num_ranks, None)
    memory = [
        RankMemory(predicted_bytes=0, measured_bytes=0, workspace_bytes=0, state_bytes=round(static))
        for static in one.ranks("static_bytes")
    ]
    unit = stages.bytes_per_unit[0] / one.placement.num_ranks
    return SimpleNamespace(costs=stages.costs, memory=memory, unit_bytes=unit)


def test_the_file_is_one_that_the_planner_reads(tmp_path: Path) -> None:
    one = LAYOUTS[1]
    write_layers_file(str(tmp_path), contents_of(one), replanner_of(one), one.placement)
    text = (tmp_path / "layers.json").read_text()
    model = Model.from_json(text)
    assert model.layers == EVEN.layers
    assert model.kinds["layer"].static_bytes == pytest.approx(6000.0), "exact: stages with layers only"
    assert model.kinds["head"].forward_ms == pytest.approx(2.0)
    assert json.loads(text)["source"] == "measured with 4 stages on 4 ranks, Ett|(tt|)*2ttL"


def test_no_file_without_a_folder_or_a_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = LAYOUTS[1]
    unmeasured: Any = SimpleNamespace(costs=None, memory=None)
    write_layers_file(str(tmp_path), contents_of(one), unmeasured, one.placement)
    assert not list(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING):
        write_layers_file(f"{tmp_path}/none", contents_of(one), replanner_of(one), one.placement)
    assert "layers.json cannot be written: No such file or directory" in caplog.text
