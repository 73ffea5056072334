"""What surrounded the passes of a recorded iteration, as costs for the planner.

Buckets of a rank are reduced one after another, so a bucket takes the time from the end of the one before, or from its own
issue. That is an upper bound where the end of a collective cannot be observed, and on a rank whose replica issued it later. Of
optimizer steps, which wait for other ranks, only the time after the last of these counts. With post-validation it contains the
snapshot. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.timeline import Activity, Bucket, Span, Timeline

__all__ = ["step_costs"]

_AFTER = (Activity.GRADIENTS, Activity.OPTIMIZER)


def step_costs(timeline: Timeline) -> StepCosts | None:
    """The times around the passes of a recorded iteration; None if nothing was recorded there.

    The timeline must be on one clock, and every rank must have an op.
    """
    around = (Activity.REDUCE, Activity.GATHER, *_AFTER)
    if not any(span.activity in around for rank in timeline.ranks for span in rank.spans):
        return None
    reduce_ms: list[tuple[float, ...]] = [()] * timeline.plan.num_stages
    gather_ms, ready, ends, beside = list(reduce_ms), list[float](), list[float](), list[bool]()
    for rank in timeline.ranks:
        last, end = rank.ops[-1].start_ms, rank.ops[-1].end_ms
        reductions = [span for span in rank.spans if span.activity is Activity.REDUCE]
        # a gather that begins later belongs to the optimizer step
        gathers = [span for span in rank.spans if span.activity is Activity.GATHER and span.start_ms < last]
        for times, spans in ((reduce_ms, reductions), (gather_ms, gathers)):
            taken = _one_after_another(spans)
            for stage in {bucket.stage for bucket in taken}:
                times[stage] = tuple(elapsed for bucket, elapsed in taken.items() if bucket.stage == stage)
        beside += [span.start_ms < end for span in reductions]  # False also of one that is complete with the last op
        ready.append(max([end, *(span.end_ms for span in reductions)]))
        ends.append(max([ready[-1], *(span.end_ms for span in rank.spans if span.activity in _AFTER)]))
    is_optimistic = any(span.activity is Activity.VALIDATE for rank in timeline.ranks for span in rank.spans)
    begins = list(accumulate(ready, max)) if is_optimistic else [max(ready)] * len(ready)
    return StepCosts(
        reduce_ms=tuple(reduce_ms),
        gather_ms=tuple(gather_ms),
        optimizer_ms=tuple(max(0.0, end - begin) for end, begin in zip(ends, begins, strict=True)),
        snapshot_ms=(0.0,) * len(ends),
        beside_passes=any(beside) or not beside,
    )


def _one_after_another(spans: Iterable[Span]) -> dict[Bucket, float]:
    """Bucket -> milliseconds of its last collective on a link that takes one after another, in the order of their issue."""
    taken, free = dict[Bucket, tuple[float, float]](), float("-inf")
    for span in sorted(spans, key=lambda span: span.end_ms):
        if span.bucket is None:  # of a trace file
            continue
        taken[span.bucket] = span.start_ms, max(0.0, span.end_ms - max(span.start_ms, free))
        free = max(free, span.end_ms)
    return {bucket: elapsed for bucket, (_, elapsed) in sorted(taken.items(), key=lambda item: item[1][0])}
