"""From the command line of one rank to `training.loop.pretrain`: what `pretrain_gpt.py` and `zerobubble train` call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import parse_arguments, refuse
from megatron.zerobubble.training.initialize import read_launch

if TYPE_CHECKING:
    from megatron.zerobubble.training.setup import ForwardStepProvider, ModelProvider

__all__ = ["run"]


def run(model_provider: ModelProvider, forward_step_provider: ForwardStepProvider, *, argv: Sequence[str] | None = None) -> None:
    """Check the flags, before torch is loaded, then train. Every rank of the job calls it.

    Args:
        model_provider: builds one stage of the model; see `training.gpt.model_provider`.
        forward_step_provider: what one microbatch does in one chunk; see `training.gpt.forward_step_provider`.
        argv: the flags; None takes those of the process.

    Raises:
        SystemExit: exit code 2 after a user error, which rank 0 reports in one line.
    """
    try:
        launch = read_launch()
    except ConfigError as error:
        refuse(error, rank=0)
    settings = parse_arguments(argv, rank=launch.rank, world_size=launch.world_size)

    from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

    with quiet_third_parties():
        from megatron.zerobubble.training.loop import pretrain

        pretrain(settings, launch, model_provider=model_provider, forward_step_provider=forward_step_provider)
