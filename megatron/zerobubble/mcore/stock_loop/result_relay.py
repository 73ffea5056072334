"""The results of the loss function, on the rank where a loop for megatron-core looks for them.

megatron-core's schedules return the results of the last stage on the last pipeline rank, and there a loop averages, prints and
writes them. Under V the last stage is on the first rank. So that rank sends them to the last one, after every call of the
schedule, pickled, from host to host.

What the results are is the loop's business: any object that can be pickled, for each microbatch. Plain dense tensors are sent
as their bytes, all others (nested, sparse, quantized, subclasses, on a third device) are pickled as torch does it. Tensors arrive
without their gradients, and on a GPU where they were on one.

The first rank's host does not wait. On CUDA a stream of its own waits for the chunk's last F and copies all plain tensors into
pinned memory at once, while Ws and Bs go on; a thread waits for that copy and sends. The last rank's host waits for the message,
which comes when the first rank's device has run its last F and not when it has run its last W, and uploads it without waiting
for its own device. If there are no results, because the loss function raised, the last rank raises its error. Not run on a GPU.
"""

from __future__ import annotations

import atexit
import io
import pickle
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.optimizer.post_validation import group_of
from megatron.zerobubble.runtime.issuer import Issued, Issuer

__all__ = ["ResultRelay"]


@dataclass(frozen=True)
class _Failure:
    """Sent in place of results."""

    error: bytes | str
    """Pickled, or described where it cannot be."""
    rank: int


class _Place(NamedTuple):
    """Where the bytes of a tensor are in a message."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Sends:
    """The messages of one call."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """Return when the last rank has them."""
        for work in self._works:
            if timeout is None:
                work.wait()  # without arguments, by which a watchdog sees that the rank waits
            else:
                work.wait(timeout)


AT_EXIT = timedelta(seconds=10)
"""How long a process that ends waits until the last results have left it."""


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
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._complete: torch.cuda.Event | None = None
        self._issuer = Issuer(device) if dist.get_rank() == self._ranks[0] else None
        self._sent: Issued | None = None
        self._at_exit = partial(_flush, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def is_last(self) -> bool:
        """Whether this rank is the one that receives results."""
        return dist.get_rank() == self._ranks[-1]

    def mark(self) -> None:
        """The last stage's last F has been issued: results change no more. Without it they are complete when they are given."""
        if self._stream is not None:
            self._complete = torch.cuda.Event()
            self._complete.record()

    def __call__(self, results: list[Any]) -> list[Any]:
        """The first rank's `results`, on the first and the last rank; other ranks keep theirs. All ranks must call it.

        Raises:
            ConfigError: results cannot be pickled; on both ranks.
            Exception: on the last rank, what the first rank gave to `fail` in place of results; on the first rank, what sending
                the results of an earlier call raised.
        """
        if self._issuer is not None:
            try:
                message = _Message(results, self._device)
            except Exception as error:
                refused = ConfigError(
                    f"the loss function returned an object that cannot be pickled ({type(error).__name__}: {error}), and under V "
                    "results are sent to the last pipeline rank: return tensors, numbers, text and containers of these"
                )
                self.fail(refused)
                raise refused from error
            self._send(message)
        elif self.is_last:
            results = self._receive()
            if isinstance(results, _Failure):
                raise _error_of(results)
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
        self._send(_Message(failure, self._device))

    def flush(self, *, is_exit: bool = False) -> None:
        """Return when the last rank has the results of every call so far; at exit, after `AT_EXIT` at the latest."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait_at_most(AT_EXIT) if is_exit else sent.wait()

    def close(self) -> None:
        """End the thread and destroy the process group. Every rank of the world must call it."""
        atexit.unregister(self._at_exit)
        if self._issuer is not None:
            self._issuer.close()
            self._issuer = None
        self.flush()
        dist.destroy_process_group(self._hosts)

    def _send(self, message: _Message) -> None:
        assert self._issuer is not None
        self.flush()
        complete, self._complete = self._complete, None
        buffer, copied = message.to_host(self._stream, complete)
        # The group's own methods: a loop may destroy all process groups behind its last call, and this one lives on until then.
        group, target = self._hosts, dist.get_group_rank(self._hosts, self._ranks[-1])

        def send() -> _Sends:
            header = group.send([torch.tensor([message.num_bytes, buffer.numel()])], target, 0)
            if copied is not None:
                copied.synchronize()
            return _Sends([header, group.send([buffer], target, 0)])

        self._sent = self._issuer(send)

    def _receive(self) -> Any:
        header, source = torch.empty(2, dtype=torch.int64), dist.get_group_rank(self._hosts, self._ranks[0])
        self._hosts.recv([header], source, 0).wait()
        num_bytes, size = header.tolist()
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=num_bytes > 0)
        self._hosts.recv([buffer], source, 0).wait()
        places, pickled = pickle.loads(buffer[num_bytes:].numpy().tobytes())
        values = buffer[:num_bytes].to(self._device, non_blocking=True) if places else buffer
        tensors = [values[at.offset :][: at.num_bytes].view(at.dtype).view(at.shape) for at in places]
        return _Unpickler(io.BytesIO(pickled), tensors).load()


def _flush(relay: weakref.ref[ResultRelay]) -> None:
    """At the end of a process: let the last results leave it. Where the other end is gone, there is nobody to tell."""
    alive = relay()
    if alive is not None:
        with suppress(RuntimeError):
            alive.flush(is_exit=True)


class _Message:
    """Results as bytes: first those of plain tensors on the device, then all else, pickled.

    Args:
        results: any object.
        device: of the model.

    Raises:
        Exception: it cannot be pickled.
    """

    def __init__(self, results: Any, device: torch.device) -> None:
        tensors, pickled = _dump(results, device)
        # Long elements first: then all are aligned.
        order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
        offsets = dict(zip(order, accumulate((tensors[each].nbytes for each in order), initial=0), strict=False))
        places = [_Place(offsets[i], each.nbytes, each.dtype, tuple(each.shape)) for i, each in enumerate(tensors)]
        self._tensors = [tensors[number] for number in order]
        self._pickled = pickle.dumps((places, pickled))
        self.num_bytes = sum(each.nbytes for each in tensors)
        """Of tensors on the device."""

    def to_host(self, stream: Any, complete: Any) -> tuple[Tensor, torch.cuda.Event | None]:
        """The message in host memory, and the event behind the copy of tensors from the device; None: there are none.

        Args:
            stream: of the copy.
            complete: the event behind which results are complete; None: where the current stream is now.
        """
        pickled = torch.frombuffer(bytearray(self._pickled), dtype=torch.uint8)
        if not self.num_bytes:
            return pickled, None
        buffer = torch.empty(self.num_bytes + len(pickled), dtype=torch.uint8, pin_memory=True)
        buffer[self.num_bytes :] = pickled
        here = torch.cuda.current_stream()
        stream.wait_event(here.record_event() if complete is None else complete)
        with torch.cuda.stream(stream):
            buffer[: self.num_bytes].copy_(torch.cat([_bytes(each) for each in self._tensors]), non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        here.wait_event(copied)  # the loop may change or free its results from here on
        return buffer, copied


def _error_of(failure: _Failure) -> Exception:
    if isinstance(failure.error, str):
        return ExecutionError(
            f"the loss function raised {failure.error} on rank {failure.rank}, in the last stage of this pipeline"
        )
    error: Exception = pickle.loads(failure.error)
    error.add_note(f"raised on rank {failure.rank}, in the last stage of this pipeline")
    return error


def _dump(results: Any, device: torch.device) -> tuple[list[Tensor], bytes]:
    """Plain tensors on `device`, if that is a GPU, and `results` pickled with numbers in place of these."""
    buffer = io.BytesIO()
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not (isinstance(value, Tensor) and _is_plain(value) and value.device.type == device.type != "cpu"):
                return None
            if id(value) not in numbers:
                numbers[id(value)] = len(tensors)
                tensors.append(value.detach())
            return numbers[id(value)]

        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return NotImplemented
            if _is_plain(value) and value.device.type == "cpu":
                return _of_bytes, (_bytes(value.detach()).numpy().tobytes(), value.dtype, tuple(value.shape))
            if value.device.type == device.type != "cpu":  # its number is that of a GPU of this rank
                return _on_own_device, (value.detach().cpu(),)
            return value.detach().__reduce_ex__(pickle.DEFAULT_PROTOCOL) if value.requires_grad else NotImplemented

    Pickler(buffer).dump(results)
    return tensors, buffer.getvalue()


class _Unpickler(pickle.Unpickler):
    """Loads what `_dump` has pickled, with these tensors."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        """The tensor of this number."""
        return self._tensors[number]


def _bytes(value: Tensor) -> Tensor:
    """A plain tensor's bytes, where it is."""
    return value.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _is_plain(value: Tensor) -> bool:
    """Whether dtype, shape and bytes describe a tensor."""
    return type(value) is Tensor and value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def _of_bytes(values: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    whole = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
    return whole.view(dtype).view(shape)


def _on_own_device(tensor: Tensor) -> Tensor:
    return tensor.to(torch.device("cuda", torch.cuda.current_device()))
