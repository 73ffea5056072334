"""What one rank refuses before the first pass ends all ranks, with that line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core import parallel_state
from torch import nn

from megatron.zerobubble.errors import ConfigError, SplitError, UserError
from tests.support.loops import SIZES, Loop
from tests.support.ranks import RankPool
from tests.support.stock import installed

V = "--virtual-pipeline-model-parallel-size 2"


def _on(rank: int) -> bool:
    return parallel_state.get_pipeline_model_parallel_rank() == rank


def _unknown_weight(chunk: Any) -> None:
    """A weight of a module that cannot be split, as large as a layer, on the last stage only."""
    if chunk.post_process:
        chunk.critic = nn.Linear(32, 256)


def _two_uses(chunk: Any) -> None:
    if _on(0) and chunk.pre_process:
        chunk.critic = nn.Linear(32, 256)


def _attention_that_sees_all(chunk: Any) -> None:
    if _on(1):
        from megatron.core.transformer.enums import AttnMaskType

        for layer in chunk.decoder.layers:
            layer.self_attention.attn_mask_type = AttnMaskType.no_mask


def _wrong_end(chunk: Any) -> None:
    """Rank 0's second chunk does not know that it is the last."""
    chunk.post_process = False


def _no_iterators(loop: Loop) -> dict[str, Any]:
    return {"data_iterator": None} if _on(1) else {}


def _frozen_since(loop: Loop) -> dict[str, Any]:
    if _on(1):
        next(loop.model[0].parameters()).requires_grad_(False)
    return {}


def _part_of_the_chunks(loop: Loop) -> dict[str, Any]:
    return {"model": loop.model[:1]} if _on(0) else {}


def _stranger(loop: Loop) -> dict[str, Any]:
    return {"model": loop.model[0].module} if _on(1) else {}


def _nothing(loop: Loop) -> dict[str, Any]:
    return {}


Prepare = Callable[[Any], None]
Arguments = Callable[[Loop], dict[str, Any]]


def refused(
    rank: int, flags: str, options: dict[str, Any], prepare: Prepare | None, given: Arguments, evaluates: bool
) -> tuple[str, str]:
    """The error of a loop's first iteration on this rank, its class and text."""
    with installed(f"{SIZES} {flags}", options) as args:
        try:
            loop = Loop(args, **({} if prepare is None else {"prepare": prepare}))
            if evaluates:
                loop.evaluate(**given(loop))
            loop.train(**given(loop))
        except UserError as error:
            return type(error).__name__, str(error)
    return "", "nothing was refused"


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: a refusal on one rank before the first pass, such as a module of the last stage that cannot be split",
    "ends all ranks with the same line",
)
@pytest.mark.parametrize(
    ("flags", "options", "prepare", "given", "line"),
    [
        ("", {"schedule": "zb-h1"}, _unknown_weight, _nothing, r"critic\.weight \(torch"),
        (V, {"schedule": "zbv"}, _unknown_weight, _nothing, r"critic\.weight \(torch"),
        (f"--use-distributed-optimizer {V}", {"schedule": "zbv"}, _two_uses, _nothing, r"critic\.weight \(torch"),
        (V, {"schedule": "zbv"}, _wrong_end, _nothing, "was built with pre_process="),
        ("", {"schedule": "zb-h1", "slices": 2}, _attention_that_sees_all, _nothing, "has a no_mask mask"),
        (V, {"schedule": "zbv"}, None, _no_iterators, "give data_iterator as a list"),
        ("--overlap-grad-reduce", {"schedule": "zb-h1"}, None, _frozen_since, r"was frozen \(requires_grad_"),
        (V, {"schedule": "zbv"}, None, _part_of_the_chunks, r"takes a model of 2 chunk\(s\)"),
        ("", {"schedule": "zb-h1"}, None, _stranger, "DistributedDataParallel did not wrap"),
    ],
    ids=[
        "split",
        "split-under-v",
        "split-sharded",
        "ends-of-the-v",
        "attention-of-slices",
        "iterators",
        "frozen",
        "chunks",
        "not-wrapped",
    ],
)
def test_all_ranks_end_with_the_line_of_the_one_that_refuses(
    two_ranks: RankPool, flags: str, options: dict[str, Any], prepare: Prepare | None, given: Arguments, line: str
) -> None:
    (kind, text), other = two_ranks.run(refused, flags, options, prepare, given, False)
    assert (kind, text) == other
    assert kind == (SplitError if "critic" in line else ConfigError).__name__
    assert re.search(line, text), text
