"""The store of deferred weight gradients.

B leaves, for every split linear of a stage, what its weight gradient needs; W takes it and computes. The store belongs to one
rank and is an argument wherever it is needed. Entries are keyed by (chunk, microbatch) and freed as soon as their W has run.

Invariants: W only runs what B has put, once; an iteration ends with an empty store; a weight gradient is computed exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.gemm import WgradKernel


class SplitWeight:
    """One weight whose gradient is deferred, and those who wait for it.

    Attributes:
        name: the parameter's name, for messages.
        weight: [out, in]. Its gradient goes into ``weight.main_grad`` if it has one (megatron-core's DDP gives it one), else
            into ``weight.grad``.
        hooks: called after each W of this weight; DDP registers its grad-ready hook here.
        before: called before each W of this weight, to provide the accumulator.
        position: its turn among the weights of one W; those with the same take it in the order of B.
    """

    __slots__ = ("before", "hooks", "name", "position", "weight")

    def __init__(self, name: str, weight: torch.nn.Parameter) -> None:
        self.name = name
        self.weight = weight
        self.hooks: list[Callable[[], None]] = []
        self.before: list[Callable[[], None]] = []
        self.position = 0

    def prepare(self) -> None:
        """Tell whoever provides the accumulator that W is about to add to it."""
        for hook in self.before:
            hook()

    def accumulator(self) -> Tensor:
        """The tensor [out, in] that W adds to; created as zeros on first use where no DDP buffer exists."""
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is not None:
            return main_grad
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        return self.weight.grad

    def notify(self) -> None:
        """Tell DDP that this weight's gradient of one microbatch is in ``main_grad``.

        Its hook, written for autograd, wants to see a ``.grad`` and a flag that says it has been added already. The weight's
        own data stands in for that gradient: the right shape, and no allocation. Where there is no ``main_grad`` the gradient
        is in ``.grad`` itself, and stays.
        """
        if not self.hooks:
            return
        parameter = self.weight
        stands_in = getattr(parameter, "main_grad", None) is not None
        if stands_in:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            parameter.grad = parameter.data
        for hook in self.hooks:
            hook()
        if stands_in:
            parameter.grad = None


class _Entry(NamedTuple):
    split: SplitWeight
    grad_output: Tensor
    """[tokens, out]"""
    input: Tensor
    """[tokens, in]"""


class _Group:
    """What is left of the Ws of several microbatches that run together, weight by weight."""

    __slots__ = ("left", "microbatches", "num_parts", "size")

    def __init__(self, microbatches: Sequence[int], entries: Sequence[list[_Entry]]) -> None:
        self.microbatches = tuple(microbatches)
        self.num_parts = len(self.microbatches)
        weights: dict[int, list[_Entry]] = {}
        for of_microbatch in entries:
            for entry in of_microbatch:
                weights.setdefault(id(entry.split), []).append(entry)
        # Reversed, to be popped: each weight's tensors are free before the next one's product starts.
        self.left = sorted(weights.values(), key=lambda uses: uses[0].split.position)[::-1]
        self.size = self._size_left()

    def take(self, part: int) -> Iterator[list[_Entry]]:
        """The weights of one part: parts are of about the same size, and the last one is what is left."""
        leave = self.size * (self.num_parts - 1 - part) / self.num_parts
        while self.left and (part == self.num_parts - 1 or self._size_left() > leave):
            yield self.left.pop()

    def _size_left(self) -> int:
        return sum(uses[0].split.weight.numel() * len(uses) for uses in self.left)


class WeightGradStore:
    """What B has put and W has not yet taken, on one rank.

    Args:
        kernel: how to accumulate.
        rank: pipeline rank, for messages.
    """

    def __init__(self, kernel: WgradKernel, *, rank: int = 0) -> None:
        self.kernel = kernel
        self.rank = rank
        self._entries: dict[tuple[int, int], list[_Entry]] = {}
        self._groups: dict[int, _Group] = {}
        """By chunk, the group of which some parts have run."""
        self._open: list[_Entry] | None = None
        self._open_key: tuple[int, int] | None = None
        self._fused = False

    @property
    def pending(self) -> frozenset[tuple[int, int]]:
        """The (chunk, microbatch) pairs whose W has not run."""
        running = {(chunk, microbatch) for chunk, group in self._groups.items() for microbatch in group.microbatches}
        return frozenset(self._entries) | running

    @property
    def pending_bytes(self) -> int:
        """Bytes of the tensors held for W; a storage that several entries share counts once."""
        storages = {}
        for entries in (*self._entries.values(), *(uses for group in self._groups.values() for uses in group.left)):
            for entry in entries:
                for tensor in (entry.grad_output, entry.input):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def begin(self, chunk: int, microbatch: int, *, fused: bool) -> None:
        """Open the books for one B. With `fused` the weight gradient is computed at once (the classic backward, BW)."""
        key = (chunk, microbatch)
        if self._open_key is not None:
            raise WeightGradStoreError(f"{self._where(key)}: B begins while B of {self._where(self._open_key)} is open")
        if key in self._entries:
            raise WeightGradStoreError(f"{self._where(key)}: B runs a second time before its W")
        self._open, self._open_key, self._fused = [], key, fused

    def end(self) -> None:
        """Close the books of the B that `begin` opened. In fused mode the weights' hooks run now."""
        if self._open is None or self._open_key is None:
            raise WeightGradStoreError(f"rank {self.rank}: a B ends that never began")
        entries, key = self._open, self._open_key
        self._open = self._open_key = None
        if self._fused:
            for split in {id(entry.split): entry.split for entry in entries}.values():
                split.notify()
        else:
            self._entries[key] = entries

    def put(self, split: SplitWeight, grad_output: Tensor, input_: Tensor) -> None:
        """Leave one weight gradient for W. Called from the backward of a split linear.

        Args:
            split: whose gradient.
            grad_output: [tokens, out], any strides.
            input_: [tokens, in].
        """
        if self._open is None:
            raise WeightGradStoreError(
                f"rank {self.rank}: a backward pass reached the split weight {split.name} outside of any B. "
                "Run backward through the schedule, or remove the split before calling backward yourself."
            )
        if self._fused:
            self.kernel.accumulate(split.accumulator(), grad_output, input_)
            grad_output = input_ = grad_output.new_empty(0)
        self._open.append(_Entry(split, grad_output, input_))

    def run(self, chunk: int, microbatch: int) -> None:
        """W: compute what B of (chunk, microbatch) left, free it, and call each weight's hooks once."""
        self.run_together(chunk, (microbatch,), part=0)

    @torch.no_grad()
    def run_together(self, chunk: int, microbatches: Sequence[int], *, part: int) -> None:
        """One part of the Ws of several microbatches: all products of some of the weights, one microbatch after another.

        There are as many parts as microbatches, so that a part takes about as long as the W of one microbatch. To be called for
        part 0, 1, ... in turn; the first one wants the Bs of all the microbatches to have run.
        """
        if part == 0:
            taken = [self._take((chunk, microbatch)) for microbatch in microbatches]
            self._groups[chunk] = _Group(microbatches, taken)
            del taken
        group = self._groups.get(chunk)
        if group is None or group.microbatches != tuple(microbatches):
            raise WeightGradStoreError(
                f"{self._where((chunk, microbatches[part]))}: W is part {part + 1} of the group {list(microbatches)}, which has "
                "not begun. The plan's order of ops is wrong."
            )
        for uses in group.take(part):
            split = uses[0].split
            split.prepare()
            uses.reverse()
            while uses:  # popped one by one, so that each entry's tensors are free before the next product starts
                _, grad_output, input_ = uses.pop()
                self.kernel.accumulate(split.accumulator(), grad_output, input_)
                del grad_output, input_
            split.notify()
        if part == group.num_parts - 1:
            del self._groups[chunk]

    def _take(self, key: tuple[int, int]) -> list[_Entry]:
        entries = self._entries.pop(key, None)
        if entries is None:
            waiting = ", ".join(f"chunk {c} microbatch {m}" for c, m in sorted(self._entries)) or "nothing"
            raise WeightGradStoreError(
                f"{self._where(key)}: W has nothing to compute, because its B has not run or its W already "
                f"has. In the store: {waiting}. The plan's order of ops is wrong."
            )
        return entries

    def check_empty(self) -> None:
        """At the end of an iteration: complain about every W that was never run."""
        if self.pending:
            left = ", ".join(f"chunk {c} microbatch {m}" for c, m in sorted(self.pending))
            self.clear()
            raise WeightGradStoreError(
                f"rank {self.rank}: the iteration ended but W never ran for {left}. Their weight gradients are missing."
            )

    def clear(self) -> None:
        """Forget everything, for example after an error."""
        self._entries.clear()
        self._groups.clear()
        self._open = self._open_key = None

    def _where(self, key: tuple[int, int]) -> str:
        return f"rank {self.rank}, chunk {key[0]}, microbatch {key[1]}"
