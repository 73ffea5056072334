"""The job that is compared: of the reference trainer by its flags, or any script. Under a contender it is a job with other flags.

Both loops are run as their users run them. `block` measures them at the calls of their schedules. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.zerobubble.bench.contenders import Contender
from megatron.zerobubble.errors import UserError
from megatron.zerobubble.flags.loop_options import Seeds
from megatron.zerobubble.flags.virtual_stages import CHUNKS, with_chunks
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.overlay import check_supported
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import costs_of_placements
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.script import run_script
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

if TYPE_CHECKING:
    from megatron.zerobubble.plan.costs.cost_model import CostModel
    from megatron.zerobubble.plan.ir import Placement
    from megatron.zerobubble.plan.plan_request import CostsOf

__all__ = ["Job", "ScriptJob", "TrainerJob"]

_SPREAD = "--pipeline-model-parallel-layout has another number of stages; layers are spread evenly"


@dataclass(frozen=True, kw_only=True)
class TrainerJob:
    """The reference trainer, which makes its schedule itself."""

    settings: Settings
    """From the user's flags, or those under a contender."""

    name = "the training loop"
    """In messages."""
    loss_causes = "Not compared: --init-by-rank, or dropout without --layout-independent-dropout."
    """Why losses are not compared."""

    @property
    def has_one_start(self) -> bool:
        """Whether all contenders begin with the same weights."""
        return not self.settings.run.init_by_rank

    @property
    def has_one_dropout(self) -> bool:
        """Whether dropout masks are the same under all contenders."""
        return self.settings.run.layout_independent_dropout

    @property
    def zero_bubble(self) -> ZeroBubbleConfig:
        """The zero-bubble flags."""
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

    def under(self, contender: Contender, *, num_iterations: int) -> tuple[Job, str | None]:
        """The job under a contender, and one line where that differs from the job as given in more than the contender's flags.

        Args:
            contender: the schedule and its flags.
            num_iterations: the fewest that it runs for.

        Raises:
            UserError: the job cannot run under it.
        """
        try:
            return TrainerJob(settings=contender.settings(self.settings, num_iterations=num_iterations)), None
        except UserError:
            if self.settings.parallel.pipeline_model_parallel_layout is None:
                raise
            with contextlib.suppress(UserError):
                spread = contender.settings(self.settings.without_layout(), num_iterations=num_iterations)
                return TrainerJob(settings=spread), _SPREAD
            raise

    def later(self) -> TrainerJob:
        """The job of blocks whose losses are not compared."""
        return self

    def use(self, contender: Contender) -> str:
        """The flags that train like this job, which is one under the contender."""
        chunks = f" {CHUNKS} {contender.num_chunks}" if contender.num_chunks else ""
        return (_schedule_flags(contender, self.zero_bubble) + chunks).strip()

    def costs_of(self, costs: CostModel, measured: Job, wanted: Job | None) -> CostsOf:
        """Placement -> costs, from those of one placement. It raises PlanError where they cannot be derived.

        Args:
            costs: profiled.
            measured: what was profiled.
            wanted: divides the layers over the stages; None: evenly.
        """
        assert isinstance(measured, TrainerJob)
        assert wanted is None or isinstance(wanted, TrainerJob)
        own, layers = measured.settings.placement, (wanted.settings if wanted else self.settings.without_layout()).stage_layers
        held = measured.settings.stage_layers(own)
        model = Model.measured(("layer",) * held.num_layers, held, costs)
        others = costs_of_placements(model, layers, costs)
        return lambda placement: costs if placement == own else others(placement)


@dataclass(frozen=True, kw_only=True)
class ScriptJob:
    """A training script for megatron-core, as `zerobubble run` runs it; under megatron-core's own schedules as it is."""

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

    loss_causes = "Not compared: the script has dropout (try its flags for 0), or draws its own weights."
    has_one_dropout = False

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

    def later(self) -> ScriptJob:
        """See `TrainerJob`. The script's own weights are there sooner: those by name are drawn on the CPU."""
        return dataclasses.replace(self, seeds=dataclasses.replace(self.seeds, weights=None))

    @property
    def has_one_start(self) -> bool:
        """See `TrainerJob`."""
        return self.seeds.weights is not None

    def under(self, contender: Contender, *, num_iterations: int) -> tuple[Job, str | None]:
        """See `TrainerJob`. How long the script trains is its own."""
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
        """See `TrainerJob`. It is the whole command; of several machines, for each."""
        flags, script = _schedule_flags(contender, self.zero_bubble), shlex.join([self.script, *self.arguments])
        if not flags:
            return script
        start = f"zerobubble run --nproc-per-node {self.num_ranks}"
        if self.is_on_several_hosts:
            start = "torchrun ... -m megatron.zerobubble.run"
        return f"{start}{' --cpu' * self.on_cpu} {flags} {script}"

    def costs_of(self, costs: CostModel, measured: Job, wanted: Job | None) -> CostsOf:
        """See `TrainerJob`. Layers are spread as in the stages that were profiled, which may be merged."""

        def costs_of(placement: Placement) -> CostModel:
            return costs if placement.num_stages == costs.num_stages else costs.merged(placement.num_stages)

        return costs_of


Job = TrainerJob | ScriptJob


def _schedule_flags(contender: Contender, config: ZeroBubbleConfig) -> str:
    """The flags of a contender's schedule; none of megatron-core's own."""
    if contender.is_stock:
        return ""
    words = ["--zero-bubble-schedule", contender.schedule]
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
