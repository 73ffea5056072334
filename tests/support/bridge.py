"""A training loop that calls megatron-core as Megatron-Bridge does, inside the ranks of a `RankPool`.

Process groups are handed around: a `ProcessGroupCollection` goes to the model, to DDP, to the optimizer and to
`finalize_model_grads`; the schedule is asked for once, with the sizes of the pipeline; every call of it, evaluation too, passes
the groups and a `P2PCommunicator`. The model, data and loss are those of the example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

import megatron.zerobubble
from megatron.zerobubble.mcore.cpu.device import HostDevice
from tests.support.gpt import _destroy_groups
from tests.support.stock import example


@contextlib.contextmanager
def installed(flags: str, schedule: str | None) -> Iterator[tuple[ModuleType, Any]]:
    """The example and its parsed flags, with the schedule installed and the process groups made."""
    loop = example()
    args = loop.parse(flags.split())
    _destroy_groups()
    with HostDevice().on_host():
        if schedule is not None:
            megatron.zerobubble.install(schedule=schedule)
        try:
            loop.initialize(args)
            yield loop, args
        finally:
            megatron.zerobubble.uninstall()
            _destroy_groups()


def build(loop: ModuleType, args: Any, groups: ProcessGroupCollection) -> list[DistributedDataParallel]:
    """The example's model chunks, with the groups handed to each and to its DDP."""
    model = partial(GPTModel, pg_collection=groups)
    wrap = partial(DistributedDataParallel, pg_collection=groups)
    with mock.patch.object(loop, "GPTModel", model), mock.patch.object(loop, "DistributedDataParallel", wrap):
        chunks: list[DistributedDataParallel] = loop.build_model(args, loop.transformer_config(args))
    return chunks


def train(rank: int, flags: str, schedule: str | None) -> dict[str, Any]:
    """The losses of each iteration and of an evaluation at its end, and the last gradients of this rank's parameters by name."""
    with installed(flags, schedule) as (loop, args):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks = build(loop, args, groups)
        config = get_model_config(chunks[0])
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=args.lr,
                clip_grad=args.clip_grad,
                bf16=args.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=args.use_distributed_optimizer,
            ),
            chunks,
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
        if args.overlap_grad_reduce:
            for name, functions in (
                ("no_sync_func", [chunk.no_sync for chunk in chunks]),
                ("grad_sync_func", [chunk.start_grad_sync for chunk in chunks]),
            ):
                setattr(config, name, functions if len(functions) > 1 else functions[0])
        config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
        config.grad_scale_func = optimizer.scale_loss
        run = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=args.virtual_pipeline_model_parallel_size)
        communicator = P2PCommunicator(pp_group=groups.pp, config=config)
        iterators = [loop.batches(args) for _ in chunks]
        call = partial(
            run,
            forward_step_func=partial(loop.forward_step, args),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=chunks,
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=communicator,
            pg_collection=groups,
        )

        def numbers(reports: list[dict[str, torch.Tensor]]) -> list[float]:
            is_last = groups.pp.rank() == groups.pp.size() - 1  # where Bridge reads them
            return [float(report["lm loss"]) for report in reports] if is_last else []

        losses = []
        for _ in range(args.train_iters):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses.append(numbers(call(decoder_seq_length=args.seq_length, forward_only=False)))
            gradients = dict(_gradients(chunks))
            optimizer.step()
        with torch.no_grad():
            losses.append(numbers(call(forward_only=True)))
        return {"losses": losses, "gradients": gradients}


def misuse(rank: int, flags: str, schedule: str) -> list[str]:
    """The messages of calls whose groups or communicator are not the ones of `parallel_state`."""

    class OtherCommunicator(P2PCommunicator):
        pass

    with installed(flags, schedule) as (loop, args):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks = build(loop, args, groups)
        others = ProcessGroupCollection.use_mpu_process_groups()
        others.dp = groups.pp
        config = get_model_config(chunks[0])
        messages = []
        for wrong in (
            {"pg_collection": others},
            {"pg_collection": object()},
            {"p2p_communicator": P2PCommunicator(pp_group=groups.dp, config=config)},
            {"p2p_communicator": OtherCommunicator(pp_group=groups.pp, config=config)},
            {"adjust_tensor_shapes_fn": len},
        ):
            try:
                get_forward_backward_func()(
                    forward_step_func=partial(loop.forward_step, args),
                    data_iterator=loop.batches(args),
                    model=chunks,
                    num_microbatches=args.num_microbatches,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    **wrong,
                )
            except megatron.zerobubble.errors.ConfigError as error:
                messages.append(str(error))
        return messages


def _gradients(chunks: list[DistributedDataParallel]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name with the layer's number in the model, gradient) of each parameter."""
    for chunk in chunks:
        model = chunk.module
        while hasattr(model, "module"):
            model = model.module
        for name, parameter in model.named_parameters():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(model.decoder.layers[int(words[2])].layer_number)
            yield ".".join(words), parameter.main_grad.detach().clone()
