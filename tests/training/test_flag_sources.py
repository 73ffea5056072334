"""What becomes of flags that are not ours, Megatron-LM's and misspelled ones, and the length of a run."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --mock-data "


def settings(flags: str, base: str = MODEL) -> Settings:
    return settings_from_argv((base + flags).split(), world_size=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lerning-rate 3", r"unrecognized arguments: --lerning-rate 3; what Megatron-LM's own .* \(--help"),
        ("--num-layer 3", "did you mean --num-layers"),
        ("--global-batchsize=3", "did you mean --global-batch-size"),
        ("--sft", "unrecognized arguments: --sft; what Megatron-LM's own pretrain_gpt.py has .* zerobubble run"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_flags_that_are_not_taken(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(f"--train-iters 1 {flags}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "warmup", "decay"),
    [("", 0, 10), ("--lr-warmup-fraction 0.5", 5, 10), ("--lr-warmup-iters 3 --lr-decay-iters 8", 3, 8)],
)
def test_the_schedule_of_the_learning_rate(flags: str, warmup: int, decay: int) -> None:
    optim = settings(f"--train-iters 10 {flags}").optim
    assert (optim.warmup_iters(10), optim.decay_iters(10)) == (warmup, decay)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "the following arguments are required: --train-iters"),
        ("--train-iters 3 --lr-warmup-iters 3", "warm-up of 3 iterations must be shorter than the decay of 3"),
    ],
)
def test_what_does_not_go_together(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(flags)
