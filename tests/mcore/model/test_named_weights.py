"""Which weights a stage begins with: drawn by name they are the same bits for every schedule, pipeline size, placement, TP and
EP; layers of each rank under V, and the ranks of the embedding and the output layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.model import named_weights
from megatron.zerobubble.mcore.model.named_weights import _draw, _sharded_tensors, draw_by_name, remember_from
from megatron.zerobubble.mcore.model.stage_layout import StageLayout, embedding_ranks
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from tests.support.gpt import Case, Trainer
from tests.support.moe import MoeCase
from tests.support.mtp import MtpCase
from tests.support.ranks import RankPool
from tests.support.transformer_engine.gpt import EngineCase

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "first weights drawn by name: the same bits for every p, placement, TP and EP, with experts and MTP layers; in loops of "
    "your own",
    "works",
    also=("mcore/stock_loop/test_install.py",),
)


Piece = tuple[str, tuple[Any, ...], torch.Tensor]
"""Key in a checkpoint, indices and slices of the whole tensor there, values."""


def pieces(rank: int, case: Case, seed: int | None, on_cpu: bool) -> list[Piece]:
    """Every weight that this rank begins with. With `on_cpu` megatron-core draws in its CPU way, which ours replaces as well."""
    make = Trainer._config

    def config(trainer: Trainer) -> Any:
        made = make(trainer)
        made.use_cpu_initialization = on_cpu
        return made

    with mock.patch.multiple(Trainer, _config=config, weights_seed=seed):
        trainer = case.trainer()
    found = []
    for chunk in trainer.chunks:
        stage = chunk.module.module if hasattr(chunk.module, "module") else chunk.module
        for weight in _sharded_tensors(stage.sharded_state_dict(metadata={})):
            found.append((weight.key, weight.global_slice(), weight.data.detach().clone()))
    trainer.close()
    return found


def wholes(found: list[Piece]) -> dict[tuple[Any, ...], dict[tuple[int, ...], torch.Tensor]]:
    """Pieces of a model without a pipeline, by key and leading indices, and then by where each begins."""
    result: dict[tuple[Any, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for key, place, values in found:
        leading = tuple(index for index in place if isinstance(index, int))
        begins = tuple(part.start for part in place if isinstance(part, slice))
        result.setdefault((key, *leading), {})[begins] = values
    return result


def assert_same(found: list[Piece], expected: list[Piece]) -> None:
    """Each piece has the bits of the piece of the model without a pipeline that it lies in."""
    reference = wholes(expected)
    for key, place, values in found:
        if values.unique().numel() == 1:
            continue  # biases and norms, which have other names in other specs
        leading = tuple(index for index in place if isinstance(index, int))
        parts = [part for part in place if isinstance(part, slice)]
        for begins, whole in reference[(key, *leading)].items():
            ends = [begin + size for begin, size in zip(begins, whole.shape, strict=True)]
            if all(begin <= part.start and part.stop <= end for begin, part, end in zip(begins, parts, ends, strict=True)):
                within = tuple(slice(part.start - begin, part.stop - begin) for part, begin in zip(parts, begins, strict=True))
                assert torch.equal(values, whole[within]), (key, place)
                break
        else:
            raise AssertionError(f"{key} {place} is no part of the model without a pipeline")


ONE = Case("stock", 1, 4)
LAYOUTS = [
    Case("zbv", 2, 4, num_chunks=2, tensor_parallel=2),
    Case("zbv", 4, 4, num_chunks=2),
    Case("zb-h1", 2, 4, tensor_parallel=2, sequence_parallel=True),
    Case("stock", 2, 4, num_chunks=2),
    Case("zb-h2", 4, 4, tied=True),
    Case("zbv", 2, 4, num_chunks=2, tensor_parallel=2, tied=True, llama=True),
    Case("zb-h1", 2, 4, dtype=torch.bfloat16),
    MoeCase("zb-h1", 2, 4, expert_parallel=2, shared=True),
    MoeCase(
        "zbv",
        2,
        4,
        num_chunks=2,
        tensor_parallel=2,
        sequence_parallel=True,
        expert_parallel=2,
        expert_tensor_parallel=1,
        layer_freq=(1,) * 8,
    ),
    MtpCase("zbv", 4, 4, num_chunks=2, num_layers=8),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@pytest.mark.sampled(0.3)
def test_every_layout_begins_with_the_same_weights(four_ranks: RankPool, case: Case) -> None:
    one = replace(case.unpipelined, tensor_parallel=1, sequence_parallel=False)
    if isinstance(one, MoeCase):
        one = replace(one, expert_parallel=1)
    expected = four_ranks.run(pieces, one, 7, True)[0]
    random = [values for _, _, values in expected if values.unique().numel() > 1]
    assert len(random) > 8, "weights that are drawn"
    for found in four_ranks.run(pieces, case, 7, False):
        assert_same(found, expected)


def test_another_seed_is_another_model_and_by_rank_layouts_differ(four_ranks: RankPool) -> None:
    case = Case("zb-h1", 2, 4, tensor_parallel=2)
    expected = four_ranks.run(pieces, ONE, 7, True)[0]
    for seed in (8, None):
        found = four_ranks.run(pieces, case, seed, False)[0]
        with pytest.raises(AssertionError, match="weight"):
            assert_same(found, expected)


def test_generators_stay_as_they_are() -> None:
    model = _Model(12, nn.init.normal_)
    state = torch.get_rng_state()
    draw_by_name(model, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


class _Config:
    def __init__(self, init_method: Any) -> None:
        self.init_method = init_method


class _Model(nn.Module):
    """A weight of some rows of 8, as a whole tensor of a checkpoint."""

    def __init__(self, rows: int, method: Any) -> None:
        super().__init__()
        config = _Config(method)
        remember_from(config)
        self.weight = nn.Parameter(torch.empty(rows, 8))
        config.init_method(self.weight)

    def sharded_state_dict(self, metadata: Any) -> dict[str, Any]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", self.weight)}


@pytest.mark.parametrize("rows", [1, 8191, 8192, 8193, 20000])
def test_more_rows_change_none_of_the_others(rows: int) -> None:
    """As when the vocabulary is padded to a multiple of the tensor-parallel size. A block here has 8192 rows."""
    models = [_Model(count, partial(nn.init.normal_, mean=0.0, std=0.02)) for count in (rows, 20480)]
    for model in models:
        draw_by_name(model, seed=3)
    assert torch.equal(models[0].weight, models[1].weight[:rows])
    assert models[1].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert models[1].weight.unique().numel() > 100_000, "no block repeats another"


def test_a_method_that_looks_at_the_shape_sees_the_whole_tensor() -> None:
    shapes = []

    def xavier(tensor: torch.Tensor) -> None:
        shapes.append(tuple(tensor.shape))
        nn.init.xavier_uniform_(tensor)

    model = _Model(20000, xavier)
    draw_by_name(model, seed=3)
    assert shapes[1:] == [(20000, 8)]
    half = ShardedTensor.from_rank_offsets("weight", torch.empty(10000, 8), (0, 1, 2))
    with torch.random.fork_rng(devices=[]):
        _draw(half, xavier, 3)
    assert torch.equal(half.data, model.weight[10000:])


def test_a_weight_without_a_name_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Nameless(_Model):
        def sharded_state_dict(self, metadata: Any) -> dict[str, Any]:
            return {}

    draw_by_name(Nameless(4, nn.init.normal_), seed=1)
    assert "weight: not in the model's checkpoints" in caplog.text


def test_wrong_number_of_stages() -> None:
    with pytest.raises(ConfigError, match=r"layout 'Et.t.tL' has 3 stages, the schedule 4"):
        StageLayout(StageLayers(per_stage=(1, 1, 1)), Placement.v(2))


def test_a_layout_can_be_copied_attribute_by_attribute() -> None:
    """As Megatron-Bridge does, down to the attributes of attributes, before it sends a configuration to other ranks."""
    layout = StageLayout(StageLayers(per_stage=(1, 1, 1, 1)), Placement.v(2))
    assert layout.placement == Placement.v(2)
    assert {type(value) for value in vars(layout).values()} <= {bool, int, list, str, tuple}


@pytest.mark.parametrize(
    ("placement", "word"), [(Placement.v(4), [10]), (Placement.linear(4), [10, 13]), (Placement.loop(4, 2), [10, 13])]
)
def test_embedding_ranks(placement: Placement, word: list[int]) -> None:
    assert embedding_ranks(placement, [10, 11, 12, 13]) == word


@pytest.mark.parametrize("text", ["EtttL", "Et|(ttt|)*2ttL", "Ettt,(|tt)*3,|t*5L", "E(t*6|)*2t|*1ttL", "E|t|L"])
def test_megatron_core_reads_the_same(text: str) -> None:
    """What we read, and what we write for it, is what megatron-core reads."""
    layers = StageLayers.parse(text)
    for written in (text, layers.text):
        stages = PipelineParallelLayerLayout.parse_str_to_list(written)
        assert tuple(stage.count(LayerType.decoder) for stage in stages) == layers.per_stage


def _said(rank: int) -> list[str]:
    case = EngineCase("zb-h1", 2, 4, num_layers=4, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True)
    with mock.patch.object(Trainer, "weights_seed", 7), mock.patch.object(named_weights._log, "warning") as warning:
        case.trainer().close()
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


@pytest.mark.sampled(0.5)
def test_a_line_says_that_weights_in_fp8_are_not_drawn(engine_ranks: RankPool) -> None:
    """Four linears in each of a stage's two layers."""
    for said in engine_ranks.run(_said):
        assert said == ["8 weights in FP8 (fp8_param) are not drawn by name: other layouts begin with others"]
