"""Placement of sends and receives: Plan -> Program, a pure function, linear in the number of ops.

A *link* is a directed pair of ranks, and every link is a first-in first-out queue with a communicator of its own. For each rank
and op the program states which receives to post before it, which message the op takes, which message it sends, and which earlier
sends are proven to have arrived by then. Four rules make the result free of deadlock on any backend, buffered or not:

1. The order of a link is the order in which its sender produces. The receiver posts in that order, also to consume in another.
2. A receive is posted no later than right before the op that takes it, and so are all receives before it on its link.
3. A send never blocks its rank: nothing waits for a send to finish before the iteration's end, except where rule 4 has shown
   that it has finished.
4. A send is *retired* (its buffer reused) when a message is taken that the receiver can only have sent after taking ours.

By 2 and 3 an op waits only for the op that produces its message, and that op waits only for its own predecessors: the
waits are the plan's own dependencies, and a valid plan has no cycle in them.

The two ops of a pair share a step: both messages are taken before it, and both are sent after it.

Where exactly a receive is posted decides whether this still holds on a GPU whose streams share hardware queues, or that waits for
all of its kernels inside an op. Receives are posted on the plan's timeline: all ops of all ranks are ordered by the time at which
they end, and a receive comes before the first op of its rank that ends after the op that sends. Then the sequence of that one
order, with every transfer right behind the op that sends, is possible for every rank, even if each thing must be over before the
next begins (`deadlock`; docs/adr/0003 has the proof). It is also when the message arrives: the transfer overlaps with the op that
runs then, and the kernel of a receive does not wait longer than that op.

With post-validation, a *fence* is the step of each rank before which it may have to discard the iteration and restart it
(`speculative_forwards`). No receive for a later step is posted before the fence, so that the messages sent but not taken by
then are known: `Program.unread`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.dependencies import execution_order
from megatron.zerobubble.plan.ir import Launch, Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.simulate import durations, run_in_order

_BACKWARD = (OpKind.B, OpKind.BW)


class Payload(enum.Enum):
    """The kind of tensor in a message."""

    ACTIVATION = "activation"
    """A stage's output, sent to the next stage."""
    GRADIENT = "gradient"
    """The gradient of a stage's input, sent to the previous stage."""


class Message(NamedTuple):
    """One tensor sent between two ranks, identified by the stage that takes it."""

    payload: Payload
    stage: int
    microbatch: int
    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    slice: int = 0

    @property
    def where(self) -> str:
        """What it is for, in words: payload, stage, microbatch and slice."""
        part = f", slice {self.slice}" if self.slice else ""
        return f"the {self.payload.value} for stage {self.stage}, microbatch {self.microbatch}{part}"


@dataclass(frozen=True, slots=True)
class Step:
    """One op, or a pair, with the transfers around it, in this order: post, take, retire, compute, send."""

    ops: Launch
    post: tuple[Message, ...] = ()
    """Receives to post before the step, for it or a later one."""
    take: tuple[Message, ...] = ()
    """The messages the ops consume, in their order: none for the first stage's F, the last stage's B, every W, and between
    stages of one rank."""
    retire: tuple[Message, ...] = ()
    """Own sends that are proven complete once `take` has arrived."""
    send: tuple[Message, ...] = ()
    """The messages the ops produce, in their order."""
    last_of_kind: tuple[bool, ...] = ()
    """Per op whether it is the last one of its kind on its stage in the iteration."""


@dataclass(frozen=True)
class Program:
    """Each rank's ops with their sends and receives in one iteration."""

    plan: Plan
    steps: tuple[tuple[Step, ...], ...]
    fence: tuple[int, ...]
    """Per rank the number of steps before its fence; 0 without a fence."""

    def unread(self, rank: int) -> tuple[Message, ...]:
        """Messages sent to `rank` before their sender's fence and not taken before its own; per link in the link's order."""
        taken = {message for step in self.steps[rank][: self.fence[rank]] for message in step.take}
        before = [step for steps, fence in zip(self.steps, self.fence, strict=True) for step in steps[:fence]]
        sent = [message for step in before for message in step.send]
        return tuple(message for message in sent if message.target == rank and message not in taken)

    def one_by_one(self) -> Program:
        """The program with a step for every op, in which a pair's first step takes the messages of both. The order on every link
        and what is waited for are the same, so that ranks which run it and ranks which run pairs can be in one pipeline."""
        if not self.plan.pairs:
            return self
        rows = tuple(tuple(part for step in row for part in _parts(step)) for row in self.steps)
        return replace(self, plan=replace(self.plan, pairs=frozenset()), steps=rows)


def speculative_forwards(plan: Plan) -> tuple[int, ...]:
    """Per rank, the number of leading forwards of its first stage that may run before the last optimizer step is validated.

    The global gradient statistics leave the last rank when it steps, one forward later than the rank before it, and reach rank r
    about when r has run p - 1 - r forwards; one more forward covers their latency. The numbers never rise from rank to rank, so
    that every rank has produced the messages that the next one takes.
    """
    placement = plan.placement
    counts: list[int] = []
    for rank, row in enumerate(plan.launches):
        wanted = 0 if rank == plan.num_ranks - 1 else min([plan.num_ranks - rank, *counts[-1:]])
        first = placement.rank_to_stages[rank][0]
        wrong = (i for i, ops in enumerate(row[:wanted]) if ops != (plan.passes.nth(first, OpKind.F, i),))
        counts.append(next(wrong, len(row[:wanted])))
    return tuple(counts)


def place_communication(
    plan: Plan, *, costs: CostModel | None = None, fence: Sequence[int] = (), lookahead: int | None = None
) -> Program:
    """Place sends and receives around the ops and pairs of a valid plan.

    Args:
        plan: a plan that `validate` accepts.
        costs: for the timeline on which receives are posted, the same on all ranks; None: F, B and W take the same time.
        fence: `speculative_forwards(plan)` with post-validation, otherwise empty.
        lookahead: for comparison, instead of the timeline: the number of steps before its use at which a receive is posted.

    Raises:
        PlanError: the costs are for another number of stages, ranks or microbatches.
    """
    fences = tuple(fence) or (0,) * plan.num_ranks
    takes = [[_messages(_taken_by, launch, plan) for launch in row] for row in plan.launches]
    sends = [[_messages(_sent_by, launch, plan) for launch in row] for row in plan.launches]
    links = _Links(takes, sends)
    if lookahead is None:
        wanted = _on_timeline(plan, sends, CostModel.uniform(plan.placement) if costs is None else costs, fences)
    else:
        queues = links.queues.values()
        wanted = {message: links.taken_at[message] - lookahead for queue in queues for message in queue}
    posts = _place_posts(plan, links, wanted, fences)
    retires = _place_retires(plan, links)
    steps = []
    for rank, row in enumerate(plan.launches):
        last = {(op.stage, op.kind): op for op in plan.ops[rank]}
        are_last = [tuple(last[op.stage, op.kind] is op for op in launch) for launch in row]
        moves = zip(map(tuple, posts[rank]), takes[rank], map(tuple, retires[rank]), sends[rank], strict=True)
        steps.append(tuple(Step(ops, *move, ends) for ops, move, ends in zip(row, moves, are_last, strict=True)))
    return Program(plan, tuple(steps), fences)


def links_of(placement: Placement) -> tuple[tuple[int, int], ...]:
    """The directed pairs of ranks between which a placement moves activations or gradients, sorted."""
    return tuple(sorted(longest_messages(placement, [0] * placement.num_stages)))


def num_messages(plan: Plan) -> int:
    """Messages per iteration over all links: an activation and its gradient per slice and pair of stages on two ranks."""
    return 2 * len(plan.passes) * num_crossings(plan.placement)


def num_crossings(placement: Placement) -> int:
    """Pairs of consecutive stages that are on two ranks."""
    return sum(here != there for here, there in itertools.pairwise(placement.stage_to_rank))


def longest_messages(placement: Placement, output_lengths: Sequence[int]) -> dict[tuple[int, int], int]:
    """Each directed pair of ranks that exchanges messages -> the longest of them.

    Args:
        placement: stage -> rank.
        output_lengths: of each stage's output, and so of its gradient.
    """
    longest: dict[tuple[int, int], int] = {}
    for length, here, there in zip(output_lengths, placement.stage_to_rank, placement.stage_to_rank[1:], strict=False):
        if here != there:
            for link in ((here, there), (there, here)):
                longest[link] = max(longest.get(link, length), length)
    return longest


def color_links(links: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Divide the links into groups by greedy coloring, such that no rank has two links in one group.

    With one communicator per group, a communicator that serializes its operations never makes one link wait for another, and
    the number of communicators does not grow with the number of ranks (4 for a chain of any length).
    """
    groups: list[list[tuple[int, int]]] = []
    for link in links:
        for group in groups:
            if not any(rank in other for other in group for rank in link):
                group.append(link)
                break
        else:
            groups.append([link])
    return tuple(tuple(group) for group in groups)


def _taken_by(op: Op, plan: Plan) -> Message | None:
    ranks = plan.placement.stage_to_rank
    here = ranks[op.stage]
    if op.kind is OpKind.F and op.stage > 0 and ranks[op.stage - 1] != here:
        return Message(Payload.ACTIVATION, op.stage, op.microbatch, ranks[op.stage - 1], here, op.slice)
    if op.kind in _BACKWARD and op.stage + 1 < plan.num_stages and ranks[op.stage + 1] != here:
        return Message(Payload.GRADIENT, op.stage, op.microbatch, ranks[op.stage + 1], here, op.slice)
    return None


def _sent_by(op: Op, plan: Plan) -> Message | None:
    ranks = plan.placement.stage_to_rank
    here = ranks[op.stage]
    if op.kind is OpKind.F and op.stage + 1 < plan.num_stages and ranks[op.stage + 1] != here:
        return Message(Payload.ACTIVATION, op.stage + 1, op.microbatch, here, ranks[op.stage + 1], op.slice)
    if op.kind in _BACKWARD and op.stage > 0 and ranks[op.stage - 1] != here:
        return Message(Payload.GRADIENT, op.stage - 1, op.microbatch, here, ranks[op.stage - 1], op.slice)
    return None


def _messages(of_op: Callable[[Op, Plan], Message | None], launch: Launch, plan: Plan) -> tuple[Message, ...]:
    return tuple(message for op in launch if (message := of_op(op, plan)) is not None)


def _parts(step: Step) -> tuple[Step, ...]:
    """A step with a pair as two. Both takes stay before the first send: it may prove to the peer that they are over (rule 4)."""
    if len(step.ops) == 1:
        return (step,)
    send = {payload: tuple(each for each in step.send if each.payload is payload) for payload in Payload}
    first, second = ((op,) for op in step.ops)
    return (
        replace(step, ops=first, send=send[Payload.ACTIVATION], last_of_kind=step.last_of_kind[:1]),
        Step(second, send=send[Payload.GRADIENT], last_of_kind=step.last_of_kind[1:]),
    )


class _Links:
    """Every link's messages in order, with the steps that send and take each message."""

    def __init__(self, takes: list[list[tuple[Message, ...]]], sends: list[list[tuple[Message, ...]]]) -> None:
        self.taken_at = {message: step for row in takes for step, messages in enumerate(row) for message in messages}
        self.sent_at = {message: step for row in sends for step, messages in enumerate(row) for message in messages}
        self.queues: dict[tuple[int, int], list[Message]] = {}
        for message in self.sent_at:
            self.queues.setdefault((message.source, message.target), []).append(message)


def _on_timeline(
    plan: Plan, sends: list[list[tuple[Message, ...]]], costs: CostModel, fence: Sequence[int]
) -> dict[Message, int]:
    """All messages in the order in which they are sent, each with the number of steps of its receiver that have ended by then.

    Ops that end at the same time are in an order in which they can run, also if some take no time. Ops before a fence come first
    on all ranks: none of them needs one from behind a fence, and no receive from there is posted before they have ended.
    """
    costs = costs.of_plan(plan)
    rows = run_in_order(plan, durations(plan, costs), costs)
    ends = [[rows[rank][first].end_ms for first in _first_ops(row)] for rank, row in enumerate(plan.launches)]
    ended, sent = [0] * plan.num_ranks, {}
    for rank, step in sorted(execution_order(plan), key=lambda at: (at[1] >= fence[at[0]], ends[at[0]][at[1]])):
        ended[rank] += 1
        for message in sends[rank][step]:
            sent[message] = ended[message.target]
    return sent


def _first_ops(row: Sequence[Launch]) -> list[int]:
    """The place of each launch's first op among the ops of its rank."""
    return list(itertools.accumulate(map(len, row), initial=0))[:-1]


def _place_posts(plan: Plan, links: _Links, wanted: Mapping[Message, int], fence: Sequence[int]) -> list[list[list[Message]]]:
    """The receives to post at each step: as late as `wanted`, but not behind a later one of their link, nor before their fence.

    Receives of several links at one step are posted in the order of `wanted`.
    """
    due: dict[Message, int] = {}
    for (_, target), queue in links.queues.items():
        latest = len(plan.launches[target])
        for message in reversed(queue):
            earliest = fence[target] if links.taken_at[message] >= fence[target] else 0
            latest = due[message] = min(latest, links.taken_at[message], max(earliest, wanted[message]))
    posts: list[list[list[Message]]] = [[[] for _ in row] for row in plan.launches]
    for message in wanted:
        posts[message.target][due[message]].append(message)
    return posts


def _place_retires(plan: Plan, links: _Links) -> list[list[list[Message]]]:
    """The sends to retire at each step (rule 4). Both queues are walked once, from their ends."""
    retires: list[list[list[Message]]] = [[[] for _ in row] for row in plan.launches]
    for (source, target), queue in links.queues.items():
        replies = links.queues.get((target, source), [])
        reply, proof = len(replies), len(plan.launches[source])
        # From the last send to the first: a reply sent at or after the step that took the message proves its arrival.
        pending = sorted(queue, key=lambda message: links.taken_at[message], reverse=True)
        for message in pending:
            while reply > 0 and links.sent_at[replies[reply - 1]] >= links.taken_at[message]:
                reply -= 1
                proof = min(proof, links.taken_at[replies[reply]])
            if proof < len(plan.launches[source]):
                retires[source][proof].append(message)
    return retires
