"""Results of the schedule benchmark: ratios measured side by side, with confidence intervals, vs. the simulator. Without torch.

Every round has one iteration of each contender. A speed-up is the ratio of the total times of all rounds, baseline over
contender, as for one long run. On a shared machine single iterations differ by a tenth, so it comes with a 95 % confidence
interval. *Reached* is the fraction of the predicted speed-up: the measured speed-up over the predicted one, which counts as
exact; at 1.0 the runtime is as fast as simulated. *Over peer* is the speed-up relative to that of another runtime with the same
placement. *Beyond passes* is the time between the passes of the same iteration, relative to the time of the passes: overhead of
the runtime, messages, and waiting for a CPU core.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.simulate import TimedOp, lengths_ms, run_in_order, span_of
from tools.benchmarks.reports import Row, markdown_table

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One iteration on one rank, in milliseconds on the clock that the ranks of one machine share."""

    start_ms: float
    """Time after the barrier that precedes the iteration."""
    end_ms: float
    """Time at which this rank was done."""
    ops: tuple[TimedOp, ...] = ()
    """The ops with their times, in order; empty if the contender does not record."""
    loss: float | None = None
    """Mean over the microbatches, on the rank with the last stage."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration on all ranks, in rank order."""

    samples: tuple[Sample, ...]

    @property
    def wall_ms(self) -> float:
        """From the first rank's start to the last rank's end."""
        return max(sample.end_ms for sample in self.samples) - min(sample.start_ms for sample in self.samples)

    @property
    def span_ms(self) -> float:
        """The simulator's span, measured: the longest time a rank needs from its first op's start to its last op's end."""
        return span_of([sample.ops for sample in self.samples])

    def beyond_passes(self, plan: Plan) -> float:
        """Relative excess of the span over that of `plan` simulated with the measured time of every pass and free links.

        Passes that are slow on a busy machine are in both. The rest is overhead of the runtime, messages, and waiting for a core
        if there are more ranks than cores.
        """
        rows = (zip(sample.ops, lengths_ms(sample.ops), strict=True) for sample in self.samples)
        took = {timed.op: length for row in rows for timed, length in row}
        return self.span_ms / span_of(run_in_order(plan, took.__getitem__)) - 1.0

    @property
    def outside_ms(self) -> float:
        """Part of `wall_ms` before the first op or after the last op of all ranks: zeroing gradients, the optimizer step."""
        first = min(sample.ops[0].start_ms for sample in self.samples)
        return self.wall_ms - (max(sample.ops[-1].end_ms for sample in self.samples) - first)

    @property
    def loss(self) -> float | None:
        """The loss of the rank with the last stage, if any was computed."""
        return next((sample.loss for sample in self.samples if sample.loss is not None), None)


def by_iteration(ranks: Sequence[Sequence[Sample]]) -> list[Iteration]:
    """Transpose: from the samples of each rank to the iteration (samples of all ranks) of each round."""
    return [Iteration(samples=samples) for samples in zip(*ranks, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, minimum and maximum of several measurements."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """The spread of one or more values."""
        ordered = sorted(values)
        return Spread(median=statistics.median(ordered), least=ordered[0], most=ordered[-1])


CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A statistic over all rounds, with its confidence interval."""

    value: float
    low: float
    """`low` to `high` is the interval with confidence `CONFIDENCE`; with few rounds it is too narrow."""
    high: float

    @staticmethod
    def of(rounds: Sequence[T], compute: Callable[[Sequence[T]], float]) -> Estimate:
        """Apply `compute` to all rounds, and for the interval to resamples of the same number of rounds, with replacement.

        The interval is the bootstrap's percentile interval (Efron 1979). The seed is fixed.
        """
        generator = random.Random(0)
        resampled = sorted(compute(generator.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
        outside = round(RESAMPLES * (1.0 - CONFIDENCE) / 2)
        return Estimate(value=compute(rounds), low=resampled[outside], high=resampled[-1 - outside])

    def over(self, divisor: float) -> Estimate:
        """Value and interval divided by `divisor`."""
        return Estimate(value=self.value / divisor, low=self.low / divisor, high=self.high / divisor)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The measurements of one contender."""

    name: str
    runtime: str
    """Value of its `Runtime`."""
    baseline: str
    """Name of the line that its speed-up is relative to."""
    peer: str | None = None
    """Name of the line whose speed-up this one's is compared with; it has a baseline of its own."""
    ms: tuple[float, ...]
    """Iteration time of every round, in milliseconds."""
    predicted_ms: float | None = None
    """Iteration time predicted by the simulator; None if the times of its passes are unknown."""
    beyond_passes: tuple[float, ...] = ()
    """`Iteration.beyond_passes` of every round, if its passes were recorded."""
    losses: tuple[float, ...] = ()
    """Loss of every round, if something was trained."""


def rows_of(lines: Sequence[Line]) -> list[Row]:
    """Every line with its ratios. The baseline and the peer of each line must be among `lines`, with equally many rounds."""
    by_name = {line.name: line for line in lines}
    return [_row(line, by_name) for line in lines]


def _rounds(line: Line, by_name: Mapping[str, Line]) -> list[tuple[float, float]]:
    """Iteration times of the baseline and of the line, round by round."""
    return list(zip(by_name[line.baseline].ms, line.ms, strict=True))


def _speed_up(rounds: Sequence[tuple[float, float]]) -> float:
    return sum(theirs for theirs, _ in rounds) / sum(own for _, own in rounds)


def _speed_up_over_peer(rounds: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float:
    return _speed_up([own for own, _ in rounds]) / _speed_up([peers for _, peers in rounds])


def _row(line: Line, by_name: Mapping[str, Line]) -> Row:
    baseline, rounds = by_name[line.baseline], _rounds(line, by_name)
    speed_up = Estimate.of(rounds, _speed_up)
    row: Row = {"name": line.name, "runtime": line.runtime, "over": baseline.name}
    row |= {"ms": asdict(Spread.of(line.ms)), "rounds_ms": [round(ms, 3) for ms in line.ms], "speed_up": asdict(speed_up)}
    if line.predicted_ms is not None:
        row["predicted_ms"] = line.predicted_ms
        row["over_prediction"] = asdict(Spread.of(ms / line.predicted_ms - 1.0 for ms in line.ms))
    if line.predicted_ms is not None and baseline.predicted_ms is not None:
        predicted = baseline.predicted_ms / line.predicted_ms
        row["predicted_speed_up"] = predicted
        row["reached"] = asdict(speed_up.over(predicted))
    if line.peer is not None:
        both = list(zip(rounds, _rounds(by_name[line.peer], by_name), strict=True))
        row |= {"peer": line.peer, "over_peer": asdict(Estimate.of(both, _speed_up_over_peer))}
    if line.beyond_passes:
        row["beyond_passes"] = asdict(Spread.of(line.beyond_passes))
    if line.losses:
        row["loss"] = {"first": line.losses[0], "last": line.losses[-1]}
    return row


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Measured times of the passes of one placement's stages."""

    placement: Placement
    costs: CostModel
    """Mean times of every stage's F, B and W; links cost nothing."""
    outside_ms: float
    """Mean of the iterations' `outside_ms`."""

    def table(self) -> list[Row]:
        """The JSON form, one row per stage."""
        kinds = (("F", self.costs.forward_ms), ("B", self.costs.backward_ms), ("W", self.costs.wgrad_ms))
        return [
            {"stage": stage, "rank": rank} | {f"{name}_ms": round(times[stage], 3) for name, times in kinds}
            for stage, rank in enumerate(self.placement.stage_to_rank)
        ]


def measured_passes(placement: Placement, iterations: Sequence[Iteration]) -> Passes:
    """Average the pass times of recorded iterations on `placement`.

    Iterations with a full backward (BW) count only if there are no others. Means and not medians, because speed-ups compare total
    times: the mean of a sum is the sum of the means.
    """
    split = [each for each in iterations if not any(op.op.kind is OpKind.BW for s in each.samples for op in s.ops)]
    times: dict[tuple[int, OpKind], list[float]] = {}
    for iteration in split or iterations:
        for sample in iteration.samples:
            for op, start, end in sample.ops:
                times.setdefault((op.stage, OpKind.B if op.kind is OpKind.BW else op.kind), []).append(end - start)

    def mean(kind: OpKind) -> tuple[float, ...]:
        stages = range(placement.num_stages)
        return tuple(statistics.fmean(times[stage, kind]) if (stage, kind) in times else 0.0 for stage in stages)

    flat = CostModel.uniform(placement)
    costs = flat.with_lists(forward_ms=mean(OpKind.F), backward_ms=mean(OpKind.B), wgrad_ms=mean(OpKind.W))
    outside = statistics.fmean(iteration.outside_ms for iteration in split or iterations)
    return Passes(placement=placement, costs=costs, outside_ms=outside)


COLUMNS = (
    *("schedule", "runtime", "median ms", "predicted", "over it", "beyond passes", "speed-up", "95 %", "over", "predicted"),
    *("reached", "95 %", "over peer", "95 %", "peer"),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return "\n".join(markdown_table(COLUMNS, map(_cells, rows)))


def _cells(row: Row) -> list[str]:
    over, beyond, reached, over_peer = (row.get(key) for key in ("over_prediction", "beyond_passes", "reached", "over_peer"))
    return [
        row["name"],
        row["runtime"],
        f"{row['ms']['median']:.1f}",
        f"{row['predicted_ms']:.1f}" if "predicted_ms" in row else "-",
        f"{over['median']:+.1%}" if over else "-",
        f"{beyond['median']:+.1%}" if beyond else "-",
        *_estimate(row["speed_up"], ".3f"),
        row["over"],
        f"{row['predicted_speed_up']:.3f}" if reached else "-",
        *_estimate(reached, ".1%"),
        *_estimate(over_peer, ".3f"),
        row.get("peer", "-"),
    ]


def _estimate(estimate: Row | None, form: str) -> tuple[str, str]:
    if estimate is None:
        return "-", "-"
    return f"{estimate['value']:{form}}", f"{estimate['low']:{form}} to {estimate['high']:{form}}"
