"""What a rank really holds: bytes of live tensors, and what each pass adds to them.

On CUDA the allocator says how much is held; it counts where the host is, so that reading it stalls nothing. The CPU has no such
count. There a dispatch mode sees every op and counts the storages that ops make until they are freed; what was there before
(weights, gradients, optimizer state) does not count. That costs Python time on every op: it is for single iterations.

Between two ops of a plan, what is held less what is in flight (receive buffers, sends not yet retired) changes by exactly what
the pass keeps or gives back. So the typical change of a stage's F is its activations, and of F and B together what stays until W;
where activations are recomputed, B adds instead of giving back.

While a pass runs there is more: what it makes and drops again (a recomputed layer is the most of it), and what is in flight. No
plan knows of that, so it is measured above what is held around each op, and not above the highest point of the iteration: a
plan that holds most around another op has it on top, too.
"""

from __future__ import annotations

import weakref
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
    """Measures what ops keep, while entered.

    Args:
        device: decides how bytes are counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._live: Callable[[], int] = _LiveStorages() if device.type == "cpu" else torch.cuda.memory_allocated
        self._entered = ExitStack()
        self._begin = self._before = 0
        self._changes: dict[tuple[int, OpKind], list[int]] = {}
        self.peak_bytes = 0
        """Most that was held after any op, less what was held at the start of the iteration."""
        self.workspace_bytes = 0
        """Most that there was while an op ran on top of what was held before or after it: temporary tensors, and tensors in
        flight."""
        self.most_bytes = 0
        """Most that was alive at any moment, less what was held at the start of the iteration."""

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
        """What is held now: by the device's allocator, or on the CPU of what ops made while this was entered."""
        return self._live()

    def clear(self) -> None:
        """Forget what was measured."""
        self._changes.clear()
        self._begin = self._before = self._live()
        self.peak_bytes = self.workspace_bytes = self.most_bytes = 0
        self._forget_most()

    def _forget_most(self) -> None:
        """Count anew from what is alive. On CUDA that is the device's own peak, in the iterations that are measured."""
        if isinstance(self._live, _LiveStorages):
            self._live.most = self._live()
        else:
            torch.cuda.reset_peak_memory_stats()

    def rewind(self) -> None:
        """Forget this iteration, which begins again."""
        self.clear()

    def _most(self) -> int:
        """What was alive at most since it was forgotten."""
        return self._live.most if isinstance(self._live, _LiveStorages) else torch.cuda.max_memory_allocated()

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        """Note what the op added."""
        held = self._live() - in_transit()
        self.workspace_bytes = max(self.workspace_bytes, self._most() - max(held, self._before))
        self.most_bytes = max(self.most_bytes, self._most() - self._begin)
        self._changes.setdefault((op.stage, op.kind), []).append(held - self._before)
        self._before = held
        self.peak_bytes = max(self.peak_bytes, held - self._begin)
        self._forget_most()

    def typical(self) -> dict[int, StageMemory]:
        """For each stage of this rank what one microbatch holds: the median over microbatches. The first one is left out, if
        there are more: masks and tables are made with it and stay."""
        changes = {key: median(values[1:] or values) for key, values in self._changes.items()}
        return {stage: _stage_memory(stage, changes) for stage in sorted({stage for stage, _ in changes})}


def _stage_memory(stage: int, changes: Mapping[tuple[int, OpKind], float]) -> StageMemory:
    activation = max(0.0, changes.get((stage, OpKind.F), 0.0))
    left = 0.0
    if (stage, OpKind.W) in changes:
        left = activation + changes.get((stage, OpKind.B), 0.0)
    return StageMemory(activation=activation, after_backward=max(0.0, left))


class _LiveStorages(TorchDispatchMode):
    """Counts bytes of storages that ops have made and nobody has freed."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0
        self.most = 0
        """Most that was alive at once."""
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
