"""Megatron-LM's flags for virtual stages, on a script's command line, as a schedule wants them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern
from megatron.zerobubble.plan.partition.stage_layers import StageLayers, regrouped_text

__all__ = ["CHUNKS", "with_chunks"]

_SIZE = "--pipeline-model-parallel-size"
_MICROBATCH = "--micro-batch-size"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
"""The number of model chunks per rank."""
_BY_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_LAYOUT = "--pipeline-model-parallel-layout"
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_WITH_STEP = "--overlap-param-gather-with-optimizer-step"
"""Has no value. Megatron-LM's parser takes it with several chunks per rank only."""


def with_chunks(words: Sequence[str], chunks: int, schedule: str, *, always: bool = False) -> tuple[list[str], str | None]:
    """A script's command line with the number of model chunks per rank that a schedule takes.

    A layout, or a hybrid model's pattern, gets as many stages as the chunks need (`StageLayers.regrouped`). Where neither is
    given, Megatron-LM's flag sets the number, and megatron-core or `DividedLayers` divides the layers by the other flags.

    Args:
        words: the command line.
        chunks: model chunks per rank.
        schedule: its name, for the line.
        always: whether the script has these flags. Otherwise only if it was given Megatron-LM's flags for a pipeline of several
            ranks and for microbatches.

    Returns:
        The command line, and a line about what changed; None if nothing did.
    """
    given = {flag: _value(words, flag) for flag in (_SIZE, _MICROBATCH, CHUNKS, _BY_LAYERS, _LAYOUT, *_PATTERNS)}
    if not (always or (given[_SIZE] not in (None, "1") and given[_MICROBATCH] is not None)):
        return list(words), None
    by_content = next((flag for flag in (_LAYOUT, *_PATTERNS) if given[flag]), None)
    left_out, added = [], []
    if by_content is not None:
        text = given[by_content] or ""
        wanted = _regrouped(by_content, text, given[_SIZE], chunks)
        if wanted != text:
            left_out, added = [by_content], [by_content, wanted]
    else:
        number = None if chunks == 1 else str(chunks)
        if given[CHUNKS] != number or given[_BY_LAYERS] is not None:
            left_out = [flag for flag in (CHUNKS, _BY_LAYERS) if given[flag] is not None]
            added = [] if number is None else [CHUNKS, number]
    kept = list(words)
    for flag in left_out:
        kept = _without(kept, flag)
    gone = [f"{flag} {shlex.quote(given[flag] or '')}" for flag in left_out]
    if left_out and chunks == 1 and _WITH_STEP in kept:
        kept.remove(_WITH_STEP)
        gone.append(_WITH_STEP)
    if not gone and not added:
        return list(words), None
    changes = [*(f"without {each}" for each in gone), *([f"with {shlex.join(added)}"] if added else [])]
    takes = "one model chunk" if chunks == 1 else f"{chunks} model chunks"
    return [*kept, *added], f"{' and '.join(changes)}: {schedule} takes {takes} per rank"


def _regrouped(flag: str, whole: str, ranks: str | None, chunks: int) -> str:
    """The value of a flag that has the contents of all stages, for `chunks` on a rank; as it is if Megatron-LM refuses it."""
    if ranks is None or not ranks.isdecimal() or int(ranks) < 2:
        return whole
    num_ranks, num_stages = int(ranks), int(ranks) * chunks
    text, slash, mtp = whole.partition("/")
    try:
        pattern = HybridPattern.parse(text) if flag in _PATTERNS else None
        given = StageLayers.parse(text).num_stages if pattern is None else len(pattern.segments)
        if given == num_stages or (given % num_ranks if given > 1 else chunks == 1):
            return whole
        return (regrouped_text(text, num_stages) if pattern is None else pattern.regrouped(num_stages).text) + slash + mtp
    except ConfigError:  # the schedule or megatron-core, which read it next, say what is wrong with it
        return whole


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
