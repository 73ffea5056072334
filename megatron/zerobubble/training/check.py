"""Checks all flags, before torch is loaded or a process group exists: each group's own, and the dataset that they name."""

from __future__ import annotations

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.flags.targets import Target, check_targets
from megatron.zerobubble.training.config import schedule
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.index import check_dataset, split_documents

__all__ = ["check_settings"]


def check_settings(settings: Settings, *, is_first: bool = True) -> None:
    """Raise unless a job with these settings can run.

    Args:
        settings: the flags.
        is_first: whether to do, too, what one rank of a job does for all: read the index of the dataset, and try to write where
            the run will write.

    Raises:
        ConfigError: flags contradict each other, do not fit the number of ranks, or name a file that cannot be written.
        DataError: the dataset is missing or damaged, or has a split without documents.
        CheckpointError: the checkpoint to load does not exist.
    """
    model, parallel, zero_bubble = settings.model, settings.parallel, settings.zero_bubble
    parallel.check(world_size=settings.world_size)
    schedule.check_schedule(settings)
    model.check(parallel, zero_bubble)
    schedule.check_layers(settings)
    schedule.check_batch(settings)
    schedule.check_slices(settings)
    schedule.check_plan(settings)
    settings.run.check(model, parallel)
    settings.mla.check(model, parallel)
    settings.moe.check(model, parallel, zero_bubble, world_size=settings.world_size)
    settings.fp8.check(model, settings.precision)
    settings.optim.check(parallel, settings.run)
    schedule.check_length(settings)
    if is_first and settings.data.data_path is not None:
        _check_splits(settings, settings.data.data_path)
    settings.checkpoint.check()
    schedule.check_trace(settings)
    check_targets(written(settings), tries=is_first)
    schedule.check_watchdog(settings)


def written(settings: Settings) -> list[Target]:
    """The files and directories that a run writes."""
    return [
        Target("--save", settings.checkpoint.save),
        Target("--metrics-jsonl", settings.run.metrics_jsonl, is_file=True),
        *settings.zero_bubble.written,
    ]


def _check_splits(settings: Settings, prefix: str) -> None:
    """Raise unless the dataset is whole and every split that the run reads has documents, or megatron-core searches forever."""
    splits = split_documents(check_dataset(prefix), settings.data.split_weights)
    training, validation, test = map(len, splits)
    if training and (validation or not settings.run.eval_iters):
        return
    name, remedy = ("validation", "--eval-iters 0, ") if training else ("training", "")
    raise DataError(
        f"--split {settings.data.split_text!r} leaves none of the {training + validation + test} document(s) of {prefix} for "
        f"{name}; give a larger share, such as --split 90,10,0, {remedy}or more documents"
    )
