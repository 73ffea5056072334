"""Where megatron-core's own schedule trains on wrong gradients (seen in 0.16.1 and 0.19.2): a comparison with it says so.

Interleaved 1F1B exchanges activations and gradients with both neighbors at once. With a pipeline of two ranks the neighbors are
one rank. A batch of transfers (`batch_p2p_comm`) then has two sends to it and two receives from it, which are matched in their
order: a rank takes the gradient for the activation, and the activation for the gradient. Megatron-LM's parser of flags refuses
this; megatron-core does not. With `overlap_p2p_comm`, and without `batch_p2p_comm`, each direction has transfers of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.zerobubble.mcore.stock_loop.status import show_line

__all__ = ["warned_of_wrong_gradients", "wrong_gradients"]

_INTERLEAVED = "forward_backward_pipelining_with_interleaving"


def wrong_gradients(config: Any, num_chunks: int) -> str | None:
    """Why megatron-core's own schedule computes wrong gradients, in one line with the remedy; None if it does not.

    Args:
        config: the model's TransformerConfig.
        num_chunks: model chunks per rank.
    """
    is_batched = config.batch_p2p_comm and not config.overlap_p2p_comm and not config.use_ring_exchange_p2p
    if num_chunks == 1 or config.pipeline_model_parallel_size != 2 or not is_batched:
        return None
    return (
        "megatron-core's interleaved 1F1B trains on wrong gradients here: with 2 pipeline ranks and batch_p2p_comm, a rank takes "
        "the other's gradient for its activation. Set overlap_p2p_comm=True and batch_p2p_comm=False before comparing losses"
    )


@contextlib.contextmanager
def warned_of_wrong_gradients(*, is_writing: bool) -> Iterator[None]:
    """While it is entered, megatron-core's own schedule writes `wrong_gradients` to stderr once, before the first passes.

    Args:
        is_writing: whether this process does. It must not have a schedule installed.
    """
    if not is_writing:
        yield
        return
    original = getattr(schedules, _INTERLEAVED)
    is_checked = False

    @functools.wraps(original)
    def checked(**given: Any) -> Any:
        nonlocal is_checked
        if not is_checked:
            is_checked = True
            why = wrong_gradients(get_model_config(given["model"][0]), len(given["model"]))
            if why is not None:
                show_line(why)
        return original(**given)

    setattr(schedules, _INTERLEAVED, checked)
    try:
        yield
    finally:
        setattr(schedules, _INTERLEAVED, original)
