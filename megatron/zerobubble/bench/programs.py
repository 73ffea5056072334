"""What a block runs: a training loop under one contender, the reference trainer's or a script's. Imports no torch.

Both are run as their users run them. `block` measures them at the calls of their schedules.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.script import run_script
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

__all__ = ["Program", "Script", "TrainerRun"]


@dataclass(frozen=True, kw_only=True)
class TrainerRun:
    """The reference trainer, which makes its schedule itself."""

    settings: Settings
    """The job under the contender."""

    name = "the training loop"
    """In messages."""
    records_steps = True
    """Whether optimizer steps are recorded with the passes."""

    @property
    def zero_bubble(self) -> ZeroBubbleConfig:
        """The contender's flags."""
        return self.settings.zero_bubble

    def run(self, launch: Launch) -> None:
        """Train. All ranks must call it."""
        from megatron.zerobubble.training.loop import pretrain

        pretrain(
            self.settings,
            launch,
            model_provider=model_provider,
            forward_step_provider=forward_step_provider,
            prog="zerobubble bench",
        )


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script for megatron-core, as `zerobubble run` runs it; under megatron-core's own schedules as it is."""

    script: str
    """Its file."""
    arguments: tuple[str, ...]
    """Its flags, with the contender's."""
    zero_bubble: ZeroBubbleConfig
    """The contender's flags."""
    on_cpu: bool = False
    """Whether it runs on the CPU in place of GPUs."""

    @property
    def name(self) -> str:
        """In messages."""
        return Path(self.script).name

    @property
    def records_steps(self) -> bool:
        """Whether optimizer steps are recorded with the passes."""
        return self.zero_bubble.enable_optimizer_post_validation

    def run(self, launch: Launch) -> None:
        """Run the script as `python SCRIPT` would. All ranks must call it. Its folder is first on the path already."""
        flags = {field.name: getattr(self.zero_bubble, field.name) for field in dataclasses.fields(self.zero_bubble)}
        run_script(self.script, self.arguments, launch, flags=argparse.Namespace(**flags), on_cpu=self.on_cpu)


Program = TrainerRun | Script
