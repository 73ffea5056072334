"""Microbatches of unequal length in a run: their lengths are announced an iteration ahead, so that plans are made meanwhile."""

from __future__ import annotations

from typing import Any

from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalMicrobatches
from megatron.zerobubble.mcore.microbatches.length_exchange import Lengths, LengthsOfReplicas
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.microbatch_lengths import microbatch_lengths

__all__ = ["announce_lengths", "lengths_of_batch"]


def announce_lengths(
    unequal: UnequalMicrobatches | None, dataset: Any, settings: Settings, *, iteration: int, consumed: int
) -> None:
    """Announce the lengths of the iteration that begins and of the next one, which is then planned meanwhile.

    All ranks must call this before every training iteration. Each knows the lengths of all data-parallel replicas.

    Args:
        unequal: of the schedule; None: nothing is announced.
        dataset: training samples.
        settings: of the run.
        iteration: iterations done.
        consumed: samples consumed so far by all ranks together.
    """
    if unequal is None:
        return
    for ahead in range(unequal.num_expected, 2 if iteration + 1 < settings.run.train_iters else 1):
        unequal.expect(_lengths(dataset, settings, consumed=consumed + ahead * settings.global_batch_size))


def _lengths(dataset: Any, settings: Settings, *, consumed: int) -> LengthsOfReplicas:
    rows = settings.batch.micro_batch_size
    return tuple(
        tuple(
            Lengths(tokens, squares / rows)
            for tokens, squares in microbatch_lengths(
                dataset, settings, consumed=consumed, num_microbatches=settings.num_microbatches, rank=replica
            )
        )
        for replica in range(settings.data_parallel_size)
    )


def lengths_of_batch(batch: Any) -> tuple[int, float]:
    """Tokens per row of a batch of documents, and the squared lengths of the sequences in one."""
    tokens = int(batch["tokens"].size(1))
    begins = batch.get("cu_seqlens")
    if begins is None:
        return tokens, float(tokens) ** 2
    return tokens, float((begins.diff().double() ** 2).sum())
