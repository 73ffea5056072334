"""One plan per iteration for microbatches as they are, and the data in the order in which that plan runs it.

    lengths of all replicas -> costs -> order of ops and assignment -> Program
    items of the data iterators --------------------- assignment -----> iterators in the plan's order
    results of the loss function <------------------- assignment ------ back in the order in which the data came

Every rank plans for itself, for the same lengths and costs, and finds the same plan: the search counts its work in op
evaluations, not seconds. Only the order within a global batch changes, and no data is dropped or moved to another batch.

Data-parallel replicas run one order of ops, because their collectives follow from it, but each has an assignment of its own:
slot i runs the k-th longest microbatch of every replica, and the plan counts the longest of those.

Where microbatches are cut, the longest has all slices and the others as many as have about the same work, by operations: what is
measured changes the order of ops and never what they compute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.flags.loop_options import TokensOf
from megatron.zerobubble.mcore.microbatches.length_exchange import (
    LengthExchange,
    Lengths,
    LengthsOfReplicas,
    lengths_of,
)
from megatron.zerobubble.mcore.microbatches.programs import Programs
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.plan.communication import Program, place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel, Piece, Work, slices_of_sequence
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.transforms import recut

__all__ = ["Arranged", "UnequalMicrobatches", "UnequalOptions", "operations"]

PlaceTransfers = Callable[[Plan, CostModel], Program]
"""(plan, costs of its microbatches in the order of the data) -> the plan with its transfers."""


class _Slots(NamedTuple):
    """The microbatches of an iteration as slots of one order of ops, each of which runs one of every replica."""

    orders: tuple[tuple[int, ...], ...]
    """Per replica and slot, the number of the microbatch in the order in which its data comes."""
    lengths: tuple[Lengths, ...]
    """Per slot, the most tokens and the most squared lengths of any replica: they wait for each other."""
    slices: tuple[int, ...]
    """Per slot, into how many its microbatches are cut."""


@dataclass(frozen=True, kw_only=True)
class UnequalOptions:
    """How the lengths of microbatches are found, and what they cost."""

    tokens_of: TokensOf
    """Length of an item of the data iterators."""
    usual_tokens: int | None
    """Tokens of a row of the usual length, to which memory limits and the costs of the schedule refer. None: the mean of the
    microbatches of the first call, for a loop that has no such length."""
    reorders: bool = True
    """Whether microbatches may run in another order than that in which they come."""
    objective: Objective = Objective.SPAN
    """What the plan of an iteration minimizes."""


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """The microbatches of one call of the schedule in the order in which its program runs them."""

    program: Program
    """The plan with its transfers."""
    iterators: Sequence[Any]
    """Per chunk its items in the plan's order; None for a chunk that reads no data."""
    order: tuple[int, ...]
    """For each microbatch of the plan, its number in the order in which the data came."""
    lengths: tuple[Lengths, ...] = ()
    """For each microbatch of the plan, its lengths on this replica; empty: all have the sequence length of the call."""

    def restored(self, results: Sequence[Any]) -> list[Any]:
        """Results of the microbatches, back in the order in which the data came. Without results: the same."""
        if len(results) != len(self.order):
            return list(results)
        restored = [None] * len(self.order)
        for place, result in zip(self.order, results, strict=True):
            restored[place] = result
        return restored


class UnequalMicrobatches:
    """Arranges the microbatches of every iteration of one rank. Every rank of the world must construct it at the same point.

    Args:
        spec: the schedule.
        options: how lengths are found.
        programs: the schedule's.
        plan: returns the schedule's plan for a number of equal microbatches.
        place: places the transfers of a training plan.
        slicing: the operations of a sequence, and how it is cut where the schedule has slices.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        options: UnequalOptions,
        programs: Programs,
        *,
        plan: Callable[[int], Plan],
        place: PlaceTransfers,
        slicing: SliceOptions | None = None,
    ) -> None:
        self._spec, self._options, self._programs, self._plan, self._place = spec, options, programs, plan, place
        self._slicing = slicing or SliceOptions()
        self._comm_ms, self._memory_limit = 0.0, spec.memory_limit
        self._links: Links | None = None
        self.model: LengthModel
        """Costs by length, from the first call on; replaced by `learn`."""
        self._usual: Lengths | None = None
        if options.usual_tokens is not None:
            self._take_usual(options.usual_tokens, float(options.usual_tokens) ** 2)
        self.exchange = LengthExchange()
        """Its process group; without a reference to the model."""
        self._replica = parallel_state.get_data_parallel_rank()
        self._planners: dict[int, MicrobatchPlanner] = {}
        """By number of microbatches."""

    def _see(self, replicas: LengthsOfReplicas) -> None:
        """Take the means of the first lengths, which all ranks know, where no length is usual."""
        if self._usual is None:
            self._take_usual(*(statistics.fmean(each[index] for own in replicas for each in own) for index in (0, 1)))

    def _take_usual(self, tokens: float, squares: float) -> None:
        """Let a microbatch of these lengths take F=B=W, until lengths and times are measured."""
        self._usual = Lengths(round(tokens), squares)
        share = self._slicing.rule.work.attention_share(max(1, round(squares / tokens)))
        costs = CostModel.uniform(self._spec.placement)
        self.model = LengthModel.of(costs, tokens=tokens, squares=squares, attention_share=share)

    @property
    def usual_tokens(self) -> int:
        """Tokens of a row of the usual length. Known after the first call."""
        assert self._usual is not None
        return self._usual.tokens

    def learn(self, model: LengthModel, *, comm_ms: float, links: Links | None, memory_limit: float | None) -> None:
        """From the next iteration on, plan with these costs. All ranks must call it at the same point, with the same costs.

        Args:
            model: costs by length.
            comm_ms: P2P latency of a message.
            links: of unequal speed; None: all have `comm_ms`.
            memory_limit: most activation memory of a rank, where 1.0 is p microbatches of which the model's stages of a rank hold
                1 each; None: the schedule's own.
        """
        self.model, self._comm_ms, self._links, self._memory_limit = model, comm_ms, links, memory_limit
        self.forget()

    def forget(self) -> None:
        """Plan anew: the schedule has other plans, or costs have changed."""
        self._planners.clear()
        self._programs.clear()

    def planned(self, replicas: LengthsOfReplicas) -> Plan:
        """The plan for these lengths, which an iteration with them runs. All ranks must call it at the same point."""
        return self._program(replicas).plan

    def arrange(
        self, iterators: Sequence[Any], num_microbatches: int, *, equal: Callable[[], Program], forward_only: bool
    ) -> Arranged:
        """Read the microbatches of one call of the schedule and find its program. All ranks of the world must call it.

        Args:
            iterators: per chunk an iterator over the data as it comes, or None.
            num_microbatches: that the call runs.
            equal: returns the program for equal microbatches, which also evaluation runs.
            forward_only: no gradients follow: the order of the data is kept, and nothing is planned.

        Raises:
            ConfigError: lengths that cannot be, or that differ between chunks or ranks.
            DataError: an iterator has fewer microbatches.
            ExecutionError: another rank could not read its data.
        """
        try:
            items = [None if each is None else _read(each, num_microbatches) for each in iterators]
            own = self._own_lengths(items)
        except Exception:
            self.exchange.fail(num_microbatches)  # or the other ranks would wait for this one
            raise
        replicas = self.exchange(own, num_microbatches)
        self._see(replicas)
        if self._spec.num_slices > 1:
            _check_whole(replicas)
        came = self._slots(replicas)
        order = came.orders[self._replica]
        if not forward_only and self._must_plan(replicas, came):
            program, slots = self._program(replicas), self._slots(replicas, matched=True)
            order = tuple(slots.orders[self._replica][program.plan.batch_index(i)] for i in range(num_microbatches))
        elif forward_only and self._spec.num_slices > 1:
            program = self._programs.of(
                replicas, lambda: place_communication(recut(equal().plan, came.slices)), forward_only=True
            )
        else:
            program = equal()
        return Arranged(
            program=program,
            iterators=[None if each is None else iter([each[place] for place in order]) for each in items],
            order=order,
            lengths=tuple(replicas[self._replica][place] for place in order),
        )

    def _own_lengths(self, items: Sequence[list[Any] | None]) -> list[Lengths] | None:
        first: list[Lengths] | None = None
        for each in items:
            if each is None:
                continue
            own = [lengths_of(self._options.tokens_of, item, number) for number, item in enumerate(each)]
            first = first or own
            if own != first:
                number = next(index for index, (a, b) in enumerate(zip(first, own, strict=True)) if a != b)
                what = "tokens" if first[number].tokens != own[number].tokens else "squares"
                raise ConfigError(
                    f"the data iterators of this rank's chunks read different data: microbatch {number} has "
                    f"{getattr(first[number], what):g} {'squared lengths' if what == 'squares' else what} on one and "
                    f"{getattr(own[number], what):g} on another; they must be over the same samples"
                )
        return first

    def _must_plan(self, replicas: LengthsOfReplicas, came: _Slots) -> bool:
        """Whether microbatches differ, or all are too short for as many slices as the schedule has."""
        is_equal = len(set(came.lengths)) == 1 and all(len(set(own)) == 1 for own in replicas)
        return not is_equal or came.slices[0] < self._spec.num_slices

    def _slots(self, replicas: LengthsOfReplicas, *, matched: bool = False) -> _Slots:
        """The microbatches as they come, or with those of other replicas matched by length, from the longest to the shortest.

        They are not matched if there is no other replica, or nothing moves.
        """
        orders: list[Sequence[int]] = [range(len(own)) for own in replicas]
        if matched and len(replicas) > 1 and self._options.reorders:
            orders = list(map(_longest_first, replicas))
        slots = [[own[i] for own, i in zip(replicas, each, strict=True)] for each in zip(*orders, strict=True)]
        lengths = tuple(Lengths(max(each.tokens for each in slot), max(each.squares for each in slot)) for slot in slots)
        slices = (1,) * len(slots)
        if self._spec.num_slices > 1:
            fewest = [min(each.tokens for each in slot) for slot in slots]
            slices = self._slicing.rule.counts([each.tokens for each in lengths], self._spec.num_slices, fewest)
        return _Slots(tuple(map(tuple, orders)), lengths, slices)

    def _program(self, replicas: LengthsOfReplicas) -> Program:
        """The program for these lengths, made unless it is known. All ranks must call it at the same point.

        The assignment of its plan is of matched slots.
        """
        self._see(replicas)
        return self._programs.of(replicas, lambda: self._made(self._slots(replicas, matched=True)))

    def _made(self, slots: _Slots) -> Program:
        base, is_cut = self._plan(len(slots.slices)), self._spec.num_slices > 1
        pieces: list[tuple[Piece, ...]] = [(each,) for each in slots.lengths]
        if is_cut:
            parts = self._slicing.parts_of([each.tokens for each in slots.lengths], slots.slices)
            pieces = [slices_of_sequence([part.length for part in own]) for own in parts]
        links = None if is_cut else self._links  # searches for slices take all links for equal
        costs = CostModel.of(self.model.table(pieces), comm_ms=self._comm_ms, links=links)
        plan = recut(base, slots.slices) if is_cut else base
        if self._options.reorders:
            if len(pieces) not in self._planners:
                self._planners[len(pieces)] = self._planner(base)
            plan = self._planners[len(pieces)].plan(costs)
        program = self._place(plan, costs)
        self.exchange.check_same(program)
        return program

    def _planner(self, base: Plan) -> MicrobatchPlanner:
        options = SearchOptions(budget=ITERATION_BUDGET, objective=self._options.objective, memory_limit=self._memory_limit)
        return MicrobatchPlanner(self._spec, base.num_microbatches, options=options, base=base)


def _longest_first(lengths: Sequence[Lengths]) -> list[int]:
    """The microbatches from the longest to the shortest; equal ones stay in the order in which they come."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index].tokens, -lengths[index].squares))


def _check_whole(replicas: LengthsOfReplicas) -> None:
    """Raise ConfigError for rows of several sequences."""
    for own in replicas:
        for number, (tokens, squares) in enumerate(own):
            if squares != float(tokens) ** 2:
                raise ConfigError(
                    f"slices do not go with packed sequences, whose attention begins anew inside of a slice, and microbatch "
                    f"{number} has {tokens} tokens and {squares:.15g} squared lengths: leave one of the two out"
                )


def _read(iterator: Any, num_microbatches: int) -> list[Any]:
    items: list[Any] = []
    try:
        while len(items) < num_microbatches:
            items.append(next(iterator))
    except StopIteration:
        raise DataError(
            f"the data iterator ended after {len(items)} of the {num_microbatches} microbatches of an iteration; give one that "
            "has them all, for example one that begins again at its end"
        ) from None
    return items


def operations(config: Any) -> Work:
    """About the operations of a layer's forward per token, and with causal attention per pair of tokens.

    Args:
        config: TransformerConfig of the model.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads * config.kv_channels
    groups = (config.num_query_groups or config.num_attention_heads) * config.kv_channels
    matrices = 3 if config.gated_linear_unit else 2
    experts = config.moe_router_topk if config.num_moe_experts else 1
    size = (config.moe_ffn_hidden_size if config.num_moe_experts else None) or config.ffn_hidden_size
    linear = hidden * (2 * heads + 2 * groups) + hidden * size * matrices * experts  # half of the operations per token
    return Work(per_token=linear, per_square=heads)  # likewise: scores and values of half of the keys
