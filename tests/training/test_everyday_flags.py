"""Megatron-LM's everyday flags: lengths in samples, flags that change no result, and everything that is wrong in one line."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.fork_flags import in_our_flags
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import build_parser, settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from tests.support.command_lines import EVERYDAY, FORK, FORK_ZBV, on_cpu
from tests.training.launch import ROOT, TINY_BATCH, TINY_MODEL, launch_warm, metrics, train

with quiet_third_parties():
    from megatron.zerobubble.training.models import mcore_config

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 --mock-data "
ITERATIONS = "--train-iters 10 --global-batch-size 8 "
SAMPLES = "--train-samples 84 --global-batch-size 8 "

FORK_EXAMPLE = f"{FORK} {FORK_ZBV} --allow-padding-num-layers"

IGNORED_IN_FORK_EXAMPLE = (
    "--no-barrier-with-level-1-timing",
    "--profile-step-start",
    "--profile-step-end",
    "--use-flash-attn",
    "--no-create-attention-mask-in-dataloader",
    "--profile-ranks",
    "--sequence-parallel",
)


def settings(flags: str, *, base: str = MODEL, world_size: int = 4) -> Settings:
    return settings_from_argv((base + flags).split(), world_size=world_size)


def refusal(flags: str, *, base: str = MODEL) -> str:
    """The one line that refuses `flags`."""
    with pytest.raises(ConfigError) as caught:
        settings(flags, base=base)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.claims(
    "Long runs",
    "the flags of the example script of the zero-bubble authors' fork, but for its tokenizer: lengths in samples, flags about "
    "logs, profilers and legacy kernels",
    "works",
)
def test_the_forks_example_parses_and_means_the_same() -> None:
    made = settings(on_cpu(FORK_EXAMPLE), base="", world_size=2)
    assert (made.train_iters, made.lr_warmup_samples / 8, made.lr_decay_samples / 8) == (100, 2, 75)
    assert made.model.num_positions == 64
    assert made.zero_bubble.schedule == "zbv"
    assert made.zero_bubble.enable_optimizer_post_validation
    assert not made.parallel.sequence_parallel, "without tensor parallelism it shards nothing, as in Megatron-LM"
    assert made.ignored_flags == IGNORED_IN_FORK_EXAMPLE
    assert len(made.notes) == 1
    assert {"--use-legacy-models", "--enable-zb-runtime", "--zero-bubble-max-pending-backward"} < set(made.notes[0].split())


@pytest.mark.parametrize("name", EVERYDAY)
def test_an_everyday_command_line_parses_or_gets_one_line(name: str) -> None:
    """The line names flags that it has, and says where they run."""
    if name in ("fork", "gpt-3"):
        settings(on_cpu(EVERYDAY[name]), base="")
        return
    message = refusal(on_cpu(EVERYDAY[name]), base="")
    named = set(re.findall(r"--[a-z0-9-]+", message.replace("did you mean --max-position-embeddings", ""))) - {"--help"}
    assert named
    assert named <= set(EVERYDAY[name].split())
    assert "megatron-core 0.17 (Python 3.12)" in message


def test_every_flag_of_the_examples_is_accepted_or_named_in_one_line() -> None:
    flags = {word for line in (*EVERYDAY.values(), FORK_EXAMPLE) for word in line.split() if word.startswith("--")}
    known = set(build_parser()._option_string_actions)
    unknown = {flag for flag in flags if known.isdisjoint(in_our_flags([flag])[0]) and in_our_flags([flag])[0]}
    message = refusal(" ".join(sorted(unknown)), base="")
    assert len(flags) > 60
    assert all(re.search(rf"{flag}\b", message) for flag in unknown)
    assert "megatron-core 0.17 (Python 3.12)" in message


def test_the_forks_example_as_it_stands_is_refused_in_one_line() -> None:
    assert "argument --tokenizer-type: invalid choice: 'GPTSentencePieceTokenizer'" in refusal(FORK_EXAMPLE, base="")
    message = refusal(FORK_EXAMPLE.replace("GPTSentencePieceTokenizer", "NullTokenizer"), base="")
    assert "unrecognized arguments: --tokenizer-model, which needs megatron-core 0.17 (Python 3.12)" in message
    assert set(re.findall(r"--[a-z0-9-]+", message)) == {"--tokenizer-model", "--help"}


@pytest.mark.parametrize(
    ("flags", "iterations", "warmup", "decay"),
    [
        (ITERATIONS, 10, 0, 80),
        (ITERATIONS + "--lr-warmup-iters 3 --lr-decay-iters 8", 10, 24, 64),
        (ITERATIONS + "--lr-warmup-fraction 0.5", 10, 40, 80),
        (SAMPLES, 10, 0, 84),
        (SAMPLES + "--lr-warmup-samples 12 --lr-decay-samples 40", 10, 12, 40),
        (SAMPLES + "--lr-warmup-fraction 0.5 --lr-decay-samples 40", 10, 20, 40),
    ],
)
def test_lengths_in_samples_and_in_iterations(flags: str, iterations: int, warmup: float, decay: int) -> None:
    """A run has whole global batches; warm-up and decay advance by one of them per step, and need not be whole ones."""
    made = settings(flags)
    assert (made.train_iters, made.lr_warmup_samples, made.lr_decay_samples) == (iterations, warmup, decay)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (ITERATIONS + "--train-samples 80", "--train-iters and --train-samples are both given; choose one"),
        (SAMPLES + "--lr-decay-iters 5", "--lr-decay-iters does not go with --train-samples: give --lr-decay-samples"),
        (SAMPLES + "--lr-warmup-iters 5", "--lr-warmup-iters does not go with --train-samples: give --lr-warmup-samples"),
        (ITERATIONS + "--lr-decay-samples 5", "--lr-decay-samples does not go with --train-iters: give --lr-decay-iters"),
        (ITERATIONS + "--lr-warmup-samples 5", "--lr-warmup-samples does not go with --train-iters: give --lr-warmup-iters"),
        (ITERATIONS + "--lr-decay-iters 5 --lr-decay-samples 40", "--lr-decay-samples does not go with --train-iters"),
        (SAMPLES + "--lr-warmup-samples 8 --lr-warmup-fraction 0.1", "--lr-warmup-fraction and --lr-warmup-samples are both"),
        (SAMPLES + "--lr-warmup-samples 84", "warm-up of 84 samples must be shorter than the decay of 84 "),
        ("--train-samples 7 --global-batch-size 8", "--train-samples 7 is less than a global batch, of 8 samples"),
        (SAMPLES + "--zero-bubble-trace . --zero-bubble-trace-iterations 11 --pipeline-model-parallel-size 2 "
         "--enable-zero-bubble", "11 come after the last one (--train-samples 84: 10 iterations)"),
        (ITERATIONS + "--lr-warmup-init 0.1", "--lr-warmup-init 0.1 is larger than --lr 0.001"),
        (ITERATIONS + "--max-position-embeddings 16", "--max-position-embeddings 16 is less than --seq-length 32"),
        (
            ITERATIONS + "--recompute-activations --recompute-granularity full",
            "--recompute-activations is --recompute-granularity selective, and full is given; leave one of them out",
        ),
        (ITERATIONS + "--adam-eps 0", "--adam-eps 0.0 must be greater than 0"),
        (ITERATIONS + "--hysteresis 0", "--hysteresis 0 must be greater than 0"),
        (ITERATIONS + "--dataloader-type cyclic", "argument --dataloader-type: invalid choice: 'cyclic' (choose from 'single')"),
        (ITERATIONS + "--tensorboard-dir", "argument --tensorboard-dir: expected one argument"),
        (ITERATIONS + "--profile-ranks", "argument --profile-ranks: expected at least one argument"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, message: str) -> None:
    assert message in refusal(flags)


def test_the_flags_reach_megatron_core() -> None:
    flags = "--adam-eps 1e-5 --sgd-momentum 0.8 --hysteresis 3 --recompute-activations --max-position-embeddings 64"
    made = settings(f"{SAMPLES} {flags} --fp16 --lr-warmup-init 1e-4 --lr-warmup-samples 8 --recompute-modules core_attn")
    optimizer = mcore_config.optimizer_config(made)
    assert (optimizer.adam_eps, optimizer.sgd_momentum, optimizer.hysteresis) == (1e-5, 0.8, 3)
    assert mcore_config.transformer_config(made, on_gpu=False, layout=None).recompute_granularity == "selective"
    assert made.optim.lr_warmup_init == 1e-4
    assert made.model.num_positions == 64
    assert settings(ITERATIONS).model.num_positions == 32


def test_what_changes_no_result_is_ignored_with_its_values() -> None:
    flags = "--tensorboard-dir d --profile --profile-ranks 0 3 --tensorboard-dir=e --wandb-project p --dataloader-type single"
    assert settings(ITERATIONS + flags).ignored_flags == ("--tensorboard-dir", "--profile", "--profile-ranks", "--wandb-project")
    assert settings(ITERATIONS).ignored_flags == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--train-foo 3 --sft --train-bar=7 --train-foo 4",
            "unrecognized arguments: --train-foo, --sft, --train-bar, which need megatron-core 0.17 (Python 3.12), where "
            "pretrain_gpt.py is Megatron-LM's own loop (--help lists all flags)",
        ),
        (
            "--num-layer 3 --tensorboard-dri x --sft",
            "unrecognized arguments: --num-layer (did you mean --num-layers?), --tensorboard-dri (did you mean "
            "--tensorboard-dir?), --sft, which",
        ),
        ("--lr --lr x", "argument --lr: expected one argument"),
        ("--lr x", "argument --lr: invalid float value: 'x' ("),
        ("--tokenizer-model T", "unrecognized arguments: --tokenizer-model, which needs megatron-core 0.17"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_in_one_line(flags: str, message: str) -> None:
    assert message in refusal(flags)
    assert "required" not in refusal(flags, base=""), "what is missing comes last"


def test_a_long_list_of_unknown_flags_is_not_cut() -> None:
    names = [f"--{letter * 40}" for letter in "abcdefghijkl"]
    message = refusal(" ".join(f"{name} 1" for name in names))
    assert all(name in message for name in names)


def test_what_is_missing_is_named() -> None:
    assert refusal("--num-layers 3", base="") == (
        "the following arguments are required: --hidden-size, --num-attention-heads, --seq-length, --lr, --micro-batch-size "
        "(--help lists all flags)"
    )
    assert refusal("") == "the length of the run is missing: give --train-iters or --train-samples"


def test_help_lists_the_ignored_flags() -> None:
    assert "Ignored:" in build_parser().format_help()


def test_samples_train_as_iterations_do_and_resume(tmp_path: Path) -> None:
    """24 samples are three iterations, the run of --train-iters 3; the checkpoint of either is continued with the other."""
    run = [
        *TINY_MODEL,
        *TINY_BATCH,
        "--mock-data",
        "--eval-iters",
        "0",
        "--pipeline-model-parallel-size",
        "2",
        "--enable-zero-bubble",
    ]
    run += [
        "--max-position-embeddings",
        "64",
        "--adam-eps",
        "1e-6",
        "--metrics-jsonl",
        tmp_path / "metrics",
        "--save",
        tmp_path / "save",
    ]
    length = ["--train-samples", "24", "--lr-warmup-samples", "8", "--lr-decay-samples", "24"]
    said = train([*run, *length, "--exit-interval", "2", "--tensorboard-dir", "x", "--timing-log-level", "1"])
    assert said.count("the reference trainer ignores --tensorboard-dir, --timing-log-level: they change no result") == 1
    assert "iteration        2/       3" in said
    length = ["--train-iters", "3", "--lr-warmup-iters", "1", "--lr-decay-iters", "3"]
    assert "done: 3 iterations" in train([*run, *length, "--load", tmp_path / "save"])
    assert [fields["lr"] for fields in metrics(tmp_path / "metrics").values()] == pytest.approx([0, 1e-2, 5e-3])


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is not None, reason="pretrain_gpt.py runs Megatron-LM's loop here"
)
def test_pretrain_gpt_says_that_this_trainer_stands_in() -> None:
    flags = [*TINY_MODEL, *TINY_BATCH, "--train-iters", "1", "--eval-iters", "0", "--mock-data"]
    done = launch_warm(flags, num_ranks=1, script=ROOT / "pretrain_gpt.py")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("this megatron-core has no training loop, so the reference trainer runs") == 1
