"""Building blocks in a few parameters, and the list-scheduling policies they define.

A building block states when one microbatch passes each stage; repeating it every period is a steady schedule, and the lifetime of
an activation within the block is the memory it needs (arXiv 2405.15362, section 3). A `Block` describes such a block by a dozen
numbers, independent of the number of ranks and microbatches:

- a slack after every pass, one number per chunk and direction, which trades memory for tolerance to delays;
- W either close behind B or whenever nothing else can run;
- how far F of a chunk runs ahead of its turn;
- a cap on the number of microbatches between two chunks of a rank, so that a rank does not fill its memory with first chunks, and
  how far the cap falls in the steady state;
- the share of the memory limit it uses;
- which times it sees: the true ones, evened out, or lengthened by the link time. A regular pattern under wrong times often beats
  an irregular one under the true times, because ranks then alternate instead of racing.

The search finds the best block by trying: some plain ones first, then random ones, then random variations of the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.search.interface import Policy, flat_durations

_NEVER = 1000.0
_WGRAD_DELAYS = (-0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, _NEVER, _NEVER)
_CAPS = (math.inf, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
_SETTLED = (1.0, 1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
_SETTLE_AFTER = (0.5, 1.0, 1.5, 2.0, 3.0)
_WAITS = (0.0, 0.03, 0.05, 0.1, 0.15, 0.3)
_WAIT_WEIGHTS = (0.0, 0.5, 1.0, 3.0)
_MEMORY_SHARES = (1.0, 1.0, 1.0, 0.9, 0.8, 0.65)


@dataclass(frozen=True)
class Block:
    """A building block. Times are shares of the bottleneck rank's time per microbatch unless noted otherwise."""

    view: int
    """Which times it sees: 0 true, 1 evened out without links, 2 lengthened by the link, 3 evened out."""
    period: float
    """Time between two microbatches."""
    slacks: tuple[float, ...]
    """After F of each chunk, then after B of each chunk, in shares of an average pass."""
    leads: tuple[float, ...]
    """How far F of each chunk runs ahead of its turn."""
    wgrad_delay: float
    """Time from B to its W."""
    cap: float
    """Most microbatches between two chunks of a rank, as a multiple of their number in the block."""
    settled: float
    """Share to which the cap falls in the steady state."""
    settle_after: float
    """Number of microbatches over which the cap falls, as a multiple of the number of ranks."""
    wait: float
    """Longest wait for an op whose input is in flight."""
    wait_weight: float
    """Priority lost per millisecond of waiting, see `Policy`."""
    memory_share: float
    """Share of the memory limit that the block uses."""


class Blocks:
    """Generates blocks for one placement and its costs, and turns them into policies.

    With n slices per microbatch a block is of slices of the mean length, and B runs n-1 periods later, behind F of the others.
    """

    def __init__(self, placement: Placement, costs: CostModel, limit: float, *, fused: bool = False) -> None:
        """`limit` is the memory limit per rank in microbatches. With `fused`, each W follows its B immediately."""
        self._placement, self._limit, self._fused, self._n = placement, limit, fused, costs.num_slices
        self._views = _views(costs, fused=fused)

    def plain(self) -> Iterator[Block]:
        """A few regular blocks, each good for some costs."""
        chunks = self._placement.num_chunks
        even = [(slack,) * (2 * chunks) for slack in (0.0, 0.5, 1.0)]
        behind = (0.0,) * chunks + tuple(3.0 * (chunk + 1) / chunks for chunk in range(chunks))
        for view, cap, delay, slacks in itertools.product((0, 2), (math.inf, 1.3), (_NEVER, 0.5), (*even, behind)):
            yield Block(view, 1.0, slacks, (0.0,) * chunks, delay, cap, 1.0, 1.0, 0.05, 1.0, 1.0)

    def random(self, random: Random) -> Block:
        """A random block."""
        chunks = self._placement.num_chunks
        return Block(
            view=random.randrange(len(self._views)),
            period=1.0 + 0.3 * random.random() * random.randrange(2),
            slacks=tuple(_slack(random) for _ in range(2 * chunks)),
            leads=tuple(_lead(random) for _ in range(chunks)),
            wgrad_delay=random.choice(_WGRAD_DELAYS),
            cap=random.choice(_CAPS),
            settled=random.choice(_SETTLED),
            settle_after=random.choice(_SETTLE_AFTER),
            wait=random.choice(_WAITS),
            wait_weight=random.choice(_WAIT_WEIGHTS),
            memory_share=random.choice(_MEMORY_SHARES),
        )

    def varied(self, block: Block, random: Random) -> Block:
        """The block with one to three parameters changed, mostly a little, sometimes to random values."""
        other = self.random(random)
        for _ in range(random.choice((1, 1, 2, 3))):
            block = self._changed(block, other, random)
        return block

    def _changed(self, block: Block, other: Block, random: Random) -> Block:
        name = random.choice(("view", "period", "slacks", "slacks", "slacks", "slacks", "leads", "leads", *_SCALED, *_CHOSEN))
        little = random.random() < 0.7
        if name == "period":
            return replace(block, period=max(0.95, block.period + _normal(random, 0.03)))
        if name in ("slacks", "leads"):
            values = list(getattr(block, name))
            index = random.randrange(len(values))
            step = _normal(random, 0.3 if name == "slacks" else 0.5)
            values[index] = values[index] + step if little else getattr(other, name)[index]
            if name == "slacks":
                values[index] = max(0.0, values[index])
            changed: dict[str, Any] = {name: tuple(values)}
            return replace(block, **changed)
        if name in _SCALED and little:
            return replace(block, **{name: getattr(block, name) * _portable(math.exp(_normal(random, 0.15)))})
        return replace(block, **{name: getattr(other, name)})

    def policy(self, block: Block) -> Policy:
        """The list-scheduling policy of a block."""
        placement = self._placement
        num_stages, chunks = placement.num_stages, placement.num_chunks
        durations, comm_ms = self._views[block.view]
        work = [[duration for s in stages for duration in durations[3 * s : 3 * s + 3]] for stages in placement.rank_to_stages]
        bottleneck = max(map(math.fsum, work))
        period, unit = bottleneck * block.period, bottleneck / (3 * chunks)
        hops = [a != b for a, b in itertools.pairwise(placement.stage_to_rank)]
        offsets = [0.0] * (3 * num_stages)
        now = 0.0
        for stage in range(num_stages):
            chunk = placement.chunk_of(stage)
            offsets[3 * stage] = now - block.leads[chunk] * period
            now += durations[3 * stage]
            if stage + 1 < num_stages and hops[stage]:
                now += comm_ms + block.slacks[chunk] * unit
        caps = [math.inf] * num_stages
        all_run = (self._n - 1) * period
        now += all_run
        for stage in reversed(range(num_stages)):
            chunk = placement.chunk_of(stage)
            offsets[3 * stage + 1] = now
            now += durations[3 * stage + 1]
            offsets[3 * stage + 2] = -math.inf if self._fused else now + block.wgrad_delay * period
            if stage > 0 and hops[stage - 1]:
                now += comm_ms + block.slacks[chunks + chunk] * unit
        if math.isfinite(block.cap) and period > 0:
            for stages in placement.rank_to_stages:
                nexts = [offsets[3 * after] for after in stages[1:]] + [offsets[3 * stages[-1] + 1] - all_run]
                for stage, after in zip(stages, nexts, strict=True):
                    caps[stage] = max(1.0, block.cap * (after - offsets[3 * stage]) / period)
        return Policy(
            durations=durations,
            comm_ms=comm_ms,
            offsets=offsets,
            caps=caps,
            period=period,
            wait_weight=block.wait_weight,
            max_wait=block.wait * period,
            limit=self._limit * block.memory_share,
            settled=block.settled,
            settle_after=block.settle_after * placement.num_ranks,
        )


_SCALED = ("wgrad_delay", "cap", "settled", "settle_after", "wait")
_CHOSEN = ("wait_weight", "memory_share")


def _views(costs: CostModel, *, fused: bool) -> list[tuple[tuple[float, ...], float]]:
    true = tuple(value / costs.num_slices for value in flat_durations(costs.whole, fused=fused))
    mean = math.fsum(true) / max(1, sum(duration > 0 for duration in true))
    even = tuple(mean if duration > 0 else 0.0 for duration in true)
    longer = tuple(value + (costs.comm_ms if index % 3 < 2 else 0.0) for index, value in enumerate(true))
    return [(true, costs.comm_ms), (even, 0.0), (longer, 0.0), (even, costs.comm_ms)]


def _slack(random: Random) -> float:
    return _portable(3.0 * random.random() ** 1.5) if random.random() < 0.8 else 0.0


def _lead(random: Random) -> float:
    return _normal(random, 3.0) if random.random() < 0.4 else 0.0


def _normal(random: Random, deviation: float) -> float:
    return _portable(random.gauss(0.0, deviation))


def _portable(value: float) -> float:
    """Without the last digits, in which the C libraries of two machines differ: the same seed draws the same blocks on all."""
    return round(value * 2**30) / 2**30
