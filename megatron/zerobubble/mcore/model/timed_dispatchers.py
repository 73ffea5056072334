"""Measures when tokens travel to and from experts: a recorder hears of the begin and the end of every dispatch and combine.

In an iteration that is measured, methods of dispatchers stand between two autograd functions that return what they get: in F the
recorder is called before and behind the method, in B by their backwards. On CUDA both are events on the stream of the passes,
behind the wait for what another stream communicates. Other iterations run without any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.zerobubble.mcore.model.expert_exchanges import METHODS, bordered
from megatron.zerobubble.runtime.recording import Recorder

__all__ = ["timed_dispatchers"]


def _is_measured(config: Any) -> bool:
    """Whether a pass computes nothing while its tokens travel, and Python runs at their begin and end."""
    return bool(
        config.num_moe_experts
        and config.expert_model_parallel_size > 1
        and not config.moe_shared_expert_overlap
        and not getattr(config, "overlap_moe_expert_parallel_comm", False)
        and getattr(config, "cuda_graph_impl", None) in (None, "none")
    )


@contextmanager
def timed_dispatchers(dispatchers: Sequence[Sequence[Any]], config: Any, recorder: Recorder | None) -> Iterator[None]:
    """Inside, `recorder.computes` is called with -1 where a pass begins to dispatch or to combine tokens, and with 1 behind that.

    Args:
        dispatchers: the `token_dispatchers` of each chunk.
        config: the chunks' TransformerConfig. Where experts are on one rank, or compute beside that, nothing is measured.
        recorder: of the passes; None: nothing is measured.
    """
    if recorder is None or not any(dispatchers) or not _is_measured(config):
        yield
        return
    places = [(each, name) for chunk in dispatchers for each in chunk for name in METHODS if hasattr(each, name)]
    before = [vars(each).get(name) for each, name in places]
    for each, name in places:
        setattr(each, name, partial(_timed, getattr(each, name), recorder.computes))
    try:
        yield
    finally:
        for (each, name), own in zip(places, before, strict=True):
            if own is None:
                delattr(each, name)
            else:
                setattr(each, name, own)


def _timed(method: Callable[..., Any], computes: Callable[[int], None], *given: Any, **others: Any) -> Any:
    """A dispatcher's method between two marks; in B its backward between two marks."""
    given = bordered(partial(computes, 1), given)
    computes(-1)
    result = method(*given, **others)
    computes(1)
    results = bordered(partial(computes, -1), result if isinstance(result, tuple) else (result,))
    return results if isinstance(result, tuple) else results[0]
