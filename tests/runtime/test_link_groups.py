"""What a link's process group is made with. A double of NCCL's options stands for torch's, which this build may lack.

It has the fields that are set here, and shows that they arrive at `new_group`; not that NCCL heeds them.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.zerobubble.runtime.link_groups import link_group


class _Options:
    """torch.distributed.ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas="NCCL's choice")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each new group."""
    groups: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda **given: groups.append(given))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    return groups


@pytest.mark.parametrize("max_ctas", [None, 2])
def test_on_nccl_a_link_has_a_stream_of_high_priority(
    monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]], max_ctas: int | None
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    link_group(timeout=timedelta(minutes=3), max_ctas=max_ctas)
    (given,) = made
    options = given["pg_options"]
    assert options.is_high_priority_stream
    assert options._timeout == given["timeout"] == timedelta(minutes=3), "torch warns where they differ"
    assert options.config.max_ctas == (max_ctas or "NCCL's choice")


def test_each_link_group_has_options_of_its_own(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]]) -> None:
    """torch writes the group's ranks and name into them."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    for _ in range(2):
        link_group(timeout=None, max_ctas=None)
    assert made[0]["pg_options"] is not made[1]["pg_options"]


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_other_backends_get_no_options(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]], backend: str) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    link_group(timeout=None, max_ctas=8)
    assert made == [{"timeout": None, "pg_options": None}]
