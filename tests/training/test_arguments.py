"""The command line: accepted flags, error messages, and a frozen list of flags."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from megatron.zerobubble.training.config.settings import Settings

from megatron.zerobubble.errors import CheckpointError, ConfigError, DataError
from megatron.zerobubble.job.error_file import read_error_file
from megatron.zerobubble.training.arguments import build_parser, settings_from_argv
from tests.training.launch import PRETRAIN, ROOT, environment

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 10 --mock-data "
)
P4 = "--pipeline-model-parallel-size 4 "
V = "--zero-bubble-v-schedule "
CP = "--context-parallel-size 2 "
PADDED = "--allow-padding-num-layers "
LAYOUT = "--pipeline-model-parallel-layout "
EARLY = "--enable-optimizer-post-validation "
TRACE = "--zero-bubble-trace . --zero-bubble-trace-iterations "


def settings(flags: str = "", *, world_size: int = 4, base: str = BASE) -> Settings:
    return settings_from_argv((base + flags).split(), world_size=world_size)


@pytest.mark.parametrize(
    ("flags", "schedule", "num_chunks", "max_pending"),
    [
        ("", "stock", 1, None),
        ("--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4", "stock", 2, None),
        ("--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4", "stock", 2, None),
        ("--num-layers-per-virtual-pipeline-stage 2", "stock", 1, None),
        ("--enable-zero-bubble", "zb-h1", 1, None),
        ("--zero-bubble-max-pending-backward 1p", "zb-h1", 1, None),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 2p", "zb-h2", 1, None),
        ("--zero-bubble-max-pending-backward 6", "zb", 1, 6),
        ("--zero-bubble-max-pending-backward 3p", "zb", 1, 12),
        ("--zero-bubble-v-schedule", "zbv", 2, None),
        ("--enable-zero-bubble --zero-bubble-v-schedule", "zbv", 2, None),
        ("--zero-bubble-schedule 1f1b", "1f1b", 1, None),
        ("--zero-bubble-schedule stock", "stock", 1, None),
        ("--zero-bubble-schedule zbv", "zbv", 2, None),
        ("--zero-bubble-schedule zb-interleaved", "zb-interleaved", 2, None),
        (
            "--zero-bubble-schedule interleaved-1f1b --num-layers 16 --num-virtual-stages-per-pipeline-rank 4",
            "interleaved-1f1b",
            4,
            None,
        ),
        ("--zero-bubble-schedule auto", "zb", 1, None),
        ("--zero-bubble-schedule auto --zero-bubble-v-schedule", "zbv", 2, None),
        ("--zero-bubble-schedule auto --num-virtual-stages-per-pipeline-rank 2", "zb-interleaved", 2, None),
    ],
)
def test_schedules(flags: str, schedule: str, num_chunks: int, max_pending: int | None) -> None:
    """`auto` runs a searched schedule with the chunks that the run is started with, at 1F1B's memory."""
    made = settings(P4 + flags)
    assert made.num_chunks == num_chunks
    spec = made.schedule_spec
    assert (spec.name, spec.num_chunks, spec.max_pending_backward) == (schedule, num_chunks, max_pending)
    if made.zero_bubble.schedule == "auto":
        assert (spec.memory_limit, made.zero_bubble.timed_iterations) == (1.0, (2, 4))
    else:
        assert made.zero_bubble.schedule == schedule
    assert made.virtual_pipeline_size == (num_chunks if num_chunks > 1 else None)


@pytest.mark.parametrize(
    ("flags", "per_stage"),
    [
        ("", (2, 2, 2, 2)),
        (V + "--num-layers 12", (2, 2, 2, 2, 1, 1, 1, 1)),
        ("--num-layers 7 " + PADDED, (2, 2, 2, 1)),
        (V + "--num-layers 14 " + PADDED, (1, 2, 2, 2, 2, 2, 2, 1)),
        (V + "--num-layers 12 " + PADDED, (2, 2, 2, 2, 1, 1, 1, 1)),
        ("--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4 --num-layers 7 " + PADDED, (1, 1, 1, 1, 1, 1, 1, 0)),
        (LAYOUT + "E|(ttt|)*2ttL", (0, 3, 3, 2)),
        (LAYOUT + "E|(t|)*6ttL " + V, (0, 1, 1, 1, 1, 1, 1, 2)),
        (LAYOUT + "E|(t|)*6ttL --global-batch-size 4", (0, 1, 1, 1, 1, 1, 1, 2)),
    ],
)
def test_layers_of_each_stage(flags: str, per_stage: tuple[int, ...]) -> None:
    made = settings(P4 + flags)
    assert made.stage_layers(made.placement).per_stage == per_stage
    assert made.num_chunks == len(per_stage) // 4


def test_batch_and_data_parallelism() -> None:
    made = settings("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 12", world_size=8)
    assert (made.data_parallel_size, made.num_microbatches, made.global_batch_size) == (2, 6, 12)
    assert settings("--micro-batch-size 3", world_size=2).global_batch_size == 6


@pytest.mark.claims(
    "Schedules",
    "`--zero-bubble-v-schedule` with layers that do not divide over the ranks (and no layout), with interleaving, with p = 1",
    "rejected",
)
@pytest.mark.claims(
    "Planning and measuring",
    "`--layout-independent-dropout` with sequence or context parallelism, attention dropout with tensor parallelism",
    "rejected",
)
@pytest.mark.claims(
    "Layers",
    "`--attention-backend fused`, `flash` with dropout",
    "rejected on a CPU; **not run on a GPU**",
    also=("mcore/attention/test_torch_attention.py",),
)
@pytest.mark.claims(
    "Long runs", "data from text; flags and their checks: a bad one is a one-line error before any process group", "works"
)
@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--pipeline-model-parallel-size 3", 3, "--num-layers 8: .* over 3 stages .linear placement.; 6 or 9 would"),
        (P4 + "--num-layers 2", 4, "--num-layers 2: .* over 4 stages .linear placement.; 4 would"),
        (P4 + V + "--num-layers 10", 4, "10 layers do not divide .*V placement.; 8 or 12 would.*-layout sets the layers of"),
        (P4 + "--num-layers 7", 4, "; 4 or 8 would.*, --allow-padding-num-layers gives the first and last stage one less"),
        (P4 + PADDED + "--num-layers 5", 4, "5 layers on 4 stages .* leave 3 places empty, .* use one of 4, 6, 7, 8"),
        (P4 + LAYOUT + "Et|tt|tt|ttL", 4, "has 7 layers, --num-layers is 8"),
        (P4 + LAYOUT + "Et|(tt|)*3tL --enable-zero-bubble", 4, "has 5 stages; schedule zb-h1 on 4 pipeline ranks needs 4"),
        (P4 + LAYOUT + "Et|(tt|)*3tL", 4, "has 5 stages; schedule stock on 4 pipeline ranks needs a multiple of 4"),
        (P4 + LAYOUT + "E|(t|)*6ttL --global-batch-size 6", 4, "interleaved .* divisible by the pipeline size 4, got 6"),
        (P4 + LAYOUT + "Et*4|t*4L " + V, 4, "has 2 stages; schedule zbv on 4 pipeline ranks needs 8"),
        (P4 + LAYOUT + "Et*7|mtL", 4, "--pipeline-model-parallel-layout: layout .* has an m .multi-token prediction."),
        (P4 + LAYOUT + "Et*7|t|m|L", 4, "has MTP layers .m. in stage 2: put them directly before the L"),
        (P4 + LAYOUT + "E(tt|)*4L " + PADDED, 4, "sets the layers of every stage; leave out --allow-padding-num-layers"),
        (LAYOUT + "Et*4|t*4L", 4, "--pipeline-model-parallel-layout .* --pipeline-model-parallel-size of at least 2, got 1"),
        (P4 + "--num-layers-per-virtual-pipeline-stage 4 --num-layers 7 " + PADDED, 4, "make stages of 2; give that or less"),
        (P4 + "--zero-bubble-balance-stages", 4, "needs a schedule of this package: add --enable-.*-schedule 1f1b"),
        (P4 + V + "--num-layers-per-virtual-pipeline-stage 1", 4, "cannot be combined with --num-layers-per-virtual"),
        (V, 4, "--zero-bubble-v-schedule .* --pipeline-model-parallel-size of at least 2, got 1"),
        ("--enable-zero-bubble", 4, "zb-h1 .* needs --pipeline-model-parallel-size of at least 2"),
        (P4 + "--zero-bubble-schedule zbx", 4, "'zbx' is unknown; choose from stock, auto, 1f1b, interleaved-1f1b, zb-h1"),
        (P4 + "--zero-bubble-schedule zbv --enable-zero-bubble", 4, "already names the schedule"),
        (P4 + "--zero-bubble-max-pending-backward soon", 4, "--zero-bubble-max-pending-backward.*'soon'.*1p or 2p"),
        (P4 + "--num-layers-per-virtual-pipeline-stage 3", 4, "does not divide the 2 layers .* choose from 1, 2"),
        (P4 + "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6", 4, "divisible by the pipeline size 4, got 6"),
        ("--num-layers-per-virtual-pipeline-stage 1", 4, "needs --pipeline-model-parallel-size of at least 2, got 1"),
        (P4, 6, r"6 rank\(s\), which is not divisible by .* 1 x .* 4 = 4"),
        ("--global-batch-size 6", 4, "--global-batch-size 6 is not divisible by --micro-batch-size 1 x .* 4 = 4; 8 would be"),
        (P4 + EARLY, 4, "--enable-optimizer-post-validation needs a schedule of this package: add --enable-zero-bubble"),
        (P4 + V + EARLY + "--post-validation-patience -1", 4, "--post-validation-patience -1 must not be negative"),
        (P4 + V + EARLY + "--post-validation-snapshot disk", 4, "--post-validation-snapshot 'disk' is unknown; choose from"),
        (P4 + "--zero-bubble-schedule zb-h1 --zero-bubble-memory-limit 1", 4, "schedule zb-h1 has a fixed order; give --enable-"),
        (P4 + V + "--zero-bubble-memory-limit 0.1", 4, "memory limit 0.1 is too small .* the smallest that works is 1.0"),
        (P4 + V + "--zero-bubble-memory-limit 0", 4, "--zero-bubble-memory-limit '0' is none of: a number above 0 .* 60GiB"),
        (P4 + V + "--zero-bubble-memory-limit 0MiB", 4, "'0MiB' is none of"),
        (P4 + V + "--zero-bubble-memory-limit much", 4, "'much' is none of: .* auto"),
        (P4 + "--zero-bubble-schedule auto --zero-bubble-planning-seconds 0", 4, "auto needs profiled iterations"),
        ("--zero-bubble-schedule auto", 4, "schedule auto fills the pipeline bubble and needs"),
        (
            P4 + "--zero-bubble-schedule auto --zero-bubble-v-schedule --num-virtual-stages-per-pipeline-rank 2",
            4,
            "--zero-bubble-v-schedule cannot be combined with",
        ),
        (P4 + V + "--zero-bubble-memory-limit auto --zero-bubble-planning-seconds 0", 4, "limit auto needs profiled iterations"),
        (P4 + "--zero-bubble-v-schedule-mem-setup half", 4, "mem-setup half needs --zero-bubble-v-schedule"),
        (P4 + V + "--zero-bubble-v-schedule-mem-setup less", 4, "mem-setup 'less' is unknown; choose from zb, half, min"),
        (P4 + V + "--zero-bubble-v-schedule-mem-setup min --zero-bubble-memory-limit 1", 4, "memory-limit 1 replaces"),
        (P4 + "--zero-bubble-replan-interval 9", 4, "schedule stock has a fixed order: .*--zero-bubble-replan-interval need"),
        (P4 + V + "--zero-bubble-replan-interval 9", 4, "than the 11 iterations that are profiled; give at least that many"),
        (P4 + V + "--zero-bubble-pipeline-timers-end-iter 9", 4, "end-iter 9 is before the first profiled iteration 100"),
        (P4 + V + "--zero-bubble-trace-iterations 5", 4, "--zero-bubble-trace-iterations needs --zero-bubble-trace DIR"),
        (P4 + V + TRACE + "0,5", 4, "--zero-bubble-trace-iterations '0,5' must be iterations from 1 on, for example 100,200"),
        (P4 + V + TRACE + "2,x", 4, "--zero-bubble-trace-iterations '2,x' must be"),
        (P4 + V + TRACE + "11,12,3", 4, "--zero-bubble-trace-iterations: 11, 12 come after the last one .--train-iters 10."),
        (P4 + V + "--zero-bubble-trace /dev/null/x", 4, "--zero-bubble-trace /dev/null/x: /dev/null is not a writable directory"),
        ("--tensor-model-parallel-size 2 --num-attention-heads 1", 2, "--num-attention-heads 1 is not divisible"),
        ("--overlap-param-gather", 4, "needs --use-distributed-optimizer and --overlap-grad-reduce"),
        ("--hidden-size 66", 4, "--hidden-size 66 does not divide over --num-attention-heads 4"),
        ("--group-query-attention --num-query-groups 3", 4, "does not divide over --num-query-groups 3"),
        ("--bf16 --fp16", 4, "--bf16 and --fp16 are both given"),
        ("--loss-scale 8", 4, "--loss-scale needs --fp16"),
        ("--clip-grad -1", 4, "--clip-grad -1.0 must not be negative"),
        ("--hidden-dropout 1", 4, "--hidden-dropout 1.0 must be at least 0 and less than 1"),
        ("--min-lr 1", 4, "--min-lr 1.0 is larger than --lr 0.001"),
        ("--lr-warmup-iters 10", 4, "warm-up of 10 iterations must be shorter than the decay of 10"),
        ("--optimizer sgd --use-distributed-optimizer", 4, "leave it out with --optimizer sgd"),
        ("--recompute-granularity full", 4, "needs --recompute-method"),
        ("--tokenizer-type NullTokenizer", 4, "NullTokenizer needs --vocab-size"),
        ("--vocab-size 100", 4, "--vocab-size 100 is too small for ByteLevelTokenizer"),
        ("--transformer-impl transformer_engine", 4, "needs the package transformer_engine, which is not installed"),
        ("--attention-backend local --transformer-impl transformer_engine", 4, "is megatron-core's own attention"),
        ("--attention-backend fused --distributed-backend gloo", 4, "fused needs CUDA.*choose auto"),
        ("--attention-backend flash --distributed-backend gloo", 4, "--attention-dropout 0.1 needs CUDA"),
        ("--attention-backend local --zero-bubble-torch-attention", 4, "leave one of them out"),
        ("--attention-backend slow", 4, "argument --attention-backend: invalid choice"),
        ("--save-interval 5", 4, "--save-interval needs --save DIR"),
        ("--split 90,ten", 4, "--split '90,ten' must be up to three proportions"),
        ("--data-path x", 4, "--mock-data and --data-path are both given"),
        ("--lr much", 4, "argument --lr: invalid float value: 'much'"),
        ("--optimizer adagrad", 4, "argument --optimizer: invalid choice: 'adagrad'"),
        ("--context-parallel-size 0", 4, "--context-parallel-size 0 must be greater than 0"),
        (CP + "--seq-length 66", 4, "--seq-length 66 is not divisible by 2 x --context-parallel-size 2 = 4: .* 64 would be"),
        ("--context-parallel-size 3", 4, "4 rank.* x --context-parallel-size 3 = 3; start it with torchrun --nproc-per-node 3"),
        (CP + "--attention-backend local", 4, "--attention-backend local needs whole sequences; choose auto, flash, fused or"),
        ("--layout-independent-dropout --tensor-model-parallel-size 2", 4, "tensor parallelism needs --attention-dropout 0"),
        (
            "--layout-independent-dropout --attention-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel",
            4,
            "with --sequence-parallel needs --hidden-dropout 0 and --attention-dropout 0",
        ),
        (CP + "--layout-independent-dropout", 4, "with --context-parallel-size 2 needs --hidden-dropout 0"),
        ("--zero-bubble-v", 4, "unrecognized arguments: --zero-bubble-v"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        settings(flags, world_size=world_size)
    assert "\n" not in str(raised.value)


def test_missing_flags_are_listed() -> None:
    with pytest.raises(ConfigError, match="required: --num-layers, --hidden-size, --num-attention-heads"):
        settings_from_argv([], world_size=1)


def test_data_must_be_there(tmp_path: Path) -> None:
    base = BASE.replace("--mock-data", "")
    with pytest.raises(ConfigError, match="no data: give --data-path"):
        settings(base=base)
    with pytest.raises(DataError, match=r"absent\.idx does not exist"):
        settings(f"--data-path {tmp_path}/absent", base=base)


@pytest.mark.claims("Long runs", "a dataset whose `--split` leaves no document for what is read", "rejected")
def test_a_split_that_is_read_has_documents(corpus: str) -> None:
    """megatron-core would search an empty split for samples forever. Test samples are never read."""
    base = BASE.replace("--mock-data", f"--data-path {corpus}")
    assert settings("--split 95,5,0.1", base=base).data.split_weights == (95.0, 5.0, 0.1)
    assert settings("--split 1000,1 --eval-iters 0", base=base).data.split_weights == (1000.0, 1.0, 0.0)
    with pytest.raises(
        DataError, match=r"'1000,1' leaves none of the \d+ document\(s\) .* for validation; .* --eval-iters 0, or more"
    ):
        settings("--split 1000,1", base=base)
    with pytest.raises(DataError, match=r"--split '0,100' leaves none of the \d+ document\(s\) .* for training"):
        settings("--split 0,100", base=base)
    with pytest.raises(ConfigError, match="--split '0,0' has no proportion above 0"):
        settings("--split 0,0", base=base)


def test_a_checkpoint_to_load_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt is missing"):
        settings(f"--load {tmp_path}")
    assert settings(f"--load {tmp_path} --save {tmp_path}").checkpoint.load == str(tmp_path), "a run may continue itself"


def test_the_list_of_flags_is_frozen() -> None:
    """Flags are an interface: adding one is a decision, and so is removing one. Then change flags.txt, too."""
    frozen = Path(__file__).with_name("flags.txt").read_text().split()
    assert sorted(build_parser()._option_string_actions) == frozen


def test_every_flag_is_documented() -> None:
    for action in build_parser()._actions:
        assert action.help, action.option_strings


def test_help_lists_groups_and_needs_no_torch() -> None:
    started = time.monotonic()
    program = f"""
import runpy, sys
sys.argv = ["pretrain_gpt.py", "--help"]
try:
    runpy.run_path({str(PRETRAIN)!r}, run_name="__main__")
except SystemExit as left:
    assert left.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for title in ("Model:", "Parallelism:", "Zero bubble:", "Optimizer and learning rate:", "Checkpoints:"):
        assert f"\n{title}\n" in done.stdout
    assert time.monotonic() - started < 30.0


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_reports_an_error(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The others leave theirs to torchrun, for an error that rank 0 does not have: of files that differ between machines."""
    from megatron.zerobubble.job import exit as job_exit
    from megatron.zerobubble.training import arguments

    monkeypatch.setattr(job_exit.time, "sleep", lambda _: None)
    with pytest.raises(SystemExit) as left:
        arguments.parse_arguments(["--bad"], rank=rank, world_size=2, error_file=str(tmp_path / "error.json"))
    assert left.value.code == 2
    reason = read_error_file(tmp_path / "error.json")
    assert reason is not None
    assert reason.startswith("pretrain_gpt.py: error: " if rank == 0 else "pretrain_gpt.py: rank 1: error: ")
    said = capsys.readouterr().err
    assert said.count("\n") == (1 if rank == 0 else 0)
    assert (rank != 0) or said.startswith("pretrain_gpt.py: error: ")


def test_errors_name_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.zerobubble.cli.train import main

    assert "usage: zerobubble train " in build_parser(prog="zerobubble train").format_usage()
    with pytest.raises(SystemExit) as left:
        main(["--nproc-per-node", "2", "--bad"])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("zerobubble train: error: ")
