"""CUDA graphs of layers under schedules that split B and W: captured and replayed on the double of `torch.cuda.CUDAGraph`.

megatron-core's own `TECudaGraphHelper`, layers and dispatchers, on Transformer Engine's own Python. References have no graphs and
no pipeline. The double hands memory of the pool out again, so a rule that is broken is seen in the numbers.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer import TransformerConfig, cuda_graphs
from packaging.version import Version
from torch import nn

from megatron.zerobubble.errors import ConfigError, ExecutionError, SplitError
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.model import kept_in_b, layer_graphs, wgrad_split
from megatron.zerobubble.mcore.model.graph_replays import _Graph
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.stock_loop.graph_options import check_graph_options
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.mcore.model.test_engine import _Deferring
from tests.support.comparisons import difference
from tests.support.ranks import RankPool
from tests.support.transformer_engine import chosen_version, graphs
from tests.support.transformer_engine.graphed import GraphedCase, GraphedMoeCase, checked_sends, outcomes

ZB_H1 = GraphedCase("zb-h1", 2, 4, num_layers=4, fuses=True)
ZB_H2 = replace(ZB_H1, schedule="zb-h2")
ZBV = GraphedCase("zbv", 2, 4, num_chunks=2, num_layers=4, fuses=True)
EXPERTS = GraphedMoeCase("zb-h1", 2, 4, num_layers=4, fuses=True)
V_EXPERTS = replace(EXPERTS, schedule="zbv", num_chunks=2)
ROUTER = ("attn", "moe_router")
SHARED_OVERLAP = replace(EXPERTS, shared=True, shared_overlap=True, scopes=ROUTER)
FUSED_EXPERTS = replace(V_EXPERTS, op_fuser=True)
needs_op_fuser = pytest.mark.skipif(
    "use_transformer_engine_op_fuser" not in TransformerConfig.__dataclass_fields__
    or Version(chosen_version()) < Version("2.15"),
    reason="experts are fused from megatron-core 0.18 and Transformer Engine 2.15 on",
)

CASES = [
    ZB_H1,
    replace(ZB_H1, num_ranks=4, num_microbatches=6, fuses=False),
    replace(ZB_H1, scopes=("mlp",)),
    replace(ZB_H1, num_ranks=4, num_microbatches=6, scopes=(), llama=True),
    replace(ZB_H2, llama=True, recompute="layernorm", scopes=("attn", "mlp")),
    replace(ZB_H2, scopes=(), llama=True),
    replace(ZBV, llama=True, recompute="mlp"),
    replace(ZBV, scopes=()),
    replace(ZB_H1, scopes=("mlp",), llama=True, recompute="mlp core_attn"),
    replace(ZBV, tensor_parallel=2, sequence_parallel=True, scopes=("attn", "mlp")),
    replace(ZBV, overlap_grad_reduce=True, distributed_optimizer=True, different_data=True, scopes=(), llama=True),
    EXPERTS,
    replace(EXPERTS, schedule="zb-h2", scopes=("moe_router",), recompute="moe_act"),
    replace(V_EXPERTS, shared=True, scopes=ROUTER),
    replace(V_EXPERTS, expert_parallel=2),
    SHARED_OVERLAP,
    pytest.param(FUSED_EXPERTS, marks=needs_op_fuser),
    replace(ZB_H1, schedule="stock"),
    replace(ZB_H1, fp8="hybrid", fp8_recipe="tensorwise"),
    replace(ZBV, fp8="hybrid", fp8_recipe="tensorwise", scopes=("attn", "mlp")),
    replace(ZB_H1, fp8="hybrid", fp8_history=4),
    replace(ZBV, fp8="hybrid"),
    replace(ZB_H1, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True),
    replace(ZBV, fp8="e4m3", fp8_recipe="tensorwise", fp8_param=True, scopes=()),
    replace(ZB_H1, fp8="hybrid", fp8_history=4, fp8_param=True, scopes=("attn", "mlp")),
    replace(ZB_H1, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True, distributed_optimizer=True, different_data=True),
    replace(ZBV, fp8="hybrid", fp8_param=True, distributed_optimizer=True, different_data=True),
]


def _compare(rank: int, case: Any) -> tuple[Any, list[str], int, int]:
    """The differences of a run with graphs, the messages that changed while they were sent, how often memory was reused, and how
    often W was replayed."""
    found: list[str] = []
    wgrads: list[Any] = []
    with ExitStack() as stack:
        replay = mock.Mock(wraps=_Graph.replay_wgrad)
        stack.enter_context(_patched(_Graph, "replay_wgrad", lambda graph: replay(graph)))

        def checked(trainer: Any) -> None:
            nonlocal found, wgrads
            if trainer.schedule.graphs is not None:
                wgrads = trainer.schedule.graphs.wgrads
            if trainer.schedule._links is not None:
                found = stack.enter_context(checked_sends(trainer.schedule._links))

        before = graphs.handed_out_again()
        actual, expected = outcomes(case, checked)
    assert not any(wgrad._left for wgrad in wgrads), "a module has not asked for its W"
    return difference(actual, expected), found, graphs.handed_out_again() - before, replay.call_count


@pytest.mark.claims(
    "Layers",
    "CUDA graphs of layers (`cuda_graph_impl=transformer_engine`) by megatron-core's own helper on a double of "
    "`torch.cuda.CUDAGraph` that hands pool memory out again: attention, MLP, router, preprocessing and whole layers under "
    "ZB-H1, ZB-H2 and ZBV, with GQA, recomputation, experts, shared experts, tensor and expert parallelism, FP8 and weights in "
    "FP8; with fused accumulation, but for FP8, W replays a graph of its own",
    "works, losses, gradients and weights bit for bit those without graphs; **not run on a GPU**",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.15)
def test_graphs_train_as_no_graphs(engine_ranks: RankPool, case: Any) -> None:
    layers = case.num_layers // case.num_ranks
    has_w = case.fuses and not getattr(case, "fp8", None) and case.scopes != ("moe_router",) and case.schedule != "stock"
    for rank, (found, changed, reused, replayed) in enumerate(engine_ranks.run(_compare, case)):
        assert max(found.losses, found.gradients, found.weights) == 0.0, (rank, found)
        assert not changed
        assert reused > 100, "the double hands out no memory a second time, and would show nothing"
        assert replayed == has_w * layers * case.num_microbatches * (case.num_steps - 1)


def _patched(owner: Any, name: str, new: Any) -> Any:
    return mock.patch.object(owner, name, new)


def test_a_module_in_a_capture_leaves_nothing_to_w() -> None:
    chunk = nn.ModuleDict({"linear": _Deferring()})
    split_weight_gradients(chunk, WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate)))
    chunk["linear"](torch.ones(1, 4))
    with (
        mock.patch.object(cuda_graphs, "is_graph_capturing", return_value=True),
        pytest.raises(
            SplitError, match="linear runs inside a CUDA graph, and its weight gradients were left to W: set wgrad_in_b"
        ),
    ):
        chunk["linear"](torch.ones(1, 4))


def test_a_frozen_module_in_a_graph_has_no_w() -> None:
    """A capture of W would ask its queue for operands, and there are none."""
    chunk = nn.ModuleDict({"frozen": _Deferring(), "trained": _Deferring()})
    chunk["frozen"].requires_grad_(False)
    stores = {name: mock.Mock() for name in chunk}
    for name, module in chunk.items():
        vars(module)["wgrad_store"] = stores[name]
    layer = SimpleNamespace(config=SimpleNamespace())
    with (
        _patched(kept_in_b, "kept_in_graphs", lambda _: []),
        _patched(wgrad_split, "graphed_layers", lambda _: [layer]),
        _patched(wgrad_split, "modules_in_graph", lambda _: list(chunk.values())),
    ):
        names = split_weight_gradients(chunk, WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate)))
    assert names == ["trained.weight"]
    assert stores["frozen"].disable_delay_wgrad_compute.called
    assert not stores["trained"].disable_delay_wgrad_compute.called


def _refused(rank: int) -> tuple[str, str, str]:
    """Why another number of microbatches, forward passes alone in training mode, and a W out of order are refused."""
    trainer = ZB_H1.trainer()
    trainer.train()
    with pytest.raises(ConfigError) as number:
        trainer.schedule.graphs.begin(3, forward_only=False)
    with pytest.raises(ConfigError) as alone:
        trainer.forward_backward(3, forward_only=True)
    layer = layer_graphs.graphed_layers(trainer.chunks[0])[0]
    trainer.schedule.graphs.begin(ZB_H1.num_microbatches, forward_only=False)
    with pytest.raises(ExecutionError) as order:
        layer.cuda_graphs[1].replay_wgrad()
    for chunk in trainer.chunks:
        chunk.eval()
    losses = trainer.forward_backward(3, forward_only=True)
    assert len(losses) in (0, ZB_H1.num_microbatches)
    trainer.close()
    return str(number.value), str(alone.value), str(order.value)


def test_what_would_be_wrong_in_silence_is_refused(engine_ranks: RankPool) -> None:
    for number, alone, order in engine_ranks.run(_refused):
        assert number.startswith("CUDA graphs were captured for 4 microbatches, and an iteration has 3: give a constant global")
        assert "forward passes alone in training mode" in alone
        assert order == (
            "a CUDA graph is replayed in another order than it was captured in: W of chunk 0, layer 0, microbatch 1, where F of "
            "chunk 0, layer 0, microbatch 0 was captured"
        )


@pytest.mark.parametrize(
    ("module", "config", "oldest", "why"),
    [
        ({"wgrad_store": 1, "fuse_wgrad_accumulation": True}, {}, "2.10.0", None),
        ({}, {}, "2.10.0", "not modules that defer them"),
        ({"wgrad_store": 1, "fuse_wgrad_accumulation": True}, {}, "99.0", "Transformer Engine is older than 99.0"),
        ({"wgrad_store": 1, "fuse_wgrad_accumulation": True}, {"fp8": "e4m3"}, "2.10.0", "not tried with FP8"),
        (
            {"wgrad_store": 1, "fuse_wgrad_accumulation": False},
            {},
            "2.10.0",
            "without gradient_accumulation_fusion Python adds them",
        ),
        (
            {"wgrad_store": 1, "fuse_wgrad_accumulation": True, "apply_bias": True},
            {},
            "2.10.0",
            "the GEMM has the gradient of a bias, too",
        ),
    ],
)
def test_a_module_whose_w_no_replay_can_compute_keeps_it_in_b(
    module: dict[str, Any], config: dict[str, Any], oldest: str, why: str | None
) -> None:
    newest = _patched(layer_graphs, "is_te_min_version", lambda version: tuple(map(int, version.split("."))) <= (2, 20, 0))
    with newest, _patched(layer_graphs, "_OLDEST_WITH_W", oldest):
        assert layer_graphs.why_in_b(SimpleNamespace(**module), SimpleNamespace(**config)) == why


GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 3}


@pytest.mark.claims(
    "Layers",
    "CUDA graphs of layers with post-validation, unequal microbatches, slices, dropout by layer and sample, "
    "without warm-up steps, or with profiling and re-planning after the capture",
    "rejected, where the config is made",
)
@pytest.mark.parametrize(
    ("flags", "others", "named"),
    [
        ({"enable_optimizer_post_validation": True}, {}, "--enable-optimizer-post-validation"),
        ({}, {"lengths": MicrobatchLengths("nested")}, "lengths"),
        ({"zero_bubble_slices": "2"}, {}, "--zero-bubble-slices"),
        ({}, {"seeds": Seeds(dropout=1)}, "dropout of Seeds"),
        ({}, {"cuda_graph_warmup_steps": 0}, "cuda_graph_warmup_steps=0"),
        (
            {"zero_bubble_pipeline_timers_start_iter": 4, "zero_bubble_pipeline_timers_end_iter": 9},
            {},
            "profiling until iteration 9",
        ),
        ({"zero_bubble_replan_interval": 50}, {}, "--zero-bubble-replan-interval"),
    ],
)
def test_options_that_graphs_do_not_go_with_are_named(flags: dict[str, Any], others: dict[str, Any], named: str) -> None:
    steps = others.pop("cuda_graph_warmup_steps", 3)
    options = RunOptions(flags=ZeroBubbleConfig(**{"enable_zero_bubble": True} | flags), **others)
    config = SimpleNamespace(**GRAPHS | {"cuda_graph_warmup_steps": steps})
    with pytest.raises(ConfigError, match=rf'^{re.escape(named)} does not go with cuda_graph_impl="transformer_engine": .*; '):
        check_graph_options(config, options)
    check_graph_options(SimpleNamespace(cuda_graph_impl="none"), options)


def test_a_flag_of_profiling_inside_the_warm_up_steps_is_taken() -> None:
    flags = ZeroBubbleConfig(
        enable_zero_bubble=True, zero_bubble_pipeline_timers_end_iter=3, zero_bubble_pipeline_timers_start_iter=2
    )
    check_graph_options(SimpleNamespace(**GRAPHS), RunOptions(flags=flags))
