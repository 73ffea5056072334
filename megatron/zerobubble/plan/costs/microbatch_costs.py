"""The five lists of costs, and those of every stage and microbatch where microbatches are not alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted

LARGEST = 1e12
"""Largest time (ms), activation memory or number of bytes. Beyond it sums of an iteration are no longer finite."""
COST_LISTS = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
"""The lists of costs, by their names in a plan file."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class CostLists(Generic[Value]):
    """What a cost model has per stage: a number, one per microbatch, or how it follows from the length."""

    forward_ms: tuple[Value, ...]
    """Time of F, per stage."""
    backward_ms: tuple[Value, ...]
    """Time of B (dgrad), per stage. A fused BW takes B plus W."""
    wgrad_ms: tuple[Value, ...]
    """Time of W (wgrad), per stage."""
    activation: tuple[Value, ...]
    """Activation memory from the start of a stage's F to the end of its B, per stage (M_B)."""
    activation_after_backward: tuple[Value, ...]
    """Activation memory from the end of a stage's B to the end of its W, per stage (M_W)."""

    @property
    def lists(self) -> dict[str, tuple[Value, ...]]:
        """The five lists per stage, by the names of their fields."""
        return {name: getattr(self, name) for name in COST_LISTS}

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_ms)


@dataclass(frozen=True, kw_only=True)
class MicrobatchCosts(CostLists[tuple[float, ...]]):
    """Costs of every stage and microbatch, `[stage][microbatch]`, in the units of `CostModel`.

    Microbatches are numbered as they come in the global batch. Raises ConfigError for lists of different sizes, and for numbers
    that are not finite or below 0.
    """

    tokens: tuple[int, ...] = ()
    """Tokens of every microbatch, for messages; empty: not known."""

    def __post_init__(self) -> None:
        for name, given in self.lists.items():
            rows = tuple(tuple(row) for row in given)
            object.__setattr__(self, name, rows)
            if len(rows) != self.num_stages or not rows:
                raise ConfigError(f"costs: forward_ms has {self.num_stages} stages and {name} has {len(rows)}")
            for stage, row in enumerate(rows):
                if len(row) != self.num_microbatches or not row:
                    raise ConfigError(
                        f"costs: {name} of stage {stage} has {len(row)} microbatches and forward_ms of stage 0 has "
                        f"{self.num_microbatches}; every stage needs one value per microbatch"
                    )
                is_number = set(map(type, row)) <= {int, float}
                # A NaN is neither the smallest nor the largest number, but it is the sum.
                if is_number and min(row) >= 0 and max(row) <= LARGEST and not math.isnan(sum(row)):
                    continue  # once per iteration and number, the check below would be half of the planner's own time
                for microbatch, value in enumerate(row):
                    check_number(f"{name} of stage {stage}, microbatch {microbatch}", value)
        object.__setattr__(self, "tokens", tuple(self.tokens))
        if self.tokens:
            check_tokens(self.tokens)
            if len(self.tokens) != self.num_microbatches:
                raise ConfigError(f"costs: {self.num_microbatches} microbatches and tokens of {len(self.tokens)}")

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches, m."""
        return len(self.forward_ms[0])

    @property
    def is_uniform(self) -> bool:
        """Whether all microbatches cost the same."""
        return all(len(set(row)) == 1 for rows in self.lists.values() for row in rows)

    def means(self) -> dict[str, tuple[float, ...]]:
        """Per stage, the mean over the microbatches, by the names of the lists of `CostModel`."""
        return {name: tuple(map(_mean, rows)) for name, rows in self.lists.items()}

    def reordered(self, assignment: Sequence[int]) -> MicrobatchCosts:
        """The same costs, with microbatch i the one that was `assignment[i]`."""
        lists = {name: tuple(tuple(row[index] for index in assignment) for row in rows) for name, rows in self.lists.items()}
        return MicrobatchCosts(**lists, tokens=tuple(self.tokens[index] for index in assignment) if self.tokens else ())

    def merged(self, size: int) -> MicrobatchCosts:
        """The costs of stages that are made of `size` consecutive ones of these."""
        lists = {
            name: tuple(
                tuple(math.fsum(values) for values in zip(*rows[at : at + size], strict=True)) for at in range(0, len(rows), size)
            )
            for name, rows in self.lists.items()
        }
        return MicrobatchCosts(**lists, tokens=self.tokens)

    def to_json(self) -> dict[str, Any]:
        """The `microbatches` object of the costs in a plan's JSON form."""
        body: dict[str, Any] = {name: [list(row) for row in rows] for name, rows in self.lists.items()}
        return body | ({"tokens": list(self.tokens)} if self.tokens else {})

    @staticmethod
    def from_json(body: object) -> MicrobatchCosts:
        """Parse the output of `to_json`. Raises PlanError for another form and ConfigError for wrong numbers."""
        if not isinstance(body, Mapping):
            raise PlanError(f"costs: 'microbatches' must be an object with {', '.join(COST_LISTS)}, got {quoted(body)}")
        for name in COST_LISTS:
            rows = body.get(name)
            if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
                raise PlanError(f"costs: {name!r} of 'microbatches' must be a list of one list per stage, got {quoted(rows)}")
        tokens = body.get("tokens", [])
        if not isinstance(tokens, list):
            raise PlanError(f"costs: 'tokens' must be a list of one number per microbatch, got {quoted(tokens)}")
        return MicrobatchCosts(**{name: tuple(body[name]) for name in COST_LISTS}, tokens=tuple(tokens))


def check_number(name: str, value: object, subject: str = "costs") -> None:
    """Raise ConfigError, which begins with its subject, unless a cost is a number from 0 to `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
        raise ConfigError(f"{subject}: {name} is {quoted(value)}; it must be a finite number from 0 to {LARGEST:g}")


def check_tokens(tokens: Sequence[object]) -> None:
    """Raise ConfigError for the first microbatch without tokens or with more than `LARGEST`, or if there is no microbatch."""
    if not tokens:
        raise ConfigError("no microbatch has tokens; give one length per microbatch")
    for microbatch, value in enumerate(tokens):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"microbatch {microbatch} has {quoted(value)} tokens; give a whole number, 1 or more")
        if value > LARGEST:
            raise ConfigError(f"microbatch {microbatch} has {quoted(value)} tokens; give a whole number, at most {LARGEST:g}")


def _mean(values: tuple[float, ...]) -> float:
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
