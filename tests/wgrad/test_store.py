"""The store: what B puts, W takes, once; and nothing is kept longer than that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.deferring import WgradKey
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support.pending import pending_bytes

PLAIN = WgradKernel(KernelKind.PLAIN, plain_accumulate)


@pytest.fixture
def store() -> WeightGradStore:
    """A store of rank 3."""
    return WeightGradStore(PLAIN, rank=3)


def weight(name: str = "linear.weight", out: int = 2, in_: int = 3, *, main_grad: bool = True) -> SplitWeight:
    """A split weight of zeros."""
    parameter = torch.nn.Parameter(torch.zeros(out, in_))
    if main_grad:
        parameter.main_grad = torch.zeros(out, in_)  # type: ignore[attr-defined]
    return SplitWeight(name, parameter)


def operands(seed: int, split: SplitWeight, tokens: int = 4) -> tuple[Tensor, Tensor]:
    """(grad_output, input) for one use of the weight."""
    generator = torch.Generator().manual_seed(seed)
    out, in_ = split.weight.shape
    return torch.randn(tokens, out, generator=generator), torch.randn(tokens, in_, generator=generator)


def put(store: WeightGradStore, key: tuple[int, int], *uses: tuple[SplitWeight, Tensor, Tensor], fused: bool = False) -> None:
    """One whole B."""
    store.begin(*key, fused=fused)
    for use in uses:
        store.put(*use)
    store.end()


# -- what is computed ---------------------------------------------------------------------------------------------------


def test_fused_computes_in_b_and_leaves_nothing(store: WeightGradStore) -> None:
    split = weight()
    calls: list[bool] = []
    split.hooks.append(lambda: calls.append(bool(split.accumulator().any())))
    grad_output, input_ = operands(0, split)
    store.begin(0, 0, fused=True)
    store.put(split, grad_output, input_)
    assert torch.equal(split.accumulator(), grad_output.t() @ input_)
    assert calls == []
    assert pending_bytes(store) == 0
    store.end()
    assert calls == [True]
    assert store.pending == frozenset()
    store.check_empty()


def test_w_is_outside_of_autograd(store: WeightGradStore) -> None:
    split = weight(main_grad=False)
    grad_output, input_ = operands(0, split)
    put(store, (0, 0), (split, grad_output, input_.requires_grad_()))
    store.run(0, 0)
    assert not split.accumulator().requires_grad


# -- hooks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_run_once_a_microbatch_after_the_last_use(store: WeightGradStore, fused: bool) -> None:
    twice, once = weight("twice"), weight("once")
    seen: list[tuple[str, Tensor]] = []
    for split in (twice, once):
        split.hooks.append(lambda split=split: seen.append((split.name, split.accumulator().clone())))
    expected = torch.zeros(2, 3)
    for microbatch in range(2):
        uses = [(twice, *operands(1, twice)), (once, *operands(2, once)), (twice, *operands(3, twice))]
        put(store, (0, microbatch), *uses, fused=fused)
        if not fused:
            assert len(seen) == 2 * microbatch
            store.run(0, microbatch)
        for split, grad_output, input_ in uses:
            if split is twice:
                expected += grad_output.t() @ input_
        names = [name for name, _ in seen[2 * microbatch :]]
        assert sorted(names) == ["once", "twice"]
        assert torch.equal(dict(seen[2 * microbatch :])["twice"], expected)


def test_a_hook_sees_the_gradient_that_ddp_reads(store: WeightGradStore) -> None:
    """A gradient of the right shape, the flag that it has been added, and no gradient afterwards."""
    split = weight()
    seen: list[tuple[torch.Size, bool]] = []

    def hook() -> None:
        assert split.weight.grad is not None
        seen.append((split.weight.grad.shape, split.weight.grad_added_to_main_grad))

    split.hooks.append(hook)
    put(store, (0, 0), (split, *operands(0, split)))
    store.run(0, 0)
    assert seen == [(split.weight.shape, True)]
    assert split.weight.grad is None


def test_a_hook_does_not_cost_the_gradient_where_there_is_no_main_grad(store: WeightGradStore) -> None:
    split = weight(main_grad=False)
    calls: list[int] = []
    split.hooks.append(lambda: calls.append(1))
    for microbatch in range(2):
        put(store, (0, microbatch), (split, *operands(microbatch, split)))
        store.run(0, microbatch)
    expected = sum(d.t() @ x for d, x in (operands(microbatch, split) for microbatch in range(2)))
    assert split.weight.grad is not None
    assert torch.equal(split.weight.grad, expected)
    assert len(calls) == 2


# -- memory -------------------------------------------------------------------------------------------------------------


def test_pending_bytes_counts_a_shared_storage_once(store: WeightGradStore) -> None:
    query, key = weight("query"), weight("key")
    (dq, x), (dk, _) = operands(0, query), operands(1, key)
    put(store, (0, 0), (query, dq, x), (key, dk, x))
    assert pending_bytes(store) == (dq.numel() + dk.numel() + x.numel()) * 4
    both = torch.randn(4, 4)
    put(store, (0, 1), (query, both[:, :2], x), (key, both[:, 2:], x))
    assert pending_bytes(store) == (dq.numel() + dk.numel() + x.numel() + both.numel()) * 4
    store.run(0, 0)
    assert pending_bytes(store) == (both.numel() + x.numel()) * 4
    store.run(0, 1)
    assert pending_bytes(store) == 0


def test_each_entry_is_free_before_the_next_gemm_starts() -> None:
    alive_at_gemm: list[list[bool]] = []
    tensors: list[weakref.ref[Tensor]] = []

    def accumulate(accumulator: Tensor, grad_output: Tensor, input_: Tensor) -> None:
        alive_at_gemm.append([tensor() is not None for tensor in tensors])

    store = WeightGradStore(WgradKernel(KernelKind.PLAIN, accumulate))

    def uses() -> Iterator[tuple[SplitWeight, Tensor, Tensor]]:
        for index in range(3):
            split = weight(str(index))
            grad_output, input_ = operands(index, split)
            tensors.append(weakref.ref(grad_output))
            tensors.append(weakref.ref(input_))
            yield split, grad_output, input_
            del grad_output, input_

    store.begin(0, 0, fused=False)
    for split, grad_output, input_ in uses():
        store.put(split, grad_output, input_)
        del grad_output, input_
    store.end()
    assert all(tensor() is not None for tensor in tensors)
    store.run(0, 0)
    assert alive_at_gemm == [[True] * 6, [False] * 2 + [True] * 4, [False] * 4 + [True] * 2]
    assert all(tensor() is None for tensor in tensors)


def test_fused_keeps_no_tensor_until_the_end_of_b(store: WeightGradStore) -> None:
    split = weight()
    store.begin(0, 0, fused=True)
    grad_output, input_ = operands(0, split)
    held = [weakref.ref(grad_output), weakref.ref(input_)]
    store.put(split, grad_output, input_)
    del grad_output, input_
    assert [tensor() for tensor in held] == [None, None]


def test_clear_frees_everything_and_closes_an_open_b(store: WeightGradStore) -> None:
    split = weight()
    put(store, (0, 0), (split, *operands(0, split)))
    store.begin(0, 1, fused=False)
    store.put(split, *operands(1, split))
    store.clear()
    assert store.pending == frozenset()
    assert pending_bytes(store) == 0
    store.check_empty()
    store.begin(0, 0, fused=False)


# -- misuse -------------------------------------------------------------------------------------------------------------


def message_of(error: pytest.ExceptionInfo[WeightGradStoreError]) -> str:
    return str(error.value)


def test_the_error_of_a_w_without_a_b_names_the_waiting_ones(store: WeightGradStore) -> None:
    with pytest.raises(WeightGradStoreError) as error:
        store.run(1, 5)
    assert message_of(error).startswith("rank 3, chunk 1, microbatch 5: W has nothing to compute")
    assert "In the store: nothing." in message_of(error)
    split = weight()
    put(store, (1, 2), (split, *operands(0, split)))
    put(store, (0, 4), (split, *operands(0, split)))
    with pytest.raises(WeightGradStoreError) as error:
        store.run(1, 5)
    assert "In the store: chunk 0 microbatch 4, chunk 1 microbatch 2." in message_of(error)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("B0 W0 W0", "rank 3, chunk 0, microbatch 0: W has nothing to compute"),
        ("begin0 W0", "rank 3, chunk 0, microbatch 0: W has nothing to compute"),
        ("BW0 W0", "rank 3, chunk 0, microbatch 0: W has nothing to compute"),
        ("B0 begin0", "rank 3, chunk 0, microbatch 0: B runs a second time before its W"),
        ("begin0 begin1", "rank 3, chunk 0, microbatch 1: B begins while B of rank 3, chunk 0, microbatch 0 is open"),
        ("end0", "rank 3: a B ends that never began"),
    ],
)
def test_calls_out_of_turn(store: WeightGradStore, calls: str, message: str) -> None:
    split = weight()
    run: dict[str, Callable[[int], None]] = {
        "B": lambda microbatch: put(store, (0, microbatch), (split, *operands(0, split))),
        "BW": lambda microbatch: put(store, (0, microbatch), (split, *operands(0, split)), fused=True),
        "W": lambda microbatch: store.run(0, microbatch),
        "begin": lambda microbatch: store.begin(0, microbatch, fused=False),
        "end": lambda _: store.end(),
    }
    *before, last = calls.split()
    for call in before:
        run[call[:-1]](int(call[-1]))
    with pytest.raises(WeightGradStoreError, match=message):
        run[last[:-1]](int(last[-1]))


def test_an_iteration_that_ends_with_w_left_over_names_them_once(store: WeightGradStore) -> None:
    split = weight()
    for key in ((1, 0), (0, 2)):
        put(store, key, (split, *operands(0, split)))
    with pytest.raises(WeightGradStoreError) as error:
        store.check_empty()
    assert message_of(error) == (
        "rank 3: the iteration ended but W never ran for chunk 0 microbatch 2, chunk 1 microbatch 0. "
        "Their weight gradients are missing."
    )
    store.check_empty()


def _fill(store: WeightGradStore, splits: list[SplitWeight], microbatches: range) -> None:
    for microbatch in microbatches:
        put(store, (0, microbatch), *((split, *operands(10 * microbatch + i, split)) for i, split in enumerate(splits)))


def _weights() -> list[SplitWeight]:
    splits = [weight("a"), weight("b", 4), weight("c"), weight("d", 4)]
    for split, position in zip(splits, (1, 0, 1, 2), strict=True):
        split.position = position
    return splits


def _keys(count: int) -> list[WgradKey]:
    return [WgradKey(0, microbatch) for microbatch in range(count)]


def test_the_same_bits_as_one_by_one() -> None:
    together, apart = _weights(), _weights()
    store, other = WeightGradStore(PLAIN), WeightGradStore(PLAIN)
    _fill(store, together, range(3))
    _fill(other, apart, range(3))
    for microbatch in range(3):
        store.run_together(_keys(3), part=microbatch)
        other.run(0, microbatch)
    store.check_empty()
    for mine, theirs in zip(together, apart, strict=True):
        assert torch.equal(mine.accumulator(), theirs.accumulator())


def test_a_weight_that_ran_ahead_is_reported_with_the_first_part() -> None:
    store, seen = WeightGradStore(PLAIN), []
    splits = _weights()
    for split in splits[:2]:
        split.hooks.append(lambda split=split: seen.append(split.name))
    _fill(store, splits[:2], range(2))
    while store.run_ahead(6):  # all of "a", which is smaller than "b"
        pass
    store.run_together(_keys(2), part=0)
    assert seen[0] == "a"
    store.run_together(_keys(2), part=1)
    assert seen == ["a", "b"]
    store.check_empty()


def test_each_weight_is_reported_once_a_group_in_turn() -> None:
    store, seen = WeightGradStore(PLAIN), []
    splits = _weights()
    for split in splits:
        split.hooks.append(lambda split=split: seen.append(split.name))
    _fill(store, splits, range(2))
    held = pending_bytes(store)
    store.run_together(_keys(2), part=0)
    assert seen == ["b", "a"]
    assert store.pending == {(0, 0, 0), (0, 1, 0)}
    assert 0 < pending_bytes(store) < held
    with pytest.raises(WeightGradStoreError, match=r"ended but W never ran for chunk 0 microbatch 0, chunk 0 microbatch 1"):
        store.check_empty()
    _fill(store, splits, range(2))
    store.run_together(_keys(2), part=0)
    store.run_together(_keys(2), part=1)
    assert seen[-2:] == ["c", "d"]
    assert store.pending == frozenset()
    assert pending_bytes(store) == 0


def test_a_part_without_its_group_is_refused() -> None:
    store = WeightGradStore(PLAIN, rank=3)
    _fill(store, _weights(), range(2))
    with pytest.raises(
        WeightGradStoreError, match=r"rank 3, chunk 0, microbatch 1: W is part 2 of the group chunk 0 microbatch 0, chunk 0"
    ):
        store.run_together(_keys(2), part=1)
    with pytest.raises(WeightGradStoreError, match=r"rank 3, chunk 0, microbatch 2: W has nothing to compute"):
        store.run_together(_keys(3), part=0)
