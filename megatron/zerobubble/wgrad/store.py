"""The store of deferred weight gradients.

B leaves, for every split linear of a stage, what its weight gradient needs (`put`); W takes it and computes (`run`). The store
belongs to one rank and is an argument wherever it is needed. Entries are keyed by chunk, microbatch and slice (`WgradKey`) and
freed as soon as their W has run.

Invariants: W only runs what B has put, once; an iteration ends with an empty store; a weight gradient is computed exactly once.

The store works while a B is open. A backward pass outside of any B, by a caller of its own, gets its weight gradients at once, as
if nothing were split (ADR 43).

A GEMM may run before its W, beside a collective of F or B (`run_ahead`). Each weight still adds its microbatches in
ascending order, to the same bits, and its hooks are called in its W as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.deferring import DeferringModule, WgradKey
from megatron.zerobubble.wgrad.gemm import WgradKernel
from megatron.zerobubble.wgrad.grouping import WgradGroup
from megatron.zerobubble.wgrad.sharing import Gathered
from megatron.zerobubble.wgrad.split_weight import DeferredGemm, SplitWeight


class GraphMemory:
    """Where the outputs of CUDA graphs are: in a pool of memory whose parts are handed out again, to graphs of later passes."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def add(self, outputs: Sequence[object]) -> None:
        """Note where the tensors among the outputs of a graph are. A graph has the same ones in every replay."""
        self._addresses.update(each.untyped_storage().data_ptr() for each in outputs if isinstance(each, Tensor))

    def own(self, operand: Any) -> Any:
        """An operand of W, or a copy of it if it lies there; of a list, of each that does. Others than plain tensors do not."""
        if isinstance(operand, list):
            return [self.own(each) for each in operand]
        if not self._addresses or type(operand) is not Tensor or operand.untyped_storage().data_ptr() not in self._addresses:
            return operand
        return operand.clone()


class WeightGradStore:
    """What B has put and W has not yet taken, on one rank.

    Args:
        kernel: how to accumulate.
        rank: pipeline rank, for messages.
    """

    def __init__(self, kernel: WgradKernel, *, rank: int = 0) -> None:
        self.kernel = kernel
        self.rank = rank
        self.graph_memory = GraphMemory()
        """Operands of W that lie there are copied."""
        self.keeps_order = False
        """While True no GEMM runs before its W: for iterations that measure the time and memory of each op."""
        self.runs_ahead = True
        """While False none does in other iterations, either."""
        self.due_at_once: frozenset[WgradKey] = frozenset()
        """Those whose W comes right after their B in the plan."""
        self._entries: dict[WgradKey, list[DeferredGemm]] = {}
        self._groups: dict[int, WgradGroup] = {}
        """By chunk, the group some of whose parts have run."""
        self._open: list[DeferredGemm] | None = None
        self._open_key: WgradKey | None = None
        self._open_modules: list[DeferringModule] = []
        self._modules: dict[WgradKey, list[DeferringModule]] = {}
        """Modules that defer weight gradients in a queue of their own, by W."""
        self._fused = self._at_once = False
        self._first: dict[int, tuple[list[ref[SplitWeight]], list[ref[DeferringModule]]]] = {}
        """By chunk, see `first`. They hold hooks of the model, which may be gone before the store."""
        self._ahead: dict[WgradKey, list[SplitWeight]] = {}
        """Weights a GEMM of which has run before its W, by W."""
        self._outside: dict[int, SplitWeight] = {}
        """By identity, weights that a backward pass outside of any B has reached and whose hooks it has not called."""

    @property
    def pending(self) -> frozenset[WgradKey]:
        """Those whose W has not run."""
        running = {key for group in self._groups.values() for key in group.keys}
        return frozenset(self._entries) | running

    def begin(self, chunk: int, microbatch: int, slice: int = 0, *, fused: bool, at_once: bool = False) -> None:
        """Start to collect the weight gradients of one B. With `fused` they are computed at once (the full backward, BW).

        With `at_once` the hooks of each weight that the chunk's first B has used once are called as soon as autograd has no more
        for it, not at the end: a weight of several layers that are recomputed apart comes to its end several times.
        """
        key = WgradKey(chunk, microbatch, slice)
        if self._open_key is not None:
            raise WeightGradStoreError(f"{self._where(key)}: B begins while B of {self._where(self._open_key)} is open")
        if key in self._entries:
            raise WeightGradStoreError(f"{self._where(key)}: B runs a second time before its W")
        self._open, self._open_key, self._fused = [], key, fused
        self._at_once = at_once

    def end(self) -> None:
        """End the B that `begin` started. In fused mode deferring modules compute and the weights' hooks are called now."""
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
                if not (self._at_once and split.is_reported):
                    split.is_due = False
                    split.notify()
        else:
            self._entries[key] = entries
            self._modules[key] = modules
            if key.chunk not in self._first:
                splits = [*self._ahead.get(key, ()), *(entry.split for entry in entries)]
                self._first[key.chunk] = [ref(split) for split in splits], [ref(module) for module in modules]

    def first(self, chunk: int) -> tuple[list[SplitWeight], list[DeferringModule]]:
        """The weights and the modules that the first B of a chunk has left to W, in its order and as often as it used them."""
        splits, modules = self._first.get(chunk, ((), ()))
        return [split for each in splits if (split := each()) is not None], [m for each in modules if (m := each()) is not None]

    @property
    def defers(self) -> bool:
        """Whether a B is open that leaves its weight gradients to a W. A fused B has none."""
        return self._open is not None and not self._fused

    def put(
        self,
        split: SplitWeight,
        grad_output: Tensor,
        input_: Tensor,
        *,
        gather_over: dist.ProcessGroup | None = None,
    ) -> None:
        """Leave one weight gradient for W. Called from the backward of a split linear; outside of a B, computes it at once.

        Args:
            split: whose gradient.
            grad_output: [tokens, out], any strides.
            input_: [tokens, in].
            gather_over: `input_` is this rank's slice of the tokens, which W gathers over this group.
        """
        if self._open is None:
            self._run_at_once(split, grad_output, input_)
            return
        if self._fused:
            self._accumulate(split, grad_output, input_)
            if self._at_once:
                self._await_end(split)
            grad_output = input_ = grad_output.new_empty(0)
        input_ = self.graph_memory.own(input_)
        self._open.append(DeferredGemm(split, grad_output, input_, gather_over))

    def _await_end(self, split: SplitWeight) -> None:
        """Let a weight be reported when autograd has no more for it."""
        assert self._open_key is not None
        if split.is_reported:
            raise WeightGradStoreError(
                f"{self._where(self._open_key)}: {split.name} is used several times in this backward pass, and once in the first "
                "one: its gradient was reported before it was complete. Use it equally often in every microbatch, or turn "
                "overlap_grad_reduce off"
            )
        splits, _ = self._first.get(self._open_key.chunk, ((), ()))
        split.is_due = splits.count(ref(split)) == 1

    def defer(self, module: DeferringModule) -> None:
        """Queue a module that stores its own weight-gradient inputs; its W runs with the others of this microbatch.

        Called when its backward runs. Outside of a B, its W runs at the end of the backward pass. Nothing is queued by a backward
        pass that does not accumulate into its weights, such as that of `torch.autograd.grad` for an activation.
        """
        if not module.is_wanted:
            module.forget()
            Variable._execution_engine.queue_callback(module.drop)
            return
        if self._open_key is None:
            module.compute_after_backward()
            return
        module.note(self._open_key)
        self._open_modules.append(module)

    @torch.no_grad()
    def run_ahead(self, most: int) -> int:
        """Compute one deferred GEMM now, ahead of its W, which then has one less to compute.

        Called beside a collective of F or B. It is the first GEMM of the oldest W that fits; if no W is deferred, and the W of
        the open B comes right after it anyway, one that this B has put. A GEMM whose operands have to be gathered is left alone:
        the gather would queue behind that collective. The choice follows from the order of ops alone, so that all data-parallel
        replicas make the same one.

        Args:
            most: largest weight, in elements, whose GEMM may run: the pass takes longer by the time that the GEMM takes beyond
                the collective.

        Returns:
            Elements of the weight whose GEMM ran, or of the weights of a module that has its own; 0: none ran.
        """
        if (self._open is not None and self._fused) or self.keeps_order or not self.runs_ahead:
            return 0
        waiting = [*self._entries.items()]  # in the order of their Bs, and so per chunk in that of their Ws
        if self._open is not None and self._open_key in self.due_at_once:
            waiting.append((self._open_key, self._open))
        for key, entries in waiting:
            for index, entry in enumerate(entries):
                # All three hold for every GEMM of a weight or for none, so no older one of this weight is passed over. To one
                # with other readers autograd adds in B, and the order of the two is the plan's; until its first B has ended, two
                # terms are the same in either order.
                split = entry.split
                if entry.gather_over is None and split.weight.numel() <= most and not split.has_share:
                    del entries[index]
                    self._accumulate(entry.split, entry.grad_output, entry.input)
                    self._ahead.setdefault(key, []).append(entry.split)
                    return split.weight.numel()
            for module in self._modules.get(key, ()):
                if module.num_elements <= most and module.compute_ahead(key):
                    return module.num_elements
        return 0

    def fill(self, most: int) -> int:
        """`run_ahead` as often as the weights together have at most this many elements. Returns how many they have."""
        left = most
        while left > 0 and (elements := self.run_ahead(left)):
            left -= elements
        return most - left

    @torch.no_grad()
    def run(self, chunk: int, microbatch: int, slice: int = 0) -> None:
        """W: compute what B of the same chunk, microbatch and slice left, free it, and call each weight's hooks once."""
        key = WgradKey(chunk, microbatch, slice)
        gemms = self._take(key)
        gemms.sort(key=_place_of_gemm)
        self._notify_ahead((key,), gemms)
        self._run(gemms)
        for module in sorted(self._modules.pop(key, ()), key=_place):
            module.compute(key)

    @torch.no_grad()
    def run_together(
        self, keys: Sequence[WgradKey], *, part: int, growing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """One part of several Ws of a chunk: all GEMMs of some weights, one W after another.

        There are as many parts as Ws, so that a part takes about as long as one of them. Call it for part 0, 1, ... in turn,
        after the Bs of all of them have run. So gradients become final all along the Ws.

        Args:
            keys: the Ws, in their order.
            part: which part.
            growing: a context for the Ws of a module but its last one: what its hooks report in them is not final.
        """
        chunk, together = keys[0].chunk, ", ".join(map(str, keys))
        if part == 0:
            group = WgradGroup(keys, [self._take(key) for key in keys], [self._modules.pop(key, []) for key in keys])
            self._groups[chunk] = group
            self._notify_ahead(keys, group.left)
        found = self._groups.get(chunk)
        if found is None or found.keys != tuple(keys):
            raise WeightGradStoreError(
                f"{self._where(keys[part])}: W is part {part + 1} of the group {together}, which has not begun. The plan's "
                "order of ops is wrong."
            )
        gemms, modules = found.take(part)
        self._run(gemms)
        for module, own in modules:
            for key in own[:-1]:
                with growing():
                    module.compute(key)
            module.compute(own[-1])
        if part == found.num_parts - 1:
            del self._groups[chunk]

    def _notify_ahead(self, keys: Sequence[WgradKey], gemms: Sequence[DeferredGemm]) -> None:
        """Call the hooks of each weight whose GEMMs all ran ahead of these Ws, to which `gemms` are left."""
        ahead = {id(each): each for key in keys for each in self._ahead.pop(key, ())}
        left = {id(gemm.split) for gemm in gemms} if ahead else set()
        for split in ahead.values():
            if id(split) not in left:
                split.notify()

    def _run(self, gemms: list[DeferredGemm]) -> None:
        """Compute GEMMs in their order, and call each weight's hooks after its last one. Empties the list."""
        last = {id(gemm.split): number for number, gemm in enumerate(gemms)}
        number = 0
        gemms.reverse()
        upcoming = _started(gemms)
        while upcoming is not None:  # one by one, so that each one's tensors are free before the GEMM after the next
            split, grad_output, input_ = upcoming
            upcoming = _started(gemms)  # its gather overlaps with this GEMM
            self._accumulate(split, grad_output, input_.wait() if isinstance(input_, Gathered) else input_)
            del grad_output, input_
            if last[id(split)] == number:
                split.notify()
            number += 1

    def _take(self, key: WgradKey) -> list[DeferredGemm]:
        entries = self._entries.pop(key, None)
        if entries is None:
            waiting = ", ".join(map(str, sorted(self._entries))) or "nothing"
            raise WeightGradStoreError(
                f"{self._where(key)}: W has nothing to compute, because its B has not run or its W already "
                f"has. In the store: {waiting}. The plan's order of ops is wrong."
            )
        return entries

    def check_empty(self) -> None:
        """At the end of an iteration: raise WeightGradStoreError if any W was never run."""
        if self.pending:
            left = ", ".join(map(str, sorted(self.pending)))
            self.clear()
            raise WeightGradStoreError(
                f"rank {self.rank}: the iteration ended but W never ran for {left}. Their weight gradients are missing."
            )

    def clear(self) -> None:
        """Drop everything, for example after an error.

        What deferring modules hold in their own queues stays there: they raise at their next W.
        """
        self._entries.clear()
        self._groups.clear()
        self._ahead.clear()
        self._modules.clear()
        self._open_modules.clear()
        self._open = self._open_key = None

    def _run_at_once(self, split: SplitWeight, grad_output: Tensor, input_: Tensor) -> None:
        """Add a weight gradient outside of any B. Hooks are called once, at the end of the backward pass."""
        self._accumulate(split, grad_output, input_)
        self._outside[id(split)] = split
        Variable._execution_engine.queue_callback(partial(self._notify_once, split))

    def _notify_once(self, split: SplitWeight) -> None:
        if self._outside.pop(id(split), None) is not None:
            split.notify()

    def _accumulate(self, split: SplitWeight, grad_output: Tensor, input_: Tensor) -> None:
        accumulator = split.accumulator()
        if grad_output.shape[0]:  # an expert without tokens adds nothing, and not every kernel takes a sum over no rows
            self.kernel.accumulate(accumulator, grad_output, input_)

    def _where(self, key: WgradKey) -> str:
        return f"rank {self.rank}, {key.where}"


_place, _place_of_gemm = attrgetter("position"), attrgetter("split.position")


def _started(gemms: list[DeferredGemm]) -> tuple[SplitWeight, Tensor, Tensor | Gathered] | None:
    """Take the last GEMM of a list, and start to gather its input if that is a slice; None if the list is empty."""
    if not gemms:
        return None
    split, grad_output, input_, group = gemms.pop()
    return split, grad_output, input_ if group is None else Gathered(input_, group)
