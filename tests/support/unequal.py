"""The small GPT with microbatches of unequal length. Everything here runs inside the ranks of a `RankPool`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalOptions
from megatron.zerobubble.mcore.replanner import Replanner, Window
from megatron.zerobubble.plan.search.search_options import SearchOptions
from tests.support.comparisons import error_of
from tests.support.gpt import MICRO_BATCH, SEQUENCE, VOCABULARY, Case, Outcome, Tensors, Trainer
from tests.support.moe import MoeCase, MoeTrainer
from tests.support.plans import reordered


@dataclass(frozen=True)
class UnequalCase(Case):
    """A comparison whose microbatches have lengths of their own in every step."""

    reorders: bool = True
    """Whether the plan may change the order of the microbatches."""
    multiple: int = 1
    """Lengths are multiples of this."""
    num_steps: int = 3

    @property
    def unpipelined(self) -> Case:
        return replace(super().unpipelined, reorders=True)  # type: ignore[call-arg]

    def lengths(self, step: int, replica: int) -> list[int]:
        """Tokens of each microbatch of a step. Every third step they are equal."""
        generator = random.Random(f"{step} {replica if self.different_data else 0}")
        if step % 3 == 2:
            return [self.multiple * 2] * self.num_microbatches
        most = SEQUENCE // self.multiple
        return [self.multiple * generator.randint(1, most) for _ in range(self.num_microbatches)]


class UnequalTrainer(Trainer, trains=UnequalCase):
    """Trains on microbatches of unequal length."""

    case: UnequalCase

    def __init__(self, case: UnequalCase, initial: Tensors | None = None) -> None:
        super().__init__(case, initial)
        self.orders: list[tuple[int, ...]] = []
        """Per call, the microbatch that each microbatch of the plan was."""
        self.slices: list[tuple[int, ...]] = []
        """Per call, the number of slices of each microbatch of the plan."""
        if self.schedule.unequal is not None:
            arrange = self.schedule.unequal.arrange

            def recorded(*args: Any, **options: Any) -> Any:
                arranged = arrange(*args, **options)
                self.orders.append(arranged.order)
                self.slices.append(arranged.program.plan.passes.slices)
                return arranged

            self.schedule.unequal.arrange = recorded  # type: ignore[method-assign]

    def _schedule_options(self) -> dict[str, Any]:
        if self.case.spec.is_stock:
            return {}
        options = UnequalOptions(
            tokens_of=lambda item: int(item[0].size(1)) * self.case.context_parallel,
            usual_tokens=SEQUENCE,
            reorders=self.case.reorders,
        )
        return {"unequal": options}

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, labels) of each microbatch, at its own length."""
        replica = parallel_state.get_data_parallel_rank() % 2 if self.case.different_data else 0
        for microbatch, length in enumerate(self.case.lengths(step, replica)):
            generator = torch.Generator().manual_seed(100_000 * replica + 1000 * step + microbatch)
            text = torch.randint(0, VOCABULARY, (MICRO_BATCH, length + 1), generator=generator).to(self.device)
            yield self._part(text[:, :-1]), self._part(text[:, 1:])


@dataclass(frozen=True)
class UnequalMoeCase(UnequalCase, MoeCase):
    """The same with experts."""


class UnequalMoeTrainer(UnequalTrainer, MoeTrainer, trains=UnequalMoeCase):
    """The same with experts."""

    case: UnequalMoeCase


def train_unequal(rank: int, case: UnequalCase) -> tuple[Outcome, list[tuple[int, ...]]]:
    """The outcome of a rank, and the order of the microbatches in every call."""
    trainer = case.trainer()
    outcome = trainer.train()
    orders = trainer.orders
    trainer.close()
    return outcome, orders


def evaluate_unequal(rank: int, case: UnequalCase) -> tuple[list[float], list[float], tuple[int, ...]]:
    """(losses of an evaluation, losses of training on the same data, order of the evaluation)."""
    trainer = case.trainer()
    with torch.no_grad():
        evaluated = trainer.forward_backward(0, forward_only=True)
    trained = trainer.forward_backward(0)
    order = trainer.orders[0]
    trainer.close()
    return evaluated, trained, order


def record_exchanges(rank: int, case: UnequalCase) -> list[str]:
    """In each step, what is all-gathered and the passes of this rank, in the order in which they began."""
    trainer = case.trainer()
    all_gather, forward_step = dist.all_gather_object, trainer.forward_step
    begun: list[str] = []

    def exchange(objects: Any, own: Any, **options: Any) -> Any:
        begun.append("plans" if isinstance(own, str) else "lengths")
        return all_gather(objects, own, **options)

    def forward(*given: Any) -> Any:
        begun.append("F")
        return forward_step(*given)

    trainer.forward_step = forward  # type: ignore[method-assign]
    steps = []
    with mock.patch.object(dist, "all_gather_object", exchange):
        for step in range(case.num_steps):
            trainer.forward_backward(step)
            steps.append(" ".join(begun))
            begun.clear()
    trainer.close()
    return steps


class Replanned(NamedTuple):
    """What a rank has after re-planning."""

    orders: str
    model: str
    has_learned: bool
    is_kept: bool
    grows: bool
    num_recorded: int


def replan_unequal(rank: int, case: UnequalCase) -> Replanned:
    """Train with a window of two profiled iterations."""
    trainer = case.trainer()
    schedule = trainer.schedule
    assert schedule.unequal is not None
    before = schedule.unequal.model
    replanner = Replanner(schedule, Window(start=1, end=2), SearchOptions(budget=1e4), num_microbatches=case.num_microbatches)
    for iteration in range(1, case.num_steps + 1):
        replanner.before(iteration, case.num_microbatches)
        trainer.forward_backward(iteration)
        if replanner.is_due(iteration):
            replanner.after(iteration, case.num_microbatches)
    model = schedule.unequal.model
    short, long = (model.costs([tokens]) for tokens in (1, SEQUENCE))
    timelines = schedule.timelines()
    found = Replanned(
        orders=str(trainer.orders),
        model=str(model),
        has_learned=model != before,
        is_kept=replanner.by_length is model,
        grows=all(short.activation[stage] < long.activation[stage] for stage in range(case.spec.placement.num_stages)),
        num_recorded=sum(len(row) for row in timelines[-1].rows) if timelines else 0,
    )
    trainer.close()
    return found


def read_different_data(rank: int, case: UnequalCase) -> None:
    """The last rank's iterator is over other samples."""
    trainer = case.trainer()
    trainer.forward_backward(rank // 3)


def give_wrong_lengths(rank: int, case: UnequalCase) -> None:
    """Count one token too many in every microbatch."""
    trainer = case.trainer()
    assert trainer.schedule.unequal is not None
    trainer.schedule.unequal._options = replace(
        trainer.schedule.unequal._options, tokens_of=lambda item: int(item[0].size(1)) + 1
    )
    trainer.forward_backward(0)


def plan_differently(rank: int, case: UnequalCase) -> str:
    """The last rank has another order of ops. The error of this rank."""
    trainer = case.trainer()
    unequal = trainer.schedule.unequal
    assert unequal is not None
    if rank == 3:
        place = unequal._place
        unequal._place = lambda plan, costs: place(reordered(plan), costs)
    return error_of(trainer)


def read_too_little(rank: int, case: UnequalCase) -> str:
    """Only the first rank reads data, and its iterators end early. The error of this rank."""
    trainer = case.trainer()
    batches = trainer.batches
    trainer.batches = lambda step: islice(batches(step), 2) if rank == 0 else None  # type: ignore[method-assign,assignment,return-value]
    return error_of(trainer)


def read_different_data_per_chunk(rank: int, case: UnequalCase) -> str:
    """Each chunk of a rank reads other data. The error of this rank."""
    trainer = case.trainer()
    batches, steps = trainer.batches, count()
    trainer.batches = lambda step: batches(next(steps))  # type: ignore[method-assign]
    return error_of(trainer)
