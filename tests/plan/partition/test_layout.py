"""Layouts: costs per stage, text, and one memory limit that holds for ranks with unequal headroom."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate

LAYER = LayerCosts(forward_ms=1, backward_ms=2, wgrad_ms=1, activation_bytes=10, after_backward_bytes=4, static_bytes=30)
EMBEDDING = LayerCosts(forward_ms=0.5, wgrad_ms=0.25, static_bytes=70)
HEAD = LayerCosts(forward_ms=2, backward_ms=2, wgrad_ms=2, activation_bytes=8, after_backward_bytes=2, static_bytes=70)
MODEL = Model(layers=("layer",) * 8, kinds={"layer": LAYER, "embedding": EMBEDDING, "head": HEAD}, comm_ms=0.1)


def layout(*per_stage: int, placement: Placement) -> Layout:
    return Layout(model=MODEL, placement=placement, per_stage=per_stage)


def test_costs_per_stage_and_rank() -> None:
    one = layout(1, 3, 4, 0, placement=Placement.v(2))
    assert one.stages("forward_ms") == [1.5, 3, 4, 2]
    assert one.ranks("static_bytes") == [70 + 30 + 70, 7 * 30]
    assert one.bottleneck_ms == pytest.approx(7 * 4)
    assert one.text == "Et|ttt|tttt|L"
    assert one.flag == "--pipeline-model-parallel-layout"
    assert StageLayers.parse(one.text).per_stage == one.per_stage


def test_text_of_empty_stages_is_read_again() -> None:
    one = layout(2, 0, 0, 6, 0, 0, placement=Placement.loop(3, 2))
    assert one.text == "Ett|(|)*2t*6||L"
    assert StageLayers.parse(one.text).per_stage == one.per_stage


def test_text_of_a_hybrid_model() -> None:
    kinds = dict.fromkeys(("attention", "mlp", "mamba"), LAYER)
    model = Model(layers=("mamba", "mlp", "attention", "mlp"), kinds=kinds)
    one = Layout(model=model, placement=Placement.linear(2), per_stage=(1, 3))
    assert one.text == "M|-*-"
    assert one.flag == "--hybrid-layer-pattern"
    assert HybridPattern.parse(one.text).segments == ("M", "-*-")


def test_a_layout_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 stages with 9 layers in all do not fit a model of 8 layers on 2 stages"):
        layout(4, 5, placement=Placement.linear(2))
    with pytest.raises(ConfigError, match=r"rank 0 has 0.00 GiB of weights, gradients and optimizer state; the device has 0.00"):
        layout(4, 4, placement=Placement.linear(2)).stage_costs(4, 180)


def _bytes_held(plan: Plan, one: Layout) -> list[float]:
    """Per rank the peak of static bytes and activations, op by op."""
    held, peaks = one.ranks("static_bytes"), one.ranks("static_bytes")
    whole, kept = one.stages("activation_bytes"), one.stages("after_backward_bytes")
    for rank, row in enumerate(plan.ops):
        for op in row:
            change = {OpKind.F: whole, OpKind.W: [-value for value in kept]}.get(op.kind)
            held[rank] += kept[op.stage] - whole[op.stage] if change is None else change[op.stage]
            peaks[rank] = max(peaks[rank], held[rank])
    return peaks


@pytest.mark.parametrize("memory", [320.0, 355.0, 420.0])
@pytest.mark.parametrize(
    "one",
    [
        layout(5, 3, placement=Placement.linear(2)),
        layout(2, 2, 3, 1, placement=Placement.v(2)),
        layout(1, 3, 4, 0, placement=Placement.v(2)),
    ],
    ids=lambda one: one.text,
)
def test_one_limit_is_the_memory_of_every_rank(one: Layout, memory: float) -> None:
    """The planner's limit, in bytes, is the device's memory on every rank, and the peaks are those counted op by op."""
    stages = one.stage_costs(6, memory)
    assert stages.memory_limit is not None
    limits = one.peak_bytes(stages, [stages.memory_limit] * 2)
    assert limits == pytest.approx([memory] * 2)
    plan = search("any", one.placement, 6, stages.costs, SearchOptions(memory_limit=stages.memory_limit, budget=0.0))
    peaks = _bytes_held(plan, one)
    assert one.peak_bytes(stages, simulate(plan, stages.costs).peak_memory) == pytest.approx(peaks)
    assert max(peaks) <= memory * (1 + 1e-9)
