"""A model of what unequal microbatches cost: a fit against tokens and squared lengths.

Linear layers take time per token, attention per pair of tokens of one sequence. So a pass of a microbatch takes about
``constant + per_token * tokens + per_square * squares``, where `squares` is the sum of the squared lengths of its sequences, with
coefficients of its own for every stage and kind. Packed sequences attend to themselves only: two of 500 tokens have half the
squares of one of 1,000.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostLists, CostTable, check_number, check_tokens

Piece = tuple[int, float]
"""Tokens of a pass, and the squared lengths that it adds to those of its microbatch: of a whole one, all of them."""


def slices_of_sequence(lengths: Sequence[int]) -> tuple[Piece, ...]:
    """The pieces of a sequence that is cut into slices of these lengths."""
    ends = itertools.accumulate(lengths)
    return tuple((length, end * end - (end - length) * (end - length)) for length, end in zip(lengths, ends, strict=True))


class Work(NamedTuple):
    """What a pass takes, in time, memory or operations: ``constant + per_token * tokens + per_square * squares``."""

    constant: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def at(self, tokens: float, squares: float) -> float:
        """The value for a microbatch of `tokens` tokens whose sequences' squared lengths sum to `squares`."""
        return self.constant + self.per_token * tokens + self.per_square * squares

    def attention_share(self, tokens: float) -> float:
        """Share of the value of a sequence of `tokens` tokens that grows with the square of its length."""
        attention = self.per_square * tokens
        return attention / (attention + self.per_token) if attention else 0.0

    def scaled(self, factor: float) -> Work:
        """All terms times a factor."""
        return Work(*(factor * each for each in self))

    @staticmethod
    def of(value: float, *, tokens: float, squares: float, attention_share: float) -> Work:
        """The work with this value at these lengths, of which a share grows with the squares, and the rest with the tokens."""
        return Work(0.0, value * (1 - attention_share) / tokens, value * attention_share / squares)

    @staticmethod
    def from_json(name: str, body: object) -> Work:
        """Parse the object of one stage in a `LengthModel`'s JSON form; `name` is for messages. Raises ConfigError."""
        if not isinstance(body, Mapping):
            raise ConfigError(f"costs: {name} must be an object with {', '.join(Work._fields)}, got {quoted(body)}")
        for field in Work._fields:
            check_number(f"{field} of {name}", body.get(field))
        return Work(*(float(body[field]) for field in Work._fields))

    @staticmethod
    def fit(lengths: Sequence[tuple[float, float]], values: Sequence[float]) -> Work:
        """The terms of 0 or more with the least squared error for measured values.

        Of equally good ones those with the fewest terms, in proportion to the tokens before others: measurements of one length
        say nothing of how a value grows.

        Args:
            lengths: (tokens, squares) of every measured microbatch.
            values: what was measured for each.

        Raises:
            ConfigError: no measurement, or lists of different sizes.
        """
        if not values or len(values) != len(lengths):
            raise ConfigError(
                f"a fit needs one value per microbatch, 1 or more; got {len(lengths)} lengths and {len(values)} values"
            )
        columns = ([1.0] * len(lengths), [float(tokens) for tokens, _ in lengths], [float(squares) for _, squares in lengths])
        scales = [max(column) or 1.0 for column in columns]
        scaled = [[value / scale for value in column] for column, scale in zip(columns, scales, strict=True)]
        noise = 1e-12 * math.fsum(value * value for value in values)
        best, least = Work(), math.fsum(value * value for value in values)
        for chosen in ((1,), (2,), (0,), (0, 1), (1, 2), (0, 2), (0, 1, 2)):
            found = least_squares([scaled[index] for index in chosen], values)
            if found is None or min(found) < 0:
                continue
            rows = zip(*(scaled[index] for index in chosen), strict=True)
            errors = (
                value - math.fsum(c * x for c, x in zip(found, row, strict=True)) for row, value in zip(rows, values, strict=True)
            )
            error = math.fsum(each * each for each in errors)
            if error < least - noise:
                coefficients = [0.0, 0.0, 0.0]
                for index, value in zip(chosen, found, strict=True):
                    coefficients[index] = value / scales[index]
                best, least = Work(*coefficients), error
        return best


@dataclass(frozen=True, kw_only=True)
class LengthModel(CostLists[Work]):
    """How the costs of a microbatch follow from its lengths, per stage.

    Activation memory of 1 is one rank's share of a microbatch of the usual size.
    """

    @staticmethod
    def of(costs: CostModel, *, tokens: float, squares: float, attention_share: float = 0.0) -> LengthModel:
        """The model that gives `costs` to a microbatch of `tokens` tokens and `squares` squared lengths, without a measurement.

        Args:
            costs: times and activation memory of that microbatch.
            tokens: its tokens, above 0.
            squares: the sum of the squared lengths of its sequences, above 0.
            attention_share: share of F's time, 0 to 1, that is attention and grows with the squares. In B attention is twice the
                work it is in F, and in W none (arXiv 2401.10241, Table 1), from which B's share follows.

        Raises:
            ConfigError: a share outside 0..1, or no tokens.
        """
        if isinstance(attention_share, bool) or not 0 <= attention_share <= 1:
            raise ConfigError(f"attention share is {quoted(attention_share)}; it must be between 0 and 1")
        if not (tokens > 0 and squares > 0):
            raise ConfigError(f"a microbatch of {tokens:g} tokens and {squares:g} squared lengths has no costs; give 1 or more")
        shares = {"forward_ms": attention_share, "backward_ms": 2 * attention_share / (1 + attention_share)}

        def work(values: tuple[float, ...], share: float) -> tuple[Work, ...]:
            return tuple(Work.of(value, tokens=tokens, squares=squares, attention_share=share) for value in values)

        return LengthModel(**{name: work(values, shares.get(name, 0.0)) for name, values in costs.lists.items()})

    @staticmethod
    def fit(costs: CostTable, squares: Sequence[float] = ()) -> LengthModel:
        """The model closest to the measured costs of passes, each list of each stage by itself (`Work.fit`).

        Args:
            costs: measured, with tokens.
            squares: of every pass; empty: passes are the slices of one sequence, or whole microbatches of one each.

        Raises:
            ConfigError: the costs have no tokens.
        """
        check_tokens(costs.tokens)
        lengths: Sequence[Piece] = slices_of_sequence(costs.tokens)
        if squares or not costs.has_slices:
            lengths = list(zip(costs.tokens, squares or [float(count) * count for count in costs.tokens], strict=True))
        return LengthModel(**{name: tuple(Work.fit(lengths, row) for row in rows) for name, rows in costs.lists.items()})

    def table(self, pieces: Sequence[Sequence[Piece]], *, key_share: float = 0.0) -> CostTable:
        """The costs of an iteration; what a fit makes negative is 0.

        Args:
            pieces: of every microbatch: one, or that of each of its slices.
            key_share: part of the activation memory of F that is keys and values, which the slices of a microbatch share. Those
                of a whole one are freed with its other activations.
        """
        passes = [piece for own in pieces for piece in own]
        lists = {
            name: tuple(tuple(max(0.0, terms.at(*piece)) for piece in passes) for terms in stages)
            for name, stages in self.lists.items()
        }
        tokens = tuple(tokens for tokens, _ in passes)
        table = CostTable(slices=tuple(map(len, pieces)), tokens=tokens, **lists)
        if not key_share:
            return table
        shares = [key_share if count > 1 else 0.0 for count in table.counts]
        keys = tuple(tuple(share * value for share, value in zip(shares, row, strict=True)) for row in table.whole.activation)
        rest = [1 - share for share, count in zip(shares, table.counts, strict=True) for _ in range(count)]
        activation = tuple(tuple(share * value for share, value in zip(rest, row, strict=True)) for row in table.activation)
        return replace(table, activation=activation, keys=keys, key_gradients=keys)

    def costs(self, tokens: Sequence[int], squares: Sequence[float] = ()) -> CostTable:
        """The costs of whole microbatches with these lengths.

        Args:
            tokens: tokens of every microbatch, 1 or more.
            squares: per microbatch the sum of the squared lengths of its sequences; empty: each is one sequence.

        Raises:
            ConfigError: a length below 1, or lists of different sizes.
        """
        check_tokens(tokens)
        if squares and len(squares) != len(tokens):
            raise ConfigError(f"{len(tokens)} microbatches have tokens and {len(squares)} have squared lengths")
        return self.table([[piece] for piece in zip(tokens, squares or [float(count) * count for count in tokens], strict=True)])

    def within(self, scales: Sequence[float]) -> LengthModel:
        """The model with the activation memory of each stage times a factor: in units of which a limit per rank is 1.

        Args:
            scales: one factor per stage.
        """
        lists = {
            name: tuple(terms.scaled(scale) for terms, scale in zip(getattr(self, name), scales, strict=True))
            for name in COST_LISTS[3:]
        }
        return replace(self, **lists)

    def to_json(self) -> dict[str, Any]:
        """Per list of costs and stage the terms by name."""
        return {name: [terms._asdict() for terms in stages] for name, stages in self.lists.items()}

    @staticmethod
    def from_json(body: object) -> LengthModel:
        """Parse the output of `to_json`; unknown keys are ignored.

        Raises:
            ConfigError: a list is missing or has another number of stages, or a term is not a finite non-negative number.
        """
        if not isinstance(body, Mapping):
            raise ConfigError(f"costs by length must be an object with {', '.join(COST_LISTS)}, got {quoted(body)}")
        lists: dict[str, tuple[Work, ...]] = {}
        for name in COST_LISTS:
            rows = body.get(name)
            if not isinstance(rows, list) or not rows:
                raise ConfigError(f"costs by length: {name!r} must be a list with one object per stage, got {quoted(rows)}")
            lists[name] = tuple(Work.from_json(f"{name} by length, stage {stage},", row) for stage, row in enumerate(rows))
            if len(rows) != len(lists[COST_LISTS[0]]):
                first, num_stages = COST_LISTS[0], len(lists[COST_LISTS[0]])
                raise ConfigError(f"costs by length: {first} has {num_stages} stages and {name} has {len(rows)}")
        return LengthModel(**lists)

    def text(self, tokens: int) -> str:
        """One line: time of F, B and W of all stages for one sequence of `tokens` tokens, and for one of half as many."""
        halves = []
        for length in (tokens, max(1, tokens // 2)):
            costs = self.costs([length])
            total = [math.fsum(row[0] for row in rows) for rows in (costs.forward_ms, costs.backward_ms, costs.wgrad_ms)]
            halves.append(f"F {total[0]:.2f}, B {total[1]:.2f}, W {total[2]:.2f} ms for {length} tokens")
        return "; ".join(halves)


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Coefficients of columns, by the normal equations; None if the columns depend on each other."""
    size = len(columns)
    rows = [[math.fsum(a * b for a, b in zip(one, other, strict=True)) for other in (*columns, values)] for one in columns]
    for index in range(size):
        pivot = max(range(index, size), key=lambda row: abs(rows[row][index]))
        if abs(rows[pivot][index]) <= 1e-9 * len(values):
            return None
        rows[index], rows[pivot] = rows[pivot], rows[index]
        rows[index] = [value / rows[index][index] for value in rows[index]]
        for other in range(size):
            if other != index:
                factor = rows[other][index]
                rows[other] = [value - factor * base for value, base in zip(rows[other], rows[index], strict=True)]
    return [row[-1] for row in rows]
