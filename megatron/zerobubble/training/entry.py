"""The entry point of one rank: `run` checks the flags and calls `loop.pretrain`. For `zerobubble train`, and
`pretrain_gpt.py` where megatron-core has no training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.exit import exit_with_error
from megatron.zerobubble.job.launch import read_launch
from megatron.zerobubble.job.rendezvous import announce_exit
from megatron.zerobubble.training.arguments import parse_arguments

if TYPE_CHECKING:
    from megatron.zerobubble.training.step import ForwardStepProvider, ModelProvider

__all__ = ["run"]

_STANDS_IN = (
    "this megatron-core has no training loop, so the reference trainer runs: Megatron-LM's loop comes with "
    "megatron-core from 0.17 on (pip install 'megatron-core>=0.17,<0.20' with Python 3.12)"
)


def run(
    model_provider: ModelProvider,
    forward_step_provider: ForwardStepProvider,
    *,
    argv: Sequence[str] | None = None,
    prog: str = "pretrain_gpt.py",
    stands_in: bool = False,
) -> None:
    """Check the flags, before torch is loaded, then train. Every rank of the job must call it.

    Args:
        model_provider: builds one stage of the model; see `training.models.gpt.model_provider`.
        forward_step_provider: makes the function that runs one microbatch through one chunk; see
            `training.models.gpt.forward_step_provider`.
        argv: the flags; None takes those of the process.
        prog: program name in the usage and in error lines.
        stands_in: whether this trainer runs in place of Megatron-LM's loop, which is then said in a line.

    Raises:
        SystemExit: exit code 2 after a user error, which rank 0 reports in one line.
    """
    try:
        launch = read_launch()
    except ConfigError as error:
        exit_with_error(error, rank=0, prog=prog)
    settings = parse_arguments(
        argv,
        rank=launch.rank,
        world_size=launch.world_size,
        is_reporting=launch.local_rank == 0,
        prog=prog,
        error_file=launch.error_file,
        before_exit=partial(announce_exit, launch),
    )

    if stands_in:
        settings = replace(settings, notes=(_STANDS_IN, *settings.notes))
    from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

    with quiet_third_parties():
        from megatron.zerobubble.training.loop import pretrain

        pretrain(settings, launch, model_provider=model_provider, forward_step_provider=forward_step_provider, prog=prog)
