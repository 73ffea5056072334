"""Megatron-LM's own training loop, which is recognized by its parsed arguments: what it needs beside megatron-core's contract."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.batches import cut_batch
from megatron.zerobubble.mcore.slices.current_slice import SlicePart

__all__ = ["cut_megatron_lm_batch", "megatron_lm_args", "reads_weights_after_step", "sliced_batches"]

_MASK = "attention_mask"
_READERS = ("log_params_norm", "qk_clip", "perform_rl_step")
"""Flags with which the loop reads or changes weights behind every optimizer step."""


def megatron_lm_args() -> Any | None:
    """The parsed arguments of Megatron-LM's loop; None in another loop."""
    loop = sys.modules.get("megatron.training.global_vars")
    try:
        return None if loop is None else loop.get_args()
    except AssertionError:  # it was imported, and does not run
        return None


def reads_weights_after_step() -> bool:
    """Whether Megatron-LM's loop reads or changes weights behind the optimizer step that it is about to take.

    An evaluation or a checkpoint does not count: both validate the step first.
    """
    args = megatron_lm_args()
    if args is None:
        return False
    saves_every = getattr(args, "save_params_interval", None)
    is_saved = saves_every is not None and (args.curr_iteration + 1) % saves_every == 0
    return is_saved or any(getattr(args, name, False) for name in _READERS)


class _WithoutMask(dict[str, Any]):
    """A batch without an attention mask: neither `in` nor a look-up by name finds one."""

    def __missing__(self, key: str) -> None:
        if key != _MASK:
            raise KeyError(key)


def sliced_batches(
    forward_step_func: Callable[..., Any], current: Callable[[], SlicePart | None], args: Any
) -> Callable[..., Any]:
    """The loop's function, which makes tensors of a slice's length where it makes some by its arguments.

    Megatron-LM's first tensor-parallel rank reads a batch and broadcasts it into tensors that the others make by
    `args.seq_length`. Its batches may have a causal mask, which is left out: attention is causal without one.

    Args:
        forward_step_func: runs a microbatch.
        current: returns the slice that runs.
        args: of the loop.

    Raises:
        ConfigError: its masks keep documents apart.
    """
    if getattr(args, "reset_attention_mask", False):
        raise ConfigError(
            "slices do not go with --reset-attention-mask, whose masks keep documents apart: leave one of the two out"
        )

    @contextmanager
    def of_slice(part: SlicePart | None) -> Iterator[None]:
        changed = {} if part is None else {"seq_length": part.length, "create_attention_mask_in_dataloader": False}
        before = {name: getattr(args, name) for name in changed if hasattr(args, name)}
        vars(args).update({name: changed[name] for name in before})
        try:
            yield
        finally:
            vars(args).update(before)

    def forward_step(*given: Any, **keywords: Any) -> Any:
        with of_slice(current()):
            return forward_step_func(*given, **keywords)

    return forward_step


def cut_megatron_lm_batch(batch: Any, offset: int, length: int) -> Any:
    """A `Cut` for the batches of Megatron-LM's datasets."""
    whole = batch["tokens"].size(1)
    rest = _WithoutMask({name: value for name, value in batch.items() if name != _MASK})
    return _WithoutMask(cut_batch(rest, SlicePart(-1, offset, length, whole)))
