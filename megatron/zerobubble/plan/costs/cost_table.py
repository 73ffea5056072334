"""The table of costs: times and memory of every stage and pass, where a pass is a microbatch or one of its slices.

A slice of causal attention sees the keys and values of all slices before it. A stage therefore keeps those of the whole
microbatch from its first F to its last B, in one piece, and their gradients from its first B, that of the last slice, to the same
end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Generic, TypeVar

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.ir import OpKind, Passes

LARGEST = 1e12
"""Largest time (ms) or activation memory. Beyond it sums of an iteration are no longer finite."""
_SMALLEST = 1e-9
"""Least of the largest time (ms), and of the largest activation memory. Below it quotients are no longer finite."""
COST_LISTS = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
"""The lists of costs, by their names in a plan file."""
KEY_LISTS = ("keys", "key_gradients")
"""The lists of what the slices of a microbatch share, by their names in a plan file."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class CostLists(Generic[Value]):
    """What costs have per stage: a number, one per pass, or how it follows from the length."""

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
class CostTable(CostLists[tuple[float, ...]]):
    """Costs of every stage and pass, `[stage][pass]`, in the units of `CostModel`.

    Passes are numbered through the microbatches as they come in the global batch, and in each through its slices. Raises
    ConfigError for lists of different sizes, and for numbers that are not finite or below 0.
    """

    slices: int | tuple[int, ...] = 1
    """Slices of every microbatch, 1 where it is whole. A number: all microbatches are alike, and the table has one of them."""
    keys: tuple[tuple[float, ...], ...] = ()
    """Memory of the keys and values that slices share, `[stage][microbatch]`; it is in no `activation`. Empty: none."""
    key_gradients: tuple[tuple[float, ...], ...] = ()
    """Memory of their gradients, likewise."""
    tokens: tuple[int, ...] = ()
    """Tokens of every pass; empty: not known."""

    def __post_init__(self) -> None:
        if not self.forward_ms or not self.starts[-1]:
            raise ConfigError(f"costs: at least one {'microbatch' if self.forward_ms else 'stage'} is needed")
        widths = dict.fromkeys(COST_LISTS, (self.starts[-1], "slices" if self.has_slices else "microbatches"))
        for name, (width, noun) in (widths | dict.fromkeys(KEY_LISTS, (len(self.counts), "microbatches"))).items():
            rows = tuple(map(tuple, getattr(self, name)))
            if not rows and name in KEY_LISTS:
                rows = ((0.0,) * width,) * self.num_stages
            object.__setattr__(self, name, rows)
            if len(rows) != self.num_stages:
                raise ConfigError(
                    f"costs: forward_ms has {self.num_stages} stages and {name} has {len(rows)}; every list needs one value per "
                    "stage"
                )
            for stage, row in enumerate(rows):
                if len(row) != width:
                    raise ConfigError(
                        f"costs: {name} of stage {stage} has {len(row)} {noun} and there are {width}; every stage needs one "
                        "value for each"
                    )
                is_number = set(map(type, row)) <= {int, float}
                # A NaN is neither the smallest nor the largest number, but it is the sum.
                if is_number and min(row) >= 0 and max(row) <= LARGEST and not math.isnan(sum(row)):
                    continue  # once per iteration and number, the check below would be half of the planner's own time
                for index, value in enumerate(row):
                    where = "" if width == 1 else f", {'microbatch' if noun == 'microbatches' else 'slice'} {index}"
                    check_number(f"{name} of stage {stage}{where}", value)
        if self.tokens:
            check_tokens(self.tokens)
            if len(self.tokens) != self.starts[-1]:
                raise ConfigError(f"costs: {self.starts[-1]} passes and tokens of {len(self.tokens)}")

    @staticmethod
    def of_microbatches(lists: Mapping[str, Sequence[Sequence[float]]], tokens: Sequence[int] = ()) -> CostTable:
        """Whole microbatches, `[stage][microbatch]` by the names of the lists."""
        count = len(next(iter(lists[COST_LISTS[0]]), ()))
        return CostTable(slices=(1,) * count, tokens=tuple(tokens), **{name: tuple(lists[name]) for name in COST_LISTS})  # type: ignore[arg-type]

    @staticmethod
    def of_slices(
        lists: Mapping[str, Sequence[Sequence[float]]],
        *,
        keys: Sequence[float] = (),
        key_gradients: Sequence[float] = (),
        tokens: Sequence[int] = (),
    ) -> CostTable:
        """The slices of microbatches that are alike: `[stage][slice]` by the names of the lists, and keys per stage."""
        return CostTable(
            slices=len(next(iter(lists[COST_LISTS[0]]), (0.0,))),
            keys=tuple((value,) for value in keys),
            key_gradients=tuple((value,) for value in key_gradients),
            tokens=tuple(tokens),
            **{name: tuple(lists[name]) for name in COST_LISTS},  # type: ignore[arg-type]
        )

    @staticmethod
    def joined(microbatches: Sequence[CostTable]) -> CostTable:
        """Microbatches with costs of their own, from a table of each one."""
        if len({each.num_stages for each in microbatches}) > 1:
            raise ConfigError("costs: the slices of every microbatch must have the same number of stages")
        rows: dict[str, Any] = {}
        for name in (*COST_LISTS, *KEY_LISTS):
            stages = zip(*(getattr(each, name) for each in microbatches), strict=True)
            rows[name] = tuple(tuple(chain.from_iterable(of_stage)) for of_stage in stages)
        are_known = all(each.tokens for each in microbatches)
        return CostTable(
            slices=tuple(count for each in microbatches for count in each.counts),
            tokens=tuple(value for each in microbatches for value in each.tokens) if are_known else (),
            **rows,
        )

    @property
    def is_alike(self) -> bool:
        """Whether all microbatches have the same costs, however many there are."""
        return isinstance(self.slices, int)

    @property
    def counts(self) -> tuple[int, ...]:
        """Slices of every microbatch of the table, which is one where all are alike."""
        return (self.slices,) if isinstance(self.slices, int) else self.slices

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first pass of every microbatch of the table, and the number of all."""
        return Passes(self.counts).starts

    @property
    def num_slices(self) -> int:
        """Slices per microbatch, n, the most of any."""
        return max(self.counts, default=1)

    @cached_property
    def has_slices(self) -> bool:
        """Whether a microbatch is cut."""
        return self.num_slices > 1

    @property
    def passes_per_microbatch(self) -> float:
        """The mean number of slices, to whose size that of a message is in inverse proportion."""
        return self.starts[-1] / len(self.counts)

    @property
    def is_uniform(self) -> bool:
        """Whether all passes cost the same."""
        return all(len(set(row)) == 1 for rows in self.lists.values() for row in rows)

    def column(self, microbatch: int) -> int:
        """The column of a microbatch in `keys`."""
        return 0 if self.is_alike else microbatch

    def of(self, microbatch: int) -> CostTable:
        """The costs of one microbatch, as if all were like it."""
        return self if self.is_alike else replace(self.chosen([microbatch]), slices=self.counts[microbatch])

    def chosen(self, microbatches: Sequence[int]) -> CostTable:
        """The costs of some microbatches, in this order, where they have their own."""
        passes = [index for i in microbatches for index in range(*self.starts[i : i + 2])]

        def picked(name: str, columns: Sequence[int]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(row[index] for index in columns) for row in getattr(self, name))

        return CostTable(
            slices=tuple(self.counts[i] for i in microbatches),
            tokens=tuple(self.tokens[index] for index in passes) if self.tokens else (),
            **{name: picked(name, passes) for name in COST_LISTS},
            **{name: picked(name, microbatches) for name in KEY_LISTS},
        )

    def _summed(self, row: Sequence[float]) -> tuple[float, ...]:
        """Per microbatch the sum over its passes."""
        return tuple(math.fsum(row[begin:end]) for begin, end in pairwise(self.starts)) if self.has_slices else tuple(row)

    def of_microbatch(self, name: str, stage: int, microbatch: int) -> float:
        """The value of one of the lists for a microbatch: the sum over its slices."""
        row, column = getattr(self, name)[stage], self.column(microbatch)
        return math.fsum(row[self.starts[column] : self.starts[column + 1]]) if self.has_slices else float(row[column])

    @property
    def tokens_of_microbatches(self) -> tuple[int, ...]:
        """Tokens of every microbatch of the table; empty: not known."""
        return tuple(sum(self.tokens[begin:end]) for begin, end in pairwise(self.starts)) if self.tokens else ()

    @property
    def whole(self) -> CostTable:
        """Microbatches in one piece, each taking what its slices take together, with the memory of their keys and values."""
        rows = {name: tuple(map(self._summed, rows)) for name, rows in self.lists.items()}
        rows["activation"] = tuple(
            tuple(map(math.fsum, zip(row, keys, strict=True))) for row, keys in zip(rows["activation"], self.keys, strict=True)
        )
        slices = 1 if self.is_alike else (1,) * len(self.counts)
        return CostTable(slices=slices, tokens=self.tokens_of_microbatches, **rows)

    def means(self) -> CostLists[float]:
        """Per stage the mean over the microbatches."""
        return CostLists(**{name: tuple(_mean(self._summed(row)) for row in rows) for name, rows in self.lists.items()})

    def cut(self, slices: int | Sequence[int]) -> CostTable:
        """Whole microbatches cut into even parts, each with the same part of times, memory and tokens.

        Args:
            slices: of every microbatch, or of each.
        """
        counts = [slices] if isinstance(slices, int) else list(slices)

        def parts(row: tuple[float, ...]) -> tuple[float, ...]:
            values = row if len(row) == len(counts) else row * len(counts)
            return tuple(value / count for value, count in zip(values, counts, strict=True) for _ in range(count))

        ends = [[total * i // count for i in range(count + 1)] for total, count in zip(self.tokens, counts, strict=False)]
        return CostTable(
            slices=slices if isinstance(slices, int) else tuple(slices),
            tokens=tuple(end - begin for each in ends for begin, end in pairwise(each)),
            **{name: tuple(map(parts, rows)) for name, rows in self.lists.items()},
        )

    @property
    def with_keys(self) -> CostTable:
        """The costs with the memory of keys and values as that of the first slice, from the first F to the last B.

        That of their gradients is left out.
        """
        return self._with_first(self.activation, self.keys)

    @property
    def reserved(self) -> CostTable:
        """Costs under which an F allocates the most memory that its pass will need, that of keys and their gradients included.

        The first slice, whose F is the first and whose B is the last of its microbatch, has the keys and values.
        """
        pairs = zip(self.activation, self.activation_after_backward, strict=True)
        keys = [tuple(map(math.fsum, zip(*each, strict=True))) for each in zip(self.keys, self.key_gradients, strict=True)]
        return self._with_first([tuple(map(max, before, after)) for before, after in pairs], keys)

    def _with_first(self, activation: Iterable[Sequence[float]], added: Iterable[Sequence[float]]) -> CostTable:
        """The costs with this memory before B, and more of the first slice of every microbatch."""
        rows = [list(row) for row in activation]
        for row, of_stage in zip(rows, added, strict=True):
            for start, value in zip(self.starts, of_stage, strict=False):
                row[start] += value
        return replace(self, activation=tuple(map(tuple, rows)), keys=(), key_gradients=())

    def scaled(self, scales: Sequence[float]) -> CostTable:
        """The costs with the activation memory of each stage times a factor."""
        rows = {
            name: tuple(tuple(value * scale for value in row) for row, scale in zip(getattr(self, name), scales, strict=True))
            for name in (*COST_LISTS[3:], *KEY_LISTS)
        }
        return replace(self, **rows)  # type: ignore[arg-type]

    def merged(self, size: int) -> CostTable:
        """The costs of stages that are made of `size` consecutive ones of these."""
        starts = range(0, self.num_stages, size)
        rows = {
            name: tuple(tuple(map(math.fsum, zip(*getattr(self, name)[at : at + size], strict=True))) for at in starts)
            for name in (*COST_LISTS, *KEY_LISTS)
        }
        return replace(self, **rows)  # type: ignore[arg-type]

    def duration_ms(self, stage: int, kind: OpKind, microbatch: int, slice: int) -> float:
        """Time of one op in milliseconds."""
        index = self.starts[self.column(microbatch)] + slice
        if kind is OpKind.F:
            return self.forward_ms[stage][index]
        backward, wgrad = self.backward_ms[stage][index], self.wgrad_ms[stage][index]
        return backward if kind is OpKind.B else wgrad if kind is OpKind.W else backward + wgrad

    def to_json(self) -> dict[str, Any]:
        """The objects of the costs in a plan's JSON form beside the means; none if all microbatches are alike and whole."""
        if self.has_slices:
            each = [self.of(i)._of_slices() for i in range(len(self.counts))]
            return {"slices": each[0] if self.is_alike else each}
        tokens = {"tokens": list(self.tokens)} if self.tokens else {}
        return {} if self.is_alike else {"microbatches": self._rows() | tokens}

    def _rows(self) -> dict[str, Any]:
        return {name: [list(row) for row in rows] for name, rows in self.lists.items()}

    def _of_slices(self) -> dict[str, Any]:
        """The object of a microbatch that is cut, or beside such ones."""
        keys = {name: [row[0] for row in getattr(self, name)] for name in KEY_LISTS}
        return self._rows() | keys | {"lengths": list(self.tokens)}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> CostTable | None:
        """Parse `to_json` in the costs of a plan; None if they have only means.

        Raises:
            PlanError: an object of another form.
            ConfigError: wrong numbers, or lists of wrong sizes.
        """
        whole, cut = body.get("microbatches"), body.get("slices")
        if whole is not None and cut is not None:
            raise ConfigError("costs: give those of microbatches or of slices; leave others out")
        if whole is not None:
            rows = _rows(whole, "microbatches")
            return CostTable.of_microbatches(rows, _list(whole, "microbatches", "tokens", "one number per microbatch"))
        if isinstance(cut, list):
            return CostTable.joined([_slices(each) for each in cut]) if cut else None
        return None if cut is None else _slices(cut)


def _slices(body: object) -> CostTable:
    rows = _rows(body, "slices")
    keys, key_gradients, tokens = (_list(body, "slices", name, "numbers") for name in (*KEY_LISTS, "lengths"))
    return CostTable.of_slices(rows, keys=keys, key_gradients=key_gradients, tokens=tokens)


def _rows(body: Any, what: str) -> dict[str, Any]:
    if not isinstance(body, Mapping):
        raise PlanError(f"costs: {what!r} must be an object with {', '.join(COST_LISTS)}, got {quoted(body)}")
    for name in COST_LISTS:
        rows = body.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise PlanError(f"costs: {name!r} of {what!r} must be a list of one list per stage, got {quoted(rows)}")
    return {name: body[name] for name in COST_LISTS}


def _list(body: Any, of: str, name: str, what: str) -> list[Any]:
    values = body.get(name, [])
    if not isinstance(values, list):
        raise PlanError(f"costs: {name!r} of {of!r} must be a list of {what}, got {quoted(values)}")
    return values


def check_number(name: str, value: object, subject: str = "costs", *, most: float = LARGEST) -> None:
    """Raise ConfigError, which begins with its subject, unless a cost is a number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ConfigError(f"{subject}: {name} is {quoted(value)}; it must be a finite number from 0 to {most:g}")


def check_largest(names: Sequence[str], largest: float) -> None:
    """Raise ConfigError if the largest of some costs is so small that quotients of them are not finite."""
    if 0 < largest < _SMALLEST:
        raise ConfigError(
            f"costs: the largest value of {', '.join(names)} is {largest}; it must be at least {_SMALLEST:g}, or all are 0"
        )


def check_tokens(tokens: Sequence[object]) -> None:
    """Raise ConfigError for the first microbatch without tokens or with more than `LARGEST`, or if there is no microbatch."""
    if not tokens:
        raise ConfigError("no microbatch has tokens; give one length per microbatch")
    for microbatch, value in enumerate(tokens):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"microbatch {microbatch} has {quoted(value)} tokens; give a whole number, 1 or more")
        if value > LARGEST:
            raise ConfigError(f"microbatch {microbatch} has {quoted(value)} tokens; give a whole number, at most {LARGEST:g}")


def numbers_of_slices(work: Sequence[float], most: int) -> tuple[int, ...]:
    """Slices of unequal microbatches: `most` of the longest, and of the others as many as have about the same work, 1 or more.

    Args:
        work: of every microbatch.
        most: n.
    """
    longest = max(work)
    return tuple(max(1, round(most * each / longest)) if longest > 0 else most for each in work)


def _mean(values: tuple[float, ...]) -> float:
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
