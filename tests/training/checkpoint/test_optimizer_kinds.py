"""Checkpoints between kinds of optimizers, on one rank: training continues bit for bit. Between layouts: tests/training."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.load import RestoredProgress, load_checkpoint
from megatron.zerobubble.training.checkpoint.save import save_checkpoint
from tests.support.training_states import train, training_state_of

pytestmark = pytest.mark.usefixtures("world_of_one")

DISTRIBUTED = ["--use-distributed-optimizer"]


def saved(flags: list[str], folder: Path) -> None:
    with training_state_of(0, [*flags, "--save", str(folder)]) as training_state:
        train(training_state, first=1, last=2)
        save_checkpoint(training_state, run="a", iteration=2, consumed_samples=16)


def continued(flags: list[str], folder: Path) -> list[float]:
    with training_state_of(0, [*flags, "--load", str(folder)]) as training_state:
        assert load_checkpoint(training_state) == RestoredProgress(2, 16)
        return train(training_state, first=3, last=4)


@pytest.mark.parametrize("precision", [pytest.param([], id="fp32", marks=pytest.mark.slow), pytest.param(["--bf16"], id="bf16")])
@pytest.mark.parametrize("writes_distributed", [True, False], ids=["distributed to plain", "plain to distributed"])
@pytest.mark.sampled(0.25)
def test_the_other_kind_continues_bit_for_bit(precision: list[str], writes_distributed: bool, tmp_path: Path) -> None:
    """fp32 is also in the chain of layouts."""
    writes, reads = (DISTRIBUTED, []) if writes_distributed else ([], DISTRIBUTED)
    saved([*precision, *writes], tmp_path)
    assert continued([*precision, *reads], tmp_path) == continued([*precision, *writes], tmp_path)


def test_losing_master_weights_is_an_error(tmp_path: Path) -> None:
    saved(["--bf16"], tmp_path)
    with pytest.raises(CheckpointError, match=r"written by the plain optimizer with master weights .* --no-load-optim"):
        continued([], tmp_path)
    continued(["--no-load-optim", "--no-load-rng"], tmp_path)
