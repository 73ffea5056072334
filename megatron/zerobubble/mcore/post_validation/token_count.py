"""The number of tokens of an iteration on every pipeline rank, without a barrier: `--calculate-per-token-loss`.

With per-token loss gradients are divided by the number of tokens of the global batch, which only the rank with the last stage
knows. megatron-core broadcasts it over the pipeline once all passes are over, which makes every rank wait for the slowest.
Without post-validation nothing is lost by that, since the optimizer step waits, too. With it the stagger would be.

The number is known long before: after the last F of the last stage, on which the last B of every stage depends. From there it is
sent to each rank through host memory, and summed over the replicas of that rank before. Nobody waits for a rank that waits for
anybody: a rank that needs the number has run a B that depends on that F.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.optimizer.post_validation import group_of
from megatron.zerobubble.runtime.threads import start_thread


class TokenCount:
    """One rank's share in sending the number of tokens. Every rank of the world must construct it at the same point.

    Args:
        pipeline: global ranks of this pipeline, by pipeline rank.
        replicas: global ranks of this stage's replicas, data-parallel and context-parallel, this one included.
        rank: this process's pipeline rank.
        source: the pipeline rank of the last stage.
        device: where the loss function's counts are.
    """

    def __init__(
        self,
        *,
        pipeline: Sequence[int],
        replicas: Sequence[int],
        rank: int,
        source: int,
        device: torch.device,
    ) -> None:
        self._pipeline = tuple(pipeline)
        self._source = self._pipeline[source]
        self._is_source = rank == source
        self._device = device
        # gloo: like the statistics of the optimizer step these numbers never queue behind a kernel (ADR 10)
        self._along = group_of(self._pipeline, backend="gloo")
        self._across = group_of(tuple(replicas), backend="gloo")
        self._sent: Future[int] | None = None

    def send(self, count: Tensor) -> None:
        """Send the number to all other ranks, from a thread. To be called on the source, behind its last F of the last stage.

        Args:
            count: integer scalar on the device, this replica's number of tokens; may be changed afterwards.
        """
        assert self._is_source
        on_host, is_ready = count.detach().clone(), None
        if self._device.type == "cuda":
            on_host = torch.empty_like(count, device="cpu", pin_memory=True)
            on_host.copy_(count, non_blocking=True)
            is_ready = torch.cuda.Event()
            is_ready.record()
        self._sent = Future()
        start_thread(partial(self._send, self._sent, on_host, is_ready), name="token-count", device=self._device)

    def total(self) -> int:
        """The number of tokens of the global batch. Every rank of the pipeline must call it once per iteration, at its end."""
        if self._is_source:
            assert self._sent is not None, "the last stage has run no F"
            sent, self._sent = self._sent, None
            return sent.result()
        values = torch.empty(1, dtype=torch.int64)
        dist.recv(values, self._source, group=self._along)
        return int(values)

    def close(self) -> None:
        """Destroy the groups. Every rank of the world must call it."""
        dist.destroy_process_group(self._along)
        dist.destroy_process_group(self._across)

    def _send(self, sent: Future[int], on_host: Tensor, is_ready: torch.cuda.Event | None) -> None:
        try:
            if is_ready is not None:
                is_ready.synchronize()
            values = on_host.reshape(1).to(torch.int64)
            dist.all_reduce(values, group=self._across)
            works = [dist.isend(values, peer, group=self._along) for peer in self._pipeline if peer != self._source]
        except Exception as error:  # noqa: BLE001 - raised by `total`
            sent.set_exception(error)
            return
        sent.set_result(int(values))  # before the sends are over: they wait for receivers, who are still in their passes
        for work in works:
            assert work is not None
            with suppress(RuntimeError):  # a receiver that is gone ends the job by itself
                work.wait()
