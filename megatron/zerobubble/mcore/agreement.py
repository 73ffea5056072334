"""Ranks that were given different settings, files or versions stop before they compute anything.

Messages between ranks are matched by their order alone, and a rank knows nothing of the flags of another one. So two hosts with
plan files, learning rates or seeds that differ would train without an error, on garbage. Every rank writes a record of what it
was given to the job's store (`check_same`); the first rank compares, and all raise the same line. Plans that ranks find by
themselves are compared by a hash before each runs for the first time (`check_same_program`).

A model may be refused on one rank alone, such as the one whose stage has a module that cannot be split. Then all refuse it
(`refusing_together`): the others would wait for that rank, and end with an error about a connection.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import distributed_c10d as c10d

from megatron.zerobubble.errors import CompatibilityError, ConfigError, SplitError, UserError
from megatron.zerobubble.job.key_value_store import UNREADABLE
from megatron.zerobubble.job.launch import store_name
from megatron.zerobubble.messages import one_line, shown
from megatron.zerobubble.plan.communication import Program
from megatron.zerobubble.version import __version__

__all__ = [
    "Given",
    "Record",
    "check_same",
    "check_same_program",
    "content_digest",
    "differences",
    "program_digest",
    "refusing_together",
    "text_digest",
    "turn",
    "versions",
]

_AGREED = "agreed"
"""The verdict where nothing differs."""
_VERDICT = "verdict"
"""Its key."""
_PATIENCE_S = 600.0
_LONGEST_PAUSE_S = 0.05
"""Seconds between two looks at the store."""
_READ_S = 5.0
"""Seconds that rank 0, whose host may have the store, waits for the others to read its verdict."""
_LEAVE_S = 2.0
"""Seconds that it then lets the others end: a torchrun that loses the store first shows an error of its own."""
_KINDS: Mapping[str, type[UserError]] = {each.__name__: each for each in (CompatibilityError, ConfigError, SplitError)}
"""By name, what a rank refuses a model with."""


@dataclass(frozen=True)
class Given:
    """A value that every rank must have been given."""

    text: str
    """The value in a message."""
    digest: str | None = None
    """Compared instead of the text, such as a hash of a file that may have another path elsewhere; None: the text is."""

    @property
    def compared(self) -> str:
        """What must be the same on every rank."""
        return self.text if self.digest is None else self.digest


@dataclass(frozen=True)
class Record:
    """What one rank was given."""

    rank: int
    host: str
    values: Mapping[str, Given]
    """Name, such as a flag -> value."""


def check_same(
    store: Any, values: Mapping[str, Given], *, rank: int, ranks: Sequence[int], remedy: str, timeout_s: float = _PATIENCE_S
) -> None:
    """Compare what some ranks were given. All of them must call this, once per store.

    It needs no process group. Each rank writes about 100 bytes to the store, and each different record is there once.

    Args:
        store: torch's key-value store, the same on all ranks, with keys of its own for this call (`PrefixStore`).
        values: what this rank was given, by name.
        rank: this rank.
        ranks: the ranks that are compared. The first of them compares.
        remedy: end of the message.
        timeout_s: how long to wait for the slowest rank.

    Raises:
        ConfigError: on every rank, with the same line: values differ, or a rank did not come.
    """
    text = json.dumps({name: [given.text, given.digest] for name, given in values.items()})
    digest = text_digest(text)
    with _naming_store(rank):
        store.compare_set(f"values/{digest}", "", text)
        store.set(f"rank/{rank}", json.dumps([socket.gethostname(), digest]))
        verdict = _judged(store, lambda: _verdict(store, ranks, remedy), rank=rank, ranks=ranks, timeout_s=timeout_s)
    if verdict != _AGREED:
        raise ConfigError(one_line(verdict))


@contextmanager
def refusing_together() -> Iterator[None]:
    """A context for checks that come out differently on each rank: what one refuses in it, all refuse at its end.

    Every rank of the world must enter it at the same point. What is inside must not wait for other ranks. Through the store of
    the default process group: no device waits.

    Raises:
        UserError: on all ranks, what the first rank to refuse raised; or a rank did not come.
    """
    refusal: UserError | None = None
    try:
        yield
    except UserError as error:
        refusal = error
    _raise_first(refusal)


def _raise_first(refusal: UserError | None) -> None:
    """Raise on every rank of the world what the first of them to refuse has given, if any has."""
    rank, ranks, store = dist.get_rank(), range(dist.get_world_size()), turn("refusals")
    own = None if refusal is None else json.dumps([type(refusal).__name__, str(refusal), rank])

    def judge() -> str:
        missing = _missing(store, ranks, "check the model before its first pass")
        if store.add("refused", 0):
            first = next(each for each in ranks if store.check([f"refusal/{each}"]))
            return str(store.get(f"refusal/{first}").decode())
        if missing:
            return json.dumps(["ConfigError", f"{missing}, and install and call the schedule on every rank", 0])
        return _AGREED

    with _naming_store(rank):
        store.set(f"rank/{rank}", "")
        if own is not None:
            store.set(f"refusal/{rank}", own)
            store.add("refused", 1)
        verdict = _judged(store, judge, rank=rank, ranks=ranks, timeout_s=_PATIENCE_S)
    if verdict == _AGREED:
        return
    if refusal is not None and verdict == own:
        raise refusal
    kind, text, refusing = json.loads(verdict)
    error = _KINDS.get(kind, ConfigError)(text)
    error.add_note(f"refused on rank {refusing}, and so on all of the {len(ranks)} ranks")
    raise error from refusal


@contextmanager
def _naming_store(rank: int) -> Iterator[None]:
    """Raise ConfigError where the store is gone."""
    try:
        yield
    except dist.DistError as error:
        raise ConfigError(
            f"{store_name()} in which rank {rank} compares what it was given is gone: see the output of that host ({error})"
        ) from error


def _judged(store: Any, judge: Callable[[], str], *, rank: int, ranks: Sequence[int], timeout_s: float) -> str:
    """What `judge` returns on the first rank, when all have come or time is up, on every rank."""
    store.add("arrived", 1)
    if rank == ranks[0]:
        _until(lambda: store.add("arrived", 0) == len(ranks), timeout_s)
        store.set(_VERDICT, judge())
    elif not _until(lambda: store.check([_VERDICT]), timeout_s + _READ_S):
        raise ConfigError(f"rank {ranks[0]}, which compares what ranks were given, has not come; see the output of its host")
    verdict = str(store.get(_VERDICT).decode(errors="replace"))
    store.add("read", 1)
    if verdict != _AGREED and rank == ranks[0]:  # the store may end with this rank, or with its host
        _until(lambda: store.add("read", 0) >= store.add("arrived", 0), _READ_S)
        time.sleep(_LEAVE_S)
    return verdict


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; return whether it came true."""
    deadline, pause = time.monotonic() + timeout_s, 0.001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


def _verdict(store: Any, ranks: Sequence[int], remedy: str) -> str:
    """Why the ranks do not run one job, in one line; or that they do."""
    missing = _missing(store, ranks, "compare what they were given")
    if missing:
        return f"{missing}, and {remedy}"
    try:
        entries = [json.loads(store.get(f"rank/{rank}")) for rank in ranks]
        by_digest = {digest: json.loads(store.get(f"values/{digest}")) for digest in dict.fromkeys(each[1] for each in entries)}
        values = {digest: {name: Given(*pair) for name, pair in found.items()} for digest, found in by_digest.items()}
        found = differences([Record(rank, host, values[digest]) for rank, (host, digest) in zip(ranks, entries, strict=True)])
    except UNREADABLE:
        return f"what ranks were given cannot be compared: something else has written to the job's store; {remedy}"
    return one_line(f"ranks were not given the same: {'; '.join(found)}; {remedy}") if found else _AGREED


def _missing(store: Any, ranks: Sequence[int], purpose: str) -> str | None:
    """The ranks that have written nothing, in the beginning of a line; None if there are none."""
    missing = [rank for rank in ranks if not store.check([f"rank/{rank}"])]
    if not missing:
        return None
    named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"of {len(ranks)} ranks these have not come to {purpose}: {named}; see the output of their hosts"


def differences(records: Sequence[Record]) -> list[str]:
    """For each name whose value is not the same in all records, which value is where."""
    distinct = {id(each.values): each.values for each in records}.values()
    found = []
    for name in dict.fromkeys(name for values in distinct for name in values):
        if len({_compared(values, name) for values in distinct}) > 1:
            having: dict[str | None, list[Record]] = {}
            for record in records:
                having.setdefault(_compared(record.values, name), []).append(record)
            found.append(f"{name} is " + " and ".join(_where(each, name) for each in having.values()))
    return found


def _compared(values: Mapping[str, Given], name: str) -> str | None:
    return values[name].compared if name in values else None


def _where(records: Sequence[Record], name: str) -> str:
    """The value that these records have, and where the first of them is."""
    first, others = records[0], f" and {len(records) - 1} more" if len(records) > 1 else ""
    value = shown(first.values[name].text) if name in first.values else "unknown"
    return f"{value} on {first.host} (rank {first.rank}{others})"


def versions() -> dict[str, Given]:
    """The versions of the packages on which the order of messages and the numbers depend."""

    def installed(name: str) -> Given:
        try:
            return Given(metadata.version(name))
        except metadata.PackageNotFoundError:
            return Given("not installed")

    return {
        "the version of megatron-zerobubble": Given(__version__),
        "the version of torch": Given(str(torch.__version__)),
        "the version of megatron-core": Given(str(megatron.core.__version__)),
        "the version of Python": Given(".".join(platform.python_version_tuple()[:2])),
        "the version of Transformer Engine": installed("transformer-engine"),
    }


def text_digest(text: str) -> str:
    """A hash of a text, 128 bits in hex."""
    return xxhash.xxh3_128(text.encode("utf-8", "surrogatepass")).hexdigest()


def content_digest(path: Path) -> str:
    """A hash of a file's content, 128 bits in hex. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def program_digest(program: Program) -> str:
    """A hash of a plan and its transfers on all ranks."""
    return text_digest(repr((program.plan.placement.stage_to_rank, program.plan.assignment, program.steps)))


def check_same_program(program: Program, *, ranks: Sequence[int], forward_only: bool) -> None:
    """Compare a plan and its transfers over a pipeline before they run for the first time. All ranks of it must call this.

    Through the store of the default process group: no device waits, and no group is made.

    Args:
        program: about to run.
        ranks: the global ranks of the pipeline.
        forward_only: it has no backward passes.

    Raises:
        ConfigError: on all ranks of the pipeline, with the same line: the plans differ.
    """
    plan = program.plan
    if len(ranks) == 1:
        return
    digest = program_digest(program)
    text = f"{plan.schedule} for {plan.num_microbatches} microbatches{', forward only' if forward_only else ''} ({digest[:8]})"
    check_same(
        turn(f"plans of {text_digest(str([*ranks]))}"),
        {"the plan about to run": Given(text, digest)},
        rank=dist.get_rank(),
        ranks=ranks,
        remedy="give all ranks the same plan file, options and versions, and call the schedule with the same numbers",
    )


def turn(name: str) -> Any:
    """Keys of the default process group's store for the next comparison of that name; ranks that call it alike get the same."""
    store = c10d._get_default_store()
    number = store.add(f"zerobubble/{name}/turns of {dist.get_rank()}", 1)
    return c10d.PrefixStore(f"zerobubble/{name}/{number}", store)
