"""What surrounds the passes of an iteration: reductions over replicas, gathering, the optimizer step and its snapshot.

A bucket of gradients is reduced when it is complete; a rank reduces one bucket after another. The parameters of a stage are
gathered bucket by bucket from the start of the rank's iteration, and its first F computes each layer when it has that. Times are
in milliseconds, as a recorder measures them (`profiling.recorded_step`) or as a user gives them per rank (`StepCosts.uniform`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_table import check_number
from megatron.zerobubble.plan.ir import Placement

STEP_TIMES = ("reduce_ms", "gather_ms", "optimizer_ms", "snapshot_ms")
"""Times of a rank, by the names of the fields of `StepCosts`, of the flags and of a plan file."""
NUM_BUCKETS = 12
"""Buckets of a rank's gradients where only their time is given."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Times around the passes. Raises ConfigError on values below 0 or above 1e12."""

    reduce_ms: tuple[tuple[float, ...], ...]
    """Reduction of each bucket of gradients over replicas, `[stage][bucket]`, in the order in which they become complete."""
    gather_ms: tuple[tuple[float, ...], ...]
    """Gathering of each bucket of parameters over replicas, `[stage][bucket]`, in the order of the layers."""
    optimizer_ms: tuple[float, ...]
    """Per rank, from reduced gradients to the next iteration: the optimizer step, and what else is between iterations."""
    snapshot_ms: tuple[float, ...]
    """Per rank, the snapshot that an optimistic optimizer step takes first; only with post-validation."""
    beside_passes: bool = True
    """Whether a bucket is reduced as soon as it is complete, and not after the rank's last op."""

    def __post_init__(self) -> None:
        if len(self.gather_ms) != len(self.reduce_ms) or len(self.snapshot_ms) != len(self.optimizer_ms):
            raise ConfigError(
                f"costs: step has reduce_ms of {len(self.reduce_ms)} stages and gather_ms of {len(self.gather_ms)}, optimizer_ms "
                f"of {len(self.optimizer_ms)} ranks and snapshot_ms of {len(self.snapshot_ms)}; give one list per stage, and one "
                "value per rank"
            )
        for name in STEP_TIMES[:2]:
            for stage, buckets in enumerate(getattr(self, name)):
                for bucket, value in enumerate(buckets):
                    check_number(f"{name} of stage {stage}, bucket {bucket}", value)
        for name in STEP_TIMES[2:]:
            for rank, value in enumerate(getattr(self, name)):
                check_number(f"{name} of rank {rank}", value)

    @staticmethod
    def uniform(
        placement: Placement,
        *,
        reduce_ms: float = 0.0,
        gather_ms: float = 0.0,
        optimizer_ms: float = 0.0,
        snapshot_ms: float = 0.0,
    ) -> StepCosts:
        """Equal ranks and buckets: the arguments are per rank, and its stages have an even part of them each.

        Args:
            placement: stage -> rank.
            reduce_ms: reduction of all gradients of a rank.
            gather_ms: gathering of all parameters of a rank.
            optimizer_ms: the optimizer step.
            snapshot_ms: the snapshot before an optimistic one.
        """
        stages = placement.rank_to_stages
        counts = [(len(stages[rank]), max(1, NUM_BUCKETS // len(stages[rank]))) for rank in placement.stage_to_rank]

        def buckets(name: str, whole: float) -> tuple[tuple[float, ...], ...]:
            check_number(name, whole)
            return tuple((whole / (parts * count),) * count for parts, count in counts)

        return StepCosts(
            reduce_ms=buckets("reduce_ms", reduce_ms),
            gather_ms=buckets("gather_ms", gather_ms),
            optimizer_ms=(optimizer_ms,) * placement.num_ranks,
            snapshot_ms=(snapshot_ms,) * placement.num_ranks,
        )

    @staticmethod
    def typical(measured: Sequence[StepCosts], typical: Callable[[Sequence[float]], float]) -> StepCosts:
        """The typical value of every time, for example the median, over measurements of one pipeline.

        A measurement with other buckets than the last, as where a collective was not seen to end, does not count.
        """
        buckets = [[list(map(len, getattr(each, name))) for name in STEP_TIMES[:2]] for each in measured]
        measured = [each for each, own in zip(measured, buckets, strict=True) if own == buckets[-1]]

        def of(values: Sequence[Any]) -> Any:
            return tuple(map(of, zip(*values, strict=True))) if isinstance(values[0], tuple) else typical(values)

        times = {name: of([getattr(each, name) for each in measured]) for name in STEP_TIMES}
        return StepCosts(beside_passes=all(each.beside_passes for each in measured), **times)

    @property
    def overlaps_reductions(self) -> bool:
        """Whether gradients are reduced beside the passes."""
        return self.beside_passes and any(map(math.fsum, self.reduce_ms))

    @property
    def has_gathers(self) -> bool:
        """Whether parameters are gathered."""
        return any(map(math.fsum, self.gather_ms))

    def merged(self, size: int) -> StepCosts:
        """The times of stages that are made of `size` consecutive ones of these, on ranks as before."""
        starts = range(0, len(self.reduce_ms), size)
        return StepCosts(
            # the last layers' gradients are complete first
            reduce_ms=tuple(tuple(chain(*self.reduce_ms[at : at + size][::-1])) for at in starts),
            gather_ms=tuple(tuple(chain(*self.gather_ms[at : at + size])) for at in starts),
            optimizer_ms=self.optimizer_ms,
            snapshot_ms=self.snapshot_ms,
            beside_passes=self.beside_passes,
        )

    def check_fits(self, placement: Placement) -> None:
        """Raise PlanError unless there are times of all stages and ranks of a placement."""
        if (len(self.reduce_ms), len(self.optimizer_ms)) != (placement.num_stages, placement.num_ranks):
            raise PlanError(
                f"the costs' step has {len(self.reduce_ms)} stages and {len(self.optimizer_ms)} ranks, and the plan "
                f"{placement.num_stages} stages and {placement.num_ranks} ranks; give reduce_ms and gather_ms of every stage, "
                "optimizer_ms and snapshot_ms of every rank"
            )

    def to_json(self) -> dict[str, Any]:
        """The object `step` of the costs in a plan's JSON form."""
        rows: dict[str, Any] = {name: list(map(list, getattr(self, name))) for name in STEP_TIMES[:2]}
        return rows | {name: list(getattr(self, name)) for name in STEP_TIMES[2:]} | {"beside_passes": self.beside_passes}

    @staticmethod
    def from_json(body: object) -> StepCosts:
        """Parse the output of `to_json`. Raises PlanError for another form, and ConfigError for wrong numbers."""
        if not isinstance(body, Mapping):
            raise PlanError(f"costs: 'step' must be an object with {', '.join(STEP_TIMES)}, got {quoted(body)}")
        for name in STEP_TIMES:
            rows = body.get(name)
            if not isinstance(rows, list) or (name in STEP_TIMES[:2] and not all(isinstance(row, list) for row in rows)):
                what = "one list of buckets per stage" if name in STEP_TIMES[:2] else "one number per rank"
                raise PlanError(f"costs: {name!r} of 'step' must be a list of {what}, got {quoted(rows)}")
        beside = body.get("beside_passes", True)
        if not isinstance(beside, bool):
            raise PlanError(f"costs: 'beside_passes' of 'step' must be true or false, got {quoted(beside)}")
        times: dict[str, Any] = {name: tuple(map(tuple, body[name])) for name in STEP_TIMES[:2]}
        return StepCosts(**times, **{name: tuple(body[name]) for name in STEP_TIMES[2:]}, beside_passes=beside)
