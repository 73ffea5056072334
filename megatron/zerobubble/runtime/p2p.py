"""Point-to-point transfers on links.

A link is a directed pair of pipeline ranks. Links are distributed over process groups so that no rank has two links in one group
(`color_links`): each link has its own communicator and its own order, on NCCL in lazy and in eager mode and on gloo alike.

Ownership: `send` keeps the tensor alive until the handle is waited on; `receive` writes into the caller's buffer, which may
be read after the handle's `wait`. On CUDA `wait` makes the current stream wait and does not block the host; on the CPU it blocks.
NCCL reads and writes on a stream of its own: it waits for the current stream at the call, and `wait` makes the current stream
wait for it. A buffer allocated and freed on the current stream is therefore never reused too early, and no record_stream is
needed, provided a send's tensor is only released after `wait`. The handles hold it until then.

On the CPU a separate thread makes the backend's calls (`issuer`), so that they do not delay the ops.

Batched links, to find out why a run hangs, have one process group and one communicator: a transfer begins when it, or one given
after it, is waited for, in one `batch_isend_irecv` with all that were given since the last batch. The executor waits for all of
them before its next op.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.errors import ConfigError, TransferError
from megatron.zerobubble.plan.communication import Message, color_links, links_of
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.runtime.issuer import Issued, Issuer
from megatron.zerobubble.runtime.link_groups import link_group


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the transfer is done (CPU) or make the current stream wait for it (CUDA)."""


class P2PLinks(Protocol):
    """Point-to-point transfers as the executor uses them. The implementation over torch is `ProcessGroupLinks`."""

    def send(self, message: Message, tensor: Tensor) -> Handle:
        """Start sending `tensor`. Never waits for another rank."""

    def receive(self, message: Message, buffer: Tensor) -> Handle:
        """Start receiving into `buffer`. Never blocks."""


class _Transfer:
    __slots__ = ("message", "tensor", "verb", "work")

    def __init__(self, verb: str, message: Message, tensor: Tensor, work: dist.Work | Issued | _Batch) -> None:
        self.verb, self.message, self.tensor, self.work = verb, message, tensor, work

    def wait(self) -> None:
        try:
            self.work.wait()
        except TransferError:
            raise  # the transfer could not be started, and the error names it already
        except RuntimeError as error:
            raise _failure(self.verb, self.message, error) from error


class _Batch:
    """Transfers that begin together, when the first of them is waited for."""

    def __init__(self) -> None:
        self.transfers: list[dist.P2POp] = []
        self.is_over = False

    def wait(self) -> None:
        """Begin all, and wait for all. Nothing happens the second time."""
        if not self.is_over:
            self.is_over = True
            for work in dist.batch_isend_irecv(self.transfers):
                work.wait()
            self.transfers.clear()


class ProcessGroupLinks:
    """The links of one pipeline over torch process groups.

    Every rank of the world must construct it at the same point, with the same placement: it creates process groups.

    Args:
        placement: stage -> rank; the links are the pairs of ranks that hold consecutive stages.
        pipeline: global ranks of this pipeline, by pipeline rank.
        rank: this process's pipeline rank.
        device: device of the tensors; every link is opened once with a tensor there.
        max_ctas: most CTAs of a transfer on NCCL; None leaves it to NCCL.
        batched: whether transfers are batched, in one group.

    Raises:
        ConfigError: the model is on a GPU and the world's backend is gloo.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        pipeline: Sequence[int],
        rank: int,
        device: torch.device,
        max_ctas: int | None = None,
        batched: bool = False,
    ) -> None:
        self._pipeline = tuple(pipeline)
        self._rank = rank
        self._device = device
        self._groups: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        if device.type == "cuda" and dist.get_backend() == "gloo":
            raise ConfigError(
                "the model is on a GPU and the default process group is gloo's, which cannot reduce gradients there: give "
                'init_process_group "nccl", or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU'
            )
        self.is_batched = batched
        """Whether `BatchedExecutor` must run over them."""
        self._batch = _Batch() if batched else None
        self._issuer = Issuer(device) if device.type == "cpu" and not batched else None
        links = links_of(placement)
        colors = (links,) if batched else color_links(links)
        for links in colors:
            # One group over the whole world serves this color of every pipeline: NCCL opens a communicator per pair that
            # exchanges messages, and the number of groups does not depend on the number of pipelines.
            group = link_group(max_ctas)
            self._groups.update(dict.fromkeys(links, group))
            if batched:  # the communicator of batches is the group's, which all of its ranks make together
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        for links in colors:
            self._open([link for link in links if rank in link])

    def send(self, message: Message, tensor: Tensor) -> Handle:
        """Start sending `tensor` (made contiguous if it is not)."""
        tensor = tensor.contiguous()
        return self._start("send", message, tensor, self._pipeline[message.target])

    def receive(self, message: Message, buffer: Tensor) -> Handle:
        """Start receiving into `buffer`."""
        return self._start("receive", message, buffer, self._pipeline[message.source])

    def times(
        self, shapes: Mapping[tuple[int, int], Sequence[int]], dtype: torch.dtype, *, repeats: int = 5
    ) -> dict[tuple[int, int], LinkTime]:
        """Measure the transfer time of each link that leaves this rank. Every rank of the world must call it, between iterations.

        It is the median over round trips that send the tensor one way and one number back, less half a round trip of one number
        both ways; less a whole one, it is the time that the tensor occupies the link. Links are measured one after the other,
        in the same order on all ranks. Between two ranks there are links in both directions or in none: activations go one way
        and gradients the other.

        Args:
            shapes: (source, target) -> shape of the tensor to send, for every link.
            dtype: its dtype.
            repeats: round trips per link.

        Returns:
            (source, target) -> the message, with `source` this rank.
        """
        token = torch.zeros(1, device=self._device)
        found = {}
        for link in sorted(self._groups):
            if self._rank in link:
                tensor = torch.zeros(tuple(shapes[link]), dtype=dtype, device=self._device)
                both = [(self._round_trip(tensor, link), self._round_trip(token, link)) for _ in range(repeats)]
                there, empty = (median(column) for column in zip(*both, strict=True))
                found[link] = LinkTime(max(0.0, there - empty / 2), max(0.0, there - empty), float(tensor.nbytes))
        return {link: elapsed for link, elapsed in found.items() if link[0] == self._rank}

    def close(self) -> None:
        """Destroy the process groups. Every rank of the world must call it."""
        if self._issuer is not None:
            self._issuer.close()
            self._issuer = None
        for group in {id(group): group for group in self._groups.values()}.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def _start(self, verb: str, message: Message, tensor: Tensor, peer: int) -> _Transfer:
        group = self._groups[message.source, message.target]
        if self._batch is not None:
            if self._batch.is_over:
                self._batch = _Batch()
            self._batch.transfers.append(_batched(verb == "send", tensor, peer, group))
            return _Transfer(verb, message, tensor, self._batch)

        def call() -> dist.Work:
            try:
                work = dist.isend(tensor, peer, group=group) if verb == "send" else dist.irecv(tensor, peer, group=group)
            except RuntimeError as error:
                raise _failure(verb, message, error) from error
            if work is None:
                raise TransferError(f"cannot {verb} {message_text(message)}: this process is not a member of the link's group")
            return work

        return _Transfer(verb, message, tensor, call() if self._issuer is None else self._issuer(call))

    def _open(self, links: Sequence[tuple[int, int]]) -> None:
        """Use each link once: NCCL opens a communicator at its first use, and both ends must do so in the same order."""
        for source, target in links:
            self._pass(torch.zeros(1, device=self._device), (source, target))

    def _pass(self, tensor: Tensor, link: tuple[int, int]) -> None:
        """Send or receive `tensor` on one of this rank's links, at once."""
        source, target = link
        is_source = self._rank == source
        peer = self._pipeline[target if is_source else source]
        if self._batch is not None:
            for work in dist.batch_isend_irecv([_batched(is_source, tensor, peer, self._groups[link])]):
                work.wait()
            return
        (dist.send if is_source else dist.recv)(tensor, peer, group=self._groups[link])

    def _round_trip(self, tensor: Tensor, link: tuple[int, int]) -> float:
        """Milliseconds at the source of `link` from sending `tensor` to receiving one number back."""
        reply = torch.zeros(1, device=self._device)
        self._synchronize()
        begin = time.perf_counter()
        for sent, way in ((tensor, link), (reply, link[::-1])):
            self._pass(sent, way)
            self._synchronize()
        return (time.perf_counter() - begin) * 1000.0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _batched(is_send: bool, tensor: Tensor, peer: int, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.isend if is_send else dist.irecv, tensor, peer, group)


def _failure(verb: str, message: Message, error: RuntimeError) -> TransferError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TransferError(f"cannot {verb} {message_text(message)}: {reason}")


def message_text(message: Message) -> str:
    """A message in words, for logs and errors: payload, stage, microbatch, slice, and the two ranks."""
    return f"{message.where} (rank {message.source} to rank {message.target})"
