"""What the blocks of a comparison say: speed-ups with intervals, what the planner predicted, the verdict. Imports no torch.

In every round each contender runs one block. The speed-up of a contender over the baseline is estimated from the ratios of their
block times in the same round: the geometric mean, with Student's interval for the mean of their logarithms. Blocks of one round
are close in time, so that a machine which is slow for minutes slows both.

A prediction is the simulator's time for the contender's order with measured times of the passes, plus the measured time of the
optimizer step. Stages that were not measured under the contender itself, as with megatron-core's own schedules, get theirs from
the parts of the model as measured under another contender (`plan.partition.layer_costs`).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Estimate", "Idle", "Outcome", "Row", "Table", "interval", "rounds_to_decide", "speed_up"]

_T_975: tuple[float, ...] = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
_T_975 += (2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
"""Student's t at 0.975 for 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2."""
_NORMAL_975 = 1.960

_WORTH_MORE_ROUNDS = 1.02
"""A speed-up above this may be one, although its interval contains 1."""
_SAME_LOSS = 1e-4
"""Largest relative difference of losses that the order of sums explains in fp32."""
_SAME_LOSS_HALF = 3e-3
"""The same in bf16 and fp16: 9e-4 after 15 iterations on a GPU (docs/benchmarks/gpu.md)."""
_UNEXPECTED = "They begin with weights drawn by name, on the same samples and without dropout: find out why before you train."
_INCOMPARABLE = "Not compared: the script has dropout (try its flags for 0), or draws its own weights."
_IMBALANCED = 0.10
"""Share of an iteration above which the report says what to do about imbalance."""
_LITTLE = 0.1
"""A bubble that leaves little to gain."""
_NOISY = 1.25
"""Ratio of the longest to the shortest time of one contender above which the report warns."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval; `low` and `high` are None with a single measurement."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above_one(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1.0


def interval(values: Sequence[float]) -> Estimate:
    """The mean of positive measurements and Student's 95 % interval for it, both on a logarithmic scale."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(mean))
    half = _quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def rounds_to_decide(estimate: Estimate, num_rounds: int) -> int | None:
    """About how many rounds an interval above 1 takes if times vary as in those that ran; None: more than 100.

    Args:
        estimate: the speed-up in these rounds, above 1, whose interval contains 1.
        num_rounds: how many they were, 2 or more.
    """
    assert estimate.high is not None
    deviation = math.log(estimate.high / estimate.value) * math.sqrt(num_rounds) / _quantile(num_rounds - 1)
    wanted = (n for n in range(num_rounds, 101) if _quantile(n - 1) * deviation / math.sqrt(n) < math.log(estimate.value))
    return next(wanted, None)


def _quantile(freedom: int) -> float:
    return _T_975[freedom - 1] if freedom <= len(_T_975) else _NORMAL_975


def speed_up(baseline: Mapping[int, float], contender: Mapping[int, float]) -> Estimate | None:
    """How many times as fast a contender is as the baseline.

    Args:
        baseline: round -> seconds per iteration.
        contender: round -> seconds per iteration. Only rounds with both count; None if there is none.
    """
    rounds = sorted(baseline.keys() & contender.keys())
    return interval([baseline[each] / contender[each] for each in rounds]) if rounds else None


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Shares of the recorded iteration's passes in which a rank does not compute, in the mean over ranks."""

    share: float
    """All of it, the sum of the others."""
    imbalance: float
    """What the mean rank computes less than the one with the most, in median pass times: no schedule fills it."""
    schedule: float
    """Idle time of the rank with the most work if the order ran with these pass times and messages that take no time."""
    waiting: float
    """The rest: messages, the host, passes that took longer than usual."""


@dataclass(kw_only=True)
class Outcome:
    """What is known of one contender so far."""

    name: str
    """As in --contenders."""
    ran: str | None = None
    """The schedule that `auto` chose; None otherwise."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Round -> seconds per iteration."""
    losses: dict[int, float] = field(default_factory=dict)
    """Round -> loss of the last iteration."""
    overhead: dict[int, float] = field(default_factory=dict)
    """Round -> share of the time in which a rank reported its progress instead of training."""
    failure: str | None = None
    """Why it cannot run, or stopped running; one line."""
    note: str | None = None
    """What differs from the job as given; one line."""
    use: str = ""
    """What to add to the command of the job to train like this."""
    idle: Idle | None = None
    """Of the recorded iteration; None where it was not recorded."""
    exposed_ms: float | None = None
    """Milliseconds of the recorded iteration in which tokens travel to or from experts and the mean rank computes nothing; None
    where nothing of that was measured."""
    predicted_ms: float | None = None
    """Predicted time per iteration."""
    bubble: float | None = None
    """Measured bubble rate of the recorded iteration; None where it was not recorded."""
    predicted_bubble: float | None = None
    """Bubble rate of the plan with measured pass times."""
    activation_bytes: int | None = None
    """Measured peak of what the passes allocate, on the rank with the most."""
    predicted_activation_bytes: float | None = None
    """The plan's peak activation memory on the rank with the most, from the measured memory of each pass."""
    state_bytes: int | None = None
    """Weights, gradients and optimizer state on the rank with the most."""
    allocated_bytes: int | None = None
    """Peak of everything that the allocator had given out; None on the CPU."""

    @property
    def ms(self) -> Estimate | None:
        """Milliseconds per iteration; None if no block has ended."""
        return interval([1000.0 * each for each in self.seconds.values()]) if self.seconds else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the fullest rank: everything allocated, or on the CPU state and activations."""
        if self.allocated_bytes is not None or self.state_bytes is None or self.activation_bytes is None:
            return self.allocated_bytes
        return self.state_bytes + self.activation_bytes

    @property
    def first_loss(self) -> float | None:
        """Loss at the end of the first block."""
        return self.losses[min(self.losses)] if self.losses else None

    @property
    def label(self) -> str:
        """Its name, with the schedule that ran."""
        return self.name if self.ran is None else f"{self.name} ({self.ran})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in the table: what follows from its outcome and the baseline's."""

    outcome: Outcome
    base: Outcome
    table: Table

    @functools.cached_property
    def speed_up(self) -> Estimate | None:
        """Over the baseline."""
        return speed_up(self.base.seconds, self.outcome.seconds)

    @property
    def predicted_speed_up(self) -> float | None:
        """Over the baseline, by the planner."""
        return _over(self.base.predicted_ms, self.outcome.predicted_ms)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None if the number of tokens differs between iterations."""
        return _over(_over(self.table.tokens, _value(self.outcome.ms)), 1e-3)

    @property
    def tokens_per_s_per_rank(self) -> float | None:
        """The same over the number of ranks."""
        return _over(self.tokens_per_s, self.table.num_ranks)

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory over the baseline's."""
        return _over(self.outcome.peak_bytes, self.base.peak_bytes)

    @property
    def has_same_loss(self) -> bool | None:
        """Whether the first block ended with the baseline's loss, up to the order of sums; None where that is no question."""
        own, other = self.outcome.first_loss, self.base.first_loss
        if self.outcome is self.base or own is None or other is None or not self.table.losses_compare:
            return None
        return math.isclose(own, other, rel_tol=self.table.same_loss)

    @property
    def reached(self) -> float | None:
        """The share of the predicted gain that was measured; None where the interval of the measured one contains 1."""
        ratio, predicted = self.speed_up, self.predicted_speed_up
        if ratio is None or predicted is None or ratio.low is None or ratio.high is None or ratio.low <= 1.0 <= ratio.high:
            return None
        return _over(ratio.value - 1.0, predicted - 1.0)


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def _over(value: float | None, other: float | None) -> float | None:
    """A quotient; None if a number is not known."""
    return value / other if value is not None and other else None


@dataclass(frozen=True, kw_only=True)
class Table:
    """The comparison so far."""

    outcomes: Sequence[Outcome]
    """One per contender."""
    baseline: str
    """The contender that speed-ups are relative to."""
    tokens: int | None
    """Per iteration, of all ranks together; None if it differs."""
    num_ranks: int
    num_cores: int | None
    """CPU cores that the ranks of this machine share; None on GPUs."""
    pipeline_size: int
    num_microbatches: int = 1
    """Per iteration and data-parallel replica."""
    costs: Mapping[str, Any] | None = None
    """The pass times that all predictions use, as in a plan's JSON form; None if nothing was profiled."""
    losses_compare: bool = True
    """Whether all contenders begin with the same weights, and have no dropout."""
    is_fp32: bool = True
    """Whether the model computes in fp32."""

    @property
    def same_loss(self) -> float:
        """Largest relative difference of losses that the order of sums explains."""
        return _SAME_LOSS if self.is_fp32 else _SAME_LOSS_HALF

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """One per contender."""
        (base,) = [outcome for outcome in self.outcomes if outcome.name == self.baseline]
        return tuple(Row(outcome=outcome, base=base, table=self) for outcome in self.outcomes)

    def same_losses(self) -> str:
        """A sentence about the losses of the last iteration of every contender's first block."""
        last = {each.name: each.first_loss for each in self.outcomes if each.first_loss is not None}
        if len(last) < 2:
            return ""
        low, high = min(last.values()), max(last.values())
        if low == high:
            return f"All contenders have the same loss after the same iterations: {low:.6f}."
        apart = (high - low) / abs(low) if low else math.inf
        if apart <= self.same_loss:
            return f"The losses of all contenders agree to {apart:.0e}: their sums are formed in another order."
        names = ", ".join(f"{name} {value:.6f}" for name, value in last.items())
        known = _UNEXPECTED if self.losses_compare else _INCOMPARABLE
        return f"The losses after the same iterations differ by {apart:.1e}: {names}. {known}"

    def exposed(self) -> str:
        """What is exposed of the all-to-alls of experts under each contender; empty where nothing was measured."""
        known = [f"{each.label} {each.exposed_ms:.4g}" for each in self.outcomes if each.exposed_ms is not None]
        return (
            f"Exposed all-to-alls of experts, ms of the recorded iteration on the mean rank: {', '.join(known)}." if known else ""
        )

    def noise(self) -> str:
        """A warning if the same contender's time differs much between rounds; else empty."""
        seconds = {each.name: each.seconds.values() for each in self.outcomes if len(each.seconds) > 1}
        spreads = {name: max(values) / min(values) for name, values in seconds.items()}
        worst = max(spreads, key=lambda name: spreads[name], default=None)
        if worst is None or spreads[worst] < _NOISY:
            return ""
        return (
            f"The machine was not quiet: {worst} took {spreads[worst]:.1f} times as long in one round as in another. Read the "
            "intervals, and repeat with nothing else running, or with more --rounds."
        )

    def imbalance(self) -> str:
        """What to do where the ranks' work differs much; else empty."""
        known = {each.label: each.idle.imbalance for each in self.outcomes if each.idle is not None}
        worst = max(known, key=lambda name: known[name], default=None)
        if worst is None or known[worst] <= _IMBALANCED:
            return ""
        return (
            f"Under {worst} the mean rank is idle for {known[worst]:.0%} of the passes because another has more to compute, "
            "which no schedule fills. Train once with --zero-bubble-balance-stages, which logs the fastest "
            "--pipeline-model-parallel-layout, or give zerobubble layout the layers.json of a trace."
        )

    def verdict(self) -> str:
        """The result in one or two sentences, and what to use."""
        ran = [row for row in self.rows if row.outcome.ms is not None]
        if not ran:
            return "No contender ran."
        if len(ran) == 1:
            return f"Only {ran[0].outcome.name} ran; there is nothing to compare."
        base = next((row for row in ran if row.outcome.name == self.baseline), None)
        if base is None:
            return f"The baseline {self.baseline} did not run; there are no speed-ups."
        with_ratio = ((row.speed_up, row) for row in ran if row.speed_up is not None)
        _, best = max(with_ratio, key=lambda each: (each[0].is_above_one, each[0].value))
        if best is base or best.speed_up is None or not best.speed_up.is_above_one:
            return self._no_gain(base, best)
        mine, theirs = best.outcome.peak_bytes, base.outcome.peak_bytes
        where = f", with {_bytes(mine)} on the fullest rank in place of {_bytes(theirs)}" if mine and theirs else ""
        text = f"{best.outcome.label} is {best.speed_up.value:.2f} times as fast as {base.outcome.name}{where}"
        text += self._over_no_sync(ran, best)
        if best.has_same_loss is False:
            return (
                f"{text} Do not use it yet: its loss is {best.outcome.first_loss:.6f} where {base.outcome.name} has "
                f"{base.outcome.first_loss:.6f}, from the same weights and samples."
            )
        return text + (f" use: {best.outcome.use}" if best.outcome.use else "")

    def _over_no_sync(self, ran: Sequence[Row], best: Row) -> str:
        """The end of the sentence: also what the best one gains over 1F1B without its device-wide wait."""
        other = next((row for row in ran if row.outcome.name.endswith(":no-sync") and row is not best), None)
        gain = None if other is None else speed_up(other.outcome.seconds, best.outcome.seconds)
        return "." if gain is None or other is None else f", and {gain.value:.2f} times as fast as {other.outcome.name}."

    def _no_gain(self, base: Row, best: Row) -> str:
        if best.speed_up is not None and best.speed_up.low is None and best is not base:
            return (
                f"{best.outcome.label} was {best.speed_up.value:.2f} times as fast as {base.outcome.name} in one round, "
                "which is no evidence yet: more --rounds give an interval."
            )
        text = f"No contender is measurably faster than {base.outcome.name}"
        if self.noise():
            return f"{text} on this machine, which was not quiet."
        if self.pipeline_size == 1:
            return f"{text}: with one pipeline rank there is no bubble to fill."
        if self.num_cores is not None and self.num_cores < self.num_ranks:
            return (
                f"{text}: {self.num_ranks} ranks share {_cores(self.num_cores)}, so a waiting rank lends its core to another. "
                "Give every rank a core of its own to see a schedule's effect."
            )
        if best is not base and best.speed_up is not None and best.speed_up.value > _WORTH_MORE_ROUNDS:
            needed = rounds_to_decide(best.speed_up, len(best.outcome.seconds.keys() & base.outcome.seconds.keys()))
            more = "more than --rounds 100" if needed is None else f"about --rounds {needed}"
            return (
                f"{best.outcome.label} was {best.speed_up.value:.2f} times as fast as {base.outcome.name}, but the interval "
                f"contains 1: {more} would decide, if times vary as they did."
            )
        if base.outcome.predicted_bubble is not None and base.outcome.predicted_bubble > _LITTLE:
            return (
                f"{text}, although {base.outcome.predicted_bubble:.1%} of its passes are bubble: messages and the host take what "
                "a schedule would gain. Longer passes (more tokens per microbatch, more layers) lose less to them."
            )
        if base.outcome.predicted_bubble is not None:
            return (
                f"{text}: only {base.outcome.predicted_bubble:.1%} of its passes are bubble with these pass times, so there is "
                "little to gain. Fewer microbatches or more pipeline ranks have more."
            )
        return f"{text}."


def _bytes(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _cores(count: int) -> str:
    return f"{count} CPU cores" if count > 1 else "one CPU core"
