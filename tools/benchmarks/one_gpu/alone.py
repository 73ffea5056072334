"""One pipeline rank's real program, alone: what other ranks would send is copied from tensors of the right shape.

Process groups are torch's `fake` ones: a collective returns at once and moves nothing. A receive is a copy on a stream of its
own, which waits for the stream of the passes and is waited for as with NCCL; it holds N(0, 1), a gradient 1e-3 of that. A send
does nothing. Everything else is what runs on a rank: the model, our executor or megatron-core's own functions, the optimizer.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
from torch import Tensor

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.plan.communication import Message, Payload

with quiet_third_parties():
    from megatron.core import parallel_state

    from megatron.zerobubble.errors import UserError
    from megatron.zerobubble.job.launch import Launch
    from megatron.zerobubble.mcore import agreement, zb_schedules
    from megatron.zerobubble.optimizer.post_validation import Relay
    from megatron.zerobubble.runtime.watch import Watch
    from megatron.zerobubble.training import setup
    from megatron.zerobubble.training.arguments import settings_from_argv
    from megatron.zerobubble.training.data.samples import chunk_reads
    from megatron.zerobubble.training.initialize import Job
    from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider
    from megatron.zerobubble.training.step import Trainer

__all__ = ["Alone", "Received", "alone"]

_GRADIENT = 1e-3
"""Size of received gradients; activations are N(0, 1)."""


class _Arrival:
    """A receive under way: the stream that waits for it goes on when the copy is there."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class Received:
    """Copies what other ranks would send."""

    def __init__(self, device: torch.device) -> None:
        self._given: dict[Any, Tensor] = {}
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def into(self, buffer: Tensor, *, is_gradient: bool) -> _Arrival:
        """Start a copy into a buffer, [s, b, h]."""
        key = is_gradient, buffer.shape, buffer.dtype
        if key not in self._given:
            given = torch.randn(buffer.shape, device=buffer.device) * (_GRADIENT if is_gradient else 1.0)
            self._given[key] = given.to(buffer.dtype)
        if self._stream is None:
            buffer.detach().copy_(self._given[key])
            return _Arrival(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            buffer.detach().copy_(self._given[key])
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return _Arrival(event)


class _Links:
    """Stands in for `ProcessGroupLinks`."""

    is_batched = False

    def __init__(self, received: Received) -> None:
        self._received = received

    def send(self, message: Message, tensor: Tensor) -> _Arrival:
        return _Arrival(None)

    def receive(self, message: Message, buffer: Tensor) -> _Arrival:
        return self._received.into(buffer, is_gradient=message.payload is Payload.GRADIENT)

    def close(self) -> None:
        pass


@contextmanager
def alone(rank: int, num_ranks: int, device: torch.device) -> Iterator[Received]:
    """A world of this many ranks, of which only this process is there."""
    new_group, received = dist.new_group, Received(device)

    def from_others(kind: Callable[..., Any], buffer: Tensor, peer: int) -> _Arrival:
        if kind is not dist.irecv:
            return _Arrival(None)
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        return received.into(buffer, is_gradient=peer == (rank + 1) % ranks)

    def receive(tensor: Tensor, src: int | None = None, **_: Any) -> _Arrival:
        assert src is not None
        return from_others(dist.irecv, tensor, src)

    def own(objects: list[Any], of_rank: Any, group: Any = None) -> None:
        objects[:] = [of_rank] * len(objects)

    def refuse(refusal: UserError | None) -> None:
        if refusal is not None:
            raise refusal

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (dist, "new_group", lambda *given, **named: new_group(*given, **(named | {"backend": "fake"}))),
            (dist, "all_gather_object", own),
            (dist, "irecv", receive),
            (dist, "isend", lambda *_, **__: _Arrival(None)),
            (dist, "P2POp", lambda kind, tensor, peer, group=None: (kind, tensor, peer)),
            (dist, "batch_isend_irecv", lambda ops: [from_others(*each) for each in ops]),
            (agreement, "_raise_first", refuse),
            (zb_schedules, "check_same_program", lambda *_, **__: None),
            (zb_schedules, "ProcessGroupLinks", lambda *_, **__: _Links(received)),
            (Relay, "all_reduce", lambda _, statistics: statistics),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))  # each group that is made wraps it
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=num_ranks)  # type: ignore[attr-defined]
        try:
            yield received
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class Alone:
    """A rank that trains in a world of its own (`alone`).

    Args:
        flags: of the reference trainer, with the pipeline's size and schedule.
        rank: which rank.
        num_ranks: of the pipeline.
        host: the installed host-device layer.
        sync: whether megatron-core's 1F1B waits for the whole device behind each exchange (`batch_p2p_sync`), as it does by
            default.
    """

    def __init__(self, flags: Sequence[str], *, rank: int, num_ranks: int, host: HostDevice, sync: bool = True) -> None:
        self.settings = settings = settings_from_argv(flags, world_size=num_ranks, rank=rank or 1)
        launch = Launch(rank=rank, local_rank=0, ranks_on_host=num_ranks, world_size=num_ranks, has_threads_set=True)
        self.watch = Watch(host.device)
        nobody: Any = None
        job = Job(launch=launch, attempt=nobody, host=host, store=nobody, watch=self.watch)
        state = setup.build_training_state(
            settings,
            job,
            vocab_size=settings.tokenizer.vocab_size or 0,
            model_provider=model_provider,
            forward_step_provider=forward_step_provider,
        )
        self.state, self.schedule = state, state.schedule
        self.schedule._config.batch_p2p_sync = sync
        self._trainer = Trainer(state)
        iterators = [self._samples() if chunk_reads(chunk) else None for chunk in state.chunks]
        self._data = iterators if len(iterators) > 1 else iterators[0]

    def _samples(self) -> Iterator[dict[str, Tensor]]:
        tokens, rows = self.settings.model.seq_length, self.settings.tokenizer.vocab_size or 2
        sample = torch.randint(0, rows, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
        batch = {
            "tokens": sample[:, :-1].contiguous(),
            "labels": sample[:, 1:].contiguous(),
            "loss_mask": torch.ones(1, tokens),
            "position_ids": torch.arange(tokens).view(1, tokens),
        }
        if self.state.device.type == "cuda":
            batch = {name: each.pin_memory() for name, each in batch.items()}
        while True:
            yield batch

    def iterate(self) -> None:
        """Run a training iteration, with its optimizer step."""
        self._trainer.iterate(self._data)

    def close(self) -> None:
        """Close links, and free all that the caller does not hold. DDP's hooks on autograd nodes refer back to the chunk: a cycle
        that Python cannot detect."""
        for chunk in self.state.chunks:
            chunk.grad_accs.clear()
        self.state.close()
        on_cuda = self.state.device.type == "cuda"
        del self._trainer, self._data, self.state, self.schedule
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
