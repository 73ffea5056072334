"""The documentation: plans that it shows are what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.zerobubble.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


def test_the_plan_on_the_planner_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The first example; the others search, which takes seconds."""
    shown = re.search(r"```console\n\$ zerobubble (plan .*)\n((?:.*\n)*?)```", (DOCS / "planner.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert main(shlex.split(shown[1])) == 0
    assert capsys.readouterr().out.strip() == shown[2].strip()
    timeline = [line for line in shown[2].splitlines() if line.startswith(("ms ", "rank "))]
    assert "\n".join(timeline) in (DOCS / "concepts.md").read_text(encoding="utf-8")
