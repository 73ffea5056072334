"""The example of a stock loop, run inside the ranks of a `RankPool` or through torchrun."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron.zerobubble
from megatron.zerobubble.integration.host import HostDevice
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
