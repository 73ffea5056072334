"""The example of a stock loop, run inside the ranks of a `RankPool` or through torchrun."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

import megatron.zerobubble
from megatron.zerobubble.flags.loop_options import MicrobatchLengths
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.compat import mtp_entries
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern
from megatron.zerobubble.training.models.layer_specs import mtp_layers
from tests.support.hybrid import EXPERTS, hybrid_stack
from tests.support.process_groups import destroy_groups

EXAMPLE = Path(__file__).parents[2] / "examples" / "stock_megatron_core.py"

History = list[dict[str, Any]]


@functools.cache
def example() -> ModuleType:
    """The example as a module. Once: it has imported what it needs of megatron.core before anything is installed."""
    spec = importlib.util.spec_from_file_location("stock_megatron_core", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_mtp(rank: int, flags: str, options: dict[str, Any]) -> History:
    """`train`, of a model with one MTP layer."""
    loop = example()

    def model(*, config: TransformerConfig, vp_stage: int | None, **others: Any) -> GPTModel:
        block_spec = mtp_layers(config, vp_stage=vp_stage)
        return GPTModel(config=config, vp_stage=vp_stage, mtp_block_spec=block_spec, position_embedding_type="rope", **others)

    configured = functools.partial(TransformerConfig, mtp_num_layers=1, transformer_impl="local")
    with mock.patch.object(loop, "GPTModel", model), mock.patch.object(loop, "TransformerConfig", configured):
        try:
            return train(rank, flags, **options)
        finally:
            mtp_entries().clear()


def train_unequal(rank: int, flags: str, options: dict[str, Any]) -> History:
    """`train`, on microbatches of unequal length, different ones on every replica. Without options: megatron-core's own schedule,
    whose ranks exchange a shape with every message."""
    loop = example()

    def batches(args: Any) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(5 + parallel_state.get_data_parallel_rank())
        while True:
            length = int(torch.randint(1, args.seq_length + 1, (1,), generator=generator))
            yield torch.randint(0, loop.VOCABULARY, (args.micro_batch_size, length + 1), generator=generator)

    def forward_step(args: Any, data_iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        text = next(data_iterator)
        positions = torch.arange(text.size(1) - 1).expand(len(text), -1)
        return chunk(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous()), loop.loss_function

    configured = functools.partial(TransformerConfig, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    with (
        mock.patch.object(loop, "TransformerConfig", configured),
        mock.patch.multiple(loop, batches=batches, forward_step=forward_step),
    ):
        return train(rank, flags, **({"lengths": MicrobatchLengths(tokens_of)} | options if options else {}))


def losses_of(histories: list[History]) -> list[Any]:
    """The losses of the ranks that logged any, in the order of data-parallel replicas."""
    return [[entry["losses"] for entry in history] for history in histories if history]


def with_flags(**flags: Any) -> dict[str, Any]:
    """The options of `install` for what only flags say."""
    return {"args": ZeroBubbleConfig(**flags)}


def tokens_of(text: torch.Tensor) -> int:
    """Length of the rows of a microbatch of `train_unequal`."""
    return text.size(1) - 1


def train_hybrid(rank: int, flags: str, options: dict[str, Any], pattern: str, argument: str = "hybrid_layer_pattern") -> History:
    """`train`, of a `HybridModel` that is given this pattern as this argument."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    loop, layers = example(), HybridPattern.parse(pattern).layers
    given: dict[str, Any] = {"num_layers": len(layers), "is_hybrid_model": True}
    if EXPERTS in layers:
        given |= {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}

    def model(*, config: TransformerConfig, transformer_layer_spec: Any, **others: Any) -> Any:
        return HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack(config),
            position_embedding_type="learned_absolute",
            **{argument: pattern},
            **others,
        )

    def configured(**fields: Any) -> TransformerConfig:
        return TransformerConfig(**(fields | given), transformer_impl="local")

    with mock.patch.object(loop, "GPTModel", model), mock.patch.object(loop, "TransformerConfig", configured):
        return train(rank, flags, **options)


def train(rank: int, flags: str, **options: Any) -> History:
    """Run the example with these flags; `options` are given to `install` instead of the flags. What this rank logged."""
    with installed(flags, options, by_flags=not options, initializes=False) as args:
        history: History = example().train(args)
    return history


@contextlib.contextmanager
def installed(
    flags: str, options: dict[str, Any] | str | None = None, *, by_flags: bool = False, initializes: bool = True
) -> Iterator[argparse.Namespace]:
    """A context with a schedule installed on this rank: the example's parsed flags.

    Args:
        flags: of the example.
        options: of `install`, or the name of the schedule; None installs nothing.
        by_flags: whether the flags are what is installed.
        initializes: whether the process groups are made.
    """
    args: argparse.Namespace = example().parse(flags.split())
    destroy_groups()
    with HostDevice().on_host():
        if by_flags:
            megatron.zerobubble.install(args)
        elif options:
            megatron.zerobubble.install(**{"schedule": options} if isinstance(options, str) else options)
        try:
            if initializes:
                example().initialize(args)
            yield args
        finally:
            megatron.zerobubble.uninstall()
            destroy_groups()


@contextlib.contextmanager
def warnings_of_package() -> Iterator[list[str]]:
    """What the package warns of meanwhile, in this process."""
    texts: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("megatron.zerobubble")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
