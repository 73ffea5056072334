"""Layers of each rank under V, and the ranks of the embedding and the output layer."""

from __future__ import annotations

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.model.stage_layout import StageLayout, embedding_ranks
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers


def _layers(layout: StageLayout, rank: int, chunk: int) -> list[int]:
    first = layout.get_layer_offset(vp_stage=chunk, pp_rank=rank)
    count = layout.layout[rank][chunk].count(LayerType.decoder)
    return list(range(first, first + count))


def test_v_places_layers_down_and_up() -> None:
    layout = StageLayout(StageLayers.spread(16, Placement.v(4)), Placement.v(4))
    held = [[_layers(layout, rank, chunk) for chunk in (0, 1)] for rank in range(4)]
    assert held == [
        [[0, 1], [14, 15]],
        [[2, 3], [12, 13]],
        [[4, 5], [10, 11]],
        [[6, 7], [8, 9]],
    ]
    layout.validate_layer_layout(num_layers=16, mtp_num_layers=None)
    assert LayerType.embedding in layout.layout[0][0]
    assert LayerType.loss in layout.layout[0][1]


def test_uneven_stages_keep_their_global_index() -> None:
    layout = StageLayout(StageLayers(per_stage=(2, 3, 3, 2)), Placement.v(2))
    assert [_layers(layout, *place) for place in ((0, 0), (1, 0), (1, 1), (0, 1))] == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9]]


def test_loop_placement_is_megatron_cores_own() -> None:
    layout = StageLayout(StageLayers.spread(8, Placement.loop(2, 2)), Placement.loop(2, 2))
    assert [_layers(layout, rank, chunk) for chunk in (0, 1) for rank in (0, 1)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_wrong_number_of_stages() -> None:
    with pytest.raises(ConfigError, match=r"layout 'Et.t.tL' has 3 stages, the schedule 4"):
        StageLayout(StageLayers(per_stage=(1, 1, 1)), Placement.v(2))


@pytest.mark.parametrize(
    ("placement", "word"), [(Placement.v(4), [10]), (Placement.linear(4), [10, 13]), (Placement.loop(4, 2), [10, 13])]
)
def test_embedding_ranks(placement: Placement, word: list[int]) -> None:
    chosen = embedding_ranks(placement)
    assert chosen["get_embedding_ranks"]([10, 11, 12, 13]) == word
    assert chosen["get_position_embedding_ranks"]([10, 11, 12, 13]) == [10]


@pytest.mark.parametrize("text", ["EtttL", "Et|(ttt|)*2ttL", "Ettt,(|tt)*3,|t*5L", "E(t*6|)*2t|*1ttL", "E|t|L"])
def test_megatron_core_reads_the_same(text: str) -> None:
    """What we read, and what we write for it, is what megatron-core reads."""
    layers = StageLayers.parse(text)
    for written in (text, layers.text):
        stages = PipelineParallelLayerLayout.parse_str_to_list(written)
        assert tuple(stage.count(LayerType.decoder) for stage in stages) == layers.per_stage
