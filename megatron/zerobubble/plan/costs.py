"""What a pass costs: per-stage times, the time of a link, and activation memory.

Times are in milliseconds per microbatch. Memory is in units of one microbatch's activations on one rank of a uniform
model, so a stage of a V schedule, half a rank, has 0.5. `activation_after_backward` is in the same unit and is what
stays from the end of a stage's B until its W (the layer inputs and output gradients that W multiplies; arXiv
2401.10241, section 2.3). With recomputed activations that is more than what F left, which is only what B recomputes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.ir import OpKind, Placement

_PER_STAGE = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of every stage and of the link between ranks. Raises ConfigError on values no machine can have."""

    forward_ms: tuple[float, ...]
    """Time of F, per stage."""
    backward_ms: tuple[float, ...]
    """Time of B, per stage. A fused BW takes B plus W."""
    wgrad_ms: tuple[float, ...]
    """Time of W, per stage."""
    comm_ms: float = 0.0
    """Added to every dependency that crosses ranks."""
    activation: tuple[float, ...]
    """Held from a stage's F until its B ends, per stage."""
    activation_after_backward: tuple[float, ...]
    """Still held from the end of a stage's B until its W ends, per stage."""

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for stage, value in enumerate(getattr(self, name)):
                _check_number(f"{name} of stage {stage}", value)
            if len(getattr(self, name)) != self.num_stages:
                raise ConfigError(
                    f"costs: forward_ms has {self.num_stages} stages and {name} has {len(getattr(self, name))}; "
                    "every list needs one value a stage"
                )
        _check_number("comm_ms", self.comm_ms)
        if not self.forward_ms:
            raise ConfigError("costs: at least one stage is needed")

    @property
    def num_stages(self) -> int:
        """Number of stages these costs are for."""
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
        """Every rank alike: the arguments are per rank and microbatch, and a rank's stages share them equally.

        Args:
            placement: says how many stages share a rank.
            forward_ms: F of all stages of one rank.
            backward_ms: B likewise.
            wgrad_ms: W likewise.
            comm_ms: per dependency that crosses ranks; not divided.
            activation_after_backward: what stays until W, as a share of a microbatch's activations. The default, all
                of it, is the safe assumption where nothing was measured; with recomputation it is above 1.
        """
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
    def times_text(self) -> str:
        """The times in words, for a log: by stage, or from how much to how much where there are many."""
        passes = ", ".join(
            f"{kind} {_brief(times)}" for kind, times in (("F", self.forward_ms), ("B", self.backward_ms), ("W", self.wgrad_ms))
        )
        return f"{passes} ms by stage, links {self.comm_ms:.2f} ms"

    @property
    def reserved(self) -> CostModel:
        """Costs under which an F takes at once what its microbatch will hold at most, after F or after B.

        A plan that keeps a limit under these keeps it under the true ones. The same object where no B leaves more than its F.
        """
        most = tuple(map(max, self.activation, self.activation_after_backward))
        return self if most == self.activation else replace(self, activation=most)

    def duration_ms(self, stage: int, kind: OpKind) -> float:
        """Time of one op."""
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
                f"({placement.num_ranks} ranks, {placement.name} placement); give one value a stage"
            )

    def to_json(self) -> dict[str, Any]:
        """The `costs` object of the plan's JSON form."""
        body: dict[str, Any] = {name: list(getattr(self, name)) for name in _PER_STAGE[:3]}
        body["comm_ms"] = self.comm_ms
        return body | {name: list(getattr(self, name)) for name in _PER_STAGE[3:]}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> CostModel:
        """Read what `to_json` wrote; keys it does not know are ignored.

        Raises:
            PlanError: a key is missing or is not a list.
            ConfigError: a value is not a finite non-negative number.
        """
        if not isinstance(body, Mapping):
            raise PlanError(f"costs must be an object with {', '.join(_PER_STAGE)} and comm_ms, got {body!r:.80}")
        for name in _PER_STAGE:
            if not isinstance(body.get(name), list):
                raise PlanError(f"costs: {name!r} must be a list with one number a stage, got {body.get(name)!r:.80}")
        lists = {name: tuple(body[name]) for name in _PER_STAGE}
        return CostModel(**lists, comm_ms=body.get("comm_ms", 0.0))


def _brief(times: tuple[float, ...]) -> str:
    return " ".join(f"{value:.1f}" for value in times) if len(times) <= 8 else f"{min(times):.1f}..{max(times):.1f}"


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"costs: {name} is {value!r}; it must be a finite number, 0 or more")
