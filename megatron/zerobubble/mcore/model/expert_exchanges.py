"""All-to-alls of experts beside computation: of the other pass of a pair (`runtime.turns`), or of a deferred wgrad GEMM.

A dispatcher of megatron-core sends tokens in `token_dispatch` and `token_combine`, in every release. Each instance gets others,
which run the same methods between two autograd functions that return what they get:

    F:  border -> the all-to-all -> border        B:  border: begin -> the all-to-all's own backward -> border: end

So the graph, and the order of every sum, are those of the pass alone, and a pair has the bits of its two passes.

On CUDA an all-to-all runs on a stream of its own, in B too, because autograd runs an op's backward on the stream of its forward.
The turn changes once it is issued; the stream of the passes waits for it when the pass has its turn again. On the CPU the
all-to-all blocks a thread, and the other one computes.

Where no other pass computes, the store computes a deferred GEMM meanwhile, as beside tensor-parallel reductions (ADR 15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.zerobubble.runtime.recording import Recorder
from megatron.zerobubble.runtime.turns import Pair, Side, Turns, Worker

__all__ = ["METHODS", "ExpertExchanges", "bordered", "why_exposed"]

_F = TypeVar("_F")
_B = TypeVar("_B")

METHODS = ("token_dispatch", "token_combine")
"""Methods of a dispatcher that send tokens, and compute nothing."""
_SEPARATE = ("alltoall", "deepep", "hybridep")
"""Dispatchers, and backends of the flex dispatcher, whose all-to-alls return memory that no other one writes to."""


def why_exposed(config: Any, *, num_slices: int = 1, is_unequal: bool = False) -> str | None:
    """Why nothing can run beside the all-to-alls of a model's experts. It follows from what is the same on all ranks.

    Args:
        config: TransformerConfig of the model.
        num_slices: of each microbatch.
        is_unequal: whether microbatches have lengths of their own.

    Returns:
        The reason; None if passes of this model can be paired.
    """
    recomputed = getattr(config, "recompute_modules", None) or []
    dispatcher = config.moe_token_dispatcher_type
    if dispatcher == "flex":
        dispatcher = config.moe_flex_dispatcher_backend
    reasons = {
        "the model has no experts": not config.num_moe_experts,
        "each rank has all experts (expert_model_parallel_size is 1)": config.expert_model_parallel_size == 1,
        f"dispatcher {dispatcher!r}: tokens have memory of their own per pass in {', '.join(_SEPARATE)} only": dispatcher
        not in _SEPARATE,
        "recompute_granularity='full' runs the dispatcher of a layer in B, while an F may be between its two all-to-alls": (
            config.recompute_granularity == "full"
        ),
        "recompute_modules with 'moe' runs the dispatcher of a layer in B, while an F may be between its two all-to-alls": (
            config.recompute_granularity == "selective" and "moe" in recomputed
        ),
        "moe_shared_expert_overlap puts the shared experts beside them already": config.moe_shared_expert_overlap,
        "fp8 and fp4 keep scales of the pass under way in one place of the process": bool(
            config.fp8 or getattr(config, "fp4", None)
        ),
        "tp_comm_overlap has buffers that the layers share": bool(config.tp_comm_overlap),
        "CUDA graphs of layers fix the order in which their passes run": getattr(config, "cuda_graph_impl", None)
        not in (None, "none"),
        "microbatches have lengths of their own, and each iteration another plan": is_unequal,
        "microbatches are cut into slices, and the model knows one at a time": num_slices > 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


class ExpertExchanges:
    """The all-to-alls of a rank's experts.

    Args:
        dispatchers: the token dispatchers of its chunks, whose methods are replaced until `remove`, and their managers.
        device: of the passes.
        fill: computes something that nothing waits for, if there is any, beside an all-to-all with no other pass.
    """

    def __init__(self, dispatchers: Sequence[Any], device: torch.device, fill: Callable[[], object]) -> None:
        self.recorder: Recorder | None = None
        """Records the iteration; None: nothing does."""
        self.turns = Turns(device)
        self._dispatchers = [each for each in dispatchers if hasattr(each, METHODS[0])]
        self._device, self._fill = device, fill
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._passes: Any = None
        """The stream of the passes, on CUDA."""
        self._worker: Worker | None = None
        self._filling: Future[Any] | None = None
        self._left: dict[Side, Pair] = {}
        """The pair that a pass has left for its all-to-all."""
        for dispatcher in self._dispatchers:
            for name in METHODS:
                setattr(dispatcher, name, _Exchange(getattr(dispatcher, name), self, dispatcher))

    def remove(self) -> None:
        """Leave the dispatchers as they were."""
        for dispatcher in self._dispatchers:
            for name in METHODS:
                vars(dispatcher).pop(name, None)

    def pair(self, forward: Callable[[], _F], backward: Callable[[], _B]) -> tuple[_F, _B]:
        """Run both passes of a pair, each beside the all-to-alls of the other one. Raises as `Turns.run`."""
        return self.turns.run(partial(self._ending, forward), partial(self._ending, backward))

    def _ending(self, run: Callable[[], _F]) -> _F:
        result = run()
        if self.recorder is not None:
            self.recorder.computes(-1)
        return result

    def _filled(self) -> None:
        """Compute something that nothing waits for."""
        if self.recorder is None:
            self._fill()
            return
        self.recorder.computes(1)
        self._fill()
        self.recorder.computes(-1)

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Around an all-to-all of F."""
        if self._stream is None:
            self.begin(Side.FORWARD)
            yield
            self.end(Side.FORWARD)
            return
        self._passes = passes = torch.cuda.current_stream()
        self._stream.wait_stream(passes)
        with torch.cuda.stream(self._stream):
            yield
        self.end(Side.FORWARD)
        passes.wait_stream(self._stream)

    def begin(self, side: Side) -> None:
        """An all-to-all is about to begin. It will block a thread of the host, but not on CUDA."""
        if self._stream is not None:
            return
        pair = self.turns.leave(side)
        if pair is not None:
            self._left[side] = pair
        else:
            self._worker = self._worker or Worker(self._device, "wgrad beside all-to-alls")
            self._filling = self._worker.submit(self._filled)

    def end(self, side: Side) -> None:
        """It has ended, on CUDA: was issued."""
        if self._stream is not None:
            if not self.turns.switch(side):
                with torch.cuda.stream(self._passes):  # in B the current one is that of the all-to-alls
                    self._filled()
        elif self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()
        else:
            self._left.pop(side).come_back(side)

    def hold(self, tensors: Sequence[Any], *, on_passes: bool) -> None:
        """Keep memory that one stream allocated until the other one has read it."""
        if self._stream is None:
            return
        stream = self._passes if on_passes else self._stream
        for each in tensors:
            if isinstance(each, Tensor) and each.is_cuda:
                each.record_stream(stream)


class _Exchange:
    """Replaces a method of one dispatcher; takes and returns the same."""

    def __init__(self, method: Callable[..., Any], exchanges: ExpertExchanges, dispatcher: Any) -> None:
        self._method, self._exchanges, self._dispatcher = method, exchanges, dispatcher

    def __call__(self, *tensors: Tensor, **others: Any) -> Any:
        if not torch.is_grad_enabled():  # evaluation
            return self._method(*tensors, **others)
        exchanges = self._exchanges
        exchanges.hold(tensors, on_passes=False)
        with exchanges.in_forward():
            result = self._method(*bordered(partial(exchanges.end, Side.BACKWARD), tensors), **others)
        results = result if isinstance(result, tuple) else (result,)
        keepers = (self._dispatcher, getattr(self._dispatcher, "_comm_manager", None))  # that of the flex dispatcher
        kept = [value for each in keepers if each is not None for value in vars(each).values()]
        exchanges.hold([*results, *kept], on_passes=True)
        results = bordered(partial(exchanges.begin, Side.BACKWARD), results)
        return results if isinstance(result, tuple) else results[0]


def bordered(in_backward: Callable[[], None], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, with `in_backward` called once the gradients of the tensors among them are known."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    passed = iter(_Border.apply(in_backward, *tensors) if tensors and torch.is_grad_enabled() else tensors)
    return tuple(next(passed) if isinstance(value, Tensor) else value for value in values)


class _Border(torch.autograd.Function):
    """Returns what it gets; its backward calls `in_backward`."""

    @staticmethod
    def forward(ctx: Any, in_backward: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.in_backward = in_backward
        ctx.set_materialize_grads(False)  # the flex dispatcher takes probabilities from its manager, not from its arguments
        return tuple(each.detach() for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.in_backward()
        return None, *gradients
