"""Ws of several microbatches together: weight by weight, in parts that take about as long as one microbatch's W."""

from __future__ import annotations

import pytest
import torch

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.wgrad.test_store import PLAIN, operands, put, weight


def _fill(store: WeightGradStore, splits: list[SplitWeight], microbatches: range) -> None:
    for microbatch in microbatches:
        put(store, (0, microbatch), *((split, *operands(10 * microbatch + i, split)) for i, split in enumerate(splits)))


def _weights() -> list[SplitWeight]:
    splits = [weight("a"), weight("b", 4), weight("c"), weight("d", 4)]
    for split, position in zip(splits, (1, 0, 1, 2), strict=True):
        split.position = position
    return splits


def test_the_same_bits_as_one_by_one() -> None:
    together, apart = _weights(), _weights()
    store, other = WeightGradStore(PLAIN), WeightGradStore(PLAIN)
    _fill(store, together, range(3))
    _fill(other, apart, range(3))
    for microbatch in range(3):
        store.run_together(0, range(3), part=microbatch)
        other.run(0, microbatch)
    store.check_empty()
    for mine, theirs in zip(together, apart, strict=True):
        assert torch.equal(mine.accumulator(), theirs.accumulator())


def test_each_weight_is_opened_and_closed_once_a_group_in_turn() -> None:
    store, seen = WeightGradStore(PLAIN), []
    splits = _weights()
    for split in splits:
        split.before.append(lambda split=split: seen.append(f"open {split.name}"))
        split.hooks.append(lambda split=split: seen.append(f"close {split.name}"))
    _fill(store, splits, range(2))
    held = store.pending_bytes
    store.run_together(0, range(2), part=0)
    assert seen == ["open b", "close b", "open a", "close a"]
    assert store.pending == {(0, 0), (0, 1)}
    assert 0 < store.pending_bytes < held
    with pytest.raises(WeightGradStoreError, match=r"ended but W never ran for chunk 0 microbatch 0, chunk 0 microbatch 1"):
        store.check_empty()
    _fill(store, splits, range(2))
    store.run_together(0, range(2), part=0)
    store.run_together(0, range(2), part=1)
    assert seen[-4:] == ["open c", "close c", "open d", "close d"]
    assert store.pending == frozenset()
    assert store.pending_bytes == 0


def test_a_part_without_its_group_is_refused() -> None:
    store = WeightGradStore(PLAIN, rank=3)
    _fill(store, _weights(), range(2))
    with pytest.raises(WeightGradStoreError, match=r"rank 3, chunk 0, microbatch 1: W is part 2 of the group \[0, 1\]"):
        store.run_together(0, range(2), part=1)
    with pytest.raises(WeightGradStoreError, match=r"rank 3, chunk 0, microbatch 2: W has nothing to compute"):
        store.run_together(0, range(3), part=0)
