"""How a model is run: one record, from the flags of any training loop to its `Engine`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.loop_options import Cut, CutDimensions, MicrobatchLengths, Seeds, TokensOf
from megatron.zerobubble.flags.virtual_stages import CHUNKS
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.microbatches.ready import READY
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.stage_layers import regrouped_text
from megatron.zerobubble.plan.registry import placement_of, schedule_info
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec

__all__ = ["RunOptions", "fields_to_set"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The zero-bubble flags, and what the loop or the call of `install` chooses besides."""

    flags: ZeroBubbleConfig
    """As parsed, or as `install` got them by keywords."""
    lengths: MicrobatchLengths | None = None
    """Of microbatches of the loop's data; None: all have the sequence length of the schedule's call."""
    cut: Cut | CutDimensions | None = None
    """With slices: cuts a batch of the loop's data, or what `cut_batch` cannot know of it; None: `cut_batch` alone."""
    seeds: Seeds = field(default_factory=Seeds)
    """Of first weights that are drawn by name (`named_weights`), and of dropout masks by layer and sample (`layout_dropout`)."""
    checkpoints_by_parameter: bool | None = None
    """Whether no checkpoint stores a distributed optimizer's state by bucket; None: as Megatron-LM's flags say, else False."""
    ranks_on_host: int = 1
    """Ranks that share the machine, and on the CPU its memory."""
    rank: int = field(default=0, compare=False)
    """Global rank, which is known before there is a process group, and may be another one after an in-process restart."""

    refusal: ConfigError | None = field(default=None, compare=False)
    """What this rank alone refuses, such as a file that it cannot write; all ranks do so before a model's first pass."""

    @property
    def microbatch_tokens(self) -> TokensOf | None:
        """Length of a microbatch of the loop's data; None: that of the schedule's call."""
        tokens = None if self.lengths is None else self.lengths.tokens
        return READY[tokens] if isinstance(tokens, str) else tokens

    @property
    def schedule(self) -> str:
        """A name of `megatron.zerobubble.plan.registry`."""
        return self.flags.schedule

    @property
    def objective(self) -> Objective:
        """The iteration time that plans minimize."""
        return Objective.with_optimizer(post_validation=self.flags.enable_optimizer_post_validation)

    @property
    def is_v(self) -> bool:
        """Whether stages are placed in a V, or in two, with the first and the last one on the same rank."""
        return schedule_info(self.flags.family(1)).placement in ("V", "W")

    def placement(self, num_ranks: int) -> Placement:
        """Stage -> rank, where that follows from the schedule's name: `is_v`."""
        return placement_of(self.flags.family(1), num_ranks=num_ranks)

    def spec(self, *, num_ranks: int, num_chunks: int | None, layout: str | None = None) -> ScheduleSpec:
        """The schedule for a pipeline of this size.

        Args:
            num_ranks: p.
            num_chunks: v, as the loop chose it; None is 1.
            layout: the text of a pipeline_model_parallel_layout that the loop chose, for the message.

        Raises:
            ConfigError: the schedule cannot run with these sizes; the message names those that the loop must be started with.
        """
        if num_ranks < 2:
            raise ConfigError(
                f"schedule {self.schedule} fills the bubble between pipeline ranks and needs a pipeline_model_parallel_size "
                f"of at least 2, got {num_ranks}; do not install it, or start more pipeline ranks"
            )
        given = num_chunks or 1
        info = schedule_info(self.flags.family(given))
        wanted = info.num_chunks if info.num_chunks is not None else max(2, given)
        if given != wanted:
            raise ConfigError(
                f"schedule {self.schedule} has {wanted} model chunk(s) per rank, the loop was started with "
                f"virtual_pipeline_model_parallel_size {num_chunks}: {_remedy(num_ranks, wanted, layout)}"
            )
        limit = self.flags.memory_limit
        return self.flags.schedule_spec(
            num_ranks=num_ranks, num_chunks=wanted, memory_limit=None if limit is None else limit.relative
        )


def fields_to_set(num_ranks: int, num_chunks: int, layout: str | None) -> str:
    """The fields of a configuration that set the number of chunks per rank, with their values, for an error message.

    Args:
        num_ranks: p.
        num_chunks: v.
        layout: the text of the layout for another number of stages that it has; None: none.
    """
    text = None
    if layout is not None:
        try:
            text = regrouped_text(layout, num_ranks * num_chunks)
        except ConfigError:
            text = None  # megatron-core's division, or that of `DividedLayers`
    chunks = num_chunks if num_chunks > 1 else None
    return f"set virtual_pipeline_model_parallel_size={chunks} and pipeline_model_parallel_layout={text!r} in its configuration"


def _remedy(num_ranks: int, wanted: int, layout: str | None) -> str:
    """How to start a loop with the wanted number of model chunks per rank: by Megatron-LM's flags, where they were parsed."""
    if "megatron.training" in sys.modules and layout is None:
        return f"add {CHUNKS} {wanted}" if wanted > 1 else f"leave out {CHUNKS} and the other flags of virtual stages"
    return (
        f"{fields_to_set(num_ranks, wanted, layout)}, and the first also in initialize_model_parallel, and build the chunks as "
        "for megatron-core's interleaved schedule (a V has two chunks per rank, zb-w four, zb-interleaved any number from two)"
    )
