"""One line in a loop written for megatron-core: the same losses, errors for unsupported options, a clean `uninstall`."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MixedPrecisionOptimizer,
)
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import megatron.zerobubble
from megatron.zerobubble.errors import CompatibilityError, ConfigError
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds, Slices
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.compat import hybrid_model
from megatron.zerobubble.mcore.stock_loop import patches as installing
from tests.support.gpt import _destroy_groups
from tests.support.hybrid import HAS_HYBRID_MODEL, WHY_NOT
from tests.support.ranks import RankPool
from tests.support.stock import EXAMPLE, example, tokens_of, train, train_hybrid, train_mtp, train_shared, train_unequal
from tests.support.tolerances import after_steps
from tests.training.launch import launch

TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"
W = f"{TWO} --virtual-pipeline-model-parallel-size 4 --num-layers 8"


TIED = "--tie-embeddings-and-output-weights"
PROFILED = (
    "--zero-bubble-pipeline-timers-start-iter 1 --zero-bubble-pipeline-timers-end-iter 2 --zero-bubble-planning-seconds 0.1"
)
BATCHED = "--enable-zero-bubble --zero-bubble-batch-p2p-comm"
OPTIMISTIC = {"schedule": "zb-h1", "optimizer_post_validation": True}
FOUR_STEPS = after_steps(4, lr=1e-3)
"""Of the example, where sums have another order."""
UNEQUAL = f"--num-layers 4 --hidden-size 32 --train-iters 3 --num-microbatches 6 --lr 1e-4 {TWO}"


def _train(rank: int, flags: str, options: dict[str, Any]) -> Any:
    return train(rank, flags, **options)


def _train_batched(rank: int, flags: str, options: dict[str, Any]) -> Any:
    """`_train`, and with our schedule every transfer in a batch."""
    batch = torch.distributed.batch_isend_irecv
    with mock.patch.object(torch.distributed, "batch_isend_irecv", side_effect=batch) as watched:
        history = _train(rank, flags, options)
    assert watched.call_count > 0 or "zero-bubble" not in flags
    return history


def _cut_text(text: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    return text[:, offset : offset + length + 1]


def _hybrid(stock: str, pattern: str, options: dict[str, Any]) -> Any:
    """A case of a `HybridModel`."""
    skip = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)
    return pytest.param(functools.partial(train_hybrid, pattern=pattern), stock, "", options, marks=skip)


@pytest.mark.claims(
    "Planning and measuring",
    "`install(lengths=)` against megatron-core's own 1F1B with `variable_seq_lengths`, two replicas with lengths of"
    " their own, also with post-validation",
    "works, first losses bit for bit",
)
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ("", {"schedule": "zb-h1"}),
        ("--virtual-pipeline-model-parallel-size 2 --overlap-grad-reduce --use-distributed-optimizer", {"schedule": "zbv"}),
        ("--virtual-pipeline-model-parallel-size 2", {"schedule": "zbv", "optimizer_post_validation": True}),
        ("", {"schedule": "1f1b", "lengths": MicrobatchLengths(tokens_of, reorder=False)}),
    ],
    ids=["zb-h1", "zbv", "post-validation", "in-order"],
)
@pytest.mark.sampled(0.25)
def test_unequal_microbatches(four_ranks: RankPool, more: str, options: dict[str, Any]) -> None:
    """The losses of megatron-core's own 1F1B with variable_seq_lengths, in the order of the data, on two replicas."""
    expected = _losses(four_ranks.run(train_unequal, UNEQUAL, {}))
    actual = _losses(four_ranks.run(train_unequal, f"{UNEQUAL} {more}", options))
    assert len(expected) == 2
    for own, reference in zip(actual, expected, strict=True):
        if "lengths" not in options:
            assert own[0] == reference[0], "a forward pass sees one microbatch, whenever it runs"
            assert own[1:] == [pytest.approx(losses, rel=1e-4) for losses in reference[1:]]
        else:
            assert own == reference


def test_lengths_that_are_not_known(four_ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"variable_seq_lengths .* schedule 'zb-h1'.*give .*install lengths="):
        four_ranks.run(train_unequal, UNEQUAL, {"schedule": "zb-h1", "lengths": None})


def _losses(histories: list[Any]) -> list[Any]:
    """The losses of the ranks that logged any, in the order of data-parallel replicas."""
    return [[entry["losses"] for entry in history] for history in histories if history]


@pytest.mark.claims(
    "Your own script",
    "`megatron.zerobubble.install` in a loop written for megatron.core: ZB-H1, ZB-H2, planned ZB, interleaved ZB, ZBV and "
    "ZB-W with tied embeddings, V-Half; bf16, per-token loss, overlapped reduction, distributed optimizer: the loop's own "
    "losses; `uninstall` leaves nothing",
    "works, bit for bit",
)
@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: multi-token prediction, ZB-H2, ZBV and ZB-W with tied embeddings, V-Half",
    "works, 4e-6",
)
@pytest.mark.claims(
    "Parallelism",
    "context parallelism in a loop of your own with `install` and `core_attention(config)` in the layer spec",
    "works, bit for bit",
)
@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: a `HybridModel`, ZB-H1, ZBV and ZB-W with tied embeddings, V-Min in bf16, uneven stages with experts "
    "(megatron-core 0.18.2 and 0.19.2)",
    "works, bit for bit",
)
@pytest.mark.parametrize(
    ("run", "stock", "more", "options"),
    [
        (_train, f"{TWO} --overlap-grad-reduce --use-distributed-optimizer", "--enable-zero-bubble", {}),
        (_train, f"{FOUR} --bf16 --clip-grad 0.5", "--zero-bubble-max-pending-backward 2p", {}),
        (_train, f"{FOUR} --num-microbatches 6", f"--zero-bubble-max-pending-backward 5 {PROFILED}", {}),
        (_train, CHUNKS, "", {"schedule": "zb-interleaved"}),
        (_train, W, "", {"schedule": "zb-interleaved"}),
        (_train, f"{CHUNKS} {TIED}", "--zero-bubble-v-schedule", {}),
        (_train, f"{W} {TIED}", "--zero-bubble-schedule zb-w --enable-optimizer-post-validation", {}),
        pytest.param(_train, f"{CHUNKS} --bf16 --calculate-per-token-loss", "", {"schedule": "v-half"}, marks=pytest.mark.smoke),
        (train_mtp, f"{TWO} {TIED}", "--overlap-grad-reduce", {"schedule": "zb-h2"}),  # stock would wait forever
        (train_mtp, f"{CHUNKS} {TIED}", "", {"schedule": "zbv"}),
        (train_mtp, f"{W} {TIED}", "", {"schedule": "zb-w"}),
        (train_mtp, CHUNKS, "", {"schedule": "v-half"}),
        (train_shared, f"{TWO} --overlap-grad-reduce --use-distributed-optimizer", "", OPTIMISTIC),
        (train_shared, f"{CHUNKS} --calculate-per-token-loss", "", {"schedule": "zbv"}),
        (_train_batched, f"{FOUR} --clip-grad 0.5", f"{BATCHED} --enable-optimizer-post-validation", {}),
        (_train_batched, CHUNKS, "--zero-bubble-v-schedule --zero-bubble-batch-p2p-comm", {}),
        _hybrid(f"{TWO} --overlap-grad-reduce", "*-*E-|*", {"schedule": "zb-h1"}),
        _hybrid(f"{CHUNKS} {TIED}", "*-*|E|*-|-", {"schedule": "zbv"}),
        _hybrid(f"{W} {TIED}", "*|-|*|-*|-|*-|*|-", {"schedule": "zb-w"}),
        _hybrid(f"{CHUNKS} --bf16", "*|-*-|*|-*", {"schedule": "v-min"}),
    ],
    ids=[
        *("zb-h1-overlapped", "zb-h2-bf16", "zb-replanned", "interleaved", "interleaved-4", "zbv-tied"),
        *("zb-w-tied-optimistic", "v-half-bf16-per-token", "mtp-zb-h2-tied", "mtp-zbv-tied", "mtp-zb-w-tied", "mtp-v-half"),
        *("cp-zb-h1-optimistic", "cp-zbv-per-token", "zb-h1-optimistic-batched", "zbv-batched"),
        *("hybrid-zb-h1", "hybrid-zbv-tied", "hybrid-zb-w-tied", "hybrid-v-min-bf16"),
    ],
)
@pytest.mark.sampled(0.25)
def test_the_same_losses_as_without(
    four_ranks: RankPool, run: Callable[..., Any], stock: str, more: str, options: dict[str, Any]
) -> None:
    """Bit for bit: the weights start alike, and each one's gradient is summed over the microbatches in the same order. With MTP
    layers the gradients of embedding and output layer are summed in another order."""
    stock = f"--num-layers 4 --hidden-size 32 --train-iters 4 {stock}"
    expected, actual = four_ranks.run(run, stock, {}), four_ranks.run(run, f"{stock} {more}", options)
    assert [bool(history) for history in actual] == [bool(history) for history in expected], "also where a V ends on rank 0"
    tolerance = FOUR_STEPS if run is train_mtp else 0.0
    assert _losses(expected)
    torch.testing.assert_close(torch.tensor(_losses(actual)), torch.tensor(_losses(expected)), rtol=tolerance, atol=tolerance)


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: slices of microbatches (`install(slices=)`, `--zero-bubble-slices`) with the distributed "
    "optimizer and overlapped reduction, post-validation, re-planning, bf16, megatron-core's and torch's attention",
    "works, 1e-5 after four steps (bf16: 1e-2)",
)
@pytest.mark.parametrize(
    ("stock", "more", "options"),
    [
        (f"{TWO} --overlap-grad-reduce --use-distributed-optimizer", "", {"schedule": "zb-h1", "slices": Slices(2)}),
        (f"{FOUR} --clip-grad 0.5", "--zero-bubble-schedule 1f1b --zero-bubble-slices 4 --zero-bubble-torch-attention", {}),
        (f"{CHUNKS} {TIED}", "", {"schedule": "zbv", "slices": Slices(2), "optimizer_post_validation": True}),
        (f"{TWO} --bf16", "", {"schedule": "zb", "slices": Slices(2, cut=_cut_text)}),
        (CHUNKS, f"--zero-bubble-v-schedule --zero-bubble-slices 8 {PROFILED}", {}),
    ],
    ids=["zb-h1-overlapped", "1f1b-torch", "zbv-optimistic", "zb-bf16-cut", "zbv-replanned"],
)
@pytest.mark.sampled(0.4)
def test_slices_have_the_losses_of_whole_microbatches(
    four_ranks: RankPool, stock: str, more: str, options: dict[str, Any]
) -> None:
    stock = f"--num-layers 4 --hidden-size 32 --train-iters 4 {stock}"
    expected, actual = four_ranks.run(train, stock), four_ranks.run(_train, f"{stock} {more}", options)
    assert [bool(history) for history in actual] == [bool(history) for history in expected]
    tolerance = 1e-2 if "--bf16" in stock else FOUR_STEPS
    torch.testing.assert_close(torch.tensor(_losses(actual)), torch.tensor(_losses(expected)), rtol=tolerance, atol=tolerance)


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: torch's attention (`--zero-bubble-torch-attention`), ZB-H1 and ZBV",
    "works, 1e-5 after four steps",
)
@pytest.mark.parametrize(
    ("stock", "more", "options"),
    [
        (f"{TWO} --overlap-grad-reduce", "--enable-zero-bubble --zero-bubble-torch-attention", {}),
        (f"{CHUNKS} {TIED}", "--zero-bubble-v-schedule --zero-bubble-torch-attention", {}),
    ],
    ids=["zb-h1-flag", "zbv"],
)
@pytest.mark.sampled(0.5)
def test_the_same_losses_with_torchs_attention(four_ranks: RankPool, stock: str, more: str, options: dict[str, Any]) -> None:
    """The sums of the softmax are made in another order."""
    stock = f"--num-layers 4 --hidden-size 32 --train-iters 4 {stock}"
    expected, found = four_ranks.run(train, stock), four_ranks.run(_train_and_count, f"{stock} {more}", options)
    actual, calls = [history for history, _ in found], [count for _, count in found]
    torch.testing.assert_close(torch.tensor(_losses(actual)), torch.tensor(_losses(expected)), rtol=FOUR_STEPS, atol=FOUR_STEPS)
    assert all(calls), "every rank has attention, and all of it is torch's"


def _train_and_count(rank: int, flags: str, options: dict[str, Any]) -> tuple[Any, int]:
    """`_train`, and the number of calls of torch's attention."""
    original = torch.nn.functional.scaled_dot_product_attention
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", side_effect=original) as watched:
        history = _train(rank, flags, options)
    return history, watched.call_count


SEEDED = [
    (f"{TWO} --tie-embeddings-and-output-weights", {"schedule": "zb-h1", "optimizer_post_validation": True}),
    (CHUNKS, {"schedule": "zbv"}),
    (f"{CHUNKS} --bf16", {"schedule": "zb-interleaved"}),
]


@pytest.mark.parametrize(("flags", "options"), SEEDED, ids=["zb-h1-tied-optimistic", "zbv", "interleaved-bf16"])
@pytest.mark.sampled(0.33)
def test_weights_and_dropout_masks_by_name_are_those_of_1f1b(four_ranks: RankPool, flags: str, options: dict[str, Any]) -> None:
    """Bit for bit, in two replicas. The loop seeds every rank alike, so that another number of chunks draws other weights."""
    seeds = {"seeds": Seeds(weights=7, dropout=8)}
    one_chunk = flags.replace(CHUNKS, TWO)
    sizes = "--num-layers 4 --hidden-size 32 --train-iters 4"
    expected = _losses(four_ranks.run(_train_with_dropout, f"{sizes} {one_chunk}", {"schedule": "1f1b"} | seeds))
    actual = _losses(four_ranks.run(_train_with_dropout, f"{sizes} {flags}", options | seeds))
    assert len(expected) == 2
    assert expected[0] != expected[1]
    assert actual == expected


def _train_with_dropout(rank: int, flags: str, options: dict[str, Any]) -> Any:
    def configured(**given: Any) -> TransformerConfig:
        return TransformerConfig(**(given | {"hidden_dropout": 0.1, "attention_dropout": 0.1}))

    with mock.patch.object(example(), "TransformerConfig", configured):
        return _train(rank, flags, options)


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)
def test_a_hybrid_pattern_that_does_not_fit_is_named_in_the_error(four_ranks: RankPool) -> None:
    for messages in four_ranks.run(_hybrid_refusals):
        assert "'*-*|-' has 2 segments, and 2 pipeline ranks with 2 stage(s) each need 4" in messages["segments"]
        assert "has MTP layers" in messages["mtp"]
        assert "by its hybrid_layer_pattern: give that" in messages["deprecated"]


def _hybrid_refusals(rank: int) -> dict[str, str]:
    messages = {}
    for name, pattern in {"segments": "*-*|-", "mtp": "*|-|*|-/*-"}.items():
        with pytest.raises(ConfigError) as caught:
            train_hybrid(rank, f"{CHUNKS} --hidden-size 32 --train-iters 1", {"schedule": "zbv"}, pattern)
        messages[name] = str(caught.value)
    with pytest.raises(ConfigError) as caught:
        train_hybrid(
            rank, f"{CHUNKS} --hidden-size 32 --train-iters 1", {"schedule": "zbv"}, "*|-|*|-", "hybrid_override_pattern"
        )
    messages["deprecated"] = str(caught.value)
    return messages


def _touched() -> dict[str, Any]:
    """Everything that is replaced."""
    owners = [schedules, parallel_state, pipeline_utils, DistributedDataParallel, TransformerConfig, GPTModel, Float16Module]
    owners += [FP32Optimizer, MixedPrecisionOptimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, ChainedOptimizer]
    owners += [hybrid_model()] * HAS_HYBRID_MODEL
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items() if callable(value)}


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    megatron.zerobubble.uninstall()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("optimistic", [False, True], ids=["synchronous", "post-validation"])
def test_installing_twice_is_once_and_uninstalling_leaves_nothing(optimistic: bool) -> None:
    before = _touched()
    megatron.zerobubble.install(schedule="zbv", optimizer_post_validation=optimistic)
    megatron.zerobubble.install(schedule="zbv", optimizer_post_validation=optimistic)
    replaced = {name for name, value in _touched().items() if value is not before[name]}
    with pytest.raises(ConfigError, match=r"schedule zbv is already installed.*uninstall first"):
        megatron.zerobubble.install(schedule="zb-h1")
    megatron.zerobubble.uninstall()
    megatron.zerobubble.uninstall()
    assert _touched() == before
    of_optimizers = {name for name in replaced if "Optimizer" in name.partition(".")[0]}
    assert {name.partition(".")[2] for name in of_optimizers} == ({"step", "zero_grad"} if optimistic else set())
    assert len(replaced - of_optimizers) == 11 + HAS_HYBRID_MODEL + optimistic, (
        "what the docstring of mcore/stock_loop/patches.py lists"
    )


@pytest.mark.usefixtures("clean")
def test_a_loop_that_has_imported_the_function_before_gets_the_schedule() -> None:
    megatron.zerobubble.install(schedule="zb-h1")
    assert isinstance(get_forward_backward_func(pp_size=2, vp_size=None), installing._PatchedSchedule)
    assert isinstance(get_forward_backward_func(pp_size=2, vp_size=2), installing._PatchedSchedule)
    assert get_forward_backward_func(pp_size=1, vp_size=None) is schedules.forward_backward_no_pipelining


def test_flags_that_choose_no_schedule_install_nothing() -> None:
    before = _touched()
    megatron.zerobubble.install(example().parse([]))
    assert _touched() == before


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: FSDP, under V other numbers of chunks than the schedule's",
    "rejected",
)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: megatron.zerobubble.install(), "no schedule to install"),
        (lambda: megatron.zerobubble.install(argparse.Namespace(lr=1.0)), "add_zero_bubble_args"),
        (lambda: megatron.zerobubble.install(example().parse([]), schedule="zbv"), "give one of them"),
        (lambda: megatron.zerobubble.install(schedule="zbw"), "zbw.*zbv"),
        (
            lambda: megatron.zerobubble.install(ZeroBubbleConfig(enable_zero_bubble=True, zero_bubble_save_plan="/no/plan.json")),
            "save-plan /no/plan.json: /no is not a",
        ),
        (lambda: megatron.zerobubble.install(optimizer_post_validation=True), "no schedule to install"),
        (lambda: megatron.zerobubble.install(schedule="stock", overlap_moe=True), "stock schedule has none: choose a schedule"),
        (
            lambda: megatron.zerobubble.install(ZeroBubbleConfig(zero_bubble_torch_attention=True)),
            "torch-attention needs a schedule of this package",
        ),
        (lambda: megatron.zerobubble.install(schedule="zbv", slices=Slices(cut=_cut_text)), "cut cuts .* there are none"),
        (lambda: megatron.zerobubble.install(schedule="zb", slices=Slices("auto"), lengths=MicrobatchLengths("thd")), "a number"),
        (lambda: megatron.zerobubble.install(schedule="zb-h1", memory_limit="8GiB"), "zb-h1 has a fixed order"),
        (
            lambda: megatron.zerobubble.install(argparse.Namespace(enable_zero_bubble=True, zero_bubble_shard_gradients=2)),
            "--zero-bubble-shard-gradients is not supported in a stock training loop",
        ),
    ],
)
def test_an_unsupported_option_is_named_in_the_error(call: Callable[[], None], message: str) -> None:
    before = _touched()
    with pytest.raises(ConfigError, match=message):
        call()
    megatron.zerobubble.uninstall()  # the error about flags that were parsed and not installed
    assert _touched() == before


@pytest.mark.parametrize("sizes", [(1, None), (2, None), (2, 2)])
@pytest.mark.usefixtures("clean")
def test_parsed_flags_that_are_never_installed_end_in_an_error(sizes: tuple[int, int | None]) -> None:
    parser = argparse.ArgumentParser()
    assert megatron.zerobubble.add_zero_bubble_args(parser) is parser, "as an extra_args_provider must"
    args = parser.parse_args(["--zero-bubble-max-pending-backward", "2p"])
    with pytest.raises(ConfigError, match=r"choose schedule zb-h2, but it was not installed.*megatron\.zerobubble\.install"):
        get_forward_backward_func(*sizes)(forward_step_func=None)
    parser.parse_args([])
    with pytest.raises(ConfigError, match="not installed"):
        get_forward_backward_func(*sizes)(forward_step_func=None)
    args.zero_bubble_max_pending_backward = None  # the loop thinks better of it
    with pytest.raises(TypeError, match="missing"):
        get_forward_backward_func(*sizes)(forward_step_func=None)
    args.zero_bubble_max_pending_backward = "1p"
    megatron.zerobubble.install(args)
    assert get_forward_backward_func(1, None) is example().get_forward_backward_func(1, None)
    assert isinstance(get_forward_backward_func(2, None), installing._PatchedSchedule)


@pytest.mark.usefixtures("clean")
def test_configurations_are_not_kept() -> None:
    """Megatron-LM's loop makes one for each microbatch."""
    megatron.zerobubble.install(schedule="zbv")
    loop = installing._installed()
    assert loop is not None
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    for _ in range(20):
        config = TransformerConfig(num_layers=8, hidden_size=32, num_attention_heads=4, **sizes)
    assert len(loop._configs) == 1
    del config
    assert not loop._configs


@pytest.mark.usefixtures("clean")
@pytest.mark.skipif(not hasattr(TransformerConfig, "overlap_moe_expert_parallel_comm"), reason="a newer megatron-core has it")
def test_a_recipe_with_overlapped_moe_communication_pairs_passes() -> None:
    """Without the virtual stages that megatron-core wants for it."""
    sizes = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "num_moe_experts": 4, "bf16": True}
    given = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "add_bias_linear": False, **sizes}
    given |= {"pipeline_dtype": torch.bfloat16, "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    with pytest.raises(AssertionError, match="virtual_pipeline_model_parallel_size"):
        TransformerConfig(**given)
    megatron.zerobubble.install(schedule="zb-h1")
    loop = installing._installed()
    assert not loop._options_of_model.flags.zero_bubble_overlap_moe
    config = TransformerConfig(**given)
    assert (config.overlap_moe_expert_parallel_comm, config.delay_wgrad_compute) == (False, True)
    assert loop._options_of_model.flags.zero_bubble_overlap_moe


def test_a_missing_name_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(parallel_state, "default_embedding_ranks")
    monkeypatch.setattr(schedules, "get_forward_backward_func", lambda: None)
    with pytest.raises(CompatibilityError) as caught:
        megatron.zerobubble.install(schedule="zbv")
    assert "parallel_state.default_embedding_ranks does not exist" in str(caught.value)
    assert "get_forward_backward_func does not use forward_backward_pipelining_without_interleaving" in str(caught.value)


def _refusals(rank: int) -> dict[str, str]:
    """The error of each loop that breaks its part of the contract."""
    messages = {}

    def refused(name: str, flags: str, **options: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            train(rank, f"--num-layers 4 --hidden-size 32 --train-iters 1 {flags}", **options)
        messages[name] = str(caught.value)

    refused("one chunk", TWO, schedule="zbv")
    refused("two chunks", CHUNKS, schedule="zb-h1")
    refused("two Vs", CHUNKS, schedule="zb-w")
    loop, original = example(), example().get_megatron_optimizer

    def install_here(*given: Any) -> Any:
        megatron.zerobubble.install(schedule="zb-h1")
        return original(*given)

    loop.get_megatron_optimizer = install_here
    refused("after the model", TWO)
    loop.get_megatron_optimizer = original
    _destroy_groups()
    parallel_state.initialize_model_parallel(1, 4, 2)
    with pytest.raises(ConfigError) as caught:
        megatron.zerobubble.install(schedule="zbv")
    messages["too late"] = str(caught.value)
    _destroy_groups()
    return messages


def test_a_loop_that_breaks_the_contract_gets_a_helpful_error(four_ranks: RankPool) -> None:
    for messages in four_ranks.run(_refusals):
        assert (
            "2 model chunk(s) per rank, the loop was started with virtual_pipeline_model_parallel_size None"
            in messages["one chunk"]
        )
        assert "a V has two chunks per rank, zb-w four, zb-interleaved any number from two" in messages["one chunk"]
        assert (
            "1 model chunk(s) per rank, the loop was started with virtual_pipeline_model_parallel_size 2: set "
            "virtual_pipeline_model_parallel_size=None and pipeline_model_parallel_layout=None in its configuration"
            in messages["two chunks"]
        )
        assert "schedule zb-w has 4 model chunk(s) per rank" in messages["two Vs"]
        assert "DistributedDataParallel did not wrap" in messages["after the model"]
        assert "call install before it" in messages["too late"]


@pytest.mark.slow
def test_the_example_through_torchrun() -> None:
    """As its docstring says, on two ranks without a GPU."""
    runs = {}
    for more in ("--zero-bubble-schedule stock", "--zero-bubble-v-schedule", "--zero-bubble-schedule 1f1b-v"):
        done = launch(["--cpu", EXAMPLE, *f"{CHUNKS} {more}".split()], num_ranks=2, module="megatron.zerobubble.run")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("\n") == done.stderr.count("zero bubble: ") == (0 if "stock" in more else 1)
        runs[more] = [json.loads(line)["losses"] for line in done.stdout.splitlines()]
    first, *others = runs.values()
    assert others == [first, first]
    assert sum(first[-1]) < sum(first[0])
