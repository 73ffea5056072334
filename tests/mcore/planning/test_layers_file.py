"""`layers.json` of a profiled run: the costs of the parts from those of stages, and what it says when they do not follow."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.planning import stage_contents
from megatron.zerobubble.mcore.planning.layers_file import static_bytes, write_layers_file
from megatron.zerobubble.mcore.planning.stage_contents import StageContents
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.profiling.report import RankMemory

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "the layer file of a profiled run: equal layers, dense and MoE, patterns",
    "works",
)


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
    return Model.measured(one.model.layers, layers, stages.costs, unit_bytes=unit, static_bytes=one.stages("static_bytes"))


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
