"""The small GPTs of `gpt` with CUDA graphs of their layers: megatron-core's own `TECudaGraphHelper` on the double in `graphs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig, cuda_graphs

from megatron.zerobubble.runtime.p2p import Handle
from tests.support.comparisons import unpipelined
from tests.support.gpt import MICRO_BATCH, SEQUENCE, Case, Outcome, Tensors, Trainer
from tests.support.transformer_engine.gpt import EngineCase, EngineMoeCase, EngineMoeTrainer, EngineTrainer

__all__ = ["GraphedCase", "GraphedMoeCase", "checked_sends", "outcomes"]

_SCOPES = "cuda_graph_modules" if "cuda_graph_modules" in TransformerConfig.__dataclass_fields__ else "cuda_graph_scope"


@dataclass(frozen=True)
class GraphedCase(EngineCase):
    """One comparison. Static inputs of megatron-core's graphs are in bf16."""

    scopes: tuple[str, ...] = ("attn",)
    """What of a layer is captured; empty: all of it."""
    dtype: torch.dtype = torch.bfloat16
    num_steps: int = 3
    """One before the capture."""
    gradient_step: int = 2

    @property
    def unpipelined(self) -> Case:
        return _as(EngineCase, self).unpipelined


@dataclass(frozen=True)
class GraphedMoeCase(EngineMoeCase):
    scopes: tuple[str, ...] = ("attn", "moe_router", "moe_preprocess")
    dtype: torch.dtype = torch.bfloat16
    num_steps: int = 3
    gradient_step: int = 2

    @property
    def unpipelined(self) -> Any:
        return _as(EngineMoeCase, self).unpipelined


def _as(kind: Any, case: Any) -> Any:
    return kind(**{field.name: getattr(case, field.name) for field in fields(kind)})


class _Graphed(Trainer):
    """Captures graphs before its second step."""

    case: Any

    def __init__(self, case: Any, initial: Tensors | None = None, *, seed: int = 1234) -> None:
        if torch.cuda.is_available():  # a capture needs generators that it can register
            initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
        super().__init__(case, initial, seed=seed)

    def _config_changes(self) -> dict[str, Any]:
        graphs = {"cuda_graph_impl": "transformer_engine", _SCOPES: list(self.case.scopes), "cuda_graph_warmup_steps": 1}
        return super()._config_changes() | graphs

    def forward_backward(self, step: int, *, forward_only: bool = False) -> list[float]:
        if step == 1 and not forward_only:
            self.capture()
        return super().forward_backward(step, forward_only=forward_only)

    def capture(self) -> None:
        """As Megatron-LM's loop does."""
        m = self.case.num_microbatches
        init_num_microbatches_calculator(0, None, m * MICRO_BATCH, MICRO_BATCH, 1)
        helper: Any = cuda_graphs.TECudaGraphHelper(self.chunks, self.config, SEQUENCE, MICRO_BATCH, optimizers=[self.optimizer])
        with self.host.on_host(), ExitStack() as stack:
            if self.case.schedule != "stock":
                made: Any = self.schedule.graphs
                given = partial(made.capture, cuda_graphs.make_graphed_callables)
                ordered: Any = lambda *_: self.schedule.capture_order(m)  # noqa: E731
                stack.enter_context(mock.patch.object(cuda_graphs, _ORDER, ordered))
                stack.enter_context(mock.patch.object(cuda_graphs, "make_graphed_callables", given))
            helper.create_cudagraphs()
        unset_num_microbatches_calculator()
        assert all(len(layer.cuda_graphs) == m for layer in helper.flattened_callables)


_ORDER = "convert_schedule_table_to_order"


class _GraphedTrainer(_Graphed, EngineTrainer, trains=GraphedCase):
    """Trains a `GraphedCase`."""


class _GraphedMoeTrainer(_Graphed, EngineMoeTrainer, trains=GraphedMoeCase):
    """Trains a `GraphedMoeCase`."""


def outcomes(case: Any, changed: Callable[[Any], Any] | None = None) -> tuple[Outcome, Outcome]:
    """(what `case` trains, what its reference without graphs trains) on this rank.

    The reference has no pipeline, or where replicas reduce while W runs, in another order of sums, the same one. Weights in FP8
    cannot be given to another layout with what they were cast from: their reference has the layout, and its weights by the seed.

    Args:
        case: the case.
        changed: called with the trainer before it trains.
    """
    initial: Tensors | None = None
    without = _as(EngineMoeCase if isinstance(case, EngineMoeCase) else EngineCase, case)
    if getattr(case, "fp8_param", False):
        without = replace(without, schedule="stock" if case.num_chunks == 1 else case.schedule)
    else:
        initial, expected = unpipelined(case.unpipelined)
    if case.overlap_grad_reduce or initial is None:
        reference = without.trainer(initial)
        expected = reference.train()
        reference.close()
    trainer = case.trainer(initial)
    if changed is not None:
        changed(trainer)
    actual = trainer.train()
    trainer.close()
    return actual, expected


@contextmanager
def checked_sends(links: Any) -> Iterator[list[str]]:
    """Inside, messages that were changed between their send and the wait for it are listed."""
    found: list[str] = []
    send = links.send

    class Checked:
        def __init__(self, message: Any, tensor: torch.Tensor) -> None:
            self.handle: Handle = send(message, tensor)
            self.message, self.tensor, self.sent = message, tensor, tensor.clone()

        def wait(self) -> None:
            self.handle.wait()
            if not torch.equal(self.tensor.nan_to_num(), self.sent.nan_to_num()):
                found.append(str(self.message))

    with mock.patch.object(links, "send", Checked):
        yield found
