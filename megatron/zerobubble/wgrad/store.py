"""The store of deferred weight gradients.

B leaves, for every split linear of a stage, what its weight gradient needs; W takes it and computes. The store belongs to one
rank and is an argument wherever it is needed. Entries are keyed by (chunk, microbatch) and freed as soon as their W has run.

Invariants: W only runs what B has put, once; an iteration ends with an empty store; a weight gradient is computed exactly once.

A product may run before its W, while a B waits for a collective (`run_ahead`). Each weight still adds its microbatches in
ascending order, to the same bits; and who waits for the weight hears of it in its W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.deferring import DeferringModule
from megatron.zerobubble.wgrad.gemm import WgradKernel
from megatron.zerobubble.wgrad.sharing import Gathered, WgradGather, WgradPolicy


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
    """[tokens, out], or this rank's slice of the tokens"""
    input: Tensor
    """[tokens, in], or this rank's slice of the tokens"""
    gather_grad_over: dist.ProcessGroup | None = None
    """Where `grad_output` is a slice: whose ranks hold the others."""
    gather_input_over: dist.ProcessGroup | None = None
    """Where `input` is a slice: whose ranks hold the others."""

    @property
    def is_whole(self) -> bool:
        """Whether both operands are here."""
        return self.gather_grad_over is None and self.gather_input_over is None


class _Step(NamedTuple):
    """One product of a W, or what is left of a weight's turn when its products have run ahead."""

    split: SplitWeight
    entry: _Entry | None
    is_first: bool
    """Of this weight, in this W or group of Ws."""
    is_last: bool


class _Operands:
    """A step on its way to its product: what is a slice is being gathered."""

    __slots__ = ("_grad_output", "_input", "step")

    def __init__(self, step: _Step) -> None:
        self.step = step._replace(entry=None)  # whose tensors are let go one by one
        self._grad_output: Tensor | Gathered | None = None
        self._input: Tensor | Gathered | None = None
        if step.entry is not None:
            _, grad_output, input_, grad_group, input_group = step.entry
            self._grad_output = grad_output if grad_group is None else Gathered(grad_output, grad_group)
            self._input = input_ if input_group is None else Gathered(input_, input_group)

    def whole(self) -> tuple[Tensor, Tensor] | None:
        """(grad_output [tokens, out], input [tokens, in]); None where there is no product left."""
        if self._grad_output is None or self._input is None:
            return None
        grad_output, input_ = (each.wait() if isinstance(each, Gathered) else each for each in (self._grad_output, self._input))
        return grad_output, input_


class _Uses(NamedTuple):
    """What is left of one weight in a W, or in the Ws of a group."""

    split: SplitWeight
    entries: list[_Entry]
    """In the order of their Bs; empty where all have run ahead."""

    @property
    def size(self) -> int:
        """In numbers of the weights to be multiplied with."""
        return self.split.weight.numel() * len(self.entries)

    def steps(self) -> list[_Step]:
        """Its products, or one step without."""
        entries: Sequence[_Entry | None] = self.entries or [None]
        last = len(entries) - 1
        return [_Step(self.split, entry, index == 0, index == last) for index, entry in enumerate(entries)]


class _Group:
    """What is left of the Ws of several microbatches that run together, weight by weight."""

    __slots__ = ("left", "microbatches", "num_parts", "size")

    def __init__(self, microbatches: Sequence[int], entries: Sequence[list[_Entry]], ahead: Iterable[SplitWeight]) -> None:
        self.microbatches = tuple(microbatches)
        self.num_parts = len(self.microbatches)
        weights = {id(split): _Uses(split, []) for split in ahead}
        for of_microbatch in entries:
            for entry in of_microbatch:
                weights.setdefault(id(entry.split), _Uses(entry.split, [])).entries.append(entry)
        # Reversed, to be popped: each weight's tensors are free before the next one's product starts.
        self.left = sorted(weights.values(), key=lambda uses: uses.split.position)[::-1]
        self.size = self._size_left()

    def take(self, part: int) -> list[_Step]:
        """The steps of one part, the last one first, to be popped. Parts are of about the same size; the last is what is left."""
        leave = self.size * (self.num_parts - 1 - part) / self.num_parts
        steps: list[_Step] = []
        while self.left and (part == self.num_parts - 1 or self._size_left() > leave):
            steps += self.left.pop().steps()
        return steps[::-1]

    def _size_left(self) -> int:
        return sum(uses.size for uses in self.left)


class WeightGradStore:
    """What B has put and W has not yet taken, on one rank.

    Args:
        kernel: how to accumulate.
        rank: pipeline rank, for messages.
        policy: what W gathers under sequence parallelism, and whether products may run before their W.
    """

    def __init__(self, kernel: WgradKernel, *, rank: int = 0, policy: WgradPolicy | None = None) -> None:
        self.kernel = kernel
        self.rank = rank
        self.policy = WgradPolicy() if policy is None else policy
        self.keeps_order = False
        """While True no product runs before its W: for iterations in which what an op takes and holds is measured."""
        self.due_at_once: frozenset[tuple[int, int]] = frozenset()
        """The (chunk, microbatch) pairs whose W the plan has right after their B."""
        self._entries: dict[tuple[int, int], list[_Entry]] = {}
        self._groups: dict[int, _Group] = {}
        """By chunk, the group of which some parts have run."""
        self._open: list[_Entry] | None = None
        self._open_key: tuple[int, int] | None = None
        self._open_modules: list[DeferringModule] = []
        self._modules: dict[tuple[int, int], list[DeferringModule]] = {}
        """Modules that keep back weight gradients themselves, by W."""
        self._fused = False
        self._ahead: dict[tuple[int, int], list[SplitWeight]] = {}
        """Weights whose product has run before its W, by W."""

    @property
    def pending(self) -> frozenset[tuple[int, int]]:
        """The (chunk, microbatch) pairs whose W has not run."""
        running = {(chunk, microbatch) for chunk, group in self._groups.items() for microbatch in group.microbatches}
        return frozenset(self._entries) | running

    @property
    def pending_bytes(self) -> int:
        """Bytes of the tensors held for W; a storage that several entries share counts once. What deferring modules hold in
        queues of their own is not known here."""
        storages = {}
        for entries in (*self._entries.values(), *(uses.entries for group in self._groups.values() for uses in group.left)):
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
        """Close the books of the B that `begin` opened. In fused mode modules compute and weights' hooks run now."""
        if self._open is None or self._open_key is None:
            raise WeightGradStoreError(f"rank {self.rank}: a B ends that never began")
        entries, key = self._open, self._open_key
        self._open = self._open_key = None
        modules, self._open_modules = self._open_modules, []
        for module in modules:
            module.after_backward(key)
        if self._fused:
            for module in modules:
                module.compute(key)
            for split in {id(entry.split): entry.split for entry in entries}.values():
                split.notify()
        else:
            self._entries[key] = entries
            self._modules[key] = modules

    def w_gathers(self, what: WgradGather) -> bool:
        """Whether the B that is open leaves the gathering of `what` (INPUT or BOTH) to W. A fused B has no W to leave it to."""
        if self._fused or self.policy.gather is WgradGather.KEEP:
            return False
        return what is WgradGather.INPUT or self.policy.gather is WgradGather.BOTH

    def put(
        self,
        split: SplitWeight,
        grad_output: Tensor,
        input_: Tensor,
        *,
        gather_grad_over: dist.ProcessGroup | None = None,
        gather_input_over: dist.ProcessGroup | None = None,
    ) -> None:
        """Leave one weight gradient for W. Called from the backward of a split linear.

        Args:
            split: whose gradient.
            grad_output: [tokens, out], any strides.
            input_: [tokens, in].
            gather_grad_over: `grad_output` is this rank's slice of the tokens, which W gathers over this group.
            gather_input_over: the same for `input_`.
        """
        self._check_open(split.name)
        assert self._open is not None
        if self._fused:
            self._accumulate(split, grad_output, input_)
            grad_output = input_ = grad_output.new_empty(0)
        self._open.append(_Entry(split, grad_output, input_, gather_grad_over, gather_input_over))

    def defer(self, module: DeferringModule) -> None:
        """Leave for W what a module keeps back itself. Called when its backward runs."""
        self._check_open(module.name)
        assert self._open_key is not None
        module.note(self._open_key)
        self._open_modules.append(module)

    @torch.no_grad()
    def run_ahead(self, most: int) -> bool:
        """Compute one product that waits, now; its W then has one less to compute.

        Called from a B whose collective is in flight. It is the first of the oldest W that fits; where none waits, and this B's W
        comes right after it anyway, one that this B has put. What has to be gathered first is left alone: it would queue behind
        that collective. The choice follows from the order of ops alone, so that data-parallel peers make the same one.

        Args:
            most: largest weight, in elements, whose product may run: B's gradient goes upstream later by what it takes longer
                than the collective.

        Returns:
            Whether there was one.
        """
        if self._fused or self.keeps_order or not self.policy.runs_ahead:
            return False
        waiting = [*self._entries.items()]  # in the order of their Bs, and so per chunk in that of their Ws
        if self._open is not None and self._open_key in self.due_at_once:
            waiting.append((self._open_key, self._open))
        for key, entries in waiting:
            for index, entry in enumerate(entries):
                # All hold for every product of a weight or for none, so no older one of this weight is passed over. A weight that
                # is given an accumulator for the time of its W has none now.
                if entry.is_whole and entry.split.weight.numel() <= most and not entry.split.before:
                    del entries[index]
                    self._accumulate(entry.split, entry.grad_output, entry.input)
                    self._ahead.setdefault(key, []).append(entry.split)
                    return True
        return False

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
            keys = [(chunk, microbatch) for microbatch in microbatches]
            taken = [self._take(key) for key in keys]
            ahead = [split for key in keys for split in self._ahead.pop(key, ())]
            self._groups[chunk] = _Group(microbatches, taken, ahead)
            del taken
        group = self._groups.get(chunk)
        if group is None or group.microbatches != tuple(microbatches):
            raise WeightGradStoreError(
                f"{self._where((chunk, microbatches[part]))}: W is part {part + 1} of the group {list(microbatches)}, which has "
                "not begun. The plan's order of ops is wrong."
            )
        steps = group.take(part)
        upcoming = _Operands(steps.pop()) if steps else None
        while upcoming is not None:  # one by one, so that each entry's tensors are free before the product after the next starts
            (split, _, is_first, is_last), operands = upcoming.step, upcoming.whole()
            upcoming = _Operands(steps.pop()) if steps else None  # gathers, if it does, beside this product
            if is_first:
                split.prepare()
            if operands is not None:
                self._accumulate(split, *operands)
            del operands
            if is_last:
                split.notify()
        if part == group.num_parts - 1:
            del self._groups[chunk]
            for microbatch in microbatches:
                for module in self._modules.pop((chunk, microbatch), ()):
                    module.compute((chunk, microbatch))

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
        """Forget everything, for example after an error.

        What deferring modules have in their queues cannot be taken out of them: they complain at their next W.
        """
        self._entries.clear()
        self._groups.clear()
        self._ahead.clear()
        self._modules.clear()
        self._open_modules.clear()
        self._open = self._open_key = None

    def _check_open(self, name: str) -> None:
        if self._open is None:
            raise WeightGradStoreError(
                f"rank {self.rank}: a backward pass reached the split weight {name} outside of any B. "
                "Run backward through the schedule, or remove the split before calling backward yourself."
            )

    def _accumulate(self, split: SplitWeight, grad_output: Tensor, input_: Tensor) -> None:
        accumulator = split.accumulator()
        if grad_output.shape[0]:  # an expert without tokens adds nothing, and not every kernel takes a sum over no rows
            self.kernel.accumulate(accumulator, grad_output, input_)

    def _where(self, key: tuple[int, int]) -> str:
        return f"rank {self.rank}, chunk {key[0]}, microbatch {key[1]}"
