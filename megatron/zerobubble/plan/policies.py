"""Where the search begins: policies drawn from building blocks.

A building block says when one microbatch passes each stage; repeating it every period is a steady schedule, and how long the
block keeps an activation alive is the memory it needs (arXiv 2405.15362, section 3). A policy here is such a block with

- a slack after every pass on the way down and up, which trades memory for tolerance;
- W either close behind B or whenever nothing else can run;
- a cap on how many microbatches are between two chunks of a rank, so that a rank does not fill its memory with first chunks;
- times that are the true ones, evened out, or lengthened by the link time: a regular pattern under the wrong times often beats an
  irregular one under the true times, because ranks then take turns instead of racing.

Which block is best is found by trying: `starting_policies` yields them in a fixed
shuffled order, so that any prefix is a fair sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.search_core import Policy, Random

_PERIODS = (1.0, 1.15, 1.3)
_SLACKS = (0.0, 0.25, 0.5, 1.0, 1.5)
_WGRAD_DELAYS = (0.5, 2.0, 1000.0)
_CAPS = (1.0, 1.3, 1.7, math.inf)
_WAITS = (0.0, 0.15)


class _Times(NamedTuple):
    """F, B, W per stage, flat, and the link time, as a policy sees them."""

    durations: tuple[float, ...]
    comm_ms: float


class _Block(NamedTuple):
    times: int
    period: float
    slack: float
    wgrad_delay: float
    cap: float
    wait: float


def flat_durations(costs: CostModel, *, fused: bool = False) -> tuple[float, ...]:
    """F, B, W of every stage in turn. With `fused`, W takes its time inside B and none of its own."""
    backward = costs.backward_ms
    wgrad = costs.wgrad_ms
    if fused:
        backward = tuple(b + w for b, w in zip(costs.backward_ms, costs.wgrad_ms, strict=True))
        wgrad = (0.0,) * costs.num_stages
    return tuple(value for stage in zip(costs.forward_ms, backward, wgrad, strict=True) for value in stage)


def starting_policies(placement: Placement, costs: CostModel, *, fused: bool = False) -> Iterator[Policy]:
    """Every starting policy, best mixed. With `fused`, each W follows its B at once."""
    views = _views(costs, fused=fused)
    caps = _CAPS if placement.num_chunks > 1 else (math.inf,)
    delays = (0.0,) if fused else _WGRAD_DELAYS
    blocks = [_Block(*values) for values in itertools.product(range(len(views)), _PERIODS, _SLACKS, delays, caps, _WAITS)]
    random = Random(0)
    for last in range(len(blocks) - 1, 0, -1):
        other = random.below(last + 1)
        blocks[last], blocks[other] = blocks[other], blocks[last]
    for block in blocks:
        yield _policy(placement, views[block.times], block, fused=fused)


def _views(costs: CostModel, *, fused: bool) -> list[_Times]:
    true = flat_durations(costs, fused=fused)
    mean = sum(true) / max(1, sum(duration > 0 for duration in true))
    even = tuple(mean if duration > 0 else 0.0 for duration in true)
    longer = tuple(value + (costs.comm_ms if index % 3 < 2 else 0.0) for index, value in enumerate(true))
    return [_Times(true, costs.comm_ms), _Times(even, 0.0), _Times(longer, 0.0), _Times(even, costs.comm_ms)]


def _policy(placement: Placement, times: _Times, block: _Block, *, fused: bool) -> Policy:
    num_stages = placement.num_stages
    durations, comm_ms = times
    per_rank = [sum(sum(durations[3 * s : 3 * s + 3]) for s in stages) for stages in placement.rank_to_stages]
    busiest = max(per_rank)
    period = busiest * block.period
    slack = block.slack * sum(durations[2::3]) / num_stages if not fused else block.slack * busiest / 12
    offsets = [0.0] * (3 * num_stages)
    now = 0.0
    for stage in range(num_stages):
        offsets[3 * stage] = now
        now += durations[3 * stage] + comm_ms + slack
    for stage in reversed(range(num_stages)):
        offsets[3 * stage + 1] = now
        now += durations[3 * stage + 1]
        offsets[3 * stage + 2] = -math.inf if fused else now + block.wgrad_delay * period
        now += comm_ms + slack
    caps = [math.inf] * num_stages
    if math.isfinite(block.cap) and period > 0:
        for stages in placement.rank_to_stages:
            for stage, after in itertools.pairwise(stages):
                caps[stage] = max(1.0, float(math.ceil(block.cap * (offsets[3 * after] - offsets[3 * stage]) / period)))
    return Policy(durations, comm_ms, offsets, caps, period, 1.0, block.wait * period)
