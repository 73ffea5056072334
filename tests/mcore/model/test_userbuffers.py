"""`tp_comm_overlap`: no operand that W reads is a buffer that another layer's B has overwritten.

Transformer Engine's real Python, with Userbuffers as a double that aliases as the real ones do. Not run on a GPU.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron.zerobubble.errors import SplitError
from megatron.zerobubble.mcore.model.transformer_engine import defer_to_w
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
from megatron.zerobubble.mcore.stock_loop.patches import _building
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support.gpt import _destroy_groups
from tests.support.ranks import RankPool
from tests.support.transformer_engine.gpt import EngineCase, compare_engine

pytestmark = pytest.mark.claims(
    "Long runs",
    "`tp_comm_overlap` with megatron-core's defaults: bulk wgrad, bulk dgrad and the row-parallel all-gather of backward are "
    "turned off, the rest stays on",
    "works, bit for bit, on a double whose buffers alias; **not run on a GPU**",
)

TOKENS, IN, OUT, LAYERS = 4, 16, 24, 2
KINDS = {
    "norm and column": ("LayerNormLinear", "column", {"ub_overlap_ag": True, "ub_bulk_dgrad": True}),
    "column": ("Linear", "column", {"ub_overlap_ag": True, "ub_bulk_dgrad": True}),
    "column with reduce-scatter": ("Linear", "column", {"ub_overlap_ag": True, "ub_overlap_rs_dgrad": True}),
    "row": ("Linear", "row", {"ub_overlap_ag": True, "ub_overlap_rs": True}),
}


def _layers(kind: str, *, overlaps: bool, delay: bool) -> nn.ModuleList:
    import transformer_engine.pytorch as te

    name, mode, options = KINDS[kind]
    torch.manual_seed(1 + parallel_state.get_tensor_model_parallel_rank())
    make: Any = getattr(te, name)
    group = parallel_state.get_tensor_model_parallel_group()
    layers = nn.ModuleList(
        make(
            *(IN, OUT),
            bias=False,
            parallel_mode=mode,
            sequence_parallel=True,
            tp_size=2,
            tp_group=group,
            delay_wgrad_compute=delay,
            device="cpu",
            params_dtype=torch.float32,
            **({"ub_name": "fc1"} | options if overlaps else {}),
        )
        for _ in range(LAYERS)
    )
    for parameter in layers.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    return layers


def _inputs(mode: str) -> list[tuple[Tensor, Tensor]]:
    """(input, gradient of the output) of each layer on this rank: sequence-parallel on the outer side."""
    generator = torch.Generator().manual_seed(7 + parallel_state.get_tensor_model_parallel_rank())
    x, y = ((TOKENS, IN), (2 * TOKENS, OUT // 2)) if mode == "column" else ((2 * TOKENS, IN // 2), (TOKENS, OUT))
    return [(torch.randn(x, generator=generator), torch.randn(y, generator=generator)) for _ in range(LAYERS)]


def _module_gradients(_rank: int, kind: str) -> list[tuple[str, bool]]:
    """Whether the gradients of each layer's input and weight are those of the fused backward without Userbuffers."""
    from tests.support.transformer_engine import userbuffers

    _destroy_groups()
    parallel_state.initialize_model_parallel(2)
    results = []
    for overlaps in (False, True):
        with userbuffers.initialized() if overlaps else nullcontext():
            layers = _layers(kind, overlaps=overlaps, delay=overlaps)
            store = WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate))
            if overlaps:
                split_weight_gradients(layers, store)
                for layer in layers:
                    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
            inputs = [(x.requires_grad_(), gradient) for x, gradient in _inputs(KINDS[kind][1])]
            outputs = [layer(x) for layer, (x, _) in zip(layers, inputs, strict=True)]
            store.begin(0, 0, fused=False)
            for output, (_, gradient) in zip(outputs, inputs, strict=True):
                output.backward(gradient)
            store.end()
            store.run(0, 0)
            results.append([*(output.detach() for output in outputs), *(x.grad for x, _ in inputs)])
            results[-1] += [layer.weight.grad for layer in layers]
    _destroy_groups()
    names = [f"{what} {layer}" for what in ("output", "dgrad", "wgrad") for layer in range(LAYERS)]
    return [(name, torch.equal(a, b)) for name, a, b in zip(names, *results, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_w_gets_operands_of_its_own(engine_ranks: RankPool, kind: str) -> None:
    for equal in engine_ranks.run(_module_gradients, kind):
        assert [name for name, is_equal in equal if not is_equal] == []


def _compare(rank: int, case: EngineCase) -> tuple[Any, list[str]]:
    from tests.support.transformer_engine import userbuffers

    records: list[logging.LogRecord] = []
    handler = SimpleNamespace(level=0, handle=records.append)
    logger = logging.getLogger("megatron.zerobubble.mcore.model.transformer_engine")
    logger.addHandler(handler)  # type: ignore[arg-type]
    try:
        with userbuffers.initialized():
            difference, _, left = compare_engine(rank, case)
    finally:
        logger.removeHandler(handler)  # type: ignore[arg-type]
    assert not left
    return difference, [record.getMessage() for record in records]


@pytest.mark.parametrize(
    "case", [EngineCase("zb-h1", 2, 4, num_layers=4, tensor_parallel=2, sequence_parallel=True, userbuffers=True)]
)
def test_a_model_with_the_defaults_of_megatron_core_trains_as_without_userbuffers(
    engine_ranks: RankPool, case: EngineCase
) -> None:
    """Which turn every overlap on: those that cannot go with W are turned off, and the log says which."""
    results = engine_ranks.run(_compare, case)
    for difference, _ in results:
        assert difference.unequal == ()
        assert difference.weights == 0
    (message,), *others = (messages for _, messages in results)
    assert not any(others), "one rank logs it"
    assert "tp_comm_overlap" in message
    assert all(name in message for name in ("bulk_wgrad", "bulk_dgrad", "overlap_ag"))


def test_bulk_wgrad_is_turned_off_before_the_model_is_built() -> None:
    config = SimpleNamespace(tp_comm_overlap=True, tp_comm_bulk_wgrad=True, tp_comm_bulk_dgrad=True, delay_wgrad_compute=False)
    defer_to_w(config)
    assert config.delay_wgrad_compute
    assert not config.tp_comm_bulk_wgrad
    assert config.tp_comm_bulk_dgrad, "modules have it turned off when they are split"
    without = SimpleNamespace(tp_comm_overlap=False, tp_comm_bulk_wgrad=True)
    defer_to_w(without)
    assert without.tp_comm_bulk_wgrad


def test_an_overlap_that_a_loop_turns_on_after_the_config_is_made_is_seen_where_the_model_is_built() -> None:
    """As frameworks do that keep overlaps in a config of their own."""
    built = []

    def original(_self: object, config: Any) -> None:
        built.append((config.delay_wgrad_compute, config.tp_comm_bulk_wgrad))

    construct: Any = _building(SimpleNamespace(options=SimpleNamespace(is_v=False)), original)  # type: ignore[arg-type]
    for ranks in (2, 1):
        options = {"tp_comm_overlap": True, "tp_comm_bulk_wgrad": True, "delay_wgrad_compute": False}
        construct(object(), SimpleNamespace(pipeline_model_parallel_size=ranks, **options))
    assert built == [(True, False), (False, True)]


class _Deferring(nn.Linear):
    """Speaks the contract of deferred weight gradients, and has an overlap that is not known here."""

    def __init__(self, **overlaps: bool) -> None:
        super().__init__(4, 4, bias=False)
        self.weight.skip_backward_post_hook = True  # type: ignore[assignment]
        vars(self).update(overlaps)

    def backward_dw(self) -> None:
        """Compute the gradient of the oldest entry of its queue."""

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """Call `hook` after it."""


@pytest.mark.parametrize("name", ["ub_bulk_wgrad", "ub_overlap_of_a_later_release"])
def test_a_built_module_with_an_overlap_that_w_cannot_have_is_named(name: str) -> None:
    chunk = nn.ModuleDict({"good": _Deferring(ub_overlap_rs_dgrad=True), "bad": _Deferring(**{name: True})})
    with pytest.raises(SplitError, match=rf"bad \(.*_Deferring\) was built with {name}"):
        split_weight_gradients(chunk, WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate)))
