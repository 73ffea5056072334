"""One pipeline rank's real program, alone: what other ranks would send is copied from tensors of the right shape.

Process groups are torch's `fake` ones: a collective returns at once and moves nothing. A receive is a copy on a stream of its
own, which waits for the stream of the passes and is waited for as with NCCL; it holds N(0, 1), a gradient 1e-3 of that. A send
does nothing. Everything else is what runs on a rank: the model, our executor or megatron-core's own functions, the optimizer.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
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
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from megatron.zerobubble.errors import UserError
    from megatron.zerobubble.mcore import agreement, zb_schedules
    from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
    from megatron.zerobubble.runtime.watch import Watch
    from megatron.zerobubble.training.models.layer_specs import stage_layers
    from tools.benchmarks.one_gpu.setting import Setting
    from tools.benchmarks.schedules.contenders import Sizes
    from tools.benchmarks.schedules.gpt import GPTContender, Model, placed

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
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))  # each group that is made wraps it
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=num_ranks)  # type: ignore[attr-defined]
        try:
            yield received
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class Alone(GPTContender):
    """A rank that trains layers of Llama-3-8B in a world of its own (`alone`).

    Args:
        spec: the schedule.
        setting: sizes of a layer.
        num_layers: of the whole model.
        host: the installed host-device layer.
        sync: whether megatron-core's 1F1B waits for the whole device behind each exchange (`batch_p2p_sync`), as it does by
            default.
    """

    def __init__(self, spec: ScheduleSpec, setting: Setting, num_layers: int, host: HostDevice, *, sync: bool) -> None:
        parallel_state.initialize_model_parallel(1, spec.num_ranks, create_gloo_process_groups=False)
        config = _llama(spec, setting, num_layers)
        config.batch_p2p_sync = sync
        model = Model(
            config=config,
            optimizer=OptimizerConfig(optimizer="adam", lr=1e-30, bf16=setting.on_gpu, params_dtype=config.params_dtype),
            vocabulary=setting.vocabulary,
            positions="rope",
            layers=lambda vp_stage: stage_layers(config, vp_stage=vp_stage),
        )
        sizes = Sizes(seq_length=setting.num_tokens, micro_batch_size=1)
        super().__init__(spec, model, sizes, host)
        self.watch = Watch(host.device)
        self.watch.begin_pipeline(range(spec.num_ranks))
        sample = torch.randint(0, setting.vocabulary, (1, setting.num_tokens + 1), generator=torch.Generator().manual_seed(1))
        self._sample = sample.pin_memory() if setting.on_gpu else sample

    def _batches(self, num_microbatches: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(num_microbatches):
            sample = self._sample.to(self._host.device, non_blocking=True)
            yield sample[:, :-1].contiguous(), sample[:, 1:].contiguous()

    def close(self) -> None:
        """Close links, and free all that the caller does not hold. DDP's hooks on autograd nodes refer back to the chunk: a cycle
        that Python cannot detect."""
        for chunk in self._chunks:
            chunk.grad_accs.clear()
        super().close()
        del self._chunks, self._optimizer, self._schedule
        gc.collect()
        if self._host.device.type == "cuda":
            torch.cuda.empty_cache()


def _llama(spec: ScheduleSpec, setting: Setting, num_layers: int) -> TransformerConfig:
    """megatron-core's configuration, with the fused kernels that a GPU has without Transformer Engine."""
    on_gpu, dtype = setting.on_gpu, torch.bfloat16 if setting.on_gpu else torch.float32
    options = placed(num_layers, spec)
    return TransformerConfig(
        **options | {"deallocate_pipeline_outputs": on_gpu or options["deallocate_pipeline_outputs"]},
        hidden_size=128 * setting.num_heads,
        num_attention_heads=setting.num_heads,
        num_query_groups=setting.num_heads // 4,
        ffn_hidden_size=448 * setting.num_heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        transformer_impl="local",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=on_gpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=on_gpu and find_spec("fused_weight_gradient_mlp_cuda") is not None,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
