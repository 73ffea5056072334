"""Parses the command line into checked `Settings`, or reports one line and exits with code 2.

The only module that reads argv. It imports no torch and has no side effects, so that `--help` and a mistyped flag cost nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.training.config.batch import BatchConfig
from megatron.zerobubble.training.config.checkpoint import CheckpointConfig
from megatron.zerobubble.training.config.data import DataConfig
from megatron.zerobubble.training.config.flags import add_group, from_namespace
from megatron.zerobubble.training.config.logging import LoggingConfig
from megatron.zerobubble.training.config.model import ModelConfig, PrecisionConfig
from megatron.zerobubble.training.config.moe import MoeConfig
from megatron.zerobubble.training.config.optim import OptimConfig
from megatron.zerobubble.training.config.parallel import ParallelConfig
from megatron.zerobubble.training.config.run import RunConfig
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.config.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.training.validate import check_settings

__all__ = ["build_parser", "exit_with_error", "parse_arguments", "settings_from_argv"]

_GROUPS = {
    "model": ModelConfig,
    "moe": MoeConfig,
    "batch": BatchConfig,
    "parallel": ParallelConfig,
    "zero_bubble": ZeroBubbleConfig,
    "optim": OptimConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "run": RunConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}
"""Field of `Settings` -> group of flags, in the order of --help."""

_GRACE_S = 5.0
"""How long a rank other than 0 waits, after a bad flag, for rank 0 to say so and for torchrun to end the job."""


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists all flags)")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all groups. It raises ConfigError where argparse would exit."""
    parser = _Parser(
        description="Train a GPT through zero-bubble pipeline schedules on megatron-core. Start it with torchrun.",
        allow_abbrev=False,
    )
    for config_class in _GROUPS.values():
        add_group(parser, config_class)
    return parser


def settings_from_argv(argv: Sequence[str], *, world_size: int) -> Settings:
    """Parse and check. Raises UserError with one clear line."""
    namespace = build_parser().parse_args(argv)
    groups: dict[str, Any] = {name: from_namespace(config_class, namespace) for name, config_class in _GROUPS.items()}
    settings = Settings(**groups, world_size=world_size)
    check_settings(settings)
    return settings


def parse_arguments(argv: Sequence[str] | None = None, *, rank: int, world_size: int) -> Settings:
    """Settings from the command line of this process, or the end of it with exit code 2.

    Args:
        argv: flags; None takes them from `sys.argv`.
        rank: this process' rank. Only rank 0 speaks.
        world_size: ranks of the job.
    """
    try:
        return settings_from_argv(sys.argv[1:] if argv is None else argv, world_size=world_size)
    except UserError as error:
        refuse(error, rank=rank)


def refuse(error: UserError, *, rank: int) -> NoReturn:
    """Say once per job what is wrong with what the user gave, and leave with exit code 2."""
    if rank != 0:
        time.sleep(_GRACE_S)
    else:
        sys.stderr.write(f"pretrain_gpt.py: error: {error}\n")
        sys.stderr.flush()
    sys.exit(2)
