"""MTP layers (multi-token prediction) on a stage that does not compute the loss: longer messages, and a third embedding."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.build import check_config
from megatron.zerobubble.mcore.model.stage_layout import StageLayout, output_lengths
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import schedule_spec
from tests.support.ranks import RankPool
from tests.support.stock import History, example, train_mtp

SIZES = "--hidden-size 32 --train-iters 3 --clip-grad 1.0"
V = f"{SIZES} --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --num-layers 6"
ONE_PER_RANK = f"{SIZES} --pipeline-model-parallel-size 4 --num-layers 3"
TWO_PER_RANK = f"{SIZES} --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2 --num-layers 5"
LAST = f"{SIZES} --pipeline-model-parallel-size 2 --num-layers 6"


def _initialize(args: Any, mtp_rank: int | None) -> None:
    """The example's `initialize`; with `mtp_rank` the ranks with an embedding are those that Megatron-LM's script names."""

    def with_embedding(pipeline: list[int], *_: Any) -> list[int]:
        last = [len(pipeline) - 1] if args.tie_embeddings_and_output_weights else []
        return [pipeline[rank] for rank in sorted({0, mtp_rank or 0, *last})]

    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size)
    given = {} if mtp_rank is None else {"get_embedding_ranks": with_embedding}
    parallel_state.initialize_model_parallel(*sizes, **given)
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)


def _train(rank: int, flags: str, options: dict[str, Any], layout: str | None, mtp_rank: int | None = None) -> dict[str, Any]:
    """The history of `train_mtp` with this layout, and the embeddings at its end. Under V copies of it are drawn differently."""
    loop, built = example(), []
    draw, build = loop.initialize_weights, loop.build_model

    def other_copies(chunk: Any) -> None:
        draw(chunk)
        if not chunk.pre_process and getattr(chunk, "mtp_process", False):
            with torch.no_grad():
                chunk.embedding.word_embeddings.weight.add_(1.0)

    def remember(*arguments: Any) -> Any:
        built.extend(build(*arguments))
        return list(built)

    def embeddings() -> list[torch.Tensor]:
        stages = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in built]
        return [stage.embedding.word_embeddings.weight.detach().clone() for stage in stages if hasattr(stage, "embedding")]

    with (
        mock.patch(
            "tests.support.stock.TransformerConfig", functools.partial(TransformerConfig, pipeline_model_parallel_layout=layout)
        ),
        mock.patch.object(loop, "initialize", functools.partial(_initialize, mtp_rank=mtp_rank)),
        mock.patch.object(loop, "initialize_weights", other_copies if options.get("schedule") == "zbv" else draw),
        mock.patch.object(loop, "build_model", remember),
    ):
        history: History = train_mtp(rank, flags, options)
        return {"history": history, "embeddings": embeddings()}


def _losses(results: list[dict[str, Any]]) -> torch.Tensor:
    """[replicas, iterations, microbatches + 1]: losses, then the gradient norm."""
    histories = [each["history"] for each in results if each["history"]]
    rows = [[[*entry["losses"], entry["grad norm"]] for entry in history] for history in histories]
    assert rows
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("flags", "others"),
    [
        ("", {}),
        ("--tie-embeddings-and-output-weights", {}),
        ("--use-distributed-optimizer --overlap-grad-reduce", {}),
        ("--calculate-per-token-loss", {"optimizer_post_validation": True}),
    ],
    ids=["untied", "tied", "distributed-optimizer", "per-token-and-post-validation"],
)
def test_a_v_with_mtp_layers_on_the_second_rank_trains_like_1f1b_with_them_on_the_last_stage(
    four_ranks: RankPool, flags: str, others: dict[str, Any]
) -> None:
    """1e-6: the gradients of the copies of the embedding are summed in another order."""
    expected = _losses(four_ranks.run(_train, f"{LAST} {flags}", {}, "Etttt|ttmL"))
    results = four_ranks.run(_train, f"{V} {flags}", {"schedule": "zbv"} | others, "Ett|tt|ttm|L")
    torch.testing.assert_close(_losses(results), expected, rtol=1e-6, atol=1e-6)
    copies = [embedding for result in results for embedding in result["embeddings"]]
    assert len(copies) == 4, "rank 0 and rank 1 of two replicas"
    assert all(torch.equal(copy, copies[0]) for copy in copies), "they begin and stay equal"


@pytest.mark.parametrize(
    ("flags", "schedule", "layout", "mtp_rank"),
    [
        (ONE_PER_RANK, "zb-h1", "Et|tt|m|L", 2),
        (f"{ONE_PER_RANK} --tie-embeddings-and-output-weights", "zb-h2", "Et|tt|m|L", 2),
        (ONE_PER_RANK, "zb-h1", "Ettt|m||L", 1),
        (f"{SIZES} --pipeline-model-parallel-size 2 --num-layers 3", "zb-h1", "Etttm|L", 0),
        (TWO_PER_RANK, "zb-interleaved", "E|t|t|t|t|t|m|L", 2),
    ],
    ids=["zb-h1", "zb-h2-tied", "empty-stage-behind", "first-stage", "zb-interleaved"],
)
def test_other_schedules_equal_megatron_cores_own_with_the_same_layout(
    four_ranks: RankPool, flags: str, schedule: str, layout: str, mtp_rank: int
) -> None:
    """1e-6: of the two uses of the output layer in a microbatch, autograd accumulates the sum and W one after the other.

    megatron-core announces the shape of every message, where a schedule of ours knows it.
    """
    expected = _losses(four_ranks.run(_train, flags, {}, layout, mtp_rank))
    actual = _losses(four_ranks.run(_train, flags, {"schedule": schedule}, layout, mtp_rank))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def _config(num_layers: int, num_ranks: int, num_chunks: int | None, layout: str) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks,
        pipeline_dtype=torch.float32,
        transformer_impl="local",
        mtp_num_layers=2,
        pipeline_model_parallel_layout=layout,
    )


def test_outputs_are_longer_from_the_mtp_stage_on() -> None:
    config = _config(5, 4, 2, "E|t|t|t|t|t|mm|L")
    assert output_lengths(config, Placement.loop(4, 2)) == (1, 1, 1, 1, 1, 1, 3, 3)
    config = _config(5, 4, 2, "E|t|t|t|t|t||mmL")
    assert output_lengths(config, Placement.loop(4, 2)) == (1, 1, 1, 1, 1, 1, 1, 3)
    layers = StageLayers.parse("Et|t|m|L")
    layout = StageLayout(layers, Placement.v(2), num_mtp_layers=1, mtp_stage=2)
    assert layout.text == "Et|t|m|L"
    config.pipeline_model_parallel_layout = layout
    assert output_lengths(config, Placement.v(2)) == (1, 1, 2, 2)


def test_a_v_refuses_mtp_layers_in_the_first_chunk_of_a_rank() -> None:
    """megatron-core would build them, and look for their embedding in the last chunk."""
    with pytest.raises(ConfigError, match=r"MTP layers \(m\) on stage 1 of 4 \(V placement\).* one of the stages 2 to 3"):
        StageLayout(StageLayers.parse("Et|m||L"), Placement.v(2), num_mtp_layers=1, mtp_stage=1)


def test_a_loop_refuses_mtp_layers_on_the_first_rank() -> None:
    config = _config(4, 4, 2, "E|t|t|t|tmm|||L")
    spec = schedule_spec("zb-interleaved", num_ranks=4, num_chunks=2)
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_layout with m \(MTP layers\) on the first rank does not go"):
        check_config(config, spec)
    check_config(_config(4, 4, 2, "E|t|t|t|t|mm||L"), spec)
