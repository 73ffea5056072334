"""The cost model: times of F, B and W per stage, P2P latency, and activation memory.

Times are in milliseconds per microbatch. Memory is in units of one microbatch's activations on one rank of a uniform
model, so a stage of a V schedule, half of a rank's layers, has 0.5. `activation_after_backward`, in the same unit, is the memory
kept from the end of a stage's B until its W: the layers' inputs and output gradients, operands of the wgrad GEMMs (arXiv
2401.10241, section 2.3). With activation recomputation it is more than F leaves, which is only the input that B recomputes from.

Microbatches of unequal lengths have costs of their own (`per_microbatch`, or `unequal_slices` where they are cut), and ranks may
have unequal links (`links`). Then the per-stage lists are the means, which are the costs of every microbatch where all are equal:
such costs are the plain ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.links import Links, LinkTime, unequal_links
from megatron.zerobubble.plan.costs.microbatch_costs import COST_LISTS, CostLists, MicrobatchCosts, check_number
from megatron.zerobubble.plan.costs.slice_costs import SliceCosts, numbers_of_slices
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan

_SMALLEST = 1e-9
"""Least of the largest time (ms), and of the largest activation memory. Below it quotients are no longer finite."""


Activations = Mapping[str, tuple[Any, ...]]
"""Activation memory of one microbatch per stage: the last two lists of a `CostModel`, by the names of its fields. Of slices,
those of `SliceCosts`, keys and their gradients included."""


@dataclass(frozen=True, kw_only=True)
class CostModel(CostLists[float]):
    """Costs of every stage and of a message between ranks. Raises ConfigError on values below 0 or above 1e12.

    The largest time is 1e-9 ms or more, unless all are 0; the largest activation memory likewise.
    """

    comm_ms: float = 0.0
    """P2P latency per message, added to every dependency that crosses ranks."""
    per_microbatch: MicrobatchCosts | None = None
    """Costs of every microbatch; the lists above are then their means, not those given. None: all microbatches are equal."""
    slices: SliceCosts | None = None
    """Costs of every slice of a microbatch; the lists above are then their sums, not those given. None: a slice has its share."""
    unequal_slices: tuple[SliceCosts, ...] = ()
    """Costs of the slices of every microbatch, of unequal lengths; the lists above are then means of their sums. Empty: none."""
    links: Links | None = None
    """Links of every pair of ranks; `comm_ms` is then the mean of neighboring ranks. None: `comm_ms` for all."""

    def __post_init__(self) -> None:
        self._take_means()
        for name in COST_LISTS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for stage, value in enumerate(getattr(self, name)):
                check_number(f"{name} of stage {stage}", value)
            if len(getattr(self, name)) != self.num_stages:
                raise ConfigError(
                    f"costs: forward_ms has {self.num_stages} stages and {name} has {len(getattr(self, name))}; "
                    "every list needs one value per stage"
                )
        check_number("comm_ms", self.comm_ms)
        if not self.forward_ms:
            raise ConfigError("costs: at least one stage is needed")
        for names in (COST_LISTS[:3], COST_LISTS[3:]):
            _check_largest(names, max(max(getattr(self, name)) for name in names))

    def _take_means(self) -> None:
        """Replace the lists by the means of the microbatches or the sums of the slices, and what is equal by the plain costs."""
        if self.slices is not None:
            for name, sums in self.slices.sums().items():
                object.__setattr__(self, name, sums)
        if (self.per_microbatch is not None) + (self.slices is not None) + bool(self.unequal_slices) > 1:
            raise ConfigError(
                "costs: give those of microbatches, of the slices of all, or of the slices of each; leave others out"
            )
        if self.unequal_slices:
            if len({each.num_stages for each in self.unequal_slices}) > 1:
                raise ConfigError("costs: the slices of every microbatch must have the same number of stages")
            every = [each.sums() for each in self.unequal_slices]
            for name in COST_LISTS:
                columns = zip(*(each[name] for each in every), strict=True)
                object.__setattr__(self, name, tuple(math.fsum(column) / len(every) for column in columns))
        if self.per_microbatch is not None:
            for name, means in self.per_microbatch.means().items():
                object.__setattr__(self, name, means)
            if self.per_microbatch.is_uniform:
                object.__setattr__(self, "per_microbatch", None)
        if self.links is not None:
            sizes = len(self.links.message_bytes)
            if sizes > 1 and self.per_microbatch is not None and sizes != self.per_microbatch.num_microbatches:
                raise ConfigError(
                    f"costs: {self.per_microbatch.num_microbatches} microbatches and message_bytes of {sizes}; "
                    "give one size for all, or one per microbatch"
                )
            object.__setattr__(self, "comm_ms", self.links.neighbors_ms)
            if self.links.is_uniform:
                object.__setattr__(self, "links", None)

    @property
    def num_microbatches(self) -> int | None:
        """Number of microbatches that have costs of their own; None: all are equal, and any number has these costs."""
        if self.per_microbatch is not None:
            return self.per_microbatch.num_microbatches
        if self.unequal_slices:
            return len(self.unequal_slices)
        sizes = 1 if self.links is None else len(self.links.message_bytes)
        return sizes if sizes > 1 else None

    @property
    def num_slices(self) -> int:
        """Slices per microbatch that have costs of their own, n, the most of any; 1: a microbatch is one."""
        return max(self.slices_of(i).num_slices for i in range(len(self.unequal_slices) or 1)) if self.has_slices else 1

    @property
    def has_slices(self) -> bool:
        """Whether slices have costs of their own."""
        return self.slices is not None or bool(self.unequal_slices)

    def slices_of(self, microbatch: int) -> SliceCosts:
        """The costs of the slices of a microbatch, which must have some."""
        slices = self.unequal_slices[microbatch] if self.unequal_slices else self.slices
        assert slices is not None
        return slices

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of every microbatch, if they are unequal and known; else empty."""
        if self.per_microbatch is not None:
            return self.per_microbatch.tokens
        return tuple(sum(each.lengths) for each in self.unequal_slices if each.lengths)

    @property
    def is_plain(self) -> bool:
        """Whether all microbatches are equal, and all links."""
        return self.per_microbatch is None and self.links is None and not self.unequal_slices

    @property
    def plain(self) -> CostModel:
        """The costs with every microbatch at the mean, whole where their slices are unequal, and every link at `comm_ms`."""
        return self if self.is_plain else replace(self.whole if self.unequal_slices else self, per_microbatch=None, links=None)

    @property
    def mean_pass(self) -> CostModel:
        """The costs of a microbatch that costs what a slice of unequal ones does on average, keys and values included."""
        number = sum(each.num_slices for each in self.unequal_slices)
        every = [each.with_keys.sums() for each in self.unequal_slices]
        lists = {
            name: [math.fsum(column) / number for column in zip(*(each[name] for each in every), strict=True)]
            for name in COST_LISTS
        }
        return CostModel.of_lists(lists, comm_ms=self.comm_ms)

    @property
    def whole(self) -> CostModel:
        """The costs of microbatches in one piece, each taking what its slices take together."""
        if self.unequal_slices:
            every = [each.with_keys.sums() for each in self.unequal_slices]
            lists = {name: tuple(zip(*(each[name] for each in every), strict=True)) for name in COST_LISTS}
            mean = sum(each.num_slices for each in self.unequal_slices) / len(every)
            own = MicrobatchCosts(tokens=self.tokens, **lists)
            return replace(self, unequal_slices=(), per_microbatch=own, comm_ms=self.comm_ms * mean)
        if self.slices is None:
            return self
        n = self.slices.num_slices
        kept = tuple(map(math.fsum, zip(self.activation, self.slices.keys, strict=True)))
        links = None if self.links is None else self.links.divided(1 / n)
        return replace(self, slices=None, activation=kept, comm_ms=self.comm_ms * n, links=links)

    def rows(self, name: str, width: int = 1) -> Sequence[Sequence[float]]:
        """One of the lists per stage and microbatch or slice; of equal ones `width` times the same value."""
        if self.unequal_slices:
            every_list = (getattr(each, name) for each in self.unequal_slices)
            return [list(itertools.chain(*rows)) for rows in zip(*every_list, strict=True)]
        every = self.per_microbatch or self.slices
        if every is None:
            return [[value] * width for value in getattr(self, name)]
        rows: Sequence[Sequence[float]] = getattr(every, name)
        return rows

    def of_microbatch(self, name: str, stage: int, microbatch: int) -> float:
        """The value of one of the lists for one microbatch; the sum over its slices where those are unequal."""
        if self.unequal_slices:
            return math.fsum(getattr(self.unequal_slices[microbatch], name)[stage])
        lists: CostModel | MicrobatchCosts = self if self.per_microbatch is None else self.per_microbatch
        value = getattr(lists, name)[stage]
        return float(value if self.per_microbatch is None else value[microbatch])

    @staticmethod
    def of_lists(lists: Mapping[str, Sequence[float]], *, comm_ms: float = 0.0) -> CostModel:
        """Plain costs from the five lists per stage, by the names of their fields."""
        return CostModel(comm_ms=comm_ms, **{name: tuple(values) for name, values in lists.items()})  # type: ignore[arg-type]

    @staticmethod
    def of_microbatches(per_microbatch: MicrobatchCosts, *, comm_ms: float = 0.0, links: Links | None = None) -> CostModel:
        """Costs of unequal microbatches, with one P2P latency or a matrix of links."""
        return replace(CostModel.of_lists(per_microbatch.means(), comm_ms=comm_ms), per_microbatch=per_microbatch, links=links)

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
        values = (forward_ms, backward_ms, wgrad_ms, 1.0, activation_after_backward)
        whole = dict(zip(COST_LISTS, values, strict=True))
        for name, value in whole.items():
            check_number(name, value)
        _check_largest(COST_LISTS[:3], max(values[:3]))  # before the division, which may make it 0
        parts = [len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank]
        return CostModel.of_lists({name: [value / part for part in parts] for name, value in whole.items()}, comm_ms=comm_ms)

    @property
    def activations(self) -> Activations:
        """The activation memory of the stages alone."""
        if self.slices is not None:
            return {name: getattr(self.slices, name) for name in (*COST_LISTS[3:], "keys", "key_gradients")}
        return {name: getattr(self, name) for name in COST_LISTS[3:]}

    def with_activations(self, activations: Activations) -> CostModel:
        """The same times with the activation memory of other costs, for as many stages, of as many slices or of microbatches."""
        if self.slices is not None and "keys" not in activations:
            even = SliceCosts.even(self.lists | dict(activations), self.num_slices).lists
            activations = {name: even[name] for name in COST_LISTS[3:]}
        if self.slices is not None:
            return replace(self, slices=replace(self.slices, **activations))
        return replace(self, **activations)  # type: ignore[arg-type]

    @property
    def times_text(self) -> str:
        """The times as text for a log: per stage, or their range if there are more than eight stages."""
        passes = ", ".join(
            f"{kind} {_brief(times)}" for kind, times in (("F", self.forward_ms), ("B", self.backward_ms), ("W", self.wgrad_ms))
        )
        every = self.num_microbatches
        unequal = "" if every is None else f" (means of {every} unequal microbatches)"
        if self.links is None:
            return f"{passes} ms by stage{unequal}, links {self.comm_ms:.2f} ms"
        pairs = itertools.permutations(range(self.links.num_ranks), 2)
        source, target = max(pairs, key=lambda pair: self.link_ms(*pair))
        links = f"links {min(self.links.neighbors):.2f} to {self.link_ms(source, target):.2f} ms"
        return f"{passes} ms by stage{unequal}, {links}, the slowest from rank {source} to rank {target}"

    @property
    def reserved(self) -> CostModel:
        """Costs under which an F allocates the most memory that its microbatch will need, whether before or after B.

        A plan that fits a memory limit under these costs also fits it under the true ones. Returns the same object if no stage
        needs more memory after B than before.
        """
        most = tuple(map(max, self.activation, self.activation_after_backward))
        every, slices = self.per_microbatch, self.slices
        if slices is not None:
            slices = slices.reserved
        if every is not None:
            rows = zip(every.activation, every.activation_after_backward, strict=True)
            every = replace(every, activation=tuple(tuple(map(max, before, after)) for before, after in rows))
        cut = tuple(each.reserved for each in self.unequal_slices)
        if (most, every, slices, cut) == (self.activation, self.per_microbatch, self.slices, self.unequal_slices):
            return self
        return replace(self, activation=most, per_microbatch=every, slices=slices, unequal_slices=cut)

    def reordered(self, assignment: Sequence[int]) -> CostModel:
        """The same costs with microbatch i the one that was `assignment[i]`; empty: the same order. See `Plan.assignment`."""
        if not assignment or self.num_microbatches is None:
            return self
        if len(assignment) != self.num_microbatches:
            raise PlanError(f"the costs are for {self.num_microbatches} microbatches and the plan assigns {len(assignment)}")
        return replace(
            self,
            per_microbatch=None if self.per_microbatch is None else self.per_microbatch.reordered(assignment),
            unequal_slices=tuple(self.unequal_slices[index] for index in assignment) if self.unequal_slices else (),
            links=None if self.links is None else self.links.reordered(assignment),
        )

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
            name: tuple(math.fsum(values[at : at + size]) for at in range(0, self.num_stages, size))
            for name, values in self.lists.items()
        }
        every = None if self.per_microbatch is None else self.per_microbatch.merged(size)
        slices = None if self.slices is None else self.slices.merged(size)
        cut = tuple(each.merged(size) for each in self.unequal_slices)
        whole = CostModel.of_lists(lists, comm_ms=self.comm_ms)
        return replace(whole, per_microbatch=every, slices=slices, unequal_slices=cut, links=self.links)

    def with_links(self, measured: Mapping[tuple[int, int], LinkTime], num_ranks: int) -> CostModel:
        """The costs with measured links, (sender, receiver) -> a message: a matrix, or where they are alike their mean."""
        shortest = min(*self.forward_ms, *self.backward_ms)
        mean = math.fsum(each.message_ms for each in measured.values()) / max(1, len(measured))
        return replace(self, comm_ms=mean, links=unequal_links(measured, num_ranks, shortest_pass_ms=shortest))

    def of_plan(self, plan: Plan) -> CostModel:
        """The costs of a plan's own microbatches and slices: `reordered` by its assignment, and divided among its slices.

        Raises:
            PlanError: the costs are for another number of stages, ranks, microbatches or slices.
        """
        return self.of_slices(plan).reordered(plan.assignment)

    def of_slices(self, plan: Plan) -> CostModel:
        """The costs with those of every slice of a plan, in the order of the data: the same if they have them. See `of_plan`."""
        self.check_fits(plan.placement, plan.num_microbatches)
        if not (plan.slice_counts or self.unequal_slices or (self.per_microbatch is not None and plan.num_slices > 1)):
            return self.divided(plan.num_slices)
        data = map(plan.batch_index, range(plan.num_microbatches))
        counts = [count for _, count in sorted(zip(data, plan.passes.slices, strict=True))]
        if not self.has_slices:
            return self.with_unequal_slices(self._even(counts))
        given = [self.slices_of(i).num_slices for i in range(plan.num_microbatches)]
        if given != counts:
            raise PlanError(
                f"the costs are for {quoted(given)} slices of the microbatches and the plan has {quoted(counts)}; give costs of "
                "each slice"
            )
        return self

    def divided(self, num_slices: int) -> CostModel:
        """The costs with those of every slice: the same costs if they have them, else each slice an even part of its microbatch.

        Of unequal microbatches the longest has `num_slices`, and the others as many as have about the same work.

        Raises:
            PlanError: they have another number of slices.
        """
        if num_slices == self.num_slices:
            return self
        if self.has_slices:
            raise PlanError(
                f"the costs are for {self.num_slices} slices per microbatch and the plan has {num_slices} slices; give costs of "
                "each slice"
            )
        if self.per_microbatch is None:
            return self.with_slices(SliceCosts.even(self.lists, num_slices))
        work = [math.fsum(column) for column in zip(*(row for name in COST_LISTS[:3] for row in self.rows(name)), strict=True)]
        return self.with_unequal_slices(self._even(numbers_of_slices(work, num_slices)))

    def _even(self, counts: Sequence[int]) -> tuple[SliceCosts, ...]:
        """Even parts of every microbatch, as many as it has slices."""
        rows = {name: self.rows(name, len(counts)) for name in COST_LISTS}
        lists = ({name: [row[i] for row in of_name] for name, of_name in rows.items()} for i in range(len(counts)))
        return tuple(map(SliceCosts.even, lists, counts, self.tokens or itertools.repeat(0)))

    def with_unequal_slices(self, every: Sequence[SliceCosts]) -> CostModel:
        """The costs with those of every slice of each microbatch, from those of whole ones: all messages have the mean length."""
        mean = sum(each.num_slices for each in every) / len(every)
        links = None if self.links is None else self.links.divided(mean)
        return replace(self, per_microbatch=None, unequal_slices=tuple(every), comm_ms=self.comm_ms / mean, links=links)

    def with_slices(self, slices: SliceCosts) -> CostModel:
        """The costs with those of every slice of a microbatch, from those of whole microbatches: a message is a part as long."""
        n = slices.num_slices
        return replace(self, slices=slices, comm_ms=self.comm_ms / n, links=None if self.links is None else self.links.divided(n))

    def duration_ms(self, stage: int, kind: OpKind, microbatch: int = 0, slice: int = 0) -> float:
        """Time of one op in milliseconds; the microbatch counts only if they are unequal, so does the slice."""
        if self.has_slices:
            return self.slices_of(microbatch).duration_ms(stage, kind, slice)
        every = self.per_microbatch
        if kind is OpKind.F:
            return self.forward_ms[stage] if every is None else every.forward_ms[stage][microbatch]
        backward = self.backward_ms[stage] if every is None else every.backward_ms[stage][microbatch]
        if kind is OpKind.B:
            return backward
        wgrad = self.wgrad_ms[stage] if every is None else every.wgrad_ms[stage][microbatch]
        return wgrad if kind is OpKind.W else backward + wgrad

    def link_ms(self, source: int, target: int, microbatch: int = 0) -> float:
        """Time of a message between two ranks in milliseconds; 0 within a rank."""
        if source == target:
            return 0.0
        return self.comm_ms if self.links is None else self.links.time_ms(source, target, microbatch)

    def busy_ms(self, source: int, target: int, microbatch: int = 0) -> float:
        """The part of a message's time in which no other message starts on its link in milliseconds."""
        return 0.0 if self.links is None else self.links.busy_ms(source, target, microbatch)

    def check_fits(self, placement: Placement, num_microbatches: int | None = None) -> None:
        """Raise PlanError unless the costs are for the stages of `placement`, its ranks, and this number of microbatches."""
        if self.num_stages != placement.num_stages:
            raise PlanError(
                f"the costs are for {self.num_stages} stages and the plan has {placement.num_stages} "
                f"({placement.num_ranks} ranks, {placement.name} placement); give one value per stage"
            )
        if self.links is not None and self.links.num_ranks != placement.num_ranks:
            raise PlanError(
                f"the matrix of links has {self.links.num_ranks} rows and the plan {placement.num_ranks} ranks; "
                "give one row and one column per rank"
            )
        own = self.num_microbatches
        if num_microbatches is not None and own is not None and own != num_microbatches:
            raise PlanError(f"the costs are for {own} microbatches and the plan has {num_microbatches}; give costs of each")

    def to_json(self) -> dict[str, Any]:
        """The `costs` object of the plan's JSON form."""
        body: dict[str, Any] = {name: list(getattr(self, name)) for name in COST_LISTS[:3]}
        body["comm_ms"] = self.comm_ms
        body |= {name: list(getattr(self, name)) for name in COST_LISTS[3:]}
        if self.per_microbatch is not None:
            body["microbatches"] = self.per_microbatch.to_json()
        if self.slices is not None:
            body["slices"] = self.slices.to_json()
        if self.unequal_slices:
            body["slices"] = [each.to_json() for each in self.unequal_slices]
        if self.links is not None:
            body["links"] = self.links.to_json()
        return body

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> CostModel:
        """Parse the output of `to_json`; unknown keys are ignored.

        Raises:
            PlanError: a key is missing or is not a list.
            ConfigError: a value is not a finite non-negative number.
        """
        if not isinstance(body, Mapping):
            raise PlanError(f"costs must be an object with {', '.join(COST_LISTS)} and comm_ms, got {quoted(body)}")
        for name in COST_LISTS:
            if not isinstance(body.get(name), list):
                raise PlanError(f"costs: {name!r} must be a list with one number per stage, got {quoted(body.get(name))}")
        lists = {name: tuple(body[name]) for name in COST_LISTS}
        every, links, slices = body.get("microbatches"), body.get("links"), body.get("slices")
        return CostModel(
            **lists,
            comm_ms=body.get("comm_ms", 0.0),
            per_microbatch=None if every is None else MicrobatchCosts.from_json(every),
            slices=None if slices is None or isinstance(slices, list) else SliceCosts.from_json(slices),
            unequal_slices=tuple(map(SliceCosts.from_json, slices)) if isinstance(slices, list) else (),
            links=None if links is None else Links.from_json(links),
        )


def _brief(times: tuple[float, ...]) -> str:
    return " ".join(f"{value:.1f}" for value in times) if len(times) <= 8 else f"{min(times):.1f}..{max(times):.1f}"


def _check_largest(names: Sequence[str], largest: float) -> None:
    if 0 < largest < _SMALLEST:
        raise ConfigError(
            f"costs: the largest value of {', '.join(names)} is {largest}; it must be at least {_SMALLEST:g}, or all are 0"
        )
