"""CUDA graphs of layers under schedules that split B and W: captured and replayed on the double of `torch.cuda.CUDAGraph`.

megatron-core's own `TECudaGraphHelper`, layers and dispatchers, on Transformer Engine's own Python. References have no graphs and
no pipeline. The double hands memory of the pool out again, so a rule that is broken is seen in the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer import cuda_graphs
from torch import nn

from megatron.zerobubble.errors import ConfigError, SplitError
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.model import layer_graphs
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.stock_loop.graph_options import check_graph_options
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import GraphMemory, WeightGradStore
from tests.mcore.model.test_engine import _Deferring
from tests.support.comparisons import difference
from tests.support.ranks import RankPool
from tests.support.transformer_engine import graphs
from tests.support.transformer_engine.graphed import GraphedCase, GraphedMoeCase, checked_sends, outcomes

ZB_H1 = GraphedCase("zb-h1", 2, 4, num_layers=4, fuses=True)
ZB_H2 = replace(ZB_H1, schedule="zb-h2")
ZBV = GraphedCase("zbv", 2, 4, num_chunks=2, num_layers=4, fuses=True)
EXPERTS = GraphedMoeCase("zb-h1", 2, 4, num_layers=4, fuses=True)
V_EXPERTS = replace(EXPERTS, schedule="zbv", num_chunks=2)
ROUTER = ("attn", "moe_router")

CASES = [
    ZB_H1,
    replace(ZB_H1, num_ranks=4, num_microbatches=6, fuses=False),
    replace(ZB_H1, scopes=("mlp",)),
    replace(ZB_H2, llama=True, recompute="layernorm"),
    replace(ZBV, llama=True),
    replace(ZBV, scopes=()),
    replace(ZBV, tensor_parallel=2, sequence_parallel=True, scopes=("attn", "mlp")),
    replace(ZBV, overlap_grad_reduce=True, distributed_optimizer=True, different_data=True),
    EXPERTS,
    replace(EXPERTS, schedule="zb-h2", scopes=("moe_router",), recompute="moe_act"),
    replace(V_EXPERTS, shared=True, scopes=ROUTER),
    replace(V_EXPERTS, expert_parallel=2),
    replace(EXPERTS, shared=True, shared_overlap=True, scopes=ROUTER),
    replace(ZB_H1, schedule="stock"),
]


def _compare(rank: int, case: Any) -> tuple[Any, list[str], int]:
    """The differences of a run with graphs, the messages that changed while they were sent, and how often memory was reused."""
    found: list[str] = []
    with ExitStack() as stack:

        def checked(trainer: Any) -> None:
            nonlocal found
            if trainer.schedule._links is not None:
                found = stack.enter_context(checked_sends(trainer.schedule._links))

        before = graphs.handed_out_again()
        actual, expected = outcomes(case, checked)
    return difference(actual, expected), found, graphs.handed_out_again() - before


@pytest.mark.claims(
    "Layers",
    "CUDA graphs of layers (`cuda_graph_impl=transformer_engine`) by megatron-core's own helper on a double of "
    "`torch.cuda.CUDAGraph` that hands pool memory out again: attention, MLP, router, preprocessing and whole layers under "
    "ZB-H1, ZB-H2 and ZBV, with GQA, recomputation, experts, shared experts, tensor and expert parallelism",
    "works, losses and weights bit for bit those without graphs; **not run on a GPU**",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.15)
def test_graphs_train_as_no_graphs(engine_ranks: RankPool, case: Any) -> None:
    for rank, (found, changed, reused) in enumerate(engine_ranks.run(_compare, case)):
        assert max(found.losses, found.gradients, found.weights) == 0.0, (rank, found)
        assert not changed
        assert reused > 100, "the double hands out no memory a second time, and would show nothing"


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold."""

    case: Any
    patches: Callable[[], list[Any]]


def _patched(owner: Any, name: str, new: Any) -> Any:
    return mock.patch.object(owner, name, new)


BROKEN = {
    "graphs are captured in the order of megatron-core's schedule": Broken(
        ZBV, lambda: [_patched(layer_graphs.LayerGraphs, "order", _stock_order)]
    ),
    "a gradient leaves a graph as it is": Broken(
        ZB_H2, lambda: [_patched(layer_graphs, "_with_own_gradient", lambda value: value)]
    ),
    "W reads an input where a graph left it": Broken(
        CASES[-2], lambda: [_patched(GraphMemory, "own", lambda _self, operand: operand)]
    ),
}


def _stock_order(graphs_: Any, plan: Any, _rank: int) -> list[int]:
    """All forward passes of a chunk before its backward passes."""
    graphs_.num_microbatches = plan.num_microbatches
    chunks = range(1, plan.placement.num_stages // plan.num_ranks + 1)
    once = [*chunks, *(-chunk for chunk in reversed(chunks))]
    return [each for _ in range(plan.num_microbatches) for each in once]


def _compare_broken(rank: int, name: str) -> tuple[Any, list[str]]:
    broken = BROKEN[name]
    with ExitStack() as stack:
        for patch in broken.patches():
            stack.enter_context(patch)
        found, changed, _ = _compare(rank, broken.case)
    return found, changed


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.sampled(0.34)
def test_a_broken_rule_is_seen_in_the_weights(engine_ranks: RankPool, name: str) -> None:
    results = engine_ranks.run(_compare_broken, name)
    assert any(found.weights > 0 for found, _ in results), results
    if "gradient leaves" in name:
        assert any(changed for _, changed in results), "a message is overwritten while it is sent"


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


def _refused(rank: int) -> tuple[str, str]:
    """Why another number of microbatches, and forward passes alone in training mode, are refused."""
    trainer = ZB_H1.trainer()
    trainer.train()
    with pytest.raises(ConfigError) as number:
        trainer.schedule.graphs.begin(3, forward_only=False)
    with pytest.raises(ConfigError) as alone:
        trainer.forward_backward(3, forward_only=True)
    for chunk in trainer.built.chunks:
        chunk.eval()
    losses = trainer.forward_backward(3, forward_only=True)
    assert len(losses) in (0, ZB_H1.num_microbatches)
    trainer.close()
    return str(number.value), str(alone.value)


def test_what_would_be_wrong_in_silence_is_refused(engine_ranks: RankPool) -> None:
    for number, alone in engine_ranks.run(_refused):
        assert number.startswith("CUDA graphs were captured for 4 microbatches, and an iteration has 3: give a constant global")
        assert "forward passes alone in training mode" in alone


GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 3}


@pytest.mark.claims(
    "Layers",
    "CUDA graphs of layers with post-validation, unequal microbatches, slices, sharded gradients, dropout by layer and sample, "
    "without warm-up steps, or with profiling and re-planning after the capture",
    "rejected, where the config is made",
)
@pytest.mark.parametrize(
    ("flags", "others", "named"),
    [
        ({"enable_optimizer_post_validation": True}, {}, "--enable-optimizer-post-validation"),
        ({}, {"lengths": MicrobatchLengths("nested")}, "lengths"),
        ({"zero_bubble_slices": "2"}, {}, "--zero-bubble-slices"),
        ({"zero_bubble_shard_gradients": 2}, {}, "--zero-bubble-shard-gradients"),
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
