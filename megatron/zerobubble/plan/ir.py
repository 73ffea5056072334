"""The plan: which rank computes what, in which order.

A `Plan` is plain data. Generators emit it, the validator checks it, the simulator scores it, the renderers show it and the
executor runs it. The text of an op is ``{stage}{kind}{microbatch}``, for example ``3F0``, ``3B0``, ``3W0``, ``3BW0``. This is the
notation of torch.distributed.pipelining with the letters of arXiv 2401.10241; torch's own letters differ:

    =====================  ====  =====
    op                     here  torch
    =====================  ====  =====
    input gradient         B     I
    fused backward         BW    B
    =====================  ====  =====

A microbatch may be cut into slices along its sequence, each with ops of its own: ``3F0.2`` is F of slice 2, ``3F0`` of slice 0,
the first one or the only one. A slice's queries see the keys and values of the slices before it, so F runs in the order of the
slices and B, which collects the gradients of those keys and values, in reverse (arXiv 2406.03488). Microbatches of unequal
lengths may have different numbers of slices.

Two adjacent ops of a rank, an F and a B or BW behind it, may be a *pair*: they are launched together, so that communication
inside the one can run beside computation of the other. A pair begins when both have their inputs, and both results exist when it
ends. Its text is ``1F4+1B2``.

Invariants of the types (`validate` checks all others): stages, ranks and microbatches are non-negative, a placement names every
rank at least once, and a plan has one row of ops per rank.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.messages import parse_json, quoted

FORMAT = "zerobubble-plan/1"
"""Version tag of the JSON form of a plan for equal microbatches and links."""

UNEQUAL_FORMAT = "zerobubble-plan/2"
"""Version tag of a plan with an assignment, or with costs per microbatch or a matrix of links. Readers refuse any other tag."""

SLICED_FORMAT = "zerobubble-plan/3"
"""Version tag of a plan whose microbatches have more than one slice."""

PAIRED_FORMAT = "zerobubble-plan/4"
"""Version tag of a plan with pairs."""

FORMATS = (FORMAT, UNEQUAL_FORMAT, SLICED_FORMAT, PAIRED_FORMAT)
"""The version tags that this version reads."""

_UNEQUAL_COSTS = ("microbatches", "links")

_OP_TEXT = re.compile(r"(\d{1,6})(F|BW|B|W)(\d{1,6})(?:\.(\d{1,6}))?")
_LONGEST_NAME = 80
_MOST_MICROBATCHES = 10**6
MOST_SLICES = 1024
"""Most slices of a microbatch."""


class OpKind(enum.Enum):
    """What an op computes (arXiv 2401.10241, section 2)."""

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """dgrad: the gradient of the stage's input, which can be sent upstream as soon as B ends."""
    W = "W"
    """wgrad: the gradients of the stage's weights."""
    BW = "BW"
    """Full backward (B+W): the input gradient is sent only after the weight gradients are computed, too."""

    __hash__ = object.__hash__  # enum's own is a Python function, called for every op in every set and dict

    def __repr__(self) -> str:
        return self.value


class Op(NamedTuple):
    """One pass of one microbatch, or of one slice of it, through one stage."""

    stage: int
    kind: OpKind
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        return f"{text}.{self.slice}" if self.slice else text

    @property
    def where(self) -> str:
        """The stage, microbatch and slice in words."""
        part = f", slice {self.slice}" if self.slice else ""
        return f"stage {self.stage}, microbatch {self.microbatch}{part}"

    @staticmethod
    def parse(text: str) -> Op:
        """Read ``3BW0`` or ``3F0.2``. Raises PlanError on anything else."""
        match = _OP_TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise PlanError(
                f"{quoted(text)} is not an op: expected <stage><F|B|W|BW><microbatch>, for example 3F0 or 3BW0, with .<slice> "
                "where it is not the first"
            )
        return Op(int(match[1]), OpKind(match[2]), int(match[3]), int(match[4] or 0))


Launch = tuple[Op, ...]
"""What a rank launches at once: one op, or the two of a pair."""


def launch_text(launch: Launch) -> str:
    """Its ops with a plus between them."""
    return "+".join(map(str, launch))


@dataclass(frozen=True)
class Passes:
    """The ops that a stage runs of one kind, numbered in their order: microbatches ascend; slices do in F, descend in B and W."""

    slices: tuple[int, ...]
    """Number of slices of every microbatch."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of the first op of every microbatch, and of all ops."""
        return (0, *accumulate(self.slices))

    def __len__(self) -> int:
        return self.starts[-1]

    def nth(self, stage: int, kind: OpKind, index: int) -> Op:
        """The op that a stage runs as its op number `index` of a kind."""
        microbatch = bisect.bisect_right(self.starts, index) - 1
        part = index - self.starts[microbatch]
        return Op(stage, kind, microbatch, part if kind is OpKind.F else self.slices[microbatch] - 1 - part)

    def number(self, op: Op) -> int:
        """The index for which `nth` gives this op."""
        first, after = self.starts[op.microbatch], self.starts[op.microbatch + 1]
        return first + op.slice if op.kind is OpKind.F else after - 1 - op.slice


@dataclass(frozen=True)
class Placement:
    """Stage -> pipeline rank.

    Stages are numbered in the order data flows. `linear`: stage s on rank s. `loop` (interleaved, round-robin): stage s on rank
    s mod p. `V`: stage s on rank s for s < p, else on rank 2p-1-s, so that the first and the last stage share rank 0. `W`: two
    Vs, one after the other, with four stages per rank.
    """

    stage_to_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.stage_to_rank:
            raise PlanError("a placement needs at least one stage")
        ranks = set(self.stage_to_rank)
        if ranks != set(range(len(ranks))):
            raise PlanError(f"stage_to_rank {quoted(list(self.stage_to_rank))} must name every rank 0..p-1 at least once")

    @staticmethod
    def linear(num_ranks: int) -> Placement:
        """One stage per rank."""
        return Placement(tuple(range(num_ranks)))

    @staticmethod
    def loop(num_ranks: int, num_chunks: int) -> Placement:
        """Interleaved (round-robin): `num_chunks` virtual stages (VPP) per rank."""
        return Placement(tuple(range(num_ranks)) * num_chunks)

    @staticmethod
    def v(num_ranks: int) -> Placement:
        """Two stages per rank, down the ranks and up again (arXiv 2401.10241, section 6)."""
        return Placement(tuple(range(num_ranks)) + tuple(reversed(range(num_ranks))))

    @staticmethod
    def w(num_ranks: int) -> Placement:
        """Four stages per rank: down the ranks, up, down and up again."""
        return Placement(2 * Placement.v(num_ranks).stage_to_rank)

    @property
    def num_stages(self) -> int:
        """Number of stages, p*v."""
        return len(self.stage_to_rank)

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks, p."""
        return max(self.stage_to_rank) + 1

    @cached_property
    def rank_to_stages(self) -> tuple[tuple[int, ...], ...]:
        """Per rank its stages in ascending order; the index of a stage in its row is its chunk."""
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.stage_to_rank):
            rows[rank].append(stage)
        return tuple(tuple(row) for row in rows)

    @property
    def num_chunks(self) -> int:
        """Largest number of stages on any rank, v."""
        return max(len(stages) for stages in self.rank_to_stages)

    def chunk_of(self, stage: int) -> int:
        """Index of `stage` among the stages of its rank."""
        return self.rank_to_stages[self.stage_to_rank[stage]].index(stage)

    @property
    def name(self) -> str:
        """`linear`, `loop`, `V`, `W` or `custom`."""
        p = self.num_ranks
        if self == Placement.linear(p):
            return "linear"
        if self == Placement.v(p):
            return "V"
        if self.num_stages % p == 0 and self == Placement.loop(p, self.num_stages // p):
            return "loop"
        return "W" if self == Placement.w(p) else "custom"


@dataclass(frozen=True)
class Plan:
    """Each rank's compute order for one iteration.

    Attributes:
        schedule: a name for people; no code depends on it.
        placement: stage -> rank.
        num_microbatches: m.
        ops: per rank its ops in compute order.
        assignment: the microbatch of the global batch that the plan runs as its microbatch i, counted in the order in which the
            data came. Empty: in that order. An op names the plan's own microbatch; costs are those of the data (`batch_index`).
        num_slices: slices of each microbatch along its sequence, n; where microbatches have different numbers, the largest.
        slice_counts: slices of each of the plan's own microbatches, where they have different numbers. Empty: n of each.
        pairs: the first ops of all pairs, each launched together with the op behind it on its rank. Empty: every op is alone.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    ops: tuple[tuple[Op, ...], ...]
    assignment: tuple[int, ...] = ()
    num_slices: int = 1
    slice_counts: tuple[int, ...] = ()
    pairs: frozenset[Op] = frozenset()

    def __post_init__(self) -> None:
        if len(self.schedule) > _LONGEST_NAME:
            raise PlanError(f"the plan's schedule is a name of {len(self.schedule)} letters; give at most {_LONGEST_NAME}")
        if not self.schedule.isprintable():
            raise PlanError(f"the plan's schedule is {quoted(self.schedule)}; give a name of printable letters")
        if len(self.ops) != self.placement.num_ranks:
            raise PlanError(f"plan {self.schedule!r} has {len(self.ops)} rows of ops for {self.placement.num_ranks} ranks")
        if self.num_microbatches < 1:
            raise PlanError(f"plan {self.schedule!r} has {quoted(self.num_microbatches)} microbatches; at least 1 is needed")
        if not 1 <= self.num_slices <= MOST_SLICES:
            raise PlanError(
                f"plan {self.schedule!r} has {quoted(self.num_slices)} slices per microbatch; give 1 to {MOST_SLICES:,}"
            )
        if self.num_microbatches > _MOST_MICROBATCHES:
            raise PlanError(
                f"plan {self.schedule!r} has {quoted(self.num_microbatches)} microbatches; at most {_MOST_MICROBATCHES:,} are "
                "allowed"
            )
        # Only now that the numbers are those of a plan: each of them makes a list.
        if self.assignment and sorted(self.assignment) != list(range(self.num_microbatches)):
            raise PlanError(
                f"plan {self.schedule!r} assigns the microbatches {quoted(list(self.assignment))}; "
                f"it must name each of 0..{self.num_microbatches - 1} exactly once"
            )
        counts = self.slice_counts
        if counts and (len(counts) != self.num_microbatches or min(counts) < 1 or max(counts) != self.num_slices):
            raise PlanError(
                f"plan {self.schedule!r} has {quoted(list(counts))} slices per microbatch; give one number per microbatch, 1 or "
                f"more, the largest of them {self.num_slices}"
            )
        if len(set(counts)) == 1:
            object.__setattr__(self, "slice_counts", ())

    @staticmethod
    def of(
        schedule: str, placement: Placement, num_microbatches: int, rows: Iterable[Iterable[Op]], *, num_slices: int = 1
    ) -> Plan:
        """Build a plan from any nested iterable of ops."""
        return Plan(schedule, placement, num_microbatches, tuple(tuple(row) for row in rows), num_slices=num_slices)

    @cached_property
    def passes(self) -> Passes:
        """The ops of a stage and kind by their numbers."""
        return Passes(self.slice_counts or (self.num_slices,) * self.num_microbatches)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, p."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages, p*v."""
        return self.placement.num_stages

    @cached_property
    def launches(self) -> tuple[tuple[Launch, ...], ...]:
        """Per rank its ops in compute order, those of a pair together."""
        if not self.pairs:
            return tuple(tuple((op,) for op in row) for row in self.ops)
        rows = []
        for row in self.ops:
            launches: list[Launch] = []
            for op in row:
                if launches and launches[-1][-1] in self.pairs and len(launches[-1]) == 1:
                    launches[-1] += (op,)
                else:
                    launches.append((op,))
            rows.append(tuple(launches))
        return tuple(rows)

    def with_ops(self, rows: Iterable[Iterable[Op]], **changes: Any) -> Plan:
        """The plan with other ops on its ranks; a pair stays one where its two ops still are adjacent, and in their order."""
        ops = tuple(map(tuple, rows))
        pairs = self.pairs
        if pairs:
            couples = {_split(launch) for row in self.launches for launch in row if len(launch) == 2}
            pairs = frozenset(couple[0] for row in ops for couple in itertools.pairwise(row) if _split(couple) in couples)
        return replace(self, ops=ops, pairs=pairs, **changes)

    def batch_index(self, microbatch: int) -> int:
        """The position in the global batch of what the plan's ops call `microbatch`."""
        return self.assignment[microbatch] if self.assignment else microbatch

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self, *, costs: Mapping[str, Any] | None = None, metrics: Mapping[str, Any] | None = None) -> str:
        """The stable JSON form, optionally with the costs the plan was made for and the metrics it reaches.

        Version 2 only where something is unequal, 3 only with slices and 4 only with pairs, so that older readers still read
        every plan that they can run.
        """
        unequal = self.assignment or (costs is not None and any(name in costs for name in _UNEQUAL_COSTS))
        body: dict[str, Any] = {
            "format": self._format(is_unequal=bool(unequal)),
            "schedule": self.schedule,
            "num_ranks": self.num_ranks,
            "num_microbatches": self.num_microbatches,
            "stage_to_rank": list(self.placement.stage_to_rank),
            "ops": [[launch_text(launch) for launch in row] for row in self.launches],
        }
        if self.assignment:
            body["assignment"] = list(self.assignment)
        if self.num_slices > 1:
            body["num_slices"] = self.num_slices
        if self.slice_counts:
            body["slice_counts"] = list(self.slice_counts)
        if costs is not None:
            body["costs"] = dict(costs)
        if metrics is not None:
            body["metrics"] = dict(metrics)
        return json.dumps(body)

    def _format(self, *, is_unequal: bool) -> str:
        if self.pairs:
            return PAIRED_FORMAT
        return SLICED_FORMAT if self.num_slices > 1 else UNEQUAL_FORMAT if is_unequal else FORMAT

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Parse the JSON form. Raises PlanError naming what is missing, malformed or of another version."""
        body = parse_json(text, "the plan", PlanError)
        if not isinstance(body, dict) or body.get("format") not in FORMATS:
            given = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise PlanError(f"the plan has format {quoted(given)}; this version reads {' and '.join(FORMATS)}")
        schedule = _field(body, "schedule", str)
        num_ranks = _field(body, "num_ranks", int)
        num_microbatches = _field(body, "num_microbatches", int)
        stage_to_rank = _int_list(_field(body, "stage_to_rank", list), "stage_to_rank")
        rows = _field(body, "ops", list)
        if not all(isinstance(row, list) for row in rows):
            raise PlanError("the plan's 'ops' must be a list of lists of op texts")
        placement = Placement(tuple(stage_to_rank))
        if placement.num_ranks != num_ranks:
            raise PlanError(f"the plan has num_ranks {quoted(num_ranks)} but stage_to_rank names {placement.num_ranks} ranks")
        assigned = body.get("assignment", []) if body["format"] != FORMAT else []
        is_paired = body["format"] == PAIRED_FORMAT
        may_be_sliced = is_paired or body["format"] == SLICED_FORMAT
        num_slices = _field({"num_slices": 1} | body if is_paired else body, "num_slices", int) if may_be_sliced else 1
        counts = body.get("slice_counts", []) if may_be_sliced else []
        for name, values in (("assignment", assigned), ("slice_counts", counts)):
            if not isinstance(values, list):
                raise PlanError(f"the plan's {name!r} must be a list of one number per microbatch, got {quoted(values)}")
        launches = [[_launch(word, is_paired=is_paired) for word in row] for row in rows]
        return Plan(
            schedule,
            placement,
            num_microbatches,
            tuple(tuple(op for launch in row for op in launch) for row in launches),
            tuple(_int_list(assigned, "assignment")),
            num_slices,
            tuple(_int_list(counts, "slice_counts")),
            frozenset(launch[0] for row in launches for launch in row if len(launch) == 2),
        )


def _split(launch: Launch) -> Launch:
    """The ops with B in place of a BW: a pair remains one where its BW is split."""
    return tuple(op._replace(kind=OpKind.B) if op.kind is OpKind.BW else op for op in launch)


def _launch(word: Any, *, is_paired: bool) -> Launch:
    """An op, or with `is_paired` a pair, from its text."""
    if not is_paired or not isinstance(word, str) or "+" not in word:
        return (Op.parse(word),)
    first, _, second = word.partition("+")
    return Op.parse(first), Op.parse(second)


def _field(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PlanError(f"the plan's {name!r} must be of type {kind.__name__}, got {quoted(value)}")
    return value


def _int_list(values: Sequence[Any], name: str) -> list[int]:
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values):
        raise PlanError(f"the plan's {name!r} must be a list of non-negative integers, got {quoted(values)}")
    return list(values)
