"""What becomes of flags that are not ours, Megatron-LM's and misspelled ones, and of the length of a run in samples."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import build_parser, settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.config.suggestions import _INSTEAD

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --mock-data "


def settings(flags: str, base: str = MODEL) -> Settings:
    return settings_from_argv((base + flags).split(), world_size=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lerning-rate 3", r"unrecognized arguments: --lerning-rate 3; what Megatron-LM's own .* \(--help"),
        ("--num-layer 3", "did you mean --num-layers"),
        ("--global-batchsize=3", "did you mean --global-batch-size"),
        ("--use-flash-attn", "--use-flash-attn is not a flag of this package: choose .* --attention-backend flash"),
        ("--use-checkpoint-args --load x", "a checkpoint does not set flags here"),
        ("--use-mcore-models", "it is always on; leave it out"),
        ("--sft", "unrecognized arguments: --sft; what Megatron-LM's own pretrain_gpt.py has .* zerobubble run"),
        ("--ckpt-format torch", "--ckpt-format torch is not supported: checkpoints are saved and loaded as torch_dist"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_flags_that_are_not_taken(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(f"--train-iters 1 {flags}")
    assert "\n" not in str(caught.value)


def test_no_flag_of_ours_is_replaced_by_another() -> None:
    known = set(build_parser()._option_string_actions)
    assert not known & set(_INSTEAD)
    named = {word.strip(",;()") for text in _INSTEAD.values() for word in text.split() if word.startswith(("--", "(--"))}
    assert {word.strip("()") for word in named} <= known, "and what they name exists"


def test_the_length_of_a_run_in_samples() -> None:
    made = settings("--global-batch-size 4 --train-samples 42 --lr-warmup-samples 9 --lr-decay-samples 40")
    assert (made.train_iters, made.lr_warmup_samples, made.lr_decay_samples) == (10, 9, 40)
    assert settings("--global-batch-size 4 --train-samples 42 --lr-warmup-fraction 0.5").lr_warmup_samples == 21
    by_iterations = settings("--global-batch-size 4 --train-iters 10 --lr-warmup-iters 3 --lr-decay-iters 8")
    assert (by_iterations.train_iters, by_iterations.lr_warmup_samples, by_iterations.lr_decay_samples) == (10, 12, 32)


def test_a_ramp_up_has_more_iterations_in_as_many_samples() -> None:
    """Batches of 2 up to 8 samples, of 4 up to 16, of 6 up to 24, then of 8; megatron-core's calculator, sample by sample."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size=8,
        micro_batch_size=1,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        rank=0,
        start_global_batch_size=2,
        batch_size_increment=2,
        ramup_samples=24,
    )
    for samples in (1, 2, 7, 23, 24, 26, 40, 100):
        consumed = iterations = 0
        while True:
            calculator.update(consumed, consistency_check=False, verbose=False)
            if consumed + calculator.get_current_running_global_batch_size() > samples:
                break
            consumed += calculator.get_current_running_global_batch_size()
            iterations += 1
        flags = f"--global-batch-size 8 --rampup-batch-size 2 2 24 --train-samples {samples}"
        if iterations:
            assert settings(flags).train_iters == iterations, samples
        else:
            with pytest.raises(ConfigError, match="--train-samples 1 is less than one batch"):
                settings(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--train-iters N is required"),
        ("--train-iters 3 --train-samples 3", "--train-iters and --train-samples are both given; choose one"),
        (
            "--train-iters 3 --lr-warmup-samples 1",
            "--lr-warmup-samples needs --train-samples; with --train-iters give --lr-warmup-i",
        ),
        (
            "--train-samples 3 --lr-decay-iters 1",
            "--lr-decay-iters needs --train-iters; with --train-samples give --lr-decay-samp",
        ),
        ("--train-samples 3 --lr-warmup-samples 3", "warm-up of 3 samples must be shorter than the decay of 3"),
        ("--train-iters 3 --dry-run-world-size 4", "--dry-run-world-size needs --dry-run"),
    ],
)
def test_what_does_not_go_together(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(flags)
