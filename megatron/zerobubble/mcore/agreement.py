"""Ranks that were given different settings, files or versions stop before they compute anything.

Messages between ranks are matched by their order alone, and a rank knows nothing of the options of another one. So two hosts
with plan files or options that differ would train without an error, on garbage. Every rank writes what it was given to the store
of the default process group (`check_same`); the first rank compares, and all raise the same line. Plans that ranks find by
themselves are compared in the same way, by a hash, before each runs for the first time (`check_same_program`).

A model may be refused on one rank alone, such as the one whose stage has a module that cannot be split. Then all refuse it
(`refusing_together`): the others would wait for that rank, and end with an error about a connection.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple

import megatron.core
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import distributed_c10d as c10d

from megatron.zerobubble.errors import CompatibilityError, ConfigError, SplitError, UserError
from megatron.zerobubble.job.launch import store_name
from megatron.zerobubble.messages import one_line, shown
from megatron.zerobubble.plan.communication import Program
from megatron.zerobubble.version import __version__

__all__ = [
    "Record",
    "check_same",
    "check_same_program",
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


class Record(NamedTuple):
    """What one rank was given."""

    rank: int
    host: str
    values: Mapping[str, str]
    """Name, such as an option -> value."""


def check_same(store: Any, values: Mapping[str, str], *, rank: int, ranks: Sequence[int], remedy: str) -> None:
    """Compare what some ranks were given. All of them must call this, once per store.

    Args:
        store: torch's key-value store, the same on all ranks, with keys of its own for this call (`turn`).
        values: what this rank was given, by name.
        rank: this rank.
        ranks: the global ranks that are compared. The first of them compares.
        remedy: end of the message.

    Raises:
        ConfigError: on every rank, with the same line: values differ, or a rank did not come.
    """

    def judge() -> str:
        missing = _missing(store, ranks, "compare what they were given")
        if missing:
            return f"{missing}, and {remedy}"
        found = differences([Record(rank, *json.loads(store.get(f"rank/{rank}"))) for rank in ranks])
        return one_line(f"ranks were not given the same: {'; '.join(found)}; {remedy}") if found else _AGREED

    with _naming_store(rank):
        store.set(f"rank/{rank}", json.dumps([socket.gethostname(), values]))
        verdict = _judged(store, judge, rank=rank, ranks=ranks)
    if verdict != _AGREED:
        raise ConfigError(verdict)


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
        verdict = _judged(store, judge, rank=rank, ranks=ranks)
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


def _judged(store: Any, judge: Callable[[], str], *, rank: int, ranks: Sequence[int]) -> str:
    """What `judge` returns on the first rank, when all have come or time is up, on every rank."""
    store.add("arrived", 1)
    if rank == ranks[0]:
        _until(lambda: store.add("arrived", 0) == len(ranks), _PATIENCE_S)
        store.set(_VERDICT, judge())
    elif not _until(lambda: store.check([_VERDICT]), _PATIENCE_S + _READ_S):
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


def _missing(store: Any, ranks: Sequence[int], purpose: str) -> str | None:
    """The ranks that have written nothing, in the beginning of a line; None if there are none."""
    missing = [rank for rank in ranks if not store.check([f"rank/{rank}"])]
    if not missing:
        return None
    named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"of {len(ranks)} ranks these have not come to {purpose}: {named}; see the output of their hosts"


def differences(records: Sequence[Record]) -> list[str]:
    """For each name whose value is not the same in all records, which value is where."""
    found = []
    for name in dict.fromkeys(name for record in records for name in record.values):
        having: dict[str | None, list[Record]] = {}
        for record in records:
            having.setdefault(record.values.get(name), []).append(record)
        if len(having) > 1:
            found.append(f"{name} is " + " and ".join(_where(value, each) for value, each in having.items()))
    return found


def _where(value: str | None, records: Sequence[Record]) -> str:
    """A value, and where the first of the records is that have it."""
    first, others = records[0], f" and {len(records) - 1} more" if len(records) > 1 else ""
    return f"{'unknown' if value is None else shown(value)} on {first.host} (rank {first.rank}{others})"


def versions() -> dict[str, str]:
    """The versions of the packages on which the order of messages and the numbers depend."""

    def installed(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    return {
        "the version of megatron-zerobubble": __version__,
        "the version of torch": str(torch.__version__),
        "the version of megatron-core": str(megatron.core.__version__),
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        "the version of Transformer Engine": installed("transformer-engine"),
    }


def text_digest(text: str) -> str:
    """A hash of a text, 128 bits in hex."""
    return xxhash.xxh3_128(text.encode("utf-8", "surrogatepass")).hexdigest()


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
    passes = ", forward only" if forward_only else ""
    text = f"{plan.schedule} for {plan.num_microbatches} microbatches{passes} ({program_digest(program)})"
    check_same(
        turn(f"plans of {text_digest(str([*ranks]))}"),
        {"the plan about to run": text},
        rank=dist.get_rank(),
        ranks=ranks,
        remedy="give all ranks the same plan file, options and versions, and call the schedule with the same numbers",
    )


def turn(name: str) -> Any:
    """Keys of the default process group's store for the next comparison of that name; ranks that call it alike get the same."""
    store = c10d._get_default_store()
    number = store.add(f"zerobubble/{name}/turns of {dist.get_rank()}", 1)
    return c10d.PrefixStore(f"zerobubble/{name}/{number}", store)
