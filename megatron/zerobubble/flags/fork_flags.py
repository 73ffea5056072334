"""The flags of the authors' fork of Megatron-LM, in ours: command lines that were written for it run as they are.

docs/fork.md has the same table, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.zerobubble.errors import ConfigError

__all__ = ["LEFT_OUT", "REFUSED", "REPLACED", "in_our_flags"]

REPLACED: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("--enable-1f1b-v",): ("--zero-bubble-schedule", "1f1b-v"),
    ("--zero-bubble-max-pending-backward", "auto"): ("--zero-bubble-memory-limit", "auto"),
}
"""What its command lines have -> what takes its place."""
LEFT_OUT: Mapping[str, bool] = {
    "--enable-zb-runtime": False,
    "--no-pre-communication-optimization": False,
    "--enable-exactly-numeric-match": False,
    "--fp32": False,
    "--use-legacy-models": False,
    "--zero-bubble-adaptive-memory-limit-percentile": True,
    "--measure-activation-memory": False,
    "--profile-memory-iter": True,
}
"""Flags that say what holds anyway, or only measure -> whether a value follows."""
REFUSED = (
    "--cpu-offload",
    "--recompute-lgd",
    "--no-paired-barrier",
    "--offload-continuous-buffers",
    "--interleave-group-size",
    "--offload-chunk-num",
    "--offload-time",
    "--auto-offload-time",
    "--offload-overlap-sr",
)
"""Flags of its experiments with offloading, which nothing here does."""


def in_our_flags(words: Sequence[str], *, is_ours: bool = True) -> tuple[list[str], str | None]:
    """A command line with its flags in ours.

    Args:
        words: the command line; other flags stay as they are.
        is_ours: whether this project's trainer or script reads it. In another one flags that are not about schedules, such as
            `--fp32`, may be its own: they stay.

    Returns:
        The command line, and a line about what was replaced or left out; None if nothing was.

    Raises:
        ConfigError: a flag asks for offloading.
    """
    known = {*(old[0] for old in REPLACED), *_ABOUT_SCHEDULES, *((*LEFT_OUT, *REFUSED) if is_ours else ())}
    rest = [part for word in words for part in (word.split("=", 1) if word.partition("=")[0] in known else [word])]
    refused = [word for word in rest if word in REFUSED] if is_ours else []
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: offloading and interleaving in groups are experiments of the authors' fork; leave them out, "
            "and choose a schedule of less memory: --zero-bubble-v-schedule-mem-setup min or half, or --zero-bubble-memory-limit"
        )
    is_v = "--zero-bubble-v-schedule" in rest
    kept: list[str] = []
    said: list[str] = []
    while rest:
        replaced = next((old for old in REPLACED if tuple(rest[: len(old)]) == old), None)
        if is_v and rest[0] == _LIMIT:
            said.append(f"{_LIMIT} is left out, as --zero-bubble-v-schedule has memory of its own")
            rest = rest[2:]
        elif replaced is not None:
            kept += REPLACED[replaced]
            said.append(f"{' '.join(replaced)} is {' '.join(REPLACED[replaced])}")
            rest = rest[len(replaced) :]
        elif rest[0] in LEFT_OUT and (is_ours or rest[0] in _ABOUT_SCHEDULES):
            said.append(f"{rest[0]} is left out")
            rest = rest[1 + LEFT_OUT[rest[0]] :]
        else:
            kept.append(rest.pop(0))
    return kept, f"flags of the authors' fork: {'; '.join(said)} (docs/fork.md)" if said else None


_ABOUT_SCHEDULES = (
    "--enable-zb-runtime",
    "--no-pre-communication-optimization",
    "--enable-exactly-numeric-match",
    "--zero-bubble-adaptive-memory-limit-percentile",
)
_LIMIT = "--zero-bubble-max-pending-backward"
