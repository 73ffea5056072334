"""When the gradients of a chunk are final: DDP is notified of each weight once, though its B and W run apart.

DDP starts to reduce a bucket when all of its gradients have been reported outside of `no_sync`. With B and W split, the last B of
a chunk reports norms and biases, and its last W the rest; between the two, Ws of earlier microbatches may run and must not count.
So gradient synchronization is enabled during the last op of each kind only, or during the Ws that run together with the last one.

A weight may have no W in the last microbatch, or in none: only the loss reads it, or a user's hook keeps its gradient in B. What
autograd computes is added in the Bs, which are over by then, so these weights are reported behind the chunk's last W. Another
chunk of the rank may read a weight, too, and its B come later: once that was seen, the weight is reported behind the last op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.final import FinalGradient

__all__ = ["FinalGradients"]


class FinalGradients:
    """Makes DDP start reductions of one chunk exactly when gradients are final, in one iteration.

    Args:
        chunk: wrapped by DDP, or not.
        deferred: its weights with deferred gradients.
    """

    def __init__(self, chunk: nn.Module, deferred: Sequence[FinalGradient]) -> None:
        self._chunk: Any = chunk
        self._deferred = deferred
        self._forbidden: contextlib.AbstractContextManager[Any] | None = None
        for each in deferred:  # an error may have ended the last iteration
            each.end()
        self.forbid()

    def allow(self) -> None:
        """Gradients reported from here on are final."""
        if self._forbidden is not None:
            self._forbidden.__exit__(None, None, None)
            self._forbidden = None

    def forbid(self) -> None:
        """Gradients reported from here on may still grow."""
        if hasattr(self._chunk, "no_sync"):
            self._forbidden = self._chunk.no_sync()
            self._forbidden.__enter__()

    def begin_last(self) -> None:
        """Before the chunk's last W, or full backward, reports: what it reports is final."""
        self.allow()
        for each in self._deferred:
            each.is_final = True

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Inside, what is reported may still grow, between `begin_last` and `end_last`, too."""
        if self._forbidden is not None:
            yield
            return
        self.forbid()
        yield
        self.allow()

    def end_last(self) -> None:
        """Behind the chunk's last W: report the weights that had none in it."""
        for each in self._deferred:
            if not each.waits_for_end:
                each.report()

    def finish(self) -> None:
        """Behind the last op of the rank.

        Raises:
            WeightGradStoreError: autograd added to a weight while its bucket was being reduced, or left a gradient in ``.grad``.
        """
        self.allow()
        for each in self._deferred:
            if each.was_late and self._is_reduced(each):
                raise WeightGradStoreError(
                    f"{each.name} got a gradient from another chunk of this rank after its own chunk's last W, when its bucket "
                    "was already being reduced over the data-parallel replicas, and it had none in earlier iterations: read the "
                    "weight in every iteration from the first one on, or turn overlap_grad_reduce off"
                )
            each.report()
            if any(weight.grad is not None and getattr(weight, "main_grad", None) is not None for weight in each.weights):
                raise WeightGradStoreError(
                    f"{each.name}: the iteration ended with a gradient in .grad that is not in main_grad; was .grad assigned?"
                )
            each.end()

    def _is_reduced(self, late: FinalGradient) -> bool:
        groups = getattr(self._chunk, "param_to_bucket_group", {})
        return any(getattr(groups.get(weight), "grad_reduce_handle", None) is not None for weight in late.weights)
