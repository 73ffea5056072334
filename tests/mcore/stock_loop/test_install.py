"""One line in a loop written for megatron-core: the same losses, errors for unsupported options, a clean `uninstall`."""

from __future__ import annotations

import argparse
import functools
import pkgutil
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
from megatron.zerobubble.mcore.compat import hybrid_model
from megatron.zerobubble.mcore.stock_loop import patches as installing
from tests.support.comparisons import message_of
from tests.support.hybrid import HAS_HYBRID_MODEL, WHY_NOT
from tests.support.process_groups import destroy_groups
from tests.support.ranks import RankPool
from tests.support.stock import (
    example,
    losses_of,
    train,
    train_hybrid,
    train_mtp,
    with_flags,
)
from tests.support.tolerances import after_steps

TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"
W = f"{TWO} --virtual-pipeline-model-parallel-size 4 --num-layers 8"


TIED = "--tie-embeddings-and-output-weights"
PROFILED = (
    "--zero-bubble-pipeline-timers-start-iter 1 --zero-bubble-pipeline-timers-end-iter 2 --zero-bubble-planning-seconds 0.1"
)
TORCHS = "--zero-bubble-torch-attention"
BATCHED = "--enable-zero-bubble --zero-bubble-batch-p2p-comm"
FOUR_STEPS = after_steps(4, lr=1e-3)
"""Of the example, where sums have another order."""


def _train(rank: int, flags: str, options: dict[str, Any]) -> Any:
    return train(rank, flags, **options)


def _train_by(rank: int, flags: str, options: dict[str, Any], function: str) -> Any:
    """`_train`, where with our schedule every rank calls this function."""
    with mock.patch(function, side_effect=pkgutil.resolve_name(function)) as watched:
        history = _train(rank, flags, options)
    assert watched.call_count > 0 or "zero-bubble" not in flags
    return history


_train_batched = functools.partial(_train_by, function="torch.distributed.batch_isend_irecv")
_train_with_torchs_attention = functools.partial(_train_by, function="torch.nn.functional.scaled_dot_product_attention")


def _cut_text(text: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    return text[:, offset : offset + length + 1]


def _hybrid(stock: str, pattern: str, options: dict[str, Any]) -> Any:
    """A case of a `HybridModel`."""
    skip = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)
    return pytest.param(functools.partial(train_hybrid, pattern=pattern), stock, "", options, marks=skip)


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
    "Your own script",
    "in a loop of your own: a `HybridModel`, ZB-H1, ZBV and ZB-W with tied embeddings, V-Min in bf16, uneven stages with experts "
    "(megatron-core 0.18.2 and 0.19.2)",
    "works, bit for bit",
)
@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: slices of microbatches (`install(slices=)`, `--zero-bubble-slices`) with the distributed "
    "optimizer and overlapped reduction, post-validation, re-planning, bf16, megatron-core's and torch's attention",
    "works, 1e-5 after four steps (bf16: 1e-2)",
)
@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: torch's attention (`--zero-bubble-torch-attention`), ZB-H1 and ZBV",
    "works, 1e-5 after four steps",
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
        (_train_batched, f"{FOUR} --clip-grad 0.5", f"{BATCHED} --enable-optimizer-post-validation", {}),
        (_train_batched, CHUNKS, "--zero-bubble-v-schedule --zero-bubble-batch-p2p-comm", {}),
        _hybrid(f"{TWO} --overlap-grad-reduce", "*-*E-|*", {"schedule": "zb-h1"}),
        _hybrid(f"{CHUNKS} {TIED}", "*-*|E|*-|-", {"schedule": "zbv"}),
        _hybrid(f"{W} {TIED}", "*|-|*|-*|-|*-|*|-", {"schedule": "zb-w"}),
        _hybrid(f"{CHUNKS} --bf16", "*|-*-|*|-*", {"schedule": "v-min"}),
        (_train, f"{TWO} --overlap-grad-reduce --use-distributed-optimizer", "", {"schedule": "zb-h1", "slices": Slices(2)}),
        (
            _train_with_torchs_attention,
            f"{FOUR} --clip-grad 0.5",
            f"--zero-bubble-schedule 1f1b --zero-bubble-slices 4 {TORCHS}",
            {},
        ),
        (_train, f"{CHUNKS} {TIED}", "", {"schedule": "zbv", "slices": Slices(2), "optimizer_post_validation": True}),
        (_train, f"{TWO} --bf16", "", {"schedule": "zb", "slices": Slices(2, cut=_cut_text)}),
        (_train, CHUNKS, f"--zero-bubble-v-schedule --zero-bubble-slices 8 {PROFILED}", {}),
        (_train_with_torchs_attention, f"{TWO} --overlap-grad-reduce", f"--enable-zero-bubble {TORCHS}", {}),
        (_train_with_torchs_attention, f"{CHUNKS} {TIED}", f"--zero-bubble-v-schedule {TORCHS}", {}),
    ],
    ids=[
        *("zb-h1-overlapped", "zb-h2-bf16", "zb-replanned", "interleaved", "interleaved-4", "zbv-tied"),
        *("zb-w-tied-optimistic", "v-half-bf16-per-token", "mtp-zb-h2-tied", "mtp-zbv-tied", "mtp-zb-w-tied", "mtp-v-half"),
        *("zb-h1-optimistic-batched", "zbv-batched"),
        *("hybrid-zb-h1", "hybrid-zbv-tied", "hybrid-zb-w-tied", "hybrid-v-min-bf16"),
        *("slices-zb-h1-overlapped", "slices-1f1b-torch", "slices-zbv-optimistic", "slices-zb-bf16-cut", "slices-zbv-replanned"),
        *("torch-zb-h1", "torch-zbv-tied"),
    ],
)
@pytest.mark.sampled(0.3)
def test_the_same_losses_as_without(
    four_ranks: RankPool, run: Callable[..., Any], stock: str, more: str, options: dict[str, Any]
) -> None:
    """Bit for bit: the weights start alike, and each one's gradient is summed over the microbatches in the same order. Other
    orders of sums have MTP layers (for embedding and output layer), slices, and the softmax of torch's attention."""
    stock = f"--num-layers 4 --hidden-size 32 --train-iters 4 {stock}"
    expected, actual = four_ranks.run(run, stock, {}), four_ranks.run(run, f"{stock} {more}", options)
    assert [bool(history) for history in actual] == [bool(history) for history in expected], "also where a V ends on rank 0"
    has_slices = "slices" in more or "slices" in options
    reordered = has_slices or run in (train_mtp, _train_with_torchs_attention)
    tolerance = 0.0 if not reordered else 1e-2 if "--bf16" in stock else FOUR_STEPS
    assert losses_of(expected)
    torch.testing.assert_close(torch.tensor(losses_of(actual)), torch.tensor(losses_of(expected)), rtol=tolerance, atol=tolerance)


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
    expected = losses_of(four_ranks.run(_train_with_dropout, f"{sizes} {one_chunk}", {"schedule": "1f1b"} | seeds))
    actual = losses_of(four_ranks.run(_train_with_dropout, f"{sizes} {flags}", options | seeds))
    assert len(expected) == 2
    assert expected[0] != expected[1]
    assert actual == expected


def _train_with_dropout(rank: int, flags: str, options: dict[str, Any]) -> Any:
    def configured(**given: Any) -> TransformerConfig:
        return TransformerConfig(**(given | {"hidden_dropout": 0.1, "attention_dropout": 0.1}))

    with mock.patch.object(example(), "TransformerConfig", configured):
        return _train(rank, flags, options)


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (["*-*|-"], "'*-*|-' has 2 segments, and 2 pipeline ranks with 2 stage(s) each need 4"),
        (["*|-|*|-/*-"], "has MTP layers"),
        (["*|-|*|-", "hybrid_override_pattern"], "by its hybrid_layer_pattern: give that"),
    ],
    ids=["segments", "mtp", "deprecated"],
)
def test_a_hybrid_pattern_that_does_not_fit_is_named_in_the_error(four_ranks: RankPool, pattern: list[str], message: str) -> None:
    flags = f"{CHUNKS} --hidden-size 32 --train-iters 1"
    for found in four_ranks.run(message_of, train_hybrid, flags, {"schedule": "zbv"}, *pattern):
        assert message in found


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


@pytest.mark.usefixtures("clean")
def test_flags_that_choose_no_schedule_install_nothing() -> None:
    before = _touched()
    megatron.zerobubble.install(example().parse([]))
    assert _touched() == before
    with pytest.raises(ConfigError, match="give one of them"):
        megatron.zerobubble.install(example().parse([]), schedule="zbv")


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: FSDP, under V other numbers of chunks than the schedule's",
    "rejected",
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no schedule to install"),
        ({"args": argparse.Namespace(lr=1.0)}, "add_zero_bubble_args"),
        ({"schedule": "zbw"}, "zbw.*zbv"),
        (with_flags(enable_zero_bubble=True, zero_bubble_save_plan="/no/plan.json"), "save-plan /no/plan.json: /no is not a"),
        ({"optimizer_post_validation": True}, "no schedule to install"),
        ({"schedule": "stock", "overlap_moe": True}, "stock schedule has none: choose a schedule"),
        (with_flags(zero_bubble_torch_attention=True), "torch-attention needs a schedule of this package"),
        ({"schedule": "zbv", "slices": Slices(cut=_cut_text)}, "cut cuts .* there are none"),
        ({"schedule": "zb", "slices": Slices("auto"), "lengths": MicrobatchLengths("thd")}, "a number"),
        ({"schedule": "zb-h1", "memory_limit": "8GiB"}, "zb-h1 has a fixed order"),
    ],
)
def test_an_unsupported_option_is_named_in_the_error(options: dict[str, Any], message: str) -> None:
    before = _touched()
    with pytest.raises(ConfigError, match=message):
        megatron.zerobubble.install(**options)
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


def _install_after_the_model(rank: int, flags: str) -> None:
    original = example().get_megatron_optimizer

    def install_here(*given: Any) -> Any:
        megatron.zerobubble.install(schedule="zb-h1")
        return original(*given)

    with mock.patch.object(example(), "get_megatron_optimizer", install_here):
        train(rank, flags)


def _install_too_late(rank: int) -> None:
    destroy_groups()
    parallel_state.initialize_model_parallel(1, 4, 2)
    try:
        megatron.zerobubble.install(schedule="zbv")
    finally:
        destroy_groups()


ONE_STEP = "--num-layers 4 --hidden-size 32 --train-iters 1"


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (
            (_train, f"{ONE_STEP} {TWO}", {"schedule": "zbv"}),
            [
                "2 model chunk(s) per rank, the loop was started with virtual_pipeline_model_parallel_size None",
                "a V has two chunks per rank, zb-w four, zb-interleaved any number from two",
            ],
        ),
        (
            (_train, f"{ONE_STEP} {CHUNKS}", {"schedule": "zb-h1"}),
            [
                "1 model chunk(s) per rank, the loop was started with virtual_pipeline_model_parallel_size 2: set "
                "virtual_pipeline_model_parallel_size=None and pipeline_model_parallel_layout=None in its configuration"
            ],
        ),
        ((_train, f"{ONE_STEP} {CHUNKS}", {"schedule": "zb-w"}), ["schedule zb-w has 4 model chunk(s) per rank"]),
        ((_install_after_the_model, f"{ONE_STEP} {TWO}"), ["DistributedDataParallel did not wrap"]),
        ((_install_too_late,), ["call install before it"]),
    ],
    ids=["one-chunk", "two-chunks", "two-Vs", "after-the-model", "too-late"],
)
def test_a_loop_that_breaks_the_contract_gets_a_helpful_error(
    four_ranks: RankPool, given: tuple[Any, ...], messages: list[str]
) -> None:
    for found in four_ranks.run(message_of, *given):
        assert all(message in found for message in messages), found
