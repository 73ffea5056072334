"""--dry-run: the report."""

from __future__ import annotations

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings

with quiet_third_parties():
    from megatron.zerobubble.training.entry import run
    from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --mock-data "
    "--train-iters 10 "
)
P4 = "--pipeline-model-parallel-size 4 --global-batch-size 8 "


def settings(flags: str = "", *, world_size: int = 1) -> Settings:
    return settings_from_argv((MODEL + flags).split(), world_size=world_size)


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("", "1f1b: 4 pipeline ranks (PP), 8 microbatches per iteration, 1 stage(s) per rank (linear)"),
        ("--num-virtual-stages-per-pipeline-rank 2 ", "interleaved-1f1b: 4 pipeline ranks (PP), 8 microbatches"),
        ("--zero-bubble-v-schedule ", "zbv: 4 pipeline ranks (PP), 8 microbatches per iteration, 2 stage(s) per rank (V)"),
        ("--zero-bubble-schedule auto ", "schedule auto: the order that is profiled; the run then chooses for its own times"),
    ],
)
def test_a_process_of_its_own_prints_the_report(flags: str, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a process group; the ranks are those of one data-parallel replica."""
    argv = (MODEL + P4 + flags + "--dry-run --swiglu").split()
    run(model_provider, forward_step_provider, argv=argv)
    report = capsys.readouterr().out
    for part in (
        plan,
        "* --swiglu given\n",
        "  --bf16 not given\n",
        "* --pipeline-model-parallel-size 4\n",
        "rank 3  ",
        "bubble ",
        "stage pipeline rank",
        "    0             0 ",
        " + head\n",
        "job: 4 ranks = 4 pipeline x 1 tensor x 1 context x 1 data; 8 microbatches of 1 x 64 tokens, 10 iterations\n",
        "dry run: the flags are valid; nothing was started\n",
    ):
        assert part in report, report
    assert not torch.distributed.is_initialized()


def test_the_number_of_ranks_of_a_dry_run() -> None:
    assert settings(P4 + "--dry-run").world_size == 4
    assert settings(P4 + "--dry-run --dry-run-world-size 8").data_parallel_size == 2
    assert settings(P4 + "--dry-run", world_size=8).world_size == 8, "WORLD_SIZE"
    with pytest.raises(ConfigError, match=r"the job has 6 rank\(s\), which is not divisible by"):
        settings(P4 + "--dry-run --dry-run-world-size 6")
