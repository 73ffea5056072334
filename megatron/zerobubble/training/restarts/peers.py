"""Which rank keeps a copy of which other rank's state.

A copy is of use where its owner's machine is lost, too, so it belongs on another machine. Ranks are in rings: the data-parallel
replicas of a part of the model, the stages of a pipeline, all ranks. All ranks go the same number of steps along their ring, so
each rank keeps the copy of exactly one other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["peers"]


def peers(hosts: Sequence[str], *, data_parallel: Sequence[Sequence[int]], pipelines: Sequence[Sequence[int]]) -> list[int]:
    """For each rank, the rank that keeps a copy of its state; a permutation.

    The next data-parallel rank, else the next pipeline rank, else the next one of all, where that puts all copies on other
    machines; else what puts most of them there. On one machine it is the first of these that is another rank.

    Args:
        hosts: the machine of each rank.
        data_parallel: the data-parallel groups, each rank in one of them.
        pipelines: the pipelines, each rank in one of them.
    """
    best, most = list(range(len(hosts))), -1
    for way in _ways(data_parallel, pipelines, [range(len(hosts))]):
        elsewhere = sum(hosts[rank] != hosts[peer] for rank, peer in enumerate(way))
        if elsewhere > most:
            best, most = way, elsewhere
        if elsewhere == len(hosts) or len(set(hosts)) == 1:
            break
    return best


def _ways(*kinds: Sequence[Sequence[int]]) -> Iterable[list[int]]:
    """The peers of all ranks, for each kind of ring that has more than one rank, and each number of steps along it."""
    for rings in kinds:
        for steps in range(1, min(len(ring) for ring in rings)):
            way = [0] * sum(len(ring) for ring in rings)
            for ring in rings:
                for place, rank in enumerate(ring):
                    way[rank] = ring[(place + steps) % len(ring)]
            yield way
