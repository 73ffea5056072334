"""Links between ranks that are not alike: latency and bandwidth of every directed pair of pipeline ranks.

Inside a node a message takes microseconds, between nodes many times as long, and the two directions of a pair may differ. A
message of `n` bytes takes ``latency + n / bandwidth``, and occupies its link for ``n / bandwidth``: the next one from the same
sender to the same receiver waits for that. Bytes grow with the tokens of the microbatch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_table import check_number

_BYTES_PER_MS = 1e6
"""Bytes per millisecond in 1 GB/s."""
_ALIKE = 2.0
"""Measured links that differ by less than this factor are taken for equal: two measurements of one link differ, too."""

_QUEUES = 0.25
"""A message that occupies its link for more than this share of the shortest pass may hold up the next one: a plan may divide the
passes over more stages than were measured."""
_LEAST_MS = 1e-6
"""Where a link was measured to be busy for less."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """A matrix of links, `[sender][receiver]`, and the bytes of a message.

    Raises ConfigError for a matrix that is not square, for numbers that are not finite or below 0, and for a bandwidth of 0.
    The diagonal is ignored and becomes 0: a rank sends nothing to itself.
    """

    latency_ms: tuple[tuple[float, ...], ...]
    """Time of an empty message in milliseconds."""
    gigabytes_per_s: tuple[tuple[float, ...], ...] = ()
    """Bandwidth in 10^9 bytes per second; empty: not known, only latency counts."""
    message_bytes: tuple[float, ...] = (0.0,)
    """Bytes of a message: one number for all microbatches, or one per microbatch."""

    def __post_init__(self) -> None:
        for name in ("latency_ms", "gigabytes_per_s"):
            object.__setattr__(self, name, tuple(tuple(row) for row in getattr(self, name)))
        object.__setattr__(self, "message_bytes", tuple(self.message_bytes))
        _check_square("latency_ms", self.latency_ms, len(self.latency_ms))
        if self.gigabytes_per_s:
            _check_square("gigabytes_per_s", self.gigabytes_per_s, self.num_ranks)
        if not self.latency_ms or not self.message_bytes:
            raise ConfigError("links: at least one rank and one message size are needed")
        for name in ("latency_ms", "gigabytes_per_s"):
            rows = enumerate(getattr(self, name))
            object.__setattr__(self, name, tuple((*row[:rank], 0.0, *row[rank + 1 :]) for rank, row in rows))
            for source, row in enumerate(getattr(self, name)):
                for target, value in enumerate(row):
                    if source != target:
                        check_number(f"{name} from rank {source} to rank {target}", value, "links")
                        if value == 0 and name == "gigabytes_per_s":
                            between = f"from rank {source} to rank {target}"
                            raise ConfigError(f"links: {name} {between} is 0; give a bandwidth above 0, or leave {name} out")
        for microbatch, value in enumerate(self.message_bytes):
            check_number(f"message_bytes of microbatch {microbatch}", value, "links")
        for source, target in itertools.permutations(range(self.num_ranks), 2):
            time = self._time(source, target, max(self.message_bytes))
            check_number(f"the time in ms of the largest message from rank {source} to rank {target}", time, "links")

    @property
    def num_ranks(self) -> int:
        """Number of ranks, p."""
        return len(self.latency_ms)

    def time_ms(self, source: int, target: int, microbatch: int = 0) -> float:
        """Time of one message in milliseconds; 0 within a rank."""
        if source == target:
            return 0.0
        size = self.message_bytes[microbatch if len(self.message_bytes) > 1 else 0]
        return self._time(source, target, size)

    def busy_ms(self, source: int, target: int, microbatch: int = 0) -> float:
        """The part of a message's time in which it occupies its link; 0 within a rank, and without bandwidths."""
        if source == target or not self.gigabytes_per_s:
            return 0.0
        size = self.message_bytes[microbatch if len(self.message_bytes) > 1 else 0]
        return size / (self.gigabytes_per_s[source][target] * _BYTES_PER_MS)

    def shortest_ms(self, source: int, target: int) -> float:
        """Time of the smallest message."""
        return 0.0 if source == target else self._time(source, target, min(self.message_bytes))

    @cached_property
    def neighbors(self) -> tuple[float, ...]:
        """Times of a mean message between neighbors of the ring of ranks, the pairs that placements use, in milliseconds."""
        p, size = self.num_ranks, math.fsum(self.message_bytes) / len(self.message_bytes)
        pairs = {(rank, (rank + 1) % p) for rank in range(p)} | {((rank + 1) % p, rank) for rank in range(p)}
        return tuple(self._time(source, target, size) for source, target in sorted(pairs) if source != target)

    @cached_property
    def neighbors_ms(self) -> float:
        """The mean of `neighbors`."""
        times = self.neighbors
        return times[0] if len(set(times)) == 1 else math.fsum(times) / max(1, len(times))

    @property
    def is_uniform(self) -> bool:
        """Whether every message takes the same time, between any ranks and for any microbatch, and occupies no link."""
        p = self.num_ranks
        sizes = set(self.message_bytes)
        if self.gigabytes_per_s and max(sizes) > 0 and p > 1:
            return False
        return len({self._time(a, b, size) for a in range(p) for b in range(p) if a != b for size in sizes}) <= 1

    def reordered(self, assignment: Sequence[int]) -> Links:
        """The same links, with message i that of microbatch `assignment[i]`."""
        if len(self.message_bytes) == 1:
            return self
        return replace(self, message_bytes=tuple(self.message_bytes[index] for index in assignment))

    def divided(self, parts: float) -> Links:
        """The same links, with messages of a part of the size."""
        return replace(self, message_bytes=tuple(size / parts for size in self.message_bytes))

    def to_json(self) -> dict[str, Any]:
        """The `links` object of the costs in a plan's JSON form."""
        body: dict[str, Any] = {"latency_ms": [list(row) for row in self.latency_ms]}
        if self.gigabytes_per_s:
            body["gigabytes_per_s"] = [list(row) for row in self.gigabytes_per_s]
        return body | {"message_bytes": list(self.message_bytes)}

    @staticmethod
    def from_json(body: object) -> Links:
        """Parse the output of `to_json`, or a file of a user's with at least `latency_ms`.

        Raises:
            PlanError: it is not an object of matrices.
            ConfigError: a matrix has the wrong shape or a wrong number.
        """
        if not isinstance(body, Mapping) or not _is_matrix(body.get("latency_ms")):
            raise PlanError(f"links must be an object with latency_ms, a list of one list per sending rank, got {quoted(body)}")
        bandwidth, sizes = body.get("gigabytes_per_s", []), body.get("message_bytes", [0.0])
        if not _is_matrix(bandwidth):
            raise PlanError(f"links: gigabytes_per_s must be a list of one list per sending rank, got {quoted(bandwidth)}")
        if not isinstance(sizes, list):
            raise PlanError(f"links: message_bytes must be a list of one number, or one per microbatch, got {quoted(sizes)}")
        return Links(latency_ms=tuple(body["latency_ms"]), gigabytes_per_s=tuple(bandwidth), message_bytes=tuple(sizes))

    def _time(self, source: int, target: int, size: float) -> float:
        latency = self.latency_ms[source][target]
        return latency + size / (self.gigabytes_per_s[source][target] * _BYTES_PER_MS) if self.gigabytes_per_s else latency


class LinkTime(NamedTuple):
    """A message on a link that carried nothing else."""

    message_ms: float
    """From its send until its receiver has it."""
    busy_ms: float = 0.0
    """The part of it in which the link takes no other message: all but the time of an empty one."""
    num_bytes: float = 1e6
    """Its size."""


def unequal_links(measured: Mapping[tuple[int, int], LinkTime], num_ranks: int, *, shortest_pass_ms: float) -> Links | None:
    """The matrix of measured links; None if they are alike and messages do not queue on them, or none was measured.

    Args:
        measured: (sender, receiver) -> a message. A pair that is missing, which no message uses, has their mean.
        num_ranks: p.
        shortest_pass_ms: a rank sends one message per pass, so none has to wait for the one before if that is gone by then.
    """
    if not measured:
        return None
    missing = LinkTime(*(math.fsum(column) / len(measured) for column in zip(*measured.values(), strict=True)))
    times = [each.message_ms for each in measured.values()]
    queues = max(each.busy_ms for each in measured.values()) > _QUEUES * shortest_pass_ms
    if not queues and max(times) <= _ALIKE * min(times):
        return None

    def matrix(value: Callable[[LinkTime], float]) -> tuple[tuple[float, ...], ...]:
        ranks = range(num_ranks)
        return tuple(tuple(value(measured.get((sender, to), missing)) for to in ranks) for sender in ranks)

    if not queues:
        return Links(latency_ms=matrix(lambda each: each.message_ms))
    size = max(each.num_bytes for each in measured.values())
    return Links(
        latency_ms=matrix(lambda each: max(0.0, each.message_ms - each.busy_ms)),
        gigabytes_per_s=matrix(lambda each: size / (max(each.busy_ms, _LEAST_MS) * _BYTES_PER_MS)),
        message_bytes=(size,),
    )


def links_text(measured: Mapping[tuple[int, int], float], hosts: Sequence[str]) -> str:
    """One line for a log: the median of measured links, and the slowest one if it differs.

    Args:
        measured: (sender, receiver) -> milliseconds of a message.
        hosts: name of every rank's host; empty names are left out.
    """
    if not measured:
        return "P2P latency not measured"
    typical, slowest = statistics.median(measured.values()), max(measured, key=lambda pair: measured[pair])
    text = f"P2P {typical:.2f} ms (median of {len(measured)} links)"
    if measured[slowest] <= _ALIKE * typical:
        return text
    ends = " -> ".join(f"rank {rank} ({hosts[rank]})" if hosts[rank] else f"rank {rank}" for rank in slowest)
    return f"{text}; slowest {ends} {measured[slowest]:.2f} ms"


def _is_matrix(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) for row in value)


def _check_square(name: str, rows: Sequence[Sequence[float]], size: int) -> None:
    widths = [len(row) for row in rows]
    if widths != [size] * size:
        raise ConfigError(
            f"links: {name} has {len(rows)} rows of {', '.join(map(str, sorted(set(widths)))) or 'no'} numbers; "
            f"it must have one row and one column for each of {size} ranks"
        )
