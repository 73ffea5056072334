"""Recording when data-parallel buckets are reduced and all-gathered.

A bucket group of megatron-core starts its collectives in `start_grad_sync` and `start_param_sync`, from DDP's own hooks. Each
instance gets methods that record the time around them. A collective's future has a callback: on the CPU it runs when the
collective has ended, on CUDA at once, on a stream that waits for the collective, so that an event recorded there has its end
time. Gloo's reduce-scatters have no future, nor have megatron-core's own handles (of a reduce-scatter that sums in fp32 after an
all-to-all, of layer-wise all-gathers): there a bucket counts as in flight until it has been waited for, which is an upper bound
of the time it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.zerobubble.plan.timeline import Activity, Bucket
from megatron.zerobubble.profiling.recorder import Exchange, OpRecorder


def record_buckets(chunks: Sequence[Any], stages: Sequence[int], recorder: OpRecorder) -> None:
    """Record every reduction and all-gather of a bucket in `recorder`, while it records.

    Args:
        chunks: this rank's chunks, wrapped by DDP.
        stages: the stage of each chunk.
        recorder: gets the records.
    """
    for chunk, stage in zip(chunks, stages, strict=True):
        groups = [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]
        for index, group in enumerate(groups):
            grads = sum(bucket.grad_data.nbytes for bucket in group.buckets)
            reduced = Bucket(stage=stage, index=index, num_bytes=grads)
            group.start_grad_sync = _Recorded(
                group, "grad_reduce_handle", group.start_grad_sync, Activity.REDUCE, reduced, recorder
            )
            if group.ddp_config.use_distributed_optimizer:
                weights = sum(bucket.param_data.nbytes for bucket in group.buckets)
                gathered = Bucket(stage=stage, index=index, num_bytes=weights)
                start = group.start_param_sync
                group.start_param_sync = _Recorded(group, "param_gather_handle", start, Activity.GATHER, gathered, recorder)


class _Recorded:
    """Replaces `start_grad_sync` or `start_param_sync` of one bucket group."""

    def __init__(
        self, group: Any, handle: str, start: Callable[..., None], activity: Activity, bucket: Bucket, recorder: OpRecorder
    ) -> None:
        self._group, self._handle, self._start = group, handle, start
        self._activity, self._bucket, self._recorder = activity, bucket, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        before = getattr(self._group, self._handle)
        exchange = self._recorder.exchange(self._activity, self._bucket) if before is None else None
        self._start(*args, **kwargs)
        if exchange is not None:
            setattr(self._group, self._handle, ended(exchange, getattr(self._group, self._handle)))


def ended(exchange: Exchange, handle: Any) -> Any:
    """End the record `exchange` when the collective behind `handle` ends.

    Args:
        exchange: the record that was begun right before the collective.
        handle: torch's coalescing manager or Work, or megatron-core's own; None if the collective was synchronous.

    Returns:
        The handle to wait for instead of `handle`; None if that is None.
    """
    if handle is None:
        exchange.over()
        return None
    try:
        future = getattr(handle, "works", [handle])[-1].get_future()
    except (AttributeError, RuntimeError):  # it has none, or its backend implements none
        return _RecordedHandle(exchange, handle)
    future.add_done_callback(lambda _: exchange.over())
    return handle


class _RecordedHandle:
    """A handle whose record ends when it has been waited for."""

    __slots__ = ("_exchange", "_handle")

    def __init__(self, exchange: Exchange, handle: Any) -> None:
        self._exchange, self._handle = exchange, handle

    def wait(self) -> None:
        self._handle.wait()
        self._exchange.over()
