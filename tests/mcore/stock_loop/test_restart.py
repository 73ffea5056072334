"""In-process restarts by nvidia-resiliency-ext: a new attempt trains as an undisturbed run, and nothing of a failed one stays."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.training.launch import ROOT, TIMEOUT_S, command, environment

PACKAGE = ROOT / ".nvidia-resiliency-ext"
TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 3 --seq-length 8 --clip-grad 1.14"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"
FAULTS = [
    {"in": "end"},
    *({"in": "forward_step", "rank": rank, "call": call} for rank in (0, 1) for call in (2, 9, 11)),
    {"in": "get_megatron_optimizer", "rank": 1, "call": 1},
    *({"in": "loss_function", "call": call} for call in (3, 6)),
]
"""Ten: among them before, at and after the validation of a step, and on a rank whose neighbor has not begun an iteration."""


def _attempts(tmp_path: Path, job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each rank wrote."""
    with socket.socket() as free:
        free.bind(("", 0))
        job |= {"port": free.getsockname()[1], "output": str(tmp_path / "rank")}
    path = os.pathsep.join([str(PACKAGE), environment()["PYTHONPATH"]])
    done = subprocess.run(
        command([json.dumps(job)], num_ranks=2, module="tests.support.restarting"),
        env=environment(PYTHONPATH=path, TORCH_CPP_LOG_LEVEL="error"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"rank.{rank}").read_text()) for rank in range(2)]


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: ten in-process restarts by nvidia-resiliency-ext 0.4.1 after errors on either rank, ZB-H1 with "
    "per-token loss and ZBV, both with post-validation: the losses of an undisturbed run, nothing of a failed attempt stays",
    "works over gloo, bit for bit, on megatron-core 0.16.1; **not run on a GPU**",
)
@pytest.mark.parametrize(
    ("flags", "options"),
    [(f"{TWO} --calculate-per-token-loss", {"schedule": "zb-h1"}), (CHUNKS, {"schedule": "zbv", "dropout_seed": 1})],
    ids=["zb-h1", "zbv"],
)
@pytest.mark.sampled(0.5, group="whole jobs")
def test_a_restart_in_process_trains_as_an_undisturbed_run(tmp_path: Path, flags: str, options: dict[str, Any]) -> None:
    if not PACKAGE.is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("nvidia-resiliency-ext was not fetched: make resiliency")
    if importlib.util.find_spec("megatron.core.dist_checkpointing.strategies.nvrx") is not None:
        pytest.skip("this megatron-core needs a newer nvidia-resiliency-ext")
    last = 1 if options["schedule"] == "zb-h1" else 0
    faults = [{"rank": last} | fault if fault["in"] == "loss_function" else fault for fault in FAULTS]
    job = {"flags": flags, "options": options | {"optimizer_post_validation": True}, "faults": faults}
    for rank, (first, *others) in enumerate(_attempts(tmp_path, job)):
        assert first["losses"] == others[-1]["losses"]
        assert len(first["losses"]) == (3 if rank == 1 else 0)
        assert [each.get("losses") for each in others[:-1]] == [None] * (len(FAULTS) - 1)
        alive = [{name: value for name, value in each.items() if name != "losses"} for each in others]
        assert alive == [alive[0]] * len(FAULTS)
        assert (alive[0]["models"], alive[0]["status"]) == (0, "None")
