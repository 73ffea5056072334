"""Measure the activation memory of a rank: bytes of live tensors, and how each pass changes them.

On CUDA the caching allocator counts bytes; it counts at the host's position, so that reading it stalls nothing. The CPU has no
such counter. There a dispatch mode intercepts every torch op and counts the storages that ops allocate until they are freed;
what was allocated before (weights, gradients, optimizer state) does not count. That costs Python time on every torch op: use it
for single iterations.

Between two ops of a plan, the live bytes less those in flight (receive buffers, sends not yet retired) change by exactly what
the pass allocates or frees. So the typical change of a stage's F is its activation memory, and that of F and B together is what
stays until W; with activation recomputation B adds memory instead of freeing some.

A running pass needs more: tensors that it allocates and frees again (mostly a recomputed layer), and tensors in flight. A plan
does not model this workspace, so it is measured on top of what is held around each op, and not on top of the peak of the
iteration: another plan may have its peak at another op, and needs the workspace there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.profiling.profile import StageMemory
from megatron.zerobubble.runtime.recording import Recorder


class MemoryMeter(Recorder):
    """Measures the activation memory of the ops that run while this context manager is entered.

    Args:
        device: decides how bytes are counted: by the allocator on CUDA, by a dispatch mode on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._live: Callable[[], int] = _LiveStorages() if device.type == "cpu" else torch.cuda.memory_allocated
        self._entered = ExitStack()
        self._begin = self._before = 0
        self._changes: dict[tuple[int, OpKind, int], list[int]] = {}
        """By stage, kind and slice, what each op has allocated less what it has freed."""
        self._of_microbatch: dict[tuple[int, int], Counter[tuple[int, OpKind]]] = {}
        """By stage and microbatch, the same by stage and kind, all slices together."""
        self.peak_bytes = 0
        """Peak of the bytes held after an op, above those at the start of the iteration."""
        self.workspace_bytes = 0
        """Peak of the bytes alive during an op, above those held before or after it: temporary tensors, and tensors in flight."""
        self.most_bytes = 0
        """Peak of the bytes alive at any moment, above those at the start of the iteration."""

    def __enter__(self) -> MemoryMeter:
        if isinstance(self._live, _LiveStorages):
            self._entered.enter_context(self._live)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        since_last_op = self._most() - self._begin
        self.workspace_bytes = max(self.workspace_bytes, since_last_op - self.peak_bytes)
        self.most_bytes = max(self.most_bytes, since_last_op)
        self._entered.close()

    @property
    def held_bytes(self) -> int:
        """Bytes held now: on CUDA by the allocator, on the CPU in tensors that ops made while this was entered."""
        return self._live()

    def clear(self) -> None:
        """Discard all measurements, and measure from the bytes held now."""
        self._changes.clear()
        self._of_microbatch.clear()
        self._begin = self._before = self._live()
        self.peak_bytes = self.workspace_bytes = self.most_bytes = 0
        self._reset_peak()

    def _reset_peak(self) -> None:
        """Reset the peak to the bytes alive now. On CUDA this resets torch's own peak statistics of the device."""
        if isinstance(self._live, _LiveStorages):
            self._live.most = self._live()
        else:
            torch.cuda.reset_peak_memory_stats()

    def rewind(self) -> None:
        """Discard this iteration, which begins again."""
        self.clear()

    def _most(self) -> int:
        """Peak of the bytes alive since `_reset_peak`."""
        return self._live.most if isinstance(self._live, _LiveStorages) else torch.cuda.max_memory_allocated()

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        """Record the change of held bytes by the op."""
        held = self._live() - in_transit()
        self.workspace_bytes = max(self.workspace_bytes, self._most() - max(held, self._before))
        self.most_bytes = max(self.most_bytes, self._most() - self._begin)
        self._changes.setdefault((op.stage, op.kind, op.slice), []).append(held - self._before)
        self._of_microbatch.setdefault((op.stage, op.microbatch), Counter())[op.stage, op.kind] += held - self._before
        self._before = held
        self.peak_bytes = max(self.peak_bytes, held - self._begin)
        self._reset_peak()

    def typical(self) -> dict[int, StageMemory]:
        """Activation memory of one microbatch for each stage of this rank: the median over microbatches.

        The first microbatch is left out if there are more: it also allocates masks and tables that stay.
        """
        changes = self._typical_changes(0)
        return {stage: _stage_memory(stage, changes) for stage in sorted({stage for stage, _ in changes})}

    def of_slices(self, key_bytes: Mapping[int, int]) -> dict[int, tuple[StageMemory, ...]]:
        """For each stage of this rank, the activation memory of every slice of a microbatch, without keys and values.

        Args:
            key_bytes: for each stage, the bytes of a microbatch's keys and values, and again those of their gradients.
        """
        last = max((number for *_, number in self._changes), default=0)
        found: dict[int, list[StageMemory]] = {}
        for number in range(last + 1):
            changes = self._typical_changes(number)
            for stage in sorted({stage for stage, _ in changes}):
                keys = key_bytes.get(stage, 0)
                own = {kind: changes[stage, kind] for kind in OpKind if (stage, kind) in changes}
                in_forward = keys if number == 0 else 0  # the first slice's F is a microbatch's first op, and its B the last
                in_backward = (keys if number == last else 0) - (2 * keys if number == 0 else 0)
                kept = {OpKind.F: in_forward, OpKind.B: in_backward, OpKind.BW: in_backward, OpKind.W: 0}
                rest = {(stage, kind): value - kept[kind] for kind, value in own.items()}
                found.setdefault(stage, []).append(_stage_memory(stage, rest))
        return {stage: tuple(memory) for stage, memory in found.items()}

    def _typical_changes(self, number: int) -> dict[tuple[int, OpKind], float]:
        """By stage and kind, the median over microbatches of what an op of this slice changes."""
        return {
            (stage, kind): median(values[1:] or values)
            for (stage, kind, index), values in self._changes.items()
            if index == number
        }

    def of_microbatches(self) -> dict[int, list[StageMemory]]:
        """For each stage of this rank, the activation memory of every microbatch of the plan, in its order.

        The first microbatch also allocates masks and tables that stay.
        """
        found: dict[int, list[StageMemory]] = {}
        for (stage, _), changes in sorted(self._of_microbatch.items()):
            found.setdefault(stage, []).append(_stage_memory(stage, changes))
        return found


def _stage_memory(stage: int, changes: Mapping[tuple[int, OpKind], float]) -> StageMemory:
    activation = max(0.0, changes.get((stage, OpKind.F), 0.0))
    left = 0.0
    if (stage, OpKind.W) in changes:
        left = activation + changes.get((stage, OpKind.B), 0.0)
    return StageMemory(activation=activation, after_backward=max(0.0, left))


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that torch ops have allocated and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0
        self.most = 0
        """Peak of the bytes alive at once."""
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __call__(self) -> int:
        return self._bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        foreign: set[int] | None = None
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._alive:
                continue
            if foreign is None:  # a view of a weight is no new memory
                given = tree_leaves((args, kwargs))
                foreign = {each.untyped_storage()._cdata for each in given if isinstance(each, Tensor)}
            if storage._cdata not in foreign:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._bytes += size
        self.most = max(self.most, self._bytes)

        def freed(_: object) -> None:
            self._bytes -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
