"""Deferred wgrad GEMMs that run ahead of their W, and W that all-gathers a sharded input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.wgrad import sharing
from megatron.zerobubble.wgrad.deferring import WgradKey
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.linear import LinearSplit, split_linear
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support.pending import pending_bytes
from tests.support.ranks import RankPool

SEQUENCE, BATCH, IN, OUT, RANKS = 8, 2, 6, 10, 2
TOKENS = SEQUENCE * BATCH
PLAIN = WgradKernel(KernelKind.PLAIN, plain_accumulate)


# -- GEMMs that run ahead of their W --------------------------------------------------------------------------------------


def put(store: WeightGradStore, splits: list[SplitWeight], microbatch: int, *, chunk: int = 0, fused: bool = False) -> None:
    """A B that defers one wgrad GEMM per weight."""
    generator = torch.Generator().manual_seed(microbatch)
    store.begin(chunk, microbatch, fused=fused)
    for split in splits:
        store.put(split, torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator))
    store.end()


def make(num_weights: int = 2) -> tuple[WeightGradStore, list[SplitWeight]]:
    store = WeightGradStore(PLAIN)
    return store, [SplitWeight(f"w{index}", torch.nn.Parameter(torch.zeros(3, 2))) for index in range(num_weights)]


def test_gemms_that_run_ahead_leave_the_same_bits_and_are_reported_in_their_w() -> None:
    (store, splits), (plain, expected) = make(), make()
    reported: list[str] = []
    for split in splits:
        split.hooks.append(lambda name=split.name: reported.append(name))
    for microbatch in range(3):
        put(store, splits, microbatch)
        put(plain, expected, microbatch)
    assert (store.fill(17), store.run_ahead(6)) == (12, 6)  # both of microbatch 0, and one of microbatch 1
    assert reported == []
    assert store.pending == {(0, 0, 0), (0, 1, 0), (0, 2, 0)}
    for microbatch in range(3):
        store.run(0, microbatch)
        plain.run(0, microbatch)
        assert sorted(reported) == ["w0", "w1"]
        reported.clear()
    store.check_empty()
    for ours, theirs in zip(splits, expected, strict=True):
        assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_a_weight_used_twice_is_reported_once_when_half_of_it_ran_ahead() -> None:
    store, (split,) = make(1)
    reported: list[int] = []
    split.hooks.append(lambda: reported.append(1))
    put(store, [split, split], 0)
    assert store.run_ahead(6)
    store.run(0, 0)
    assert reported == [1]


def test_nothing_runs_ahead_where_it_must_not() -> None:
    store, splits = make()
    assert not store.run_ahead(6), "nothing waits"
    put(store, splits, 0)
    store.keeps_order = True
    assert not store.run_ahead(6), "what ops take is being measured"
    store.keeps_order = False
    store.begin(0, 1, fused=True)
    assert not store.run_ahead(6), "a full backward has wgrad GEMMs of its own"
    store.end()


def test_a_b_runs_its_own_gemms_ahead_only_if_its_w_is_next() -> None:
    """Else B would be the fused backward again, and its gradient late for nothing."""
    store, (split,) = make(1)
    store.due_at_once = frozenset({WgradKey(0, 1)})
    for microbatch, is_next in ((0, False), (1, True)):
        store.begin(0, microbatch, fused=False)
        store.put(split, torch.ones(4, 3), torch.ones(4, 2))
        assert bool(store.run_ahead(6)) is is_next
        store.end()
        store.run(0, microbatch)
    assert torch.equal(split.weight.grad, torch.full((3, 2), 8.0))


def test_a_gemm_that_is_too_large_waits() -> None:
    store = make(0)[0]
    head = SplitWeight("head", torch.nn.Parameter(torch.zeros(30, 2)))
    layer = SplitWeight("layer", torch.nn.Parameter(torch.zeros(3, 2)))
    store.begin(0, 0, fused=False)
    for split in (head, layer):
        store.put(split, torch.ones(4, len(split.weight)), torch.ones(4, 2))
    store.end()
    assert [store.run_ahead(6), store.run_ahead(6)] == [6, 0]
    assert head.weight.grad is None
    assert layer.weight.grad is not None
    store.run(0, 0)
    assert head.weight.grad is not None


def test_an_iteration_that_fails_forgets_the_gemms_that_ran_ahead() -> None:
    store, splits = make()
    reported: list[int] = []
    splits[0].hooks.append(lambda: reported.append(1))
    put(store, splits, 0)
    store.run_ahead(6)
    store.clear()
    put(store, [splits[1]], 0)
    store.run(0, 0)
    assert reported == []


# -- who gathers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathering:
    """What one microbatch of a linear did."""

    collectives_in_b: int
    collectives_in_w: int
    held_floats: int
    gradient: Tensor
    input_grad: Tensor


@pytest.mark.parametrize(
    ("linear", "fused", "in_b", "in_w", "held"),
    [
        ("column", False, 1, 1, TOKENS * IN // RANKS + TOKENS * OUT),
        ("column", True, 2, 0, 0),
        ("column of a whole input", False, 1, 0, TOKENS * IN + TOKENS * OUT),
        ("row", False, 0, 0, TOKENS * IN + TOKENS * OUT),
        ("row", True, 0, 0, 0),
    ],
)
def test_a_linear_has_its_collectives_and_its_memory(
    four_ranks: RankPool, linear: str, fused: bool, in_b: int, in_w: int, held: int
) -> None:
    for result, whole in four_ranks.run(run_gathering, linear, fused):
        assert (result.collectives_in_b, result.collectives_in_w, result.held_floats) == (in_b, in_w, held)
        assert torch.equal(result.gradient, whole.gradient)
        assert torch.equal(result.input_grad, whole.input_grad)


def run_gathering(rank: int, linear: str, fused: bool) -> tuple[Gathering, Gathering]:
    """Of a linear, and of the same one with the full backward."""
    with tensor_parallel_group() as group:
        return _gathering(linear, fused, group), _gathering(linear, True, group)


def _gathering(linear: str, fused: bool, group: dist.ProcessGroup) -> Gathering:
    store = WeightGradStore(PLAIN)
    weight = torch.nn.Parameter(torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)))
    how = LinearSplit(SplitWeight("weight", weight), store)
    x = _input(group, SEQUENCE // RANKS if linear == "column" else SEQUENCE).requires_grad_()
    options = {"sequence_parallel": linear == "column", "reduce_input_grad": linear == "column of a whole input"}
    output = split_linear(x * 1, weight, None, how, **options, group=group)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))  # gathered: the same on all ranks
    with CollectiveCount() as in_b:
        backward(store, 0, output, gradient, fused=fused)
    held = pending_bytes(store) // 4
    with CollectiveCount() as in_w:
        if not fused:
            store.run(0, 0)
    assert weight.grad is not None
    assert x.grad is not None
    return Gathering(in_b.count, in_w.count, held, weight.grad, x.grad)


@contextmanager
def tensor_parallel_group() -> Iterator[dist.ProcessGroup]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    yield parallel_state.get_tensor_model_parallel_group()
    parallel_state.destroy_model_parallel()


def backward(store: WeightGradStore, microbatch: int, output: Tensor, gradient: Tensor, *, fused: bool = False) -> None:
    store.begin(0, microbatch, fused=fused)
    output.backward(gradient)
    store.end()


def _input(group: dist.ProcessGroup, length: int) -> Tensor:
    """[length, batch, in], different on each rank of the group."""
    return torch.randn(length, BATCH, IN, generator=torch.Generator().manual_seed(10 + dist.get_rank(group)))


class CollectiveCount:
    """Counts the collectives that the split linear starts, by standing in front of the names it calls."""

    def __enter__(self) -> CollectiveCount:
        self.count = 0
        self._places = [(dist, "all_reduce"), (sharing, "_all_gather"), (sharing, "_reduce_scatter")]
        self._before = [getattr(owner, name) for owner, name in self._places]
        for (owner, name), function in zip(self._places, self._before, strict=True):
            setattr(owner, name, self._counting(function))
        return self

    def __exit__(self, *_: Any) -> None:
        for (owner, name), function in zip(self._places, self._before, strict=True):
            setattr(owner, name, function)

    def _counting(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counted


def test_a_gemm_of_a_weight_with_another_reader_waits_for_its_w() -> None:
    """Autograd adds to that weight in every B, and a GEMM that ran ahead of its W would come before another B's share."""
    store, (split,) = make(1)
    split.weight.main_grad = torch.zeros(3, 2)
    put(store, [split], 0)
    assert store.run_ahead(6)
    store.run(0, 0)
    split.weight.sum().backward()
    put(store, [split], 1)
    assert not store.run_ahead(6)
    store.run(0, 1)
