"""What one rank refuses before the first pass ends all ranks, with that line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError, SplitError, UserError
from megatron.zerobubble.flags.loop_options import Slices
from megatron.zerobubble.mcore import engine
from tests.support.loops import SIZES, Loop, forward_step
from tests.support.ranks import RankPool
from tests.support.stock import installed, with_flags

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


def _without_a_core(loop: Loop) -> dict[str, Any]:
    if _on(1):
        missing = mock.Mock(side_effect=ConfigError("the compiled search core cannot be loaded"))
        mock.patch.object(engine, "library", missing).start()
    return {}


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
        finally:
            mock.patch.stopall()
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
        ("", {"schedule": "zb-h1", "slices": Slices(2)}, _attention_that_sees_all, _nothing, "has a no_mask mask"),
        (V, {"schedule": "zbv"}, None, _no_iterators, "give data_iterator as a list"),
        ("--overlap-grad-reduce", {"schedule": "zb-h1"}, None, _frozen_since, r"was frozen \(requires_grad_"),
        (V, {"schedule": "zbv"}, None, _part_of_the_chunks, r"takes a model of 2 chunk\(s\)"),
        ("", {"schedule": "zb-h1"}, None, _stranger, "DistributedDataParallel did not wrap"),
        (V, {"schedule": "zbv"}, None, _without_a_core, "the compiled search core cannot be loaded"),
        (V, with_flags(zero_bubble_v_schedule=True, zero_bubble_trace="/dev/null"), None, _nothing, "/dev/null is a file"),
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
        "search-core",
        "target",
    ],
)
def test_all_ranks_end_with_the_line_of_the_one_that_refuses(
    two_ranks: RankPool, flags: str, options: dict[str, Any], prepare: Prepare | None, given: Arguments, line: str
) -> None:
    (kind, text), other = two_ranks.run(refused, flags, options, prepare, given, False)
    assert (kind, text) == other
    assert kind == (SplitError if "critic" in line else ConfigError).__name__
    assert re.search(line, text), text


def _outputs(rank: int, schedule: str, flags: str, change: Callable[[Tensor], Any]) -> None:
    """An iteration whose first stage returns something else than its hidden states."""

    def changed(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        output, loss = forward_step(data_iterator, model)
        return (change(output) if get_attr_wrapped_model(model, "pre_process") else output), loss

    without = mock.patch.object(megatron.zerobubble, "uninstall")  # which all ranks call, and the other one waits for a message
    with without, installed(f"{SIZES} {flags}", schedule) as args:
        Loop(args).train(forward_step_func=changed)


def _pair(output: Tensor) -> Any:
    return output, output.detach().mean()


def _dict(output: Tensor) -> Any:
    return {"hidden_states": output}


def _half(output: Tensor) -> Any:
    return output.bfloat16()


@pytest.mark.parametrize(
    ("schedule", "flags", "change", "line"),
    [
        ("zb-h1", "", _pair, r"returned a tuple of 2 as the stage's output, .* one tensor, the hidden states \(8, 2, 16\)"),
        ("zbv", V, _dict, "returned dict as the stage's output"),
        ("zb-h1", "", _half, r"the output is torch\.bfloat16, .* config\.pipeline_dtype, torch\.float32"),
    ],
)
def test_an_output_that_is_not_one_tensor_is_named(
    two_ranks: RankPool, schedule: str, flags: str, change: Callable[[Tensor], Any], line: str
) -> None:
    with pytest.raises(AssertionError, match=rf"ExecutionError: stage 0, microbatch 0: .*{line}"):
        two_ranks.run(_outputs, schedule, flags, change)
