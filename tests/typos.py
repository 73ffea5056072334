"""Misspelled calls of `install`, for mypy (`make lint`): an ignore where it finds nothing wrong is an error, too."""

from __future__ import annotations

import megatron.zerobubble
from megatron.zerobubble import MicrobatchLengths, Seeds, Slices, ZeroBubbleConfig, install


def right() -> None:
    """No type error."""
    install(
        schedule="zb-h2",
        slices=Slices(8, cut=lambda batch, offset, length: batch),
        lengths=MicrobatchLengths("thd"),
        seeds=Seeds(weights=1),
    )
    install(ZeroBubbleConfig(zero_bubble_schedule="zbv"), lengths=MicrobatchLengths(lambda batch: 3, reorder=False))


def wrong() -> None:
    """A type error in every line."""
    install(schedule="zbh1")  # type: ignore[arg-type]
    install(schedle="zbv")  # type: ignore[arg-type]
    install(schedule="zbv", weights_seed=1)  # type: ignore[arg-type]
    install(schedule="zbv", slices=8)  # type: ignore[arg-type]
    install(lengths=MicrobatchLengths("thdd"))  # type: ignore[arg-type]
    install(seeds=Seeds(weight=1))  # type: ignore[call-arg]
    install(ZeroBubbleConfig(zero_bubble_schedule="zb-h3"))  # type: ignore[arg-type]
    install(ZeroBubbleConfig(zero_bubble_replan_intervall=3))  # type: ignore[call-arg]
    megatron.zerobubble.instal(schedule="zbv")  # type: ignore[attr-defined]
