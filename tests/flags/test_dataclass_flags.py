"""Flags from dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import add_group, field_docs, from_namespace
from megatron.zerobubble.flags.memory_limit import MemoryLimit
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore import state_memory as memory
from megatron.zerobubble.mcore.state_memory import usable_bytes


@dataclass(frozen=True, kw_only=True)
class Example:
    """Example group.

    More about it.
    """

    size: int = 1
    """How large. 100% sure."""
    rate: float = 0.5
    """How fast."""
    name: str | None = None
    """What it is called."""
    kind: Literal["a", "b"] = "a"
    """Which kind."""
    loud: bool = False
    """Whether to shout."""


def parse(*argv: str) -> Example:
    parser = argparse.ArgumentParser()
    add_group(parser, Example)
    return from_namespace(Example, parser.parse_args(argv))


def test_defaults_and_values() -> None:
    assert parse("--size", "3") == Example(size=3)
    given = parse("--size", "3", "--rate", "1e-3", "--name", "x", "--kind", "b", "--loud")
    assert (given.rate, given.name, given.kind, given.loud) == (1e-3, "x", "b", True)


def test_help_is_the_docstring() -> None:
    parser = argparse.ArgumentParser()
    add_group(parser, Example)
    text = " ".join(parser.format_help().split())
    assert "Example group: More about it." in text
    assert "How large. 100% sure. Default: 1." in text
    assert "How fast. Default: 0.5." in text


def test_every_zero_bubble_flag_is_documented() -> None:
    assert set(field_docs(ZeroBubbleConfig)) == {field.name for field in dataclasses.fields(ZeroBubbleConfig)}


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0.75", MemoryLimit(relative=0.75)),
        ("2", MemoryLimit(relative=2.0)),
        ("60GiB", MemoryLimit(total_bytes=60 * 2**30)),
        ("1.5 tib", MemoryLimit(total_bytes=3 * 2**39)),
        ("512MB", MemoryLimit(total_bytes=512_000_000)),
        (" Auto ", MemoryLimit()),
    ],
)
def test_limits(text: str, limit: MemoryLimit) -> None:
    assert MemoryLimit.parse(text) == limit
    assert limit.is_relative is (limit.relative is not None)


def test_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU belongs to one rank, the machine's memory is shared by its ranks; a fraction of either is reserved."""
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__)
    assert usable_bytes(torch.device("cpu"), ranks_on_host=4) == 942_080
    properties = mock.Mock(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert usable_bytes(torch.device("cuda"), ranks_on_host=8) == pytest.approx(73.6e9)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("zero_bubble_slices", 8, "of type int; give str"),
        ("zero_bubble_trace", Path("trace"), "of type PosixPath; give str"),
        ("zero_bubble_replan_interval", True, "of type bool; give int"),
        ("zero_bubble_planning_seconds", "5", "of type str; give float"),
        ("enable_zero_bubble", 1, "of type int; give bool"),
    ],
)
def test_a_config_that_a_program_writes_has_the_types_of_its_fields(name: str, value: object, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*, {wanted}$"):
        ZeroBubbleConfig(**{"zero_bubble_schedule": "zb", name: value})  # type: ignore[arg-type]
    ZeroBubbleConfig(zero_bubble_schedule="zb", zero_bubble_planning_seconds=5)
