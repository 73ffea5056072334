"""Shared experts on a stream of their own (`moe_shared_expert_overlap`), and W, which runs on the stream of the passes.

F and B of shared experts run on a side stream, beside the dispatcher's all-to-alls. What they leave to W was allocated and
written there. B makes the stream of the passes wait for the side stream, and F and B begin by making the side stream wait for
the other (megatron-core's `shared_experts.py` and `token_dispatcher.py`). So W finds its operands, and the next shared expert
finds their memory free: torch's allocator gives it to the side stream again as soon as W is issued. Both rest on where
megatron-core waits today; here W waits by itself, and the side stream waits for W. GEMMs that would run ahead of their W, in a
B, run in W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import nn

__all__ = ["between_streams", "side_streams"]


def side_streams(chunk: nn.Module) -> list[Any]:
    """The streams on which shared experts of a chunk run; empty without `moe_shared_expert_overlap`."""
    found = [each.stream for each in chunk.modules() if isinstance(each, SharedExpertMLP)]
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.cuda.Stream)))


@contextmanager
def between_streams(streams: Sequence[Any]) -> Iterator[None]:
    """What runs inside comes after the work of these streams so far, and before what they are given later."""
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    yield
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
