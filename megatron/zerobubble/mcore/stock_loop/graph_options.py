"""Which options of `install` go with CUDA graphs of layers. Checked when a config is made, in most loops before anything else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.model.layer_graphs import IMPLEMENTATION
from megatron.zerobubble.mcore.run_options import RunOptions

__all__ = ["check_graph_options"]


def check_graph_options(config: Any, options: RunOptions) -> None:
    """Check that the schedule's options go with the CUDA graphs of a config.

    Args:
        config: TransformerConfig, after megatron-core's checks.
        options: of `install`.

    Raises:
        ConfigError: an option that does not, by name.
    """
    if getattr(config, "cuda_graph_impl", None) != IMPLEMENTATION:
        return
    for name, why, remedy in _refused(config, options):
        raise ConfigError(f'{name} does not go with cuda_graph_impl="{IMPLEMENTATION}": {why}; {remedy}')


def _refused(config: Any, options: RunOptions) -> Iterator[tuple[str, str, str]]:
    """(name, why, remedy) of each option that does not go with graphs."""
    flags, steps, leave = options.flags, config.cuda_graph_warmup_steps, "leave one of the two out"
    if flags.enable_optimizer_post_validation:
        yield "--enable-optimizer-post-validation", "forwards that it runs again were not tried with graphs", leave
    if options.lengths is not None:
        yield "lengths", "a graph has the shapes with which it was captured, and microbatches are of unequal length", leave
    if flags.zero_bubble_slices is not None or flags.num_slices > 1:
        yield "--zero-bubble-slices", "a graph has the shapes and positions with which it was captured", leave
    if options.seeds.dropout is not None:
        yield "dropout of Seeds", "it seeds each layer on the host, which a replay does not run", leave
    if steps < 1:
        yield (
            f"cuda_graph_warmup_steps={steps}",
            "graphs are captured in the order of the plan, which is made for the first iteration",
            "give at least 1",
        )
    last = max(flags.zero_bubble_pipeline_timers_start_iter or 0, flags.zero_bubble_pipeline_timers_end_iter or 0)
    if last > steps:
        yield (
            f"profiling until iteration {last}",
            f"graphs are captured after {steps} iterations, and the plan is fixed from then on",
            f"give --zero-bubble-pipeline-timers-end-iter {steps} at most, or more cuda_graph_warmup_steps",
        )
    if flags.zero_bubble_replan_interval is not None:
        yield "--zero-bubble-replan-interval", "the plan is fixed once graphs are captured", leave
