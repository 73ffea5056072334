"""When the record of a bucket's collective ends, by the kind of handle that megatron-core waits for.

Times are simulated; not run on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.reduce_scatter_with_fp32_accumulation import _ReduceScatterWithFP32AccumulationWorkHandle

from megatron.zerobubble.mcore.ddp.record_buckets import ended
from megatron.zerobubble.plan.timeline import Activity, Bucket
from megatron.zerobubble.profiling.recorder import Exchange


class CudaMarks:
    """Marks as on CUDA: numbers that count up."""

    on_cuda = True

    def __init__(self) -> None:
        self.count = 0

    def now(self) -> int:
        self.count += 1
        return self.count


class Work:
    """torch's Work, which is over when `complete` is called."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()
        self.waits = 0

    def get_future(self) -> torch.futures.Future[None]:
        return self.future

    def complete(self) -> None:
        self.future.set_result(None)

    def wait(self) -> None:
        self.waits += 1


class Coalesced:
    """torch's coalescing manager."""

    def __init__(self, work: Work) -> None:
        self.works = [work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def exchange() -> Exchange:
    marks: Any = CudaMarks()
    return Exchange(Activity.REDUCE, Bucket(stage=0, index=0, num_bytes=8), marks)


@pytest.mark.parametrize("handle_of", [lambda work: work, Coalesced], ids=["work", "coalesced"])
def test_a_record_on_cuda_ends_with_the_collective(handle_of: Any) -> None:
    work, record = Work(), exchange()
    handle = ended(record, handle_of(work))
    assert record.end is None
    work.complete()
    assert record.end is not None
    handle.wait()
    assert work.waits == 1


def test_a_reduce_scatter_accumulated_in_fp32_ends_when_it_has_been_waited_for() -> None:
    work, record, shard = Work(), exchange(), torch.zeros(2)
    received = torch.tensor([1.0, 2.0, 10.0, 20.0])
    handle = ended(record, _ReduceScatterWithFP32AccumulationWorkHandle(work, received, shard, 2))
    work.complete()
    assert record.end is None, "the sum over ranks comes after the all-to-all"
    handle.wait()
    assert record.end is not None
    assert work.waits == 1
    assert torch.equal(shard, torch.tensor([11.0, 22.0]))


def test_a_layer_wise_all_gather_ends_when_it_has_been_waited_for() -> None:
    kind = getattr(param_and_grad_buffer, "_LayerwiseAllGatherHandle", None)
    if kind is None:
        pytest.skip("this megatron-core has no layer-wise all-gathers")
    works, record = [Work(), Work()], exchange()
    handle = ended(record, kind(works))
    assert record.end is None
    handle.wait()
    assert record.end is not None
    assert [work.waits for work in works] == [0, 1]
