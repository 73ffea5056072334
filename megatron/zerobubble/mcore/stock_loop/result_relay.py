"""The results of the loss function, on the rank where a loop for megatron-core looks for them.

megatron-core's schedules return the results of the last stage on the last pipeline rank, and there a loop averages, prints and
writes them. Under V the last stage is on the first rank. So that rank sends them to the last one, after every call of the
schedule, pickled, from host to host.

What the results are is the loop's business: any object that can be pickled, for each microbatch. Plain dense tensors are pickled
as their bytes, all others (nested, sparse, quantized, subclasses, on a third device) as torch does it. Tensors arrive without
their gradients, and on a GPU where they were on one. The first host waits for its results, and the last host for the first one,
at a point at which a synchronous optimizer, or the next evaluation, would wait anyway. If there are no results, because the loss
function raised, the last rank raises its error. Not run on a GPU.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.optimizer.post_validation import group_of

__all__ = ["ResultRelay"]


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
        device: of the model.

    Every rank of the world must construct it at the same point: it creates gloo groups.
    """

    def __init__(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        self._ranks = dist.get_process_group_ranks(pipeline)
        self._device = device
        self._hosts = group_of(self._ranks, backend="gloo")

    @property
    def is_last(self) -> bool:
        """Whether this rank is the one that receives results."""
        return dist.get_rank() == self._ranks[-1]

    def __call__(self, results: list[Any]) -> list[Any]:
        """The first rank's `results`, on the first and the last rank; other ranks keep theirs. All ranks must call it.

        Raises:
            ConfigError: results cannot be pickled; on both ranks.
            Exception: on the last rank, what the first rank gave to `fail` in place of results.
        """
        first, last = self._ranks[0], self._ranks[-1]
        if dist.get_rank() == first:
            try:
                text = _dump(results, self._device)
            except Exception as error:
                refused = ConfigError(
                    f"the loss function returned an object that cannot be pickled ({type(error).__name__}: {error}), and under V "
                    "results are sent to the last pipeline rank: return tensors, numbers, text and containers of these"
                )
                self.fail(refused)
                raise refused from error
            dist.send_object_list([text], dst=last, group=self._hosts)
        elif self.is_last:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=first, group=self._hosts)
            if isinstance(received[0], _Failure):
                raise _error_of(received[0])
            results = pickle.loads(received[0])
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


def _error_of(failure: _Failure) -> Exception:
    if isinstance(failure.error, str):
        return ExecutionError(
            f"the loss function raised {failure.error} on rank {failure.rank}, in the last stage of this pipeline"
        )
    error: Exception = pickle.loads(failure.error)
    error.add_note(f"raised on rank {failure.rank}, in the last stage of this pipeline")
    return error


def _dump(results: list[Any], device: torch.device) -> bytes:
    """Pickle `results`, with tensors that `device` has as such of the device where they are loaded."""
    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return NotImplemented
            is_here = value.device.type == device.type != "cpu"  # its number is that of a GPU of this rank
            if _is_plain(value) and (is_here or value.device.type == "cpu"):
                values = value.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
                return _of_bytes, (values.numpy().tobytes(), value.dtype, tuple(value.shape), is_here)
            if is_here:
                return _on_own_device, (value.detach().cpu(),)
            return value.detach().__reduce_ex__(pickle.DEFAULT_PROTOCOL) if value.requires_grad else NotImplemented

    Pickler(buffer).dump(results)
    return buffer.getvalue()


def _is_plain(value: Tensor) -> bool:
    """Whether dtype, shape and bytes describe a tensor."""
    return type(value) is Tensor and value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def _of_bytes(values: bytes, dtype: torch.dtype, shape: tuple[int, ...], on_device: bool) -> Tensor:
    whole = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
    tensor = whole.view(dtype).view(shape)
    return _on_own_device(tensor) if on_device else tensor


def _on_own_device(tensor: Tensor) -> Tensor:
    return tensor.to(torch.device("cuda", torch.cuda.current_device()))
