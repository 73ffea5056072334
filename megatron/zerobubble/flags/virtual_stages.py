"""Megatron-LM's flags for virtual stages, on a script's command line, as a schedule wants them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CHUNKS", "with_chunks"]

_SIZE = "--pipeline-model-parallel-size"
_MICROBATCH = "--micro-batch-size"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
"""The number of model chunks per rank."""
_BY_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_BY_CONTENT = ("--pipeline-model-parallel-layout", "--hybrid-layer-pattern")


def with_chunks(words: Sequence[str], chunks: int, schedule: str, *, always: bool = False) -> tuple[list[str], str | None]:
    """A script's command line with the number of model chunks per rank that a schedule takes.

    Nothing changes where a layout or a hybrid model's pattern divides the layers.

    Args:
        words: the command line.
        chunks: model chunks per rank.
        schedule: its name, for the line.
        always: whether the script has these flags. Otherwise only if it was given Megatron-LM's flags for a pipeline of several
            ranks and for microbatches.

    Returns:
        The command line, and a line about what changed; None if nothing did.
    """
    given = {flag: _value(words, flag) for flag in (_SIZE, _MICROBATCH, CHUNKS, _BY_LAYERS, *_BY_CONTENT)}
    has_them = always or (given[_SIZE] not in (None, "1") and given[_MICROBATCH] is not None)
    if not has_them or any(given[flag] for flag in _BY_CONTENT):
        return list(words), None
    wanted = None if chunks == 1 else str(chunks)
    if given[CHUNKS] == wanted and given[_BY_LAYERS] is None:
        return list(words), None
    left_out = [f"{flag} {given[flag]}" for flag in (CHUNKS, _BY_LAYERS) if given[flag] is not None]
    added = [] if wanted is None else [CHUNKS, wanted]
    changes = [*(f"without {each}" for each in left_out), *([f"with {' '.join(added)}"] if added else [])]
    kept = _without(_without(words, CHUNKS), _BY_LAYERS)
    takes = "one model chunk" if chunks == 1 else f"{chunks} model chunks"
    return [*kept, *added], f"{' and '.join(changes)}: {schedule} takes {takes} per rank"


def _value(words: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, given with a space or an equals sign."""
    found = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else " ".join(words[place + 1 : place + 2])
    return found


def _without(words: Sequence[str], flag: str) -> list[str]:
    kept: list[str] = []
    is_value = False
    for word in words:
        if not is_value and word.partition("=")[0] != flag:
            kept.append(word)
        is_value = word == flag
    return kept
