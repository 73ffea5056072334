"""Lower bounds over all layouts: any partition into stages on a linear, loop, V or W placement, any order of ops.

Each is proven in docs/adr/0040-bound-over-all-layouts.md. For p ranks and m microbatches:

1. *Packing.* Whole layers are packed onto p ranks, each with the memory of its weights and of one microbatch; the embedding and
   the head are on one rank (V, W) or on two (linear, loop). Some rank then works at least the smallest time T for which the
   packing exists, for every microbatch: the span is at least m*T.
2. *Memory times time*, over all ranks: a layer's activations stay at least while the microbatch runs through all layers after it
   and back.
3. *Path.* One microbatch runs through all layers and back, over all links.
4. *Packing with starts*, for the makespan: the k-th rank to get a layer begins only after the embedding, k-2 layers and k-1
   links, so it has that much less time for its work.

The packing is exact for up to three kinds of layers, and counts layers as divisible for more.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.bounds.schedule_bound import TimeBound
from megatron.zerobubble.plan.partition.layer_costs import EMBEDDING, HEAD, LayerCosts, Model

__all__ = ["bound_over_layouts"]

_PRECISION = 1e-7
_MOST_KINDS = 3


def bound_over_layouts(model: Model, num_ranks: int, num_microbatches: int, memory_bytes: float | None = None) -> TimeBound:
    """Lower bounds over all partitions and placements.

    Args:
        model: the layers with their times and bytes.
        num_ranks: pipeline ranks p.
        num_microbatches: microbatches per iteration m.
        memory_bytes: memory of one device; None: no limit.

    Raises:
        ConfigError: no layout fits the memory.
    """
    p, m = num_ranks, num_microbatches
    memory = math.inf if memory_bytes is None else memory_bytes * (1 + 1e-9)
    packings = [_Packing(model, p, memory, ends_share_rank=ends) for ends in ((False, True) if p > 1 else (True,))]
    if not any(packing.fits([math.inf] * p) for packing in packings):
        raise ConfigError(
            f"no layout of {model.num_layers} layers on {p} ranks fits devices of {memory / 2**30:.2f} GiB: weights, gradients, "
            f"optimizer state and one microbatch take {_resident(model.total) / 2**30:.2f} GiB in all{_too_large(model, memory)}"
        )
    starts = _starts(model, p)
    path = model.total.forward_ms + model.total.backward_ms + model.first.wgrad_ms + 2 * (p - 1) * model.comm_ms
    steady = m * _smallest(
        lambda time: any(packing.fits([time] * p) for packing in packings), model.total.work_ms / p, model.total.work_ms
    )
    span = max(steady, path, _memory_time(model, p, m, memory))
    makespan = _smallest(
        lambda end: any(packing.fits([(end - start) / m for start in starts]) for packing in packings),
        span,
        max(span, m * model.total.work_ms + starts[-1]),
    )
    return TimeBound(span_ms=span, makespan_ms=max(span, makespan))


def _resident(part: LayerCosts) -> float:
    """Bytes of a part that its rank holds at least: weights, gradients, optimizer state, and activations of one microbatch."""
    return part.static_bytes + part.activation_bytes


def _too_large(model: Model, memory: float) -> str:
    """The end of a message: what alone exceeds a device, or that there are too few of them."""
    parts = {EMBEDDING: model.first, HEAD: model.last} | {kind: model.kinds[kind] for kind in model.layers}
    name, part = max(parts.items(), key=lambda item: _resident(item[1]))
    if _resident(part) <= memory:
        return "; take more ranks"
    return f", and the kind {name} alone {_resident(part) / 2**30:.2f} GiB; divide it over more tensor-parallel ranks"


def _smallest(works: Callable[[float], bool], low: float, high: float) -> float:
    """A number just below the smallest one in [low, high] for which the monotone `works` holds; `low` if it holds there."""
    if works(low):
        return low
    while high - low > _PRECISION * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if works(middle) else (middle, high)
    return low


def _starts(model: Model, num_ranks: int) -> list[float]:
    """Earliest start of the k-th rank to get a part of the model, in milliseconds."""
    forwards = model.sums["forward_ms"]
    later = [model.first.forward_ms + forwards[min(k, model.num_layers)] + (k + 1) * model.comm_ms for k in range(num_ranks - 1)]
    return [0.0, *later]


def _memory_time(model: Model, num_ranks: int, num_microbatches: int, memory: float) -> float:
    """The span that the activations of all microbatches need in the headroom of all ranks together."""
    headroom = num_ranks * memory - model.total.static_bytes
    if math.isinf(headroom) or headroom <= 0:
        return 0.0
    occupied, turn = 0.0, 0.0
    for part in (model.last, *reversed(model.costs), model.first):
        turn += part.forward_ms + part.backward_ms
        kept = min(part.activation_bytes, part.after_backward_bytes)  # a fused BW keeps the former until its end
        occupied += part.activation_bytes * turn + kept * part.wgrad_ms
    return num_microbatches * occupied / headroom


class _Bin(NamedTuple):
    """What a rank has left for decoder layers."""

    time_ms: float
    num_bytes: float


class _Packing:
    """Whether the layers fit p ranks in given times, each rank within its memory; layers in any order."""

    def __init__(self, model: Model, num_ranks: int, memory: float, *, ends_share_rank: bool) -> None:
        counts = Counter((one.work_ms, _resident(one)) for one in model.costs)
        kinds = sorted(counts.items(), key=lambda item: (item[1], item[0]))
        self._kinds = [(_Bin(*kind), count) for kind, count in kinds]
        self._work_ms = math.fsum(one.work_ms for one in model.costs)
        first, last = ((part.work_ms, _resident(part)) for part in (model.first, model.last))
        if ends_share_rank:
            pinned = [(first[0] + last[0], first[1] + last[1])] + [(0.0, 0.0)] * (num_ranks - 1)
        else:
            pinned = [first, last] + [(0.0, 0.0)] * (num_ranks - 2)
        self._pinned = pinned
        self._shifted = not ends_share_rank
        self._memory = memory

    def fits(self, times_ms: Sequence[float]) -> bool:
        """Whether the k-th rank can do all its work in `times_ms[k]`; these fall with k.

        The head's rank may be any but the first. It gets the second time, and so does the next rank, which gives each of these
        ranks at least the time that it has.
        """
        if self._shifted:
            times_ms = [*times_ms[:2], *times_ms[1:-1]]
        bins = [
            _Bin(time * (1 + 1e-12) - work, self._memory - held)
            for time, (work, held) in zip(times_ms, self._pinned, strict=True)
        ]
        if min(one.time_ms for one in bins) < 0 or min(one.num_bytes for one in bins) < 0:
            return False
        if len(self._kinds) > _MOST_KINDS:
            longest = max(kind.time_ms for kind, _ in self._kinds)
            return sum(one.time_ms for one in bins) >= self._work_ms and longest <= max(one.time_ms for one in bins)
        return self._pack(bins)

    def _pack(self, bins: Sequence[_Bin]) -> bool:
        """Dynamic program over the ranks: for every number of layers of the rarer kinds, the most of the last kind."""
        *rare, (common, wanted) = self._kinds
        limits = [count for _, count in rare]
        best = {(0,) * len(rare): 0}
        tables: dict[_Bin, list[tuple[tuple[int, ...], int]]] = {}
        for one in bins:
            if one not in tables:
                tables[one] = _table(one, [kind for kind, _ in rare], limits, common, wanted)
            grown: dict[tuple[int, ...], int] = {}
            for have, most in best.items():
                for more, extra in tables[one]:
                    total = tuple(map(sum, zip(have, more, strict=True)))
                    if most + extra > grown.get(total, -1) and all(map(int.__le__, total, limits)):
                        grown[total] = most + extra
            best = grown
        return best.get(tuple(limits), -1) >= wanted


def _table(
    one: _Bin, rare: Sequence[_Bin], limits: Sequence[int], common: _Bin, wanted: int
) -> list[tuple[tuple[int, ...], int]]:
    """For every number of rare layers that fit a rank, the most common ones beside them."""
    ranges = [range(min(limit, _most(one, kind, limit)) + 1) for kind, limit in zip(rare, limits, strict=True)]
    rows = []
    for numbers in itertools.product(*ranges):
        left = _Bin(
            one.time_ms - math.fsum(n * kind.time_ms for n, kind in zip(numbers, rare, strict=True)),
            one.num_bytes - math.fsum(n * kind.num_bytes for n, kind in zip(numbers, rare, strict=True)),
        )
        if all(have >= -1e-12 * max(whole, 1.0) for have, whole in zip(left, one, strict=True)):
            rows.append((numbers, _most(left, common, wanted)))
    return rows


def _most(left: _Bin, kind: _Bin, wanted: int) -> int:
    """How many layers of a kind fit, up to rounding and to the number wanted."""
    shares = [(1 + 1e-9) * have / need for have, need in zip(left, kind, strict=True) if need > 0]
    most = min(shares, default=math.inf)
    return wanted if most >= wanted else max(0, math.floor(most + 1e-9))
