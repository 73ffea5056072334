"""The example of a stock loop, run inside the ranks of a `RankPool` or through torchrun."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

import megatron.zerobubble
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.training.layer_specs import mtp_layers
from tests.support.gpt import _forget_groups

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


def train_further_tokens(rank: int, flags: str, options: dict[str, Any]) -> History:
    """`train`, of a model that also predicts one further token."""
    loop = example()

    def model(*, config: TransformerConfig, vp_stage: int | None, **others: Any) -> GPTModel:
        heads = mtp_layers(config, vp_stage=vp_stage)
        return GPTModel(config=config, vp_stage=vp_stage, mtp_block_spec=heads, position_embedding_type="rope", **others)

    configured = functools.partial(TransformerConfig, mtp_num_layers=1, transformer_impl="local")
    with mock.patch.object(loop, "GPTModel", model), mock.patch.object(loop, "TransformerConfig", configured):
        try:
            return train(rank, flags, **options)
        finally:
            MTPLossLoggingHelper.tracker.clear()


def train(rank: int, flags: str, **options: Any) -> History:
    """Run the example with these flags; `options` are given to `install` instead of the flags. What this rank logged."""
    loop = example()
    args = loop.parse(flags.split())
    _forget_groups()
    with HostDevice().on_host():
        if options:
            megatron.zerobubble.install(**options)
        else:
            megatron.zerobubble.install(args)
        try:
            history: History = loop.train(args)
        finally:
            megatron.zerobubble.uninstall()
            _forget_groups()
    return history
