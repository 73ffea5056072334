"""The cost model: times of F, B and W per stage, P2P latency, and activation memory.

Times are in milliseconds per microbatch. Memory is in units of one microbatch's activations on one rank of a uniform
model, so a stage of a V schedule, half of a rank's layers, has 0.5. `activation_after_backward`, in the same unit, is the memory
kept from the end of a stage's B until its W: the layers' inputs and output gradients, operands of the wgrad GEMMs (arXiv
2401.10241, section 2.3). With activation recomputation it is more than F leaves, which is only the input that B recomputes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.ir import OpKind, Placement

_PER_STAGE = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
_LARGEST, _SMALLEST = 1e12, 1e-9
"""Bounds of times (ms) and of activation memory. Beyond them sums and quotients of an iteration are no longer finite."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activation memory of one microbatch per stage, in the unit of `CostModel`."""

    activation: tuple[float, ...]
    """From the start of a stage's F to the end of its B (M_B)."""
    activation_after_backward: tuple[float, ...]
    """From the end of a stage's B to the end of its W (M_W)."""

    def to_json(self) -> dict[str, list[float]]:
        """Both lists by their names in the `costs` object of a plan."""
        return {name: list(getattr(self, name)) for name in _PER_STAGE[3:]}


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of every stage and of a message between ranks. Raises ConfigError on values below 0 or above 1e12.

    The largest time is 1e-9 ms or more, unless all are 0; the largest activation memory likewise.
    """

    forward_ms: tuple[float, ...]
    """Time of F, per stage."""
    backward_ms: tuple[float, ...]
    """Time of B (dgrad), per stage. A fused BW takes B plus W."""
    wgrad_ms: tuple[float, ...]
    """Time of W (wgrad), per stage."""
    comm_ms: float = 0.0
    """P2P latency per message, added to every dependency that crosses ranks."""
    activation: tuple[float, ...]
    """Activation memory from the start of a stage's F to the end of its B, per stage (M_B)."""
    activation_after_backward: tuple[float, ...]
    """Activation memory from the end of a stage's B to the end of its W, per stage (M_W)."""

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for stage, value in enumerate(getattr(self, name)):
                _check_number(f"{name} of stage {stage}", value)
            if len(getattr(self, name)) != self.num_stages:
                raise ConfigError(
                    f"costs: forward_ms has {self.num_stages} stages and {name} has {len(getattr(self, name))}; "
                    "every list needs one value per stage"
                )
        _check_number("comm_ms", self.comm_ms)
        if not self.forward_ms:
            raise ConfigError("costs: at least one stage is needed")
        for names in (_PER_STAGE[:3], _PER_STAGE[3:]):
            _check_largest(names, max(max(getattr(self, name)) for name in names))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_ms)

    @staticmethod
    def uniform(
        placement: Placement,
        *,
        forward_ms: float = 1.0,
        backward_ms: float = 1.0,
        wgrad_ms: float = 1.0,
        comm_ms: float = 0.0,
        activation_after_backward: float = 1.0,
    ) -> CostModel:
        """Uniform ranks: the arguments are per rank and microbatch, and are divided equally among a rank's stages.

        Args:
            placement: stage -> rank.
            forward_ms: F of all stages of one rank.
            backward_ms: B of all stages of one rank.
            wgrad_ms: W of all stages of one rank.
            comm_ms: P2P latency per message; not divided.
            activation_after_backward: fraction of a microbatch's activation memory kept after B, M_W / M_B. The default,
                all of it, is the safe assumption without a measurement; with recomputation it is above 1.
        """
        times = (forward_ms, backward_ms, wgrad_ms)
        for name, value in zip(_PER_STAGE, times, strict=False):
            _check_number(name, value)
        _check_largest(_PER_STAGE[:3], max(times))  # before the division, which may make it 0
        parts = [len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank]

        def shared(name: str, value: float) -> tuple[float, ...]:
            _check_number(name, value)
            return tuple(value / part for part in parts)

        return CostModel(
            forward_ms=shared("forward_ms", forward_ms),
            backward_ms=shared("backward_ms", backward_ms),
            wgrad_ms=shared("wgrad_ms", wgrad_ms),
            comm_ms=comm_ms,
            activation=shared("activation", 1.0),
            activation_after_backward=shared("activation_after_backward", activation_after_backward),
        )

    @property
    def activations(self) -> Activations:
        """The activation memory of the stages alone."""
        return Activations(activation=self.activation, activation_after_backward=self.activation_after_backward)

    @property
    def times_text(self) -> str:
        """The times as text for a log: per stage, or their range if there are more than eight stages."""
        passes = ", ".join(
            f"{kind} {_brief(times)}" for kind, times in (("F", self.forward_ms), ("B", self.backward_ms), ("W", self.wgrad_ms))
        )
        return f"{passes} ms by stage, links {self.comm_ms:.2f} ms"

    @property
    def reserved(self) -> CostModel:
        """Costs under which an F allocates the most memory that its microbatch will need, whether before or after B.

        A plan that fits a memory limit under these costs also fits it under the true ones. Returns the same object if no stage
        needs more memory after B than before.
        """
        most = tuple(map(max, self.activation, self.activation_after_backward))
        return self if most == self.activation else replace(self, activation=most)

    def merged(self, num_stages: int) -> CostModel:
        """The costs of fewer stages, each made of the same number of consecutive ones of these.

        This is how a stage of p stages follows from two of the 2p stages of a V schedule: both number the same layers in order.

        Raises:
            PlanError: the number of these stages is not a multiple of `num_stages`.
        """
        if num_stages < 1 or self.num_stages % num_stages:
            raise PlanError(f"costs of {self.num_stages} stages cannot be merged into {num_stages}: give a divisor")
        size = self.num_stages // num_stages
        lists = {
            name: tuple(math.fsum(getattr(self, name)[at : at + size]) for at in range(0, self.num_stages, size))
            for name in _PER_STAGE
        }
        return CostModel(**lists, comm_ms=self.comm_ms)

    def duration_ms(self, stage: int, kind: OpKind) -> float:
        """Time of one op in milliseconds."""
        if kind is OpKind.F:
            return self.forward_ms[stage]
        if kind is OpKind.B:
            return self.backward_ms[stage]
        if kind is OpKind.W:
            return self.wgrad_ms[stage]
        return self.backward_ms[stage] + self.wgrad_ms[stage]

    def check_fits(self, placement: Placement) -> None:
        """Raise PlanError unless there is one value for every stage of `placement`."""
        if self.num_stages != placement.num_stages:
            raise PlanError(
                f"the costs are for {self.num_stages} stages and the plan has {placement.num_stages} "
                f"({placement.num_ranks} ranks, {placement.name} placement); give one value per stage"
            )

    def to_json(self) -> dict[str, Any]:
        """The `costs` object of the plan's JSON form."""
        body: dict[str, Any] = {name: list(getattr(self, name)) for name in _PER_STAGE[:3]}
        body["comm_ms"] = self.comm_ms
        return body | {name: list(getattr(self, name)) for name in _PER_STAGE[3:]}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> CostModel:
        """Parse the output of `to_json`; unknown keys are ignored.

        Raises:
            PlanError: a key is missing or is not a list.
            ConfigError: a value is not a finite non-negative number.
        """
        if not isinstance(body, Mapping):
            raise PlanError(f"costs must be an object with {', '.join(_PER_STAGE)} and comm_ms, got {quoted(body)}")
        for name in _PER_STAGE:
            if not isinstance(body.get(name), list):
                raise PlanError(f"costs: {name!r} must be a list with one number per stage, got {quoted(body.get(name))}")
        lists = {name: tuple(body[name]) for name in _PER_STAGE}
        return CostModel(**lists, comm_ms=body.get("comm_ms", 0.0))


def _brief(times: tuple[float, ...]) -> str:
    return " ".join(f"{value:.1f}" for value in times) if len(times) <= 8 else f"{min(times):.1f}..{max(times):.1f}"


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        raise ConfigError(f"costs: {name} is {quoted(value)}; it must be a finite number from 0 to {_LARGEST:g}")


def _check_largest(names: Sequence[str], largest: float) -> None:
    if 0 < largest < _SMALLEST:
        raise ConfigError(
            f"costs: the largest value of {', '.join(names)} is {largest}; it must be at least {_SMALLEST:g}, or all are 0"
        )
