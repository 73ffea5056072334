"""Which rank keeps a copy of which other rank's state."""

from __future__ import annotations

import pytest

from megatron.zerobubble.training.restarts.peers import peers


@pytest.mark.parametrize(
    ("hosts", "data_parallel", "pipelines", "expected"),
    [
        ("a", [[0]], [[0]], [0]),
        ("aa", [[0], [1]], [[0, 1]], [1, 0]),
        ("aaaa", [[0, 1], [2, 3]], [[0, 2], [1, 3]], [1, 0, 3, 2]),
        ("aabb", [[0, 1], [2, 3]], [[0, 2], [1, 3]], [2, 3, 0, 1]),
        ("aabb", [[0], [1], [2], [3]], [[0, 1, 2, 3]], [2, 3, 0, 1]),
        ("aabb", [[0, 1, 2, 3]], [[0], [1], [2], [3]], [2, 3, 0, 1]),
        ("aabb", [[0], [1], [2], [3]], [[0], [1], [2], [3]], [2, 3, 0, 1]),
        ("aaab", [[0, 1, 2, 3]], [[0], [1], [2], [3]], [1, 2, 3, 0]),
    ],
    ids=["alone", "pipeline", "replicas", "pipeline elsewhere", "two stages on", "replica elsewhere", "tensor only", "uneven"],
)
def test_a_copy_is_on_another_machine_if_there_is_one(
    hosts: str, data_parallel: list[list[int]], pipelines: list[list[int]], expected: list[int]
) -> None:
    chosen = peers(hosts, data_parallel=data_parallel, pipelines=pipelines)
    assert chosen == expected
    assert sorted(chosen) == list(range(len(hosts))), "each rank keeps the copy of exactly one"
