"""The results of the loss function, on the rank where a loop for megatron-core looks for them.

megatron-core's schedules return the results of the last stage on the last pipeline rank, and there a loop averages, prints and
writes them. Under V the last stage is on the first rank. So that rank sends them to the last one, after every call of the
schedule: one message per dtype, of as many numbers as the loss function returned. Both ranks then have them.

What the results are is the loop's business: dictionaries of tensors, or of numbers, for each microbatch. Everything but the
values of tensors is pickled and sent from host to host, on a gloo group, so that no host waits for a GPU; tensors on a GPU with
NCCL go from GPU to GPU in the order of the stream. The last host waits for the first one's, at a point at which a synchronous
optimizer, or the next evaluation, would wait for it anyway. The NCCL path has not run on GPUs.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.optimizer.post_validation import group_of

__all__ = ["ResultRelay"]


@dataclass(frozen=True)
class _Form:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_on_device: bool
    """Whether its values go from GPU to GPU, and not through host memory."""


class ResultRelay:
    """Sends results from the first to the last rank of one pipeline.

    Args:
        pipeline: the process group of the pipeline.
        device: of tensors that are received.

    Every rank of the world must construct it at the same point: it creates gloo groups.
    """

    def __init__(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        self._ranks = dist.get_process_group_ranks(pipeline)
        self._pipeline = pipeline
        self._device = device
        self._between_devices = dist.get_backend(pipeline) != "gloo"
        self._hosts = group_of(self._ranks, backend="gloo")

    def __call__(self, results: list[Any]) -> list[Any]:
        """The first rank's `results`, on the first and the last rank; other ranks keep theirs. All ranks must call it."""
        rank, first, last = dist.get_rank(), self._ranks[0], self._ranks[-1]
        if rank == first:
            tensors: list[Tensor] = []
            text, forms = _dump(results, tensors, between_devices=self._between_devices)
            dist.send_object_list([(text, forms)], dst=last, group=self._hosts)
            for form, indices in _messages(forms):
                values = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
                dist.send(values if form.is_on_device else values.cpu(), dst=last, group=self._group_of(form))
        elif rank == last:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=first, group=self._hosts)
            text, forms = received[0]
            results = _load(text, self._receive(forms, first))
        return results

    def close(self) -> None:
        """Destroy the process group. Every rank of the world must call it."""
        dist.destroy_process_group(self._hosts)

    def _group_of(self, form: _Form) -> dist.ProcessGroup:
        return self._pipeline if form.is_on_device else self._hosts

    def _receive(self, forms: Sequence[_Form], source: int) -> list[Tensor]:
        received: dict[int, Tensor] = {}
        for form, indices in _messages(forms):
            sizes = [math.prod(forms[index].shape) for index in indices]
            values = torch.empty(sum(sizes), dtype=form.dtype, device=self._device if form.is_on_device else "cpu")
            dist.recv(values, src=source, group=self._group_of(form))
            parts = values.to(self._device).split(sizes)
            received.update({index: part.view(forms[index].shape) for index, part in zip(indices, parts, strict=True)})
        return [received[index] for index in range(len(forms))]


def _messages(forms: Sequence[_Form]) -> Iterator[tuple[_Form, list[int]]]:
    """The tensors of each message: those of one dtype that take the same way. Empty tensors are in one, too."""
    together: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, form in enumerate(forms):
        together.setdefault((form.dtype, form.is_on_device), []).append(index)
    return ((forms[indices[0]], indices) for indices in together.values())


def _dump(results: list[Any], tensors: list[Tensor], *, between_devices: bool) -> tuple[bytes, list[_Form]]:
    """Pickle `results` without their tensors, which are appended to `tensors`."""
    buffer, forms = io.BytesIO(), []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, Tensor):
                return None
            tensors.append(value)
            forms.append(_Form(value.dtype, tuple(value.shape), between_devices and value.device.type != "cpu"))
            return len(forms) - 1

    Pickler(buffer).dump(results)
    return buffer.getvalue(), forms


def _load(text: bytes, tensors: Sequence[Tensor]) -> list[Any]:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Tensor:
            return tensors[index]

    results: list[Any] = Unpickler(io.BytesIO(text)).load()
    return results
