"""The training script that is compared, as `zerobubble run` runs it. Under a contender it is the script with other flags.

The script runs as its users run it. `block` measures it at the calls of its schedule. Imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.zerobubble.bench.contenders import Contender
from megatron.zerobubble.flags.loop_options import Seeds
from megatron.zerobubble.flags.virtual_stages import with_chunks
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.overlay import check_supported
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.script import run_script

__all__ = ["Job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training script for megatron-core with its flags; under megatron-core's own schedules nothing is installed."""

    script: str
    """Its file."""
    arguments: tuple[str, ...]
    """Its flags, without zero-bubble flags."""
    zero_bubble: ZeroBubbleConfig
    """The zero-bubble flags."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Contender -> the flags that the script needs under it, such as a number of chunks; those missing here get Megatron-LM's."""
    on_cpu: bool = False
    """Whether it runs on the CPU in place of GPUs."""
    num_ranks: int = 1
    """Of the job."""
    is_on_several_hosts: bool = False
    """Whether the ranks are on several machines."""
    seeds: Seeds = field(default_factory=Seeds)
    """First weights are drawn by one under every contender, see `install`; megatron-core's own schedules keep their masks."""

    @property
    def name(self) -> str:
        """In messages."""
        return Path(self.script).name

    def run(self, launch: Launch) -> None:
        """Run the script as `python SCRIPT` would. All ranks must call it. Its folder is first on the path already."""
        flags = {field.name: getattr(self.zero_bubble, field.name) for field in dataclasses.fields(self.zero_bubble)}
        run_script(
            self.script,
            self.arguments,
            launch,
            zero_bubble=argparse.Namespace(**flags),
            on_cpu=self.on_cpu,
            seeds=self.seeds,
        )

    def later(self) -> Job:
        """The job of blocks whose losses are not compared: with its own weights, for those by name are drawn on the CPU."""
        return dataclasses.replace(self, seeds=dataclasses.replace(self.seeds, weights=None))

    def under(self, contender: Contender) -> tuple[Job, str | None]:
        """The job under a contender, and one line where its flags differ from those given in more than the schedule's.

        Raises:
            UserError: the job cannot run under it.
        """
        zero_bubble = contender.zero_bubble(self.zero_bubble)
        check_supported(zero_bubble)
        arguments, note = self._arguments(contender)
        return dataclasses.replace(self, arguments=tuple(arguments), zero_bubble=zero_bubble), note

    def _arguments(self, contender: Contender) -> tuple[Sequence[str], str | None]:
        """The script's flags under a contender, and a line about what is other than as given."""
        own = self.flags.get(contender.text)
        if own is not None:
            return (*self.arguments, *shlex.split(own)), f"with {own}"
        if contender.schedule == AUTO:
            return self.arguments, None
        return with_chunks(self.arguments, contender.num_chunks_per_rank, contender.text, always=True)

    def use(self, contender: Contender) -> str:
        """The command that trains like this job, which is one under the contender; of several machines, for each."""
        script = shlex.join([self.script, *self.arguments])
        if contender.is_stock:
            return script
        start = f"zerobubble run --nproc-per-node {self.num_ranks}"
        if self.is_on_several_hosts:
            start = "torchrun ... -m megatron.zerobubble.run"
        return f"{start}{' --cpu' * self.on_cpu} {_schedule_flags(self.zero_bubble, contender.schedule)} {script}"


def _schedule_flags(config: ZeroBubbleConfig, schedule: str) -> str:
    words = ["--zero-bubble-schedule", schedule]
    if config.zero_bubble_v_schedule:  # which chunks auto plans for
        words.append("--zero-bubble-v-schedule")
    if config.zero_bubble_slices is not None:
        words += ["--zero-bubble-slices", config.zero_bubble_slices]
    if config.zero_bubble_memory_limit is not None:
        words += ["--zero-bubble-memory-limit", config.zero_bubble_memory_limit]
    if config.zero_bubble_overlap_moe:
        words.append("--zero-bubble-overlap-moe")
    if config.enable_optimizer_post_validation:
        words.append("--enable-optimizer-post-validation")
    return shlex.join(words)
