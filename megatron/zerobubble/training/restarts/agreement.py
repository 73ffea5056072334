"""Which iteration all ranks resume from, given the copies that each rank offers; a pure function.

All ranks evaluate it on the same offers, so they agree without another message. An iteration counts only if the state of every
rank after it is offered by some rank, whole and for the same layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zerobubble.training.restarts.copies import CopyRecord

__all__ = ["Agreement", "Offer", "Source", "agree"]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A copy that a rank has found whole on its machine."""

    name: str
    """Name of the copy there."""
    record: CopyRecord
    """What it is of."""
    rank: int
    """The rank that offers it."""
    host: str
    """Its machine."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a rank takes its state from."""

    name: str
    """Name of the copy."""
    record: CopyRecord
    """What it is of."""
    rank: int
    """The rank that offers it."""
    is_sent: bool
    """Whether it is on another machine, and has to be sent."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks resume from."""

    iteration: int
    """Iterations done."""
    consumed_samples: int
    """Samples consumed by then."""
    sources: tuple[Source, ...]
    """Where each rank takes its state from."""


def agree(
    offers: Sequence[Offer], *, job: str, hosts: Sequence[str], fingerprints: Sequence[str]
) -> tuple[Agreement | None, str]:
    """The newest iteration for which the state of every rank is offered, or None; and why, if there is none.

    Args:
        offers: of all ranks together.
        job: id of the job; copies of others are ignored.
        hosts: the machine of each rank.
        fingerprints: of each rank's part of the model and of the flags.
    """
    own = [offer for offer in offers if offer.record.job == job]
    if not own:
        return None, "no copies of this job are in memory"
    fitting = [
        offer for offer in own if offer.record.owner < len(hosts) and offer.record.fingerprint == fingerprints[offer.record.owner]
    ]
    if not fitting:
        return None, "the copies in memory are of another layout or other flags"
    by_iteration: dict[tuple[int, int], dict[int, list[Offer]]] = defaultdict(lambda: defaultdict(list))
    for offer in fitting:
        by_iteration[offer.record.iteration, offer.record.consumed_samples][offer.record.owner].append(offer)
    missing: list[int] = []
    for (iteration, consumed_samples), by_owner in sorted(by_iteration.items(), reverse=True):
        without = [rank for rank in range(len(hosts)) if rank not in by_owner]
        if not without:
            sources = tuple(_source(by_owner[rank], hosts[rank]) for rank in range(len(hosts)))
            return Agreement(iteration=iteration, consumed_samples=consumed_samples, sources=sources), ""
        missing = missing or without
    newest = max(by_iteration)[0]
    return None, f"the state of rank {missing[0]} after iteration {newest} is in no memory, or damaged there"


def _source(offers: Sequence[Offer], host: str) -> Source:
    """The offer on the machine itself, else the one of the lowest rank."""
    chosen = min(offers, key=lambda offer: (offer.host != host, offer.rank, offer.name))
    return Source(name=chosen.name, record=chosen.record, rank=chosen.rank, is_sent=chosen.host != host)
