"""`layers.json` of a profiled run: the costs of the parts from those of stages, and what it says when they do not follow."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.profiling.report import RankMemory
from megatron.zerobubble.training.config import model
from megatron.zerobubble.training.estimate.memory_estimate import stage_weights
from megatron.zerobubble.training.planning.layers_file import static_bytes, write_layers_file
from megatron.zerobubble.training.planning.measured_layers import layer_kinds, measured_model
from tests.training.test_arguments import settings


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


V = "--pipeline-model-parallel-size 4 --zero-bubble-v-schedule"


def test_the_state_of_a_rank_is_divided_by_weights() -> None:
    """Rank 0 of a V has the embedding and the head, the others two equal layers."""
    flags = f"{V} --untie-embeddings-and-output-weights"
    weights = stage_weights(settings(flags), vocab_size=256)
    found = static_bytes(settings(flags), [1000.0, 60.0, 70.0, 80.0], vocab_size=256)
    assert found[1:7] == [30.0, 35.0, 40.0, 40.0, 35.0, 30.0]
    assert (found[0] + found[7], found[0] / found[7]) == pytest.approx((1000.0, weights[0] / weights[7]))


def test_tied_word_embeddings_count_at_both_ends() -> None:
    """A V has them once, on rank 0; the linear and interleaved placements that the planner tries as well have them twice."""
    state = [1000.0, 60.0, 70.0, 80.0]
    found = static_bytes(settings(V), state, vocab_size=256)
    words = 256 * settings(V).model.hidden_size
    weights = stage_weights(settings(V), vocab_size=256)
    assert sum(found) - sum(state) == pytest.approx(1000.0 * words / (weights[0] + weights[7]))
    assert found[7] - found[1] > 0
    linear = settings("--pipeline-model-parallel-size 4 --zero-bubble-schedule zb")
    assert static_bytes(linear, state, vocab_size=256) == pytest.approx(state), "which has them twice already"


def test_kinds_of_layers() -> None:
    assert layer_kinds(settings("--pipeline-model-parallel-size 4")) == ("layer",) * 8
    experts = "--pipeline-model-parallel-size 4 --num-experts 2 --moe-layer-freq ([0]*3+[1]*5)"
    assert layer_kinds(settings(experts)) == ("dense",) * 3 + ("moe_layer",) * 5


def test_kinds_of_a_hybrid_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "has_hybrid_model", lambda: True)
    flags = "--pipeline-model-parallel-size 4 --num-layers 4 --num-experts 2 --hybrid-layer-pattern=-|*|E|-"
    assert layer_kinds(settings(flags)) == ("mlp", "attention", "moe", "mlp")


def replanner_of(one: Layout) -> Any:
    stages = one.stage_costs(one.placement.num_ranks, None)
    memory = [
        RankMemory(predicted_bytes=0, measured_bytes=0, workspace_bytes=0, state_bytes=round(static))
        for static in one.ranks("static_bytes")
    ]
    unit = stages.bytes_per_unit[0] / one.placement.num_ranks
    return SimpleNamespace(costs=stages.costs, memory=memory, unit_bytes=unit)


@pytest.mark.usefixtures("world_of_one")
def test_the_file_is_one_that_the_planner_reads(tmp_path: Path) -> None:
    flags = f"--pipeline-model-parallel-size 4 --zero-bubble-schedule zb --zero-bubble-trace {tmp_path}"
    write_layers_file(settings(flags), replanner_of(LAYOUTS[1]), vocab_size=256)
    text = (tmp_path / "layers.json").read_text()
    model = Model.from_json(text)
    assert model.layers == EVEN.layers
    assert model.kinds["layer"].static_bytes == pytest.approx(6000.0), "exact: stages with layers only"
    assert model.kinds["head"].forward_ms == pytest.approx(2.0)
    assert json.loads(text)["source"] == "measured with 4 stages on 4 ranks, Ett|(tt|)*2ttL"


@pytest.mark.usefixtures("world_of_one")
def test_no_file_without_a_folder_or_a_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = "--pipeline-model-parallel-size 4 --zero-bubble-schedule zb"
    write_layers_file(settings(flags), replanner_of(LAYOUTS[1]), vocab_size=256)
    write_layers_file(settings(f"{flags} --zero-bubble-trace {tmp_path}"), None, vocab_size=256)
    assert not list(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING):
        write_layers_file(settings(f"{flags} --zero-bubble-trace {tmp_path}/none"), replanner_of(LAYOUTS[1]), vocab_size=256)
    assert "layers.json cannot be written: No such file or directory" in caplog.text
