"""The results of the loss function, on the rank where a loop for megatron-core looks for them.

megatron-core's schedules return the results of the last stage on the last pipeline rank, and there a loop averages, prints and
writes them. Under V the last stage is on the first rank. So that rank sends them to the last one, after every call of the
schedule: the results, pickled without their tensors, and then the bytes of all tensors in one message.

What the results are is the loop's business: any object that can be pickled, for each microbatch. Plain dense tensors are sent by
their bytes. All others (nested, sparse, quantized, subclasses, on a third device) are pickled with the rest. Tensors arrive
without their gradients. The pickled part goes from host to host, on a gloo group, so that no host waits for a GPU; the bytes of
tensors on a GPU go with NCCL from GPU to GPU in the order of the stream. The last host waits for the first one's, at a point at
which a synchronous optimizer, or the next evaluation, would wait for it anyway. If there are no results, because the loss
function raised, the last rank raises its error. The NCCL path has not run on GPUs.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.optimizer.post_validation import group_of

__all__ = ["ResultRelay"]


@dataclass(frozen=True)
class _Form:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_on_host: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Failure:
    """Sent in place of results."""

    error: bytes | str
    """Pickled, or described where it cannot be."""
    rank: int


class ResultRelay:
    """Sends results from the first to the last rank of one pipeline.

    Args:
        pipeline: the process group of the pipeline.
        device: of the model; tensors that are there, or on the host, are sent by their bytes.

    Every rank of the world must construct it at the same point: it creates gloo groups.
    """

    def __init__(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        self._ranks = dist.get_process_group_ranks(pipeline)
        self._pipeline = pipeline
        self._device = device
        self._between_devices = dist.get_backend(pipeline) != "gloo"
        self._hosts = group_of(self._ranks, backend="gloo")

    def __call__(self, results: list[Any]) -> list[Any]:
        """The first rank's `results`, on the first and the last rank; other ranks keep theirs. All ranks must call it.

        Raises:
            ConfigError: results cannot be pickled; on both ranks.
            Exception: on the last rank, what the first rank gave to `fail` in place of results.
        """
        rank, first, last = dist.get_rank(), self._ranks[0], self._ranks[-1]
        if rank == first:
            tensors: list[Tensor] = []
            try:
                text, forms = _dump(results, tensors, self._device)
            except Exception as error:
                refused = ConfigError(
                    f"the loss function returned an object that cannot be pickled ({type(error).__name__}: {error}), and under V "
                    "results are sent to the last pipeline rank: return tensors, numbers, text and containers of these"
                )
                self.fail(refused)
                raise refused from error
            dist.send_object_list([(text, forms)], dst=last, group=self._hosts)
            for on_host in (True, False):
                mine = [each for each, form in zip(tensors, forms, strict=True) if form.is_on_host is on_host]
                if mine:
                    values = torch.cat([_bytes_of(each) for each in mine])
                    dist.send(values if self._stays_on_device(on_host) else values.cpu(), dst=last, group=self._group(on_host))
        elif rank == last:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=first, group=self._hosts)
            if isinstance(received[0], _Failure):
                raise _error_of(received[0])
            text, forms = received[0]
            results = _load(text, self._receive(forms, first))
        return results

    def fail(self, error: Exception) -> None:
        """Make the last rank's call raise `error`. The first rank calls it in place of its own call."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # noqa: BLE001 -- any class may define how it is pickled; its text is sent then
            failure = _Failure(f"{type(error).__name__}: {error}", dist.get_rank())
        else:
            failure = _Failure(pickled, dist.get_rank())
        dist.send_object_list([failure], dst=self._ranks[-1], group=self._hosts)

    def close(self) -> None:
        """Destroy the process group. Every rank of the world must call it."""
        dist.destroy_process_group(self._hosts)

    def _stays_on_device(self, on_host: bool) -> bool:
        return self._between_devices and not on_host

    def _group(self, on_host: bool) -> dist.ProcessGroup:
        return self._pipeline if self._stays_on_device(on_host) else self._hosts

    def _receive(self, forms: Sequence[_Form], source: int) -> list[Tensor]:
        received: dict[int, Tensor] = {}
        for on_host in (True, False):
            indices = [index for index, form in enumerate(forms) if form.is_on_host is on_host]
            if indices:
                sizes = [forms[index].num_bytes for index in indices]
                wire = self._device if self._stays_on_device(on_host) else "cpu"
                values = torch.empty(sum(sizes), dtype=torch.uint8, device=wire)
                dist.recv(values, src=source, group=self._group(on_host))
                parts = values.to("cpu" if on_host else self._device).split(sizes)
                received.update(zip(indices, map(_of_bytes, parts, (forms[index] for index in indices)), strict=True))
        return [received[index] for index in range(len(forms))]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _of_bytes(part: Tensor, form: _Form) -> Tensor:
    """A tensor of its own: aligned, and the others are not kept by it."""
    return part.clone().view(form.dtype).view(form.shape)


def _error_of(failure: _Failure) -> Exception:
    if isinstance(failure.error, str):
        return ExecutionError(
            f"the loss function raised {failure.error} on rank {failure.rank}, in the last stage of this pipeline"
        )
    error: Exception = pickle.loads(failure.error)
    error.add_note(f"raised on rank {failure.rank}, in the last stage of this pipeline")
    return error


def _dump(results: list[Any], tensors: list[Tensor], device: torch.device) -> tuple[bytes, list[_Form]]:
    """Pickle `results` without their plain tensors, which are appended to `tensors`."""
    buffer, forms = io.BytesIO(), []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not _is_plain(value, device):
                return None
            tensors.append(value)
            forms.append(_Form(value.dtype, tuple(value.shape), value.device.type == "cpu"))
            return len(forms) - 1

        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return NotImplemented
            if value.device.type == device.type != "cpu":  # its number is that of a GPU of this rank
                return _on_own_device, (value.detach().cpu(),)
            return value.detach().__reduce_ex__(pickle.DEFAULT_PROTOCOL) if value.requires_grad else NotImplemented

    Pickler(buffer).dump(results)
    return buffer.getvalue(), forms


def _is_plain(value: Any, device: torch.device) -> bool:
    """Whether `value` is a tensor that dtype, shape and bytes describe."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized)
        and value.device.type in ("cpu", device.type)
    )


def _on_own_device(tensor: Tensor) -> Tensor:
    return tensor.to(torch.device("cuda", torch.cuda.current_device()))


def _load(text: bytes, tensors: Iterable[Tensor]) -> list[Any]:
    by_index = list(tensors)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Tensor:
            return by_index[index]

    results: list[Any] = Unpickler(io.BytesIO(text)).load()
    return results
