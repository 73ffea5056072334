"""What the list scheduler starts from: policies drawn from building blocks, and blocks drawn from others.

A building block says when one microbatch passes each stage; repeating it every period is a steady schedule, and how long the
block keeps an activation alive is the memory it needs (arXiv 2405.15362, section 3). A `Block` is such a block in a dozen
numbers, whatever the number of ranks and microbatches:

- a slack after every pass, one number per chunk and direction, which trades memory for tolerance;
- W either close behind B or whenever nothing else can run;
- how far F of a chunk goes ahead of its turn;
- a cap on how many microbatches are between two chunks of a rank, so that a rank does not fill its memory with first chunks, and
  how much lower the cap is once the pipeline runs;
- the share of the memory it uses at all;
- times that are the true ones, evened out, or lengthened by the link time: a regular pattern under the wrong times often beats an
  irregular one under the true times, because ranks then take turns instead of racing.

Which block is best is found by trying: some plain ones first, then random ones, then random changes of the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.search.core import Policy

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
    """A building block. Times are in shares of the busiest rank's time for one microbatch unless said otherwise."""

    view: int
    """Which times it sees: 0 true, 1 evened out without links, 2 lengthened by the link, 3 evened out."""
    period: float
    """Distance of two microbatches."""
    slacks: tuple[float, ...]
    """After F of each chunk, then after B of each chunk, in shares of an average pass."""
    leads: tuple[float, ...]
    """How far F of each chunk goes ahead of its turn."""
    wgrad_delay: float
    """W behind its B."""
    cap: float
    """Microbatches between two chunks of a rank, as a multiple of what the block has there."""
    settled: float
    """Share of the cap that is left in the end."""
    settle_after: float
    """Microbatches a rank until then."""
    wait: float
    """Longest wait for an op on its way."""
    wait_weight: float
    """See `Policy`."""
    memory_share: float
    """Of the limit."""


class Blocks:
    """Blocks of one problem, and the policies they stand for."""

    def __init__(self, placement: Placement, costs: CostModel, limit: float, *, fused: bool = False) -> None:
        """`limit` in microbatches. With `fused`, each W follows its B at once."""
        self._placement, self._limit, self._fused = placement, limit, fused
        self._views = _views(costs, fused=fused)

    def plain(self) -> Iterator[Block]:
        """A few that are good for something."""
        chunks = self._placement.num_chunks
        even = [(slack,) * (2 * chunks) for slack in (0.0, 0.5, 1.0)]
        behind = (0.0,) * chunks + tuple(3.0 * (chunk + 1) / chunks for chunk in range(chunks))
        for view, cap, delay, slacks in itertools.product((0, 2), (math.inf, 1.3), (_NEVER, 0.5), (*even, behind)):
            yield Block(view, 1.0, slacks, (0.0,) * chunks, delay, cap, 1.0, 1.0, 0.05, 1.0, 1.0)

    def random(self, random: Random) -> Block:
        """Any block."""
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
        """One to three numbers changed: mostly a little, sometimes for a random one."""
        other = self.random(random)
        for _ in range(random.choice((1, 1, 2, 3))):
            block = self._changed(block, other, random)
        return block

    def _changed(self, block: Block, other: Block, random: Random) -> Block:
        name = random.choice(("view", "period", "slacks", "slacks", "slacks", "slacks", "leads", "leads", *_SCALED, *_CHOSEN))
        little = random.random() < 0.7
        if name == "period":
            return replace(block, period=max(0.95, block.period + random.gauss(0.0, 0.03)))
        if name in ("slacks", "leads"):
            values = list(getattr(block, name))
            index = random.randrange(len(values))
            step = random.gauss(0.0, 0.3 if name == "slacks" else 0.5)
            values[index] = values[index] + step if little else getattr(other, name)[index]
            if name == "slacks":
                values[index] = max(0.0, values[index])
            changed: dict[str, Any] = {name: tuple(values)}
            return replace(block, **changed)
        if name in _SCALED and little:
            return replace(block, **{name: getattr(block, name) * math.exp(random.gauss(0.0, 0.15))})
        return replace(block, **{name: getattr(other, name)})

    def policy(self, block: Block) -> Policy:
        """The list scheduler's numbers."""
        placement = self._placement
        num_stages, chunks = placement.num_stages, placement.num_chunks
        durations, comm_ms = self._views[block.view]
        busiest = max(sum(sum(durations[3 * s : 3 * s + 3]) for s in stages) for stages in placement.rank_to_stages)
        period, unit = busiest * block.period, busiest / (3 * chunks)
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
        for stage in reversed(range(num_stages)):
            chunk = placement.chunk_of(stage)
            offsets[3 * stage + 1] = now
            now += durations[3 * stage + 1]
            offsets[3 * stage + 2] = -math.inf if self._fused else now + block.wgrad_delay * period
            if stage > 0 and hops[stage - 1]:
                now += comm_ms + block.slacks[chunks + chunk] * unit
        if math.isfinite(block.cap) and period > 0:
            for stages in placement.rank_to_stages:
                nexts = [offsets[3 * after] for after in stages[1:]] + [offsets[3 * stages[-1] + 1]]
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


def flat_durations(costs: CostModel, *, fused: bool = False) -> tuple[float, ...]:
    """F, B, W of every stage in turn. With `fused`, W takes its time inside B and none of its own."""
    backward = costs.backward_ms
    wgrad = costs.wgrad_ms
    if fused:
        backward = tuple(b + w for b, w in zip(costs.backward_ms, costs.wgrad_ms, strict=True))
        wgrad = (0.0,) * costs.num_stages
    return tuple(value for stage in zip(costs.forward_ms, backward, wgrad, strict=True) for value in stage)


def _views(costs: CostModel, *, fused: bool) -> list[tuple[tuple[float, ...], float]]:
    true = flat_durations(costs, fused=fused)
    mean = sum(true) / max(1, sum(duration > 0 for duration in true))
    even = tuple(mean if duration > 0 else 0.0 for duration in true)
    longer = tuple(value + (costs.comm_ms if index % 3 < 2 else 0.0) for index, value in enumerate(true))
    return [(true, costs.comm_ms), (even, 0.0), (longer, 0.0), (even, costs.comm_ms)]


def _slack(random: Random) -> float:
    return 3.0 * random.random() ** 1.5 if random.random() < 0.8 else 0.0


def _lead(random: Random) -> float:
    return random.gauss(0.0, 3.0) if random.random() < 0.4 else 0.0
