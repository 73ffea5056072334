"""Jobs whose number of microbatches grows (batch-size ramp-up) and that plan again meanwhile: all ranks reach the end."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.zerobubble.plan.ir import Plan
from tests.support.loops import SIZES, Loop
from tests.support.ranks import RankPool
from tests.support.stock import installed

RAMP = (2, 2, 4, 4, 6)
CHUNKS = "--virtual-pipeline-model-parallel-size 2"
AUTO = "--zero-bubble-schedule auto --zero-bubble-planning-seconds 0.05"
REPLANNED = (
    "--zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-pipeline-timers-end-iter 3 --zero-bubble-planning-seconds 0.05"
)
VALIDATED = "--enable-optimizer-post-validation --clip-grad 0.5"


def ramp(rank: int, flags: str) -> dict[str, Any]:
    """The results of a job of this ramp on one rank, and its weights; `uninstall` ends it."""
    with installed(f"{SIZES} {flags}", by_flags=True) as args, contextlib.redirect_stderr(io.StringIO()):
        loop = Loop(args)
        for num_microbatches in RAMP:
            loop.train(num_microbatches)
    return {"results": loop.seen, **loop.state()}


@pytest.mark.claims(
    "Your own script",
    "a number of microbatches that grows (batch-size ramp-up) while it is planned again, with trace, saved plan, balanced stages "
    "and post-validation: ZB-H1, ZBV, `auto`",
    "works, losses bit for bit (clipped: 1e-6)",
)
@pytest.mark.parametrize(
    ("flags", "has_files"),
    [
        (f"--zero-bubble-max-pending-backward 1p {REPLANNED}", False),
        (f"{CHUNKS} --zero-bubble-v-schedule {REPLANNED}", True),
        (f"{AUTO} --zero-bubble-balance-stages", True),
        (f"{CHUNKS} {AUTO} --zero-bubble-v-schedule {VALIDATED}", False),
    ],
    ids=["zb-h1", "zbv-trace-plan", "auto-trace-plan-balance", "auto-v-post-validation"],
)
def test_a_job_with_a_ramp_ends_as_stock(two_ranks: RankPool, tmp_path: Path, flags: str, has_files: bool) -> None:
    trace, plan = tmp_path / "trace", tmp_path / "plan.json"
    files = f"--zero-bubble-trace {trace} --zero-bubble-trace-iterations 2,5 --zero-bubble-save-plan {plan}" if has_files else ""
    clip = "--clip-grad 0.5" if VALIDATED in flags else ""
    stock, ramped = (two_ranks.run(ramp, each) for each in (f"--zero-bubble-schedule stock {clip}", f"{flags} {files}"))
    losses = [[float(np.mean([each["lm loss"] for each in call])) for call in job[-1]["results"]] for job in (stock, ramped)]
    assert losses[1] == (pytest.approx(losses[0], rel=1e-6) if clip else losses[0])
    if has_files:
        assert Plan.from_json(plan.read_bytes()).num_microbatches == RAMP[-1]
        recorded = json.loads((trace / "report.json").read_text())["iterations"]
        assert [(each["iteration"], each["num_microbatches"]) for each in recorded] == [(2, 2), (5, 6)]
