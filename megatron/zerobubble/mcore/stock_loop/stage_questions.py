"""Which stage is running: `is_pipeline_first_stage` and its relatives, answered under V placement.

megatron-core answers most of these questions by the pipeline rank, because in a loop placement a rank's chunks hold at most one
end of the model. Under V the first pipeline rank has both ends, and the last has none. So there are two answers:

- **While a chunk runs**, forward step and loss function, each question is about that chunk. A `get_batch` that asks without
  `vp_stage` loads tokens for the first stage and labels for the last, as it should.
- **Otherwise** a question without `vp_stage` is about the rank and gets megatron-core's answer: the last pipeline rank is last.
  There a loop expects the losses, and finds them (`result_relay`). A question with `vp_stage` is about that chunk.

`is_pp_first_stage` and `is_pp_last_stage` are imported by name everywhere, so the function that both look up is replaced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import utils
from torch import nn

__all__ = ["StageQuestions"]

Ends = tuple[bool, bool]
"""Whether a chunk holds the first and the last stage."""


class StageQuestions:
    """The chunk that runs on this rank, and the replacements of megatron-core's functions that ask for it.

    Args:
        ends: `vp_stage` -> which ends of the model that chunk of this rank holds.
    """

    def __init__(self, ends: Callable[[int | None], Ends]) -> None:
        self._ends = ends
        self._running: int | None = None

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """(owner, attribute, replacement) of the functions that are replaced."""
        return [
            (parallel_state, "is_pipeline_first_stage", self._is_stage(parallel_state.is_pipeline_first_stage, end=0)),
            (parallel_state, "is_pipeline_last_stage", self._is_stage(parallel_state.is_pipeline_last_stage, end=1)),
            (utils, "get_pg_rank", self._rank_in_pipeline(utils.get_pg_rank)),
        ]

    def answering(self, forward_step_func: Callable[..., Any], chunks: Sequence[nn.Module]) -> Callable[..., Any]:
        """A loop's forward step, and the loss function that it returns, during which questions are about the running chunk.

        Args:
            forward_step_func: called with a data iterator and one of `chunks`; returns the output and a loss function or None.
            chunks: this rank's model chunks, by `vp_stage`.
        """
        self._running = None  # an in-process restart may have interrupted an earlier call anywhere
        number_of = {id(chunk): number for number, chunk in enumerate(chunks)}

        @functools.wraps(forward_step_func)
        def forward_step(data_iterator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            during = self._during(number_of[id(model)])
            output, loss_func = during(forward_step_func)(data_iterator, model, *args, **kwargs)
            return output, None if loss_func is None else during(loss_func)

        return forward_step

    @contextlib.contextmanager
    def _during(self, chunk: int) -> Iterator[None]:
        """While `chunk` runs. Also a decorator."""
        before, self._running = self._running, chunk
        try:
            yield
        finally:
            self._running = before

    def _is_stage(self, original: Callable[..., bool], *, end: int) -> Callable[..., bool]:
        @functools.wraps(original)
        def is_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
            is_about_chunk = not ignore_virtual and parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
            if is_about_chunk and (vp_stage is not None or self._running is None):
                return self._ends(vp_stage)[end]
            if self._running is not None:
                return self._ends(self._running)[end]
            return original(ignore_virtual=ignore_virtual, vp_stage=vp_stage)

        return is_stage

    def _rank_in_pipeline(self, original: Callable[..., int]) -> Callable[..., int]:
        """The rank by which megatron-core tells the ends of a pipeline from the middle, which is here -1."""

        @functools.wraps(original)
        def get_pg_rank(group: Any = None) -> int:
            if self._running is None or group is None:
                return original(group)
            is_first, is_last = self._ends(self._running)
            return 0 if is_first else utils.get_pg_size(group) - 1 if is_last else -1

        return get_pg_rank
