"""The layers of each stage under V, by every option with which megatron-core divides them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.config_checks import check_config
from megatron.zerobubble.mcore.model.stage_layout import StageLayout, output_lengths
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import schedule_spec
from tests.support.loops import merged, train_with_groups
from tests.support.ranks import RankPool
from tests.support.stock import History, example, train_mtp
from tests.support.tolerances import after_steps

pytestmark = pytest.mark.claims(
    "Your own script",
    "`install` with MTP layers on a stage in front of the one with the loss: ZBV with them on the second rank (tied "
    "and not, distributed optimizer with overlapped reductions, per-token loss) against 1F1B with them on the last "
    "stage; ZB-H1, ZB-H2 and interleaved ZB against megatron-core's schedules with the same layout",
    "works, 4e-6",
)


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.fixture
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    name = getattr(request, "param", "zbv")
    megatron.zerobubble.install(schedule=name)
    yield name
    megatron.zerobubble.uninstall()


def _config(num_layers: int, num_ranks: int, num_chunks: int | None = 2, **given: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks,
        pipeline_dtype=torch.float32,
        transformer_impl="local",
        **given,
    )


def _built(config: TransformerConfig, placement: Placement) -> list[tuple[int, int, int]]:
    """(first layer, number of layers, number of MTP layers) of each stage, as megatron-core's own functions build them."""
    built = []
    for rank, chunk in [(placement.stage_to_rank[stage], placement.chunk_of(stage)) for stage in range(placement.num_stages)]:
        number = chunk if placement.num_chunks > 1 else None
        with mock.patch.multiple(
            parallel_state,
            get_pipeline_model_parallel_rank=mock.Mock(return_value=rank),
            get_virtual_pipeline_model_parallel_world_size=mock.Mock(return_value=config.virtual_pipeline_model_parallel_size),
        ):
            has_mtp = config.pipeline_model_parallel_layout is not None and config.mtp_num_layers
            mtp = get_mtp_num_layers_to_build(config, vp_stage=number) if has_mtp else 0
            offset = get_transformer_layer_offset(config, vp_stage=number)
            count = get_num_layers_to_build(config, vp_stage=number)
        built.append((offset, count, mtp))
    return built


def _stages(*counts: tuple[int, int]) -> list[int]:
    return [layers for layers, times in counts for _ in range(times)]


def _listed(counts: list[int], *, mtp: int = 0) -> list[list[str]]:
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * mtp + ["loss"]
    return stages


MTP = {"mtp_num_layers": 1}
DEEPSEEK = _stages((1, 1), (2, 30), (0, 1))
MTP_ALONE = _stages((1, 1), (2, 28), (3, 1), (0, 2))
KIMI = _stages((3, 1), (4, 14), (2, 1))
RECIPES: dict[str, tuple[int, int, dict[str, Any], list[int]]] = {
    "GPT 32 layers": (32, 4, {}, _stages((4, 8))),
    "Llama-3 70B, 80 layers": (80, 4, {}, _stages((10, 8))),
    "Llama-3 405B, 126 layers": (126, 8, {}, _stages((7, 1), (8, 14), (7, 1))),
    "Llama-3 405B, ends accounted for": (126, 8, {EMBEDDING: True, LOSS: True}, _stages((7, 1), (8, 14), (7, 1))),
    "Llama-3 405B on 16 ranks": (126, 16, {EMBEDDING: True, LOSS: True}, _stages((3, 1), (4, 30), (3, 1))),
    "loss accounted for": (63, 8, {LOSS: True}, _stages((4, 15), (3, 1))),
    "embedding accounted for": (63, 8, {EMBEDDING: True}, _stages((3, 1), (4, 15))),
    "ends accounted for, uneven": (61, 8, {EMBEDDING: True, LOSS: True}, _stages((3, 1), (4, 14), (2, 1))),
    "DeepSeek-V3 without MTP": (61, 8, {}, _stages((3, 1), (4, 13), (3, 2))),
    "DeepSeek-V3 with MTP": (61, 16, MTP, DEEPSEEK),
    "DeepSeek-V3, text": (61, 16, MTP | {"pipeline_model_parallel_layout": "Et|(tt|)*30mL"}, DEEPSEEK),
    "DeepSeek-V3, list": (61, 16, MTP | {"pipeline_model_parallel_layout": _listed(DEEPSEEK, mtp=1)}, DEEPSEEK),
    "DeepSeek-V3, MTP on a stage of its own": (60, 16, MTP | {"pipeline_model_parallel_layout": "Et|(tt|)*28ttt|m|L"}, MTP_ALONE),
    "Kimi-K2, list": (61, 8, {"pipeline_model_parallel_layout": _listed(KIMI)}, KIMI),
    "Kimi-K2, text": (61, 8, {"pipeline_model_parallel_layout": "Ettt|(tttt|)*14ttL"}, KIMI),
    "Qwen3-235B, 94 layers": (94, 8, {}, _stages((5, 1), (6, 14), (5, 1))),
    "Qwen3-235B, fewer at both ends": (94, 8, {FIRST: 10, LAST: 10}, _stages((5, 1), (6, 14), (5, 1))),
    "Qwen3-235B, odd numbers at both ends": (94, 8, {FIRST: 11, LAST: 11}, _stages((5, 1), (6, 14), (5, 1))),
    "an odd number in the first stage": (126, 8, {FIRST: 17}, _stages((8, 1), (8, 13), (7, 2))),
    "an odd number in the last stage": (78, 8, {LAST: 9}, _stages((5, 14), (4, 2))),
    "one layer in the first stage": (60, 4, {FIRST: 1}, _stages((0, 1), (9, 4), (8, 3))),
    "fewer in the last stage": (62, 8, {LAST: 4}, _stages((4, 15), (2, 1))),
    "fewer in the first stage, uneven": (62, 8, {FIRST: 6}, _stages((3, 1), (4, 14), (3, 1))),
    "46 layers": (46, 4, {}, _stages((5, 1), (6, 6), (5, 1))),
    "layers that divide over the ranks only": (12, 4, {}, _stages((2, 4), (1, 4))),
    "one layer per stage but the ends": (14, 8, {}, _stages((0, 1), (1, 14), (0, 1))),
}


@pytest.mark.claims(
    "Planning and measuring",
    "25 recipes of published sizes (DeepSeek-V3, Kimi-K2, Llama-3 405B, Qwen3-235B, ...): the layers of every rank and chunk "
    "as megatron-core's functions build them; one with `m` on a stage of its own",
    "works, configurations only",
)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("schedule")
def test_recipes_have_these_layers_in_a_v(name: str) -> None:
    num_layers, num_ranks, given, expected = RECIPES[name]
    config = _config(num_layers, num_ranks, **copy.deepcopy(given))
    built = _built(config, Placement.v(num_ranks))
    assert [count for _, count, _ in built] == expected
    assert [first for first, _, _ in built] == [sum(expected[:stage]) for stage in range(len(expected))]
    behind = 1 if "of its own" in name else 0
    assert [mtp for _, _, mtp in built] == [0] * (2 * num_ranks - 1 - behind) + [config.mtp_num_layers or 0] + [0] * behind
    assert {each: getattr(config, each) for each in given if each != "pipeline_model_parallel_layout"} == {
        each: value for each, value in given.items() if each != "pipeline_model_parallel_layout"
    }, "what the loop has set can be read"


LINEAR: list[tuple[int, int, int | None, dict[str, Any]]] = [
    (80, 8, None, {}),
    (126, 8, None, {EMBEDDING: True, LOSS: True}),
    (126, 8, 2, {EMBEDDING: True, LOSS: True}),
    (62, 8, None, {FIRST: 10, LAST: 10}),
    (94, 8, 2, {FIRST: 10, LAST: 12}),
    (61, 16, None, MTP | {"pipeline_model_parallel_layout": "Et*3|(t*4|)*14ttmL"}),
    (61, 16, 2, MTP | {"pipeline_model_parallel_layout": _listed(DEEPSEEK, mtp=1)}),
]


@pytest.mark.parametrize(("num_layers", "num_ranks", "num_chunks", "given"), LINEAR)
def test_other_schedules_have_megatron_cores_own_division(
    num_layers: int, num_ranks: int, num_chunks: int | None, given: dict[str, Any]
) -> None:
    placement = Placement.linear(num_ranks) if num_chunks is None else Placement.loop(num_ranks, num_chunks)
    expected = _built(_config(num_layers, num_ranks, num_chunks, **copy.deepcopy(given)), placement)
    megatron.zerobubble.install(schedule="zb-h1" if num_chunks is None else "zb-interleaved")
    try:
        actual = _built(_config(num_layers, num_ranks, num_chunks, **copy.deepcopy(given)), placement)
    finally:
        megatron.zerobubble.uninstall()
    assert actual == expected
    assert sum(count for _, count, _ in actual) == num_layers


SET = (
    r": set virtual_pipeline_model_parallel_size=2 and pipeline_model_parallel_layout='Ett\|\(tt\|\)\*2ttL' in its configuration"
)


@pytest.mark.parametrize(
    ("schedule", "chunks", "layout", "message"),
    [
        ("zbv", None, "Etttt|ttttL", SET),
        ("zbv", 3, None, "size 3: set virtual_pipeline_model_parallel_size=2 and pipeline_model_parallel_layout=None in"),
        ("zb-h1", 2, "Ett|tt|tt|ttL", r"size=None and pipeline_model_parallel_layout='Etttt\|ttttL' in its configuration"),
        ("zb-h1", 2, "no layout", "size=None and pipeline_model_parallel_layout=None in its configuration"),
    ],
)
def test_a_refusal_names_the_fields_and_their_values(schedule: str, chunks: int | None, layout: str | None, message: str) -> None:
    options = RunOptions(flags=ZeroBubbleConfig(zero_bubble_schedule=schedule))
    with pytest.raises(ConfigError, match=message):
        options.spec(num_ranks=2, num_chunks=chunks, layout=layout)


@pytest.mark.parametrize(
    ("num_layers", "given", "message"),
    [
        (
            8,
            {"pipeline_model_parallel_layout": "Etttt|ttttL"},
            rf"layout 'Etttt\|ttttL' has 2 stages, .* zbv on 2 .* needs 4.*{SET}",
        ),
        (8, {"pipeline_model_parallel_layout": _listed([4, 4])}, r"layout 'Etttt\|ttttL' has 2 stages"),
        (9, {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"}, "pipeline_model_parallel_layout .* has 8 of .* num_layers=9"),
        (6, MTP | {"pipeline_model_parallel_layout": "Ett|ttm|tt|L"}, "^pipeline_model_parallel_layout: .* has an m .* in"),
        (6, MTP | {"pipeline_model_parallel_layout": "Ett|ttttm||L"}, "^pipeline_model_parallel_layout: MTP .* on stage 1 of 4"),
        (6, MTP | {"pipeline_model_parallel_layout": "Ett|tt|tt|mmL"}, "has 2 of the model's mtp_num_layers=1"),
        (6, {"pipeline_model_parallel_layout": "Ett|tt|tt|mL"}, "has 1 of the model's mtp_num_layers=None"),
        (8, {"pipeline_model_parallel_layout": [["encoder"], [], [], []]}, "pipeline_model_parallel_layout has .*'encoder'"),
        (8, {"pipeline_model_parallel_layout": [["embedding"], 3]}, "pipeline_model_parallel_layout is .*give a text"),
        (8, {"pipeline_model_parallel_layout": 4}, "pipeline_model_parallel_layout is 4; give a text"),
        (8, {FIRST: -3}, f"{FIRST}=-3: give a number of layers above 0, or the layers of each stage by pipeline_model"),
        (8, {LAST: 0}, f"{LAST}=0: give a number of layers above 0"),
        (8, {LAST: 14}, f"{LAST}=14: 8 layers leave 1 for the other 3 stages"),
        (1, {EMBEDDING: True, LOSS: True}, f"{EMBEDDING}=True, {LOSS}=True: 1 layers leave stage 2 of 4"),
        (1, {}, "num_layers=1: 1 layers do not divide over 4 stages"),
    ],
)
@pytest.mark.usefixtures("schedule")
def test_an_error_names_the_option(num_layers: int, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(num_layers, 2, **given)


@pytest.mark.usefixtures("schedule")
def test_megatron_cores_own_layout_goes_in_the_order_of_its_stages() -> None:
    """A recipe may have made the object before `install`, and hand on copies of it."""
    text = "E|ttt|tt|tL"
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    for layout in (PipelineParallelLayerLayout(text, 2), copy.deepcopy(PipelineParallelLayerLayout(stages, 2)), stages):
        config = _config(6, 2, None, pipeline_model_parallel_layout=layout)
        assert [count for _, count, _ in _built(config, Placement.v(2))] == [0, 3, 2, 1]
        assert config.virtual_pipeline_model_parallel_size == 2, "as megatron-core takes it from the layout"


@pytest.mark.usefixtures("schedule")
def test_a_configuration_made_from_another_divides_its_own_layers() -> None:
    """Also a copy, and one that changes what the division follows from."""
    config = copy.deepcopy(_config(126, 8, **{EMBEDDING: True, LOSS: True}))
    fewer = dataclasses.replace(config, num_layers=30)
    assert [count for _, count, _ in _built(fewer, Placement.v(8))] == _stages((1, 1), (2, 14), (1, 1))
    plain = dataclasses.replace(fewer, num_layers=32, **{EMBEDDING: False, LOSS: False})
    assert [count for _, count, _ in _built(plain, Placement.v(8))] == [2] * 16
    smaller = dataclasses.replace(plain, pipeline_model_parallel_size=4)
    assert [count for _, count, _ in _built(smaller, Placement.v(4))] == [4] * 8
    given = _config(6, 2, pipeline_model_parallel_layout="E|ttt|tt|tL")
    assert [count for _, count, _ in _built(dataclasses.replace(given, hidden_size=64), Placement.v(2))] == [0, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_layout 'E\|ttt\|tt\|tL' has 6 of .* num_layers=8"):
        dataclasses.replace(given, num_layers=8)


@pytest.mark.usefixtures("schedule")
def test_an_uneven_division_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        _config(61, 16, **MTP)
    _config(64, 16)
    (line,) = caplog.messages
    assert "schedule zbv divides 61 layers over 32 stages as Et|(tt|)*30L, and 1 MTP layer(s) on the last" in line
    assert "give pipeline_model_parallel_layout" in line


TWO = "--pipeline-model-parallel-size 2 --num-layers 6 --hidden-size 32 --train-iters 3"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"


def _train(rank: int, flags: str, schedule: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """`train_with_groups`, with these options of TransformerConfig."""
    with mock.patch.object(example(), "TransformerConfig", functools.partial(TransformerConfig, **given)):
        return train_with_groups(rank, flags, schedule)


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: process groups and a communicator in every call, as Megatron-Bridge passes them: ZB-H1, ZB-H2, "
    "ZBV, losses and gradients",
    "works, bit for bit",
)
@pytest.mark.claims(
    "Planning and measuring",
    "`install` of ZBV, V-Half and ZB-W with layouts as lists, objects and text, `m` in the last stage, "
    "`account_for_*_in_pipeline_split`, `num_layers_in_first/last_pipeline_stage`, 6 layers on 4 stages; ZB-H1, ZB-H2 and "
    "interleaved ZB, too: losses and gradients of an even 1F1B",
    "works, bit for bit (MTP within 4e-6)",
)
@pytest.mark.parametrize(
    ("flags", "schedule", "given"),
    [
        (f"{CHUNKS} --calculate-per-token-loss", "zbv", {}),
        (f"{CHUNKS} --tie-embeddings-and-output-weights", "zbv", {EMBEDDING: True, LOSS: True}),
        (CHUNKS, "v-half", {"pipeline_model_parallel_layout": _listed([0, 3, 2, 1])}),
        (f"{TWO} --virtual-pipeline-model-parallel-size 4", "zb-w", {}),
        (f"{CHUNKS} --overlap-grad-reduce", "zbv", {FIRST: 2, LAST: 3}),
        (TWO, "zb-h1", {FIRST: 2}),
        (TWO, "zb-h2", {EMBEDDING: True, LOSS: True}),
        (TWO, "zb-h1", {"pipeline_model_parallel_layout": _listed([4, 2])}),
        (CHUNKS, "zb-interleaved", {"pipeline_model_parallel_layout": "E|ttt|tt|tL"}),
    ],
    ids=[
        *("per-token", "accounted-tied", "list", "zb-w", "ends-overlapped"),
        *("zb-h1-first", "zb-h2-accounted", "zb-h1-list", "interleaved-text"),
    ],
)
@pytest.mark.sampled(0.25)
def test_the_losses_and_gradients_of_an_even_model(
    four_ranks: RankPool, flags: str, schedule: str, given: dict[str, Any]
) -> None:
    """Bit for bit those of megatron-core's 1F1B with three layers per rank: a layer has the same weights wherever it is."""
    plain = " ".join([TWO, *(flag for flag in flags.split() if flag.startswith(("--tie", "--calculate")))])
    expected = merged(four_ranks.run(_train, plain, None, {}))
    actual = merged(four_ranks.run(_train, flags, schedule, given))
    assert actual.pop("results") == expected.pop("results") != [[]] * 4
    assert actual.keys() == expected.keys()
    assert [name for name, value in actual.items() if not np.array_equal(value, expected[name])] == []


SIZES = "--hidden-size 32 --train-iters 3 --clip-grad 1.0"
THREE_STEPS = after_steps(3, lr=1e-3)
"""Of the example, where sums have another order."""
V = f"{SIZES} --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --num-layers 6"
ONE_PER_RANK = f"{SIZES} --pipeline-model-parallel-size 4 --num-layers 3"
TWO_PER_RANK = f"{SIZES} --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2 --num-layers 5"
ON_LAST = f"{SIZES} --pipeline-model-parallel-size 2 --num-layers 6"


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


def _train_with_mtp(
    rank: int, flags: str, options: dict[str, Any], layout: str | None, mtp_rank: int | None = None
) -> dict[str, Any]:
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
    ("flags", "schedule", "layout", "mtp_rank"),
    [
        (ONE_PER_RANK, "zb-h1", "Et|tt|m|L", 2),
        (f"{ONE_PER_RANK} --tie-embeddings-and-output-weights", "zb-h2", "Et|tt|m|L", 2),
        (ONE_PER_RANK, "zb-h1", "Ettt|m||L", 1),
        (f"{SIZES} --pipeline-model-parallel-size 2 --num-layers 3", "zb-h1", "Etttm|L", 0),
        (TWO_PER_RANK, "zb-interleaved", "E|t|t|t|t|t|m|L", 2),
        (V, "zbv", "Ett|tt|ttm|L", None),
        (f"{V} --tie-embeddings-and-output-weights", "zbv", "Ett|tt|ttm|L", None),
        (f"{V} --use-distributed-optimizer --overlap-grad-reduce", "zbv", "Ett|tt|ttm|L", None),
        (f"{V} --calculate-per-token-loss", "zbv", "Ett|tt|ttm|L", None),
    ],
    ids=[
        *("zb-h1", "zb-h2-tied", "empty-stage-behind", "first-stage", "zb-interleaved"),
        *("zbv", "zbv-tied", "zbv-distributed-optimizer", "zbv-per-token-and-post-validation"),
    ],
)
@pytest.mark.sampled(0.23)
def test_mtp_layers_in_front_of_the_last_stage_train_as_in_megatron_cores_own_schedule(
    four_ranks: RankPool, flags: str, schedule: str, layout: str, mtp_rank: int | None
) -> None:
    """With the same layout, a V like 1F1B with them on the last stage. Sums have another order: of the two uses of the output
    layer in a microbatch, autograd accumulates the sum and W one after the other, and a V adds up the gradients of the copies of
    the embedding.

    megatron-core announces the shape of every message, where a schedule of ours knows it.
    """
    is_v = schedule == "zbv"
    plain = flags.replace(V, ON_LAST) if is_v else flags
    options = {"schedule": schedule, "optimizer_post_validation": "--calculate-per-token-loss" in flags}
    expected = _losses(four_ranks.run(_train_with_mtp, plain, {}, "Etttt|ttmL" if is_v else layout, mtp_rank))
    results = four_ranks.run(_train_with_mtp, flags, options, layout, mtp_rank)
    torch.testing.assert_close(_losses(results), expected, rtol=THREE_STEPS, atol=THREE_STEPS)
    if is_v:
        copies = [embedding for result in results for embedding in result["embeddings"]]
        assert len(copies) == 4, "rank 0 and rank 1 of two replicas"
        assert all(torch.equal(copy, copies[0]) for copy in copies), "they begin and stay equal"


def test_outputs_are_longer_from_the_mtp_stage_on() -> None:
    config = _config(5, 4, 2, mtp_num_layers=2, pipeline_model_parallel_layout="E|t|t|t|t|t|mm|L")
    assert output_lengths(config, Placement.loop(4, 2)) == (1, 1, 1, 1, 1, 1, 3, 3)
    config = _config(5, 4, 2, mtp_num_layers=2, pipeline_model_parallel_layout="E|t|t|t|t|t||mmL")
    assert output_lengths(config, Placement.loop(4, 2)) == (1, 1, 1, 1, 1, 1, 1, 3)
    layers = StageLayers.parse("Et|t|m|L")
    layout = StageLayout(layers, Placement.v(2), num_mtp_layers=1, mtp_stage=2)
    assert layout.text == "Et|t|m|L"
    config.pipeline_model_parallel_layout = layout
    assert output_lengths(config, Placement.v(2)) == (1, 1, 2, 2)


def test_stages_whose_embedding_megatron_core_would_not_find_have_no_mtp_layers() -> None:
    """It looks for it in the last chunk of a rank, and under a loop not on the first rank."""
    with pytest.raises(ConfigError, match=r"MTP layers \(m\) on stage 1 of 4 \(V placement\).* one of the stages 2 to 3"):
        StageLayout(StageLayers.parse("Et|m||L"), Placement.v(2), num_mtp_layers=1, mtp_stage=1)
    config = _config(4, 4, 2, mtp_num_layers=2, pipeline_model_parallel_layout="E|t|t|t|tmm|||L")
    spec = schedule_spec("zb-interleaved", num_ranks=4, num_chunks=2)
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_layout with m \(MTP layers\) on the first rank does not go"):
        check_config(config, spec)
    check_config(_config(4, 4, 2, mtp_num_layers=2, pipeline_model_parallel_layout="E|t|t|t|t|mm||L"), spec)
