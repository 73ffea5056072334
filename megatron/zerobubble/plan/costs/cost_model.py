"""The cost model: times of F, B and W per stage and pass, P2P latency, and activation memory.

Times are in milliseconds. Memory is in units of one microbatch's activations on one rank of a uniform model, so a stage of a V
schedule, half of a rank's layers, has 0.5. `activation_after_backward`, in the same unit, is the memory kept from the end of a
stage's B until its W: the layers' inputs and output gradients, operands of the wgrad GEMMs (arXiv 2401.10241, section 2.3). With
activation recomputation it is more than F leaves, which is only the input that B recomputes from.

One table has the costs of every pass: of one microbatch where all are alike, of each where they are not, and of slices where
microbatches are cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_table import (
    COST_LISTS,
    KEY_LISTS,
    CostLists,
    CostTable,
    check_largest,
    check_number,
    numbers_of_slices,
)
from megatron.zerobubble.plan.costs.links import Links, LinkTime, unequal_links
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan

Activations = Mapping[str, tuple[Any, ...]]
"""Activation memory of one microbatch per stage: the last two lists of a `CostModel`, by the names of its fields. Of slices,
those of each, and their keys and gradients."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of every stage and of a message between ranks. Raises ConfigError on values below 0 or above 1e12.

    The largest time is 1e-9 ms or more, unless all are 0; the largest activation memory likewise.
    """

    table: CostTable
    """Times and memory of every stage and pass."""
    comm_ms: float = 0.0
    """Time of a message, that of a pass, added to every dependency that crosses ranks; with links the mean of neighbors."""
    latency_share: float = 0.0
    """Share of `comm_ms` that an empty message takes as well; the rest grows with its length. 0 where it was not measured."""
    links: Links | None = None
    """Links of every pair of ranks; None: `comm_ms` for all."""
    step: StepCosts | None = None
    """What surrounds the passes of an iteration; None: nothing."""
    all_to_all: tuple[float, float] = (0.0, 0.0)
    """Shares of the times of F and of B, 0 to 1, in which tokens travel to their experts and back. In a pair they are hidden
    beside the other op's computation, and else beside W; W has none."""
    wgrad_beside: float = 0.0
    """Share of a W, 0 to 1, that its rank can compute earlier, while an F or B outside of pairs has an all-to-all under way."""

    def __post_init__(self) -> None:
        check_number("comm_ms", self.comm_ms)
        check_number("latency_share", self.latency_share, most=1.0)
        for name, share in zip(("F", "B"), self.all_to_all, strict=True):
            check_number(f"all_to_all of {name}", share, most=1.0)
        check_number("wgrad_beside", self.wgrad_beside, most=1.0)
        for names in (COST_LISTS[:3], COST_LISTS[3:]):
            check_largest(names, max(max(self.lists[name]) for name in names))
        sizes, count = 1 if self.links is None else len(self.links.message_bytes), len(self.table.counts)
        if sizes > 1 and not self.table.is_alike and sizes != count:
            raise ConfigError(
                f"costs: {count} microbatches and message_bytes of {sizes}; give one size for all, or one per microbatch"
            )
        if self.step is not None and len(self.step.reduce_ms) != self.num_stages:
            raise ConfigError(f"costs: {self.num_stages} stages and step of {len(self.step.reduce_ms)}; give all times of each")

    @staticmethod
    def of(
        table: CostTable,
        *,
        comm_ms: float = 0.0,
        latency_share: float = 0.0,
        links: Links | None = None,
        **others: Any,
    ) -> CostModel:
        """Costs as plain as they can be: whole microbatches of equal costs are alike, and equal links are one latency."""
        if table.counts and not table.is_alike and not table.has_slices and table.is_uniform:
            table = replace(table.of(0), tokens=())
        if links is not None:
            comm_ms, latency_share, links = links.neighbors_ms, 0.0, None if links.is_uniform else links
        return CostModel(table=table, comm_ms=comm_ms, latency_share=latency_share, links=links, **others)

    def changed(self, **parts: Any) -> CostModel:
        """The costs with other values of some fields, as plain as they can be (`of`)."""
        return CostModel.of(**{each.name: getattr(self, each.name) for each in fields(self)} | parts)

    @staticmethod
    def of_lists(lists: Mapping[str, Sequence[float]], *, comm_ms: float = 0.0) -> CostModel:
        """Plain costs from the five lists per stage, by the names of their fields."""
        table = CostTable(**{name: tuple((value,) for value in lists[name]) for name in COST_LISTS})  # type: ignore[arg-type]
        return CostModel(table=table, comm_ms=comm_ms)

    def with_lists(self, **lists: tuple[float, ...]) -> CostModel:
        """Plain costs with other lists per stage."""
        return self.changed(table=CostModel.of_lists(self.lists | lists).table, links=None)

    def with_table(self, table: CostTable, *, message_length: float | None = None) -> CostModel:
        """The costs of other passes of the same microbatches. Nothing else changes the time of messages.

        Args:
            table: the costs of these passes.
            message_length: how many times as long a message is; None: it is as long as a pass, of which there are more or fewer.
        """
        own, new = self.table.passes_per_microbatch, table.passes_per_microbatch
        if message_length is not None:
            own, new = message_length, 1.0
        links = None if self.links is None else self.links.divided(new / own)
        latency_ms = self.comm_ms * self.latency_share
        comm_ms = latency_ms + self.comm_ms * (1 - self.latency_share) * own / new
        share = latency_ms / comm_ms if latency_ms else 0.0
        return self.changed(table=table, comm_ms=comm_ms, latency_share=share, links=links)

    @cached_property
    def means(self) -> CostLists[float]:
        """Per stage the mean over the microbatches, each the sum of its passes."""
        return self.table.means()

    @property
    def lists(self) -> dict[str, tuple[float, ...]]:
        """`means` by the names of the lists."""
        return self.means.lists

    @property
    def forward_ms(self) -> tuple[float, ...]:
        """Mean time of F of a microbatch, per stage."""
        return self.means.forward_ms

    @property
    def backward_ms(self) -> tuple[float, ...]:
        """Mean time of B, per stage."""
        return self.means.backward_ms

    @property
    def wgrad_ms(self) -> tuple[float, ...]:
        """Mean time of W, per stage."""
        return self.means.wgrad_ms

    @property
    def activation(self) -> tuple[float, ...]:
        """Mean activation memory until the end of B, per stage."""
        return self.means.activation

    @property
    def activation_after_backward(self) -> tuple[float, ...]:
        """Mean activation memory from then on until the end of W, per stage."""
        return self.means.activation_after_backward

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.table.num_stages

    @property
    def num_microbatches(self) -> int | None:
        """Number of microbatches that have costs of their own; None: all are alike, and any number has these costs."""
        if not self.table.is_alike:
            return len(self.table.counts)
        sizes = 1 if self.links is None else len(self.links.message_bytes)
        return sizes if sizes > 1 else None

    @property
    def num_slices(self) -> int:
        """Slices per microbatch, n, the most of any; 1: all are whole."""
        return self.table.num_slices

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """Slices of each of microbatches with costs of their own; empty: all are alike, or whole."""
        return () if self.table.is_alike or not self.table.has_slices else self.table.counts

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of every microbatch, if they are unequal and known; else empty."""
        return () if self.table.is_alike else self.table.tokens_of_microbatches

    @property
    def is_plain(self) -> bool:
        """Whether all microbatches are alike, and all links."""
        return self.table.is_alike and self.links is None

    @property
    def plain(self) -> CostModel:
        """The costs with every microbatch at the mean, whole where their slices are unequal, and every link at `comm_ms`."""
        if self.is_plain:
            return self
        if self.table.is_alike:
            return replace(self, links=None)
        return self.whole.with_lists()

    @property
    def mean_pass(self) -> CostModel:
        """The costs of a microbatch that costs what a pass does on average, keys and values included."""
        number = self.table.starts[-1]
        lists = {name: [math.fsum(row) / number for row in rows] for name, rows in self.table.with_keys.lists.items()}
        return CostModel.of_lists(lists, comm_ms=self.comm_ms)

    @property
    def whole(self) -> CostModel:
        """The costs of microbatches in one piece, each taking what its slices take together."""
        return self.with_table(self.table.whole) if self.table.has_slices else self

    def rows(self, name: str, width: int = 1) -> Sequence[Sequence[float]]:
        """One of the lists per stage and pass; of whole microbatches that are alike `width` times the same value."""
        rows: Sequence[Sequence[float]] = getattr(self.table, name)
        return rows if self.table.slices != 1 else [list(row) * width for row in rows]

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
        check_largest(COST_LISTS[:3], max(values[:3]))  # before the division, which may make it 0
        parts = [len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank]
        return CostModel.of_lists({name: [value / part for part in parts] for name, value in whole.items()}, comm_ms=comm_ms)

    @property
    def activations(self) -> Activations:
        """The activation memory of the stages alone, of microbatches that are alike."""
        if not self.table.has_slices:
            return {name: self.lists[name] for name in COST_LISTS[3:]}
        rows = {name: getattr(self.table, name) for name in COST_LISTS[3:]}
        return rows | {name: tuple(row[0] for row in getattr(self.table, name)) for name in KEY_LISTS}

    def with_activations(self, activations: Activations) -> CostModel:
        """The same times with the activation memory of other costs, for as many stages, of as many slices or of microbatches."""
        keys = {name: tuple((value,) for value in activations[name]) for name in KEY_LISTS if name in activations}
        rows = {name: tuple(activations[name]) for name in COST_LISTS[3:]}
        if not keys:
            rows = {name: tuple((value / self.num_slices,) * self.num_slices for value in row) for name, row in rows.items()}
        return replace(self, table=replace(self.table, **rows, **keys))  # type: ignore[arg-type]

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
        table = self.table.reserved
        return self if table == self.table else replace(self, table=table)

    def reordered(self, assignment: Sequence[int]) -> CostModel:
        """The same costs with microbatch i the one that was `assignment[i]`; empty: the same order. See `Plan.assignment`."""
        if not assignment or self.num_microbatches is None:
            return self
        if len(assignment) != self.num_microbatches:
            raise PlanError(f"the costs are for {self.num_microbatches} microbatches and the plan assigns {len(assignment)}")
        return replace(
            self,
            table=self.table if self.table.is_alike else self.table.chosen(assignment),
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
        step = None if self.step is None else self.step.merged(size)
        return replace(self, table=self.table.merged(size), step=step)

    def with_links(self, measured: Mapping[tuple[int, int], LinkTime], num_ranks: int) -> CostModel:
        """The costs with measured links, (sender, receiver) -> a message: a matrix, or where they are alike their mean."""
        shortest = min(*self.forward_ms, *self.backward_ms)
        links = unequal_links(measured, num_ranks, shortest_pass_ms=shortest)
        total, busy = (math.fsum(each[index] for each in measured.values()) for index in (0, 1))
        share = max(0.0, 1 - busy / total) if busy else 0.0
        return self.changed(comm_ms=total / max(1, len(measured)), latency_share=share, links=links)

    def of_plan(self, plan: Plan) -> CostModel:
        """The costs of a plan's own microbatches and slices: `reordered` by its assignment, and divided among its slices.

        Raises:
            PlanError: the costs are for another number of stages, ranks, microbatches or slices.
        """
        return self.of_slices(plan).reordered(plan.assignment)

    def of_slices(self, plan: Plan) -> CostModel:
        """The costs with those of every slice of a plan, in the order of the data: the same if they have them. See `of_plan`."""
        self.check_fits(plan.placement, plan.num_microbatches)
        if self.table.is_alike and not plan.slice_counts:
            return self.divided(plan.num_slices)
        data = map(plan.batch_index, range(plan.num_microbatches))
        counts = [count for _, count in sorted(zip(data, plan.passes.slices, strict=True))]
        given = list(self.table.counts) * (plan.num_microbatches if self.table.is_alike else 1)
        if given == counts:
            return self
        if not self.table.has_slices:
            return self.with_table(self.table.cut(counts))
        raise PlanError(
            f"the costs are for {quoted(given)} slices of the microbatches and the plan has {quoted(counts)}; give costs of "
            "each slice"
        )

    def divided(self, num_slices: int) -> CostModel:
        """The costs with those of every slice: the same costs if they have them, else each slice an even part of its microbatch.

        Of unequal microbatches the longest has `num_slices`, and the others as many as have about the same work.

        Raises:
            PlanError: they have another number of slices.
        """
        if num_slices == self.num_slices:
            return self
        if self.table.has_slices:
            raise PlanError(
                f"the costs are for {self.num_slices} slices per microbatch and the plan has {num_slices} slices; give costs of "
                "each slice"
            )
        if self.table.is_alike:
            return self.with_table(self.table.cut(num_slices))
        work = [math.fsum(column) for column in zip(*(row for name in COST_LISTS[:3] for row in self.rows(name)), strict=True)]
        return self.with_table(self.table.cut(numbers_of_slices(work, num_slices)))

    def duration_ms(self, stage: int, kind: OpKind, microbatch: int = 0, slice: int = 0) -> float:
        """Time of one op in milliseconds; the microbatch counts only if they are unequal."""
        return self.table.duration_ms(stage, kind, microbatch, slice)

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
        if self.step is not None:
            self.step.check_fits(placement)
        own = self.num_microbatches
        if num_microbatches is not None and own is not None and own != num_microbatches:
            raise PlanError(f"the costs are for {own} microbatches and the plan has {num_microbatches}; give costs of each")

    def to_json(self) -> dict[str, Any]:
        """The `costs` object of the plan's JSON form."""
        body: dict[str, Any] = {name: list(self.lists[name]) for name in COST_LISTS[:3]}
        body["comm_ms"] = self.comm_ms
        if self.latency_share:
            body["latency_share"] = self.latency_share
        body |= {name: list(self.lists[name]) for name in COST_LISTS[3:]} | self.table.to_json()
        if self.links is not None:
            body["links"] = self.links.to_json()
        if self.step is not None:
            body["step"] = self.step.to_json()
        if any(self.all_to_all):
            body["all_to_all"] = list(self.all_to_all)
        if self.wgrad_beside:
            body["wgrad_beside"] = self.wgrad_beside
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
        table, links, comm_ms = CostTable.from_json(body), body.get("links"), body.get("comm_ms", 0.0)
        if table is None:
            table = CostModel.of_lists({name: body[name] for name in COST_LISTS}).table
        step = None if body.get("step") is None else StepCosts.from_json(body["step"])
        shares = body.get("all_to_all", [0.0, 0.0])
        if not isinstance(shares, list) or len(shares) != 2:
            raise PlanError(f"costs: 'all_to_all' must be a list of two shares, of F and of B, got {quoted(shares)}")
        return CostModel.of(
            table,
            comm_ms=comm_ms,
            latency_share=body.get("latency_share", 0.0),
            links=None if links is None else Links.from_json(links),
            step=step,
            all_to_all=(shares[0], shares[1]),
            wgrad_beside=body.get("wgrad_beside", 0.0),
        )


def _brief(times: tuple[float, ...]) -> str:
    return " ".join(f"{value:.1f}" for value in times) if len(times) <= 8 else f"{min(times):.1f}..{max(times):.1f}"
