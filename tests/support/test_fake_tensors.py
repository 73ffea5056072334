"""Whole ranks at true sizes on FakeTensors of `cuda:0`: what their passes launch, hold and read, and where their tensors are."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from megatron.zerobubble.plan.ir import Op, OpKind
from tests.support.fake_tensors import guard
from tests.support.fake_tensors.cases import CASES, Case

pytestmark = pytest.mark.skipif(guard.compiler() is None, reason="no C++ compiler for the device of FakeTensors")

ON_HOST = ("core/tensor_parallel/random.py:fork", "core/transformer/moe/")
"""Where megatron-core makes tensors on the host: a check of its random state, and the sizes of what experts get."""


@pytest.mark.claims(
    "Long runs",
    "whole ranks at true sizes (Llama-3-8B and 70B, DeepSeek-V3-like stages, to 32k tokens) on FakeTensors of `cuda:0`: B + W "
    "launch no more kernels than BW; bytes after F, B and W are those of the plan within 2 %, and between B and W those that W "
    "needs; every tensor on the device; the host reads nothing in passes, but for the sizes of experts in F; "
    "[the counts](benchmarks/fake_tensors.md)",
    "works; no kernel runs; **not run on a GPU**",
)
@pytest.mark.sampled(1 / 16)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_passes_launch_hold_and_read_no_more_than_planned(case: Case) -> None:
    command = [sys.executable, "-m", "tests.support.fake_tensors", "--case", case.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    ran = json.loads(done.stdout.splitlines()[-1])
    for stage, ops in ran["stages"].items():
        assert ops["B"]["kernels"] + ops["W"]["kernels"] <= ops["BW"]["kernels"], stage
        assert ops["W"]["kernels"] == ops["W"]["gemms"], "a W is GEMMs and nothing else"
        for kind in "FBW":
            allowed = case.reads if kind == "F" or (kind == "B" and "--recompute-granularity full" in case.others) else ()
            assert set(ops[kind]["reads"]) <= set(allowed), (stage, kind)
            assert [made for made in ops[kind]["elsewhere"] if not any(f" at {each}" in made for each in ON_HOST)] == []
    assert ran["reads_around"] == {}
    assert sum(ran["reads_in_step"].values()) == 1, "all statistics at once"
    _check_bytes(ran)


def _check_bytes(ran: dict[str, Any]) -> None:
    """What is held after each op is what the planner sums up, from the bytes that a microbatch has after its F and its B."""
    tolerance = 0.02 * ran["peak_bytes"]
    after = {stage: {OpKind.F: ops["activation"], OpKind.B: ops["after_backward"]} for stage, ops in ran["stages"].items()}
    held: dict[tuple[int, int], OpKind] = {}
    for text, seen, pending in ran["held_bytes"]:
        op = Op.parse(text)
        held[op.stage, op.microbatch] = op.kind
        waiting, deferred = (
            sum(after[str(stage)][kind] for (stage, _), kind in held.items() if kind in kinds)
            for kinds in ([OpKind.F], [OpKind.B])
        )
        assert seen == pytest.approx(waiting + deferred, abs=tolerance), text
        assert seen == pytest.approx(waiting + pending, abs=tolerance), f"{text}: beside the operands of W something is held"
    assert ran["left_bytes"] == pytest.approx(0, abs=tolerance)
    allocated, reserved = ran["replayed"]
    assert ran["state_bytes"] + ran["most_bytes"] <= allocated <= reserved
