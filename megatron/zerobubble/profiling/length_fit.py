"""How the passes' times and memory grow with the length of a microbatch, fitted to a profile of unequal ones.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs.length_model import LengthModel, Work
from megatron.zerobubble.plan.ir import OpKind, Placement
from megatron.zerobubble.profiling.profile import ByLength, RankProfile, StageMemory

__all__ = ["fit_lengths"]


def fit_lengths(ranks: Sequence[RankProfile], placement: Placement, *, usual_tokens: int) -> tuple[LengthModel, float]:
    """The costs of microbatches by their lengths, closest to what all ranks have measured.

    Args:
        ranks: the profile of every rank that holds a stage, in any order, with passes by length.
        placement: stage -> rank.
        usual_tokens: tokens of a microbatch of one sequence, p of which are 1.0 of activation memory on a rank.

    Returns:
        The model, and the bytes of its unit of memory: a usual microbatch on a rank with an equal part of the model; 0 if memory
        was not measured, and then it grows with the tokens.

    Raises:
        ExecutionError: a stage's F or B was not timed by length.
    """
    stages = range(placement.num_stages)

    def fitted(found: Sequence[ByLength[Any]], part: Callable[[Any], float]) -> Work:
        return Work.fit([(each.tokens, each.squares) for each in found], [part(each.value) for each in found])

    def time_terms(stage: int, *kinds: OpKind, optional: bool = False) -> Work:
        passes = [each for rank in ranks for kind in kinds for each in rank.timed.get((stage, kind), ())]
        if not passes and not optional:
            raise ExecutionError(f"no {kinds[0].value} of stage {stage} was timed by length")
        return fitted(passes, float) if passes else Work()

    def memory_terms(stage: int, part: Callable[[StageMemory], float]) -> Work:
        held = [each for rank in ranks for each in rank.measured.get(stage, ())]
        return fitted(held, part) if held else Work()

    activation = [memory_terms(stage, lambda memory: memory.activation) for stage in stages]
    after_backward = [memory_terms(stage, lambda memory: memory.after_backward) for stage in stages]
    usual = (float(usual_tokens), float(usual_tokens) ** 2)
    unit = math.fsum(terms.at(*usual) for terms in activation) / placement.num_ranks
    if unit <= 0:
        equal = Work(0.0, 1.0 / placement.num_chunks / usual_tokens, 0.0)
        activation = after_backward = [equal] * placement.num_stages
    else:
        activation, after_backward = ([terms.scaled(1 / unit) for terms in each] for each in (activation, after_backward))
    return LengthModel(
        forward_ms=tuple(time_terms(stage, OpKind.F) for stage in stages),
        backward_ms=tuple(time_terms(stage, OpKind.B, OpKind.BW) for stage in stages),
        wgrad_ms=tuple(time_terms(stage, OpKind.W, optional=True) for stage in stages),
        activation=tuple(activation),
        activation_after_backward=tuple(after_backward),
    ), max(0.0, unit)
