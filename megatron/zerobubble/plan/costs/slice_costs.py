"""Costs of the slices of a microbatch: times and memory of each, and the memory of keys and values.

A slice of causal attention sees the keys and values of all slices before it. A stage therefore keeps those of the whole
microbatch from its first F to its last B, in one piece, and their gradients from its first B, that of the last slice, to the same
end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.microbatch_costs import COST_LISTS, CostLists, check_number
from megatron.zerobubble.plan.ir import Op, OpKind

_KEY_LISTS = ("keys", "key_gradients")


@dataclass(frozen=True, kw_only=True)
class SliceCosts(CostLists[tuple[float, ...]]):
    """Costs of every stage and slice, `[stage][slice]`, in the units of `CostModel`, of one microbatch or of each alike.

    Activation memory is without keys and values. Raises ConfigError for lists of different sizes, and for numbers that are not
    finite or below 0.
    """

    keys: tuple[float, ...] = ()
    """Memory of the keys and values of a microbatch, per stage; empty: none of its own."""
    key_gradients: tuple[float, ...] = ()
    """Memory of their gradients, per stage; empty: none of its own."""
    lengths: tuple[int, ...] = ()
    """Tokens of every slice; empty: not known."""

    def __post_init__(self) -> None:
        for name, given in self.lists.items():
            rows = tuple(tuple(row) for row in given)
            object.__setattr__(self, name, rows)
            if len(rows) != self.num_stages or not rows or {len(row) for row in rows} != {self.num_slices}:
                raise ConfigError(
                    f"costs: {name} of slices must have one list per stage, with one number per slice, as forward_ms"
                )
            for stage, row in enumerate(rows):
                for index, value in enumerate(row):
                    check_number(f"{name} of stage {stage}, slice {index}", value)
        for name in _KEY_LISTS:
            row = tuple(getattr(self, name)) or (0.0,) * self.num_stages
            object.__setattr__(self, name, row)
            if len(row) != self.num_stages:
                raise ConfigError(f"costs: {name} has {len(row)} stages and forward_ms of slices has {self.num_stages}")
            for stage, value in enumerate(row):
                check_number(f"{name} of stage {stage}", value)
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if self.lengths and len(self.lengths) != self.num_slices:
            raise ConfigError(f"costs: {self.num_slices} slices and lengths of {len(self.lengths)}")

    @property
    def num_slices(self) -> int:
        """Number of slices of a microbatch, n."""
        return len(self.forward_ms[0])

    @staticmethod
    def even(lists: Mapping[str, Sequence[float]], num_slices: int, tokens: int = 0) -> SliceCosts:
        """Slices that take the same part of a microbatch's times and memory each, by the names of the lists.

        Its tokens, unless they are 0, are divided as evenly.
        """
        parts = {name: tuple((value / num_slices,) * num_slices for value in values) for name, values in lists.items()}
        cuts = [tokens * index // num_slices for index in range(num_slices + 1)]
        lengths = tuple(end - begin for begin, end in pairwise(cuts)) if tokens else ()
        return SliceCosts(**parts, lengths=lengths)  # type: ignore[arg-type]

    def sums(self) -> dict[str, tuple[float, ...]]:
        """Per stage, the sum over the slices, by the names of the lists of `CostModel`."""
        return {name: tuple(map(math.fsum, rows)) for name, rows in self.lists.items()}

    def duration_ms(self, stage: int, kind: OpKind, index: int) -> float:
        """Time of one op in milliseconds."""
        if kind is OpKind.F:
            return self.forward_ms[stage][index]
        backward, wgrad = self.backward_ms[stage][index], self.wgrad_ms[stage][index]
        return backward if kind is OpKind.B else wgrad if kind is OpKind.W else backward + wgrad

    @property
    def with_keys(self) -> SliceCosts:
        """The costs with the memory of keys and values as that of the first slice, from the first F to the last B.

        That of their gradients is left out.
        """
        rows = zip(self.activation, self.keys, strict=True)
        return replace(self, activation=tuple((row[0] + keys, *row[1:]) for row, keys in rows), keys=(), key_gradients=())

    @property
    def reserved(self) -> SliceCosts:
        """Costs under which an F allocates the most memory that its slice will need, that of keys and their gradients included.

        The first slice, whose F is the first and whose B is the last of its microbatch, has the keys and values.
        """
        pairs = zip(self.activation, self.activation_after_backward, strict=True)
        most = [tuple(map(max, before, after)) for before, after in pairs]
        keys = map(math.fsum, zip(self.keys, self.key_gradients, strict=True))
        most = [(row[0] + key, *row[1:]) for row, key in zip(most, keys, strict=True)]
        return replace(self, activation=tuple(most), keys=(), key_gradients=())

    def merged(self, size: int) -> SliceCosts:
        """The costs of stages that are made of `size` consecutive ones of these."""
        starts = range(0, self.num_stages, size)
        lists = {
            name: tuple(tuple(map(math.fsum, zip(*rows[at : at + size], strict=True))) for at in starts)
            for name, rows in self.lists.items()
        }
        keys = {name: tuple(math.fsum(getattr(self, name)[at : at + size]) for at in starts) for name in _KEY_LISTS}
        return SliceCosts(lengths=self.lengths, **lists, **keys)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """The `slices` object of the costs in a plan's JSON form."""
        body: dict[str, Any] = {name: [list(row) for row in rows] for name, rows in self.lists.items()}
        return body | {name: list(getattr(self, name)) for name in (*_KEY_LISTS, "lengths")}

    @staticmethod
    def from_json(body: object) -> SliceCosts:
        """Parse the output of `to_json`. Raises PlanError for another form and ConfigError for wrong numbers."""
        if not isinstance(body, Mapping):
            raise PlanError(f"costs: 'slices' must be an object with {', '.join(COST_LISTS)}, got {quoted(body)}")
        for name in COST_LISTS:
            rows = body.get(name)
            if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
                raise PlanError(f"costs: {name!r} of 'slices' must be a list of one list per stage, got {quoted(rows)}")
        others = {name: body.get(name, []) for name in (*_KEY_LISTS, "lengths")}
        for name, values in others.items():
            if not isinstance(values, list):
                raise PlanError(f"costs: {name!r} of 'slices' must be a list of numbers, got {quoted(values)}")
        return SliceCosts(**{name: tuple(body[name]) for name in COST_LISTS}, **{name: tuple(of) for name, of in others.items()})


def numbers_of_slices(work: Sequence[float], most: int) -> tuple[int, ...]:
    """Slices of unequal microbatches: `most` of the longest, and of the others as many as have about the same work, 1 or more.

    Args:
        work: of every microbatch.
        most: n.
    """
    longest = max(work)
    return tuple(max(1, round(most * each / longest)) if longest > 0 else most for each in work)


def memory_of_slices(row: Sequence[Op], slices_of: Callable[[int], SliceCosts]) -> list[float]:
    """One rank's activation memory at each of its ops, in microbatches: from the start of an F, from the end of another op.

    Args:
        row: the rank's ops; those of F alone keep nothing but keys and values, until the microbatch's last slice.
        slices_of: microbatch -> the costs of its slices.
    """
    has_backward = any(op.kind is not OpKind.F for op in row)
    held, memory = 0.0, []
    for stage, kind, microbatch, index in row:
        costs = slices_of(microbatch)
        last = costs.num_slices - 1
        before, after = costs.activation[stage][index], costs.activation_after_backward[stage][index]
        if kind is OpKind.F:
            held += before + (costs.keys[stage] if index == 0 else 0.0)
        elif kind is OpKind.W:
            held -= after
        else:
            held += (after if kind is OpKind.B else 0.0) - before
            if index == last:
                held += costs.key_gradients[stage]
            if index == 0:  # with one slice the gradients come and go within the op
                held -= costs.keys[stage] + costs.key_gradients[stage]
        memory.append(max(held, 0.0))
        if not has_backward:
            held -= before + (costs.keys[stage] if index == last else 0.0)
    return memory
