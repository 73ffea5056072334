"""The command line of tools/benchmarks/post_validation.py: it measures both kinds of steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.training.launch import ROOT, environment

SMALL = ["--num-ranks", "2", "--num-microbatches", "4", "--iterations", "1", "--repeats", "2"]
PASSES = ["--forward-ms", "2", "--backward-ms", "2", "--wgrad-ms", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.benchmarks.post_validation", *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment(), cwd=ROOT)


def test_measures_both_kinds_of_steps_beside_the_prediction(tmp_path: Path) -> None:
    done = run(*PASSES, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    body = json.loads((tmp_path / "out.json").read_text())
    assert body["format"] == "zerobubble-post-validation-benchmark/1"
    assert [row["schedule"] for row in body["schedules"]] == ["zb-h2", "zbv"]
    for row in body["schedules"]:
        assert row["simulated_span_ms"] == 24.0, "four microbatches without a bubble"
        assert row["simulated_makespan_ms"] > 24.0
        assert len(row["synchronous_ms"]) == len(row["early_ms"]) == 2
        assert min(row["synchronous_ms"] + row["early_ms"]) > 12.0, "the passes take their time"
        assert row["reached_least"] <= row["reached"] <= row["reached_most"]
        assert row["schedule"] in done.stdout
