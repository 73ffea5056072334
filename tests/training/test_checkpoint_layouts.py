"""A checkpoint can be loaded under any other layout, and saved again: training goes on as if nothing had been in between.

A chain of jobs on four ranks, each with another schedule, placement, pipeline, tensor or data-parallel size, or optimizer. The
first one trains, each loads what the one before it saved and saves it again, and the last one trains on: the losses of its next
iterations are those of the first job's, up to the order of sums.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zerobubble.training import checkpointing
from megatron.zerobubble.training.saving import Saver
from tests.support.ranks import RankPool
from tests.support.trainees import train, trainee_of

INTERLEAVED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
V2, V4 = (
    "--pipeline-model-parallel-size 2 --zero-bubble-v-schedule",
    "--pipeline-model-parallel-size 4 --zero-bubble-v-schedule",
)
H1 = "--pipeline-model-parallel-size 2 --enable-zero-bubble"
DISTRIBUTED = "--use-distributed-optimizer"

SLOW = pytest.mark.slow
CHAINS = {
    "fp32": [
        f"{INTERLEAVED} {DISTRIBUTED}",
        V2,
        f"{V4} --async-save",
        f"{H1} --tensor-model-parallel-size 2",
        f"--tensor-model-parallel-size 1 {DISTRIBUTED} --async-save",
        f"{INTERLEAVED} {DISTRIBUTED}",
    ],
    "bf16": [
        f"{H1} --bf16",
        f"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-bubble-v-schedule {DISTRIBUTED} --bf16",
        f"{V4} --bf16",
        f"{H1} --bf16",
    ],
}


def walk(rank: int, chain: list[str], folder: str) -> tuple[list[float], list[float]]:
    """Losses of iterations 3 and 4 in the first job, which saves after 2, and in the last one."""
    expected: list[float] = []
    actual: list[float] = []
    for number, flags in enumerate(chain):
        load = ["--load", f"{folder}/{number - 1}"] if number else []
        with trainee_of(rank, [*flags.split(), "--save", f"{folder}/{number}", *load]) as (trainee, store):
            if load:
                restored = checkpointing.load(trainee)
                assert restored == checkpointing.Restored(2, 16)
            else:
                train(trainee, first=1, last=2)
            saver = Saver(trainee, store)
            saver.save(iteration=2, consumed_samples=16)
            if number == 0:
                expected = train(trainee, first=3, last=4)
            if number == len(chain) - 1:
                actual = train(trainee, first=3, last=4)
            saver.finish()
    return expected, actual


@pytest.mark.parametrize("chain", [pytest.param(CHAINS["fp32"], id="fp32"), pytest.param(CHAINS["bf16"], id="bf16", marks=SLOW)])
def test_a_checkpoint_goes_through_any_layout(chain: list[str], four_ranks: RankPool, tmp_path: Path) -> None:
    for expected, actual in four_ranks.run(walk, chain, str(tmp_path)):
        assert actual == pytest.approx(expected, rel=1e-6 if "--bf16" not in chain[0] else 1e-3)
