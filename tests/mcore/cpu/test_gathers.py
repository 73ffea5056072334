"""One all-gather of weights at a time per gloo group: the order of waits, and that real ones do not crash."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.mcore.cpu.gathers import one_at_a_time
from tests.support.ranks import RankPool

NUM_PAIRS = 600
"""Without waiting, one of four ranks dies in about every third run."""


class Group:
    """Of ranks."""


def buckets(group: Any) -> SimpleNamespace:
    return SimpleNamespace(intra_distributed_optimizer_instance_group=group, param_gather_handle=None)


def test_an_all_gather_waits_for_the_previous_one_of_its_group_only() -> None:
    log: list[str] = []

    def gather(buckets: Any, name: str, *, is_waited_for: bool = True) -> None:
        log.append(f"start {name}")
        buckets.param_gather_handle = mock.Mock(wait=lambda: log.append(f"wait {name}")) if is_waited_for else None

    start = one_at_a_time(gather)
    one, two, other = (buckets(group) for group in [Group()] * 2 + [Group()])
    start(one, "one")
    start(other, "other")
    start(two, "two")
    assert log == ["start one", "start other", "wait one", "start two"]
    two.param_gather_handle = None  # as after its wait
    gc.collect()
    start(one, "again", is_waited_for=False)
    start(two, "last")
    assert log[4:] == ["start again", "start last"]


def test_the_host_device_layer_installs_it() -> None:
    untouched = _ParamAndGradBucketGroup.start_param_sync
    with HostDevice():
        assert vars(_ParamAndGradBucketGroup.start_param_sync)["__wrapped__"] is untouched
    assert _ParamAndGradBucketGroup.start_param_sync is untouched


def gather_in_pairs(rank: int) -> bool:
    """Two buckets of one group, both in flight before the first is waited for."""

    def gather(buckets: Any) -> None:
        with _coalescing_manager(dist.group.WORLD, async_ops=True) as handle:
            dist.all_gather_into_tensor(buckets.weights, buckets.shard, async_op=True)
        buckets.param_gather_handle = handle

    start = one_at_a_time(gather)
    both = [buckets(dist.group.WORLD) for _ in range(2)]
    for index, each in enumerate(both):
        each.weights = torch.zeros(dist.get_world_size() * (100 + 1000 * index))
        each.shard = each.weights.chunk(dist.get_world_size())[rank]
    for number in range(NUM_PAIRS):
        for each in both:
            each.shard.fill_(number + rank)
            start(each)
        for each in both:
            each.param_gather_handle.wait()
            each.param_gather_handle = None
    expected = NUM_PAIRS - 1 + torch.arange(dist.get_world_size())
    return all((each.weights.view(dist.get_world_size(), -1) == expected[:, None]).all() for each in both)


def test_hundreds_of_pairs_survive(four_ranks: RankPool) -> None:
    assert four_ranks.run(gather_in_pairs) == [True] * 4
