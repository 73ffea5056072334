"""Flags of the authors' fork of Megatron-LM: each has an answer, and docs/fork.md has the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.fork_flags import LEFT_OUT, REFUSED, REPLACED, in_our_flags
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig

pytestmark = pytest.mark.claims(
    "Your own script",
    "the flags of the authors' fork, in `pretrain_gpt.py` and `zerobubble run`: taken, replaced, left out or refused",
    "works",
)


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("--enable-zero-bubble --lr 1", "--enable-zero-bubble --lr 1"),
        ("--enable-1f1b-v --lr 1", "--zero-bubble-schedule 1f1b-v --lr 1"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward auto", "--enable-zero-bubble --zero-bubble-memory-limit auto"),
        ("--zero-bubble-max-pending-backward=auto", "--zero-bubble-memory-limit auto"),
        ("--zero-bubble-max-pending-backward 2p", "--zero-bubble-max-pending-backward 2p"),
        ("--zero-bubble-max-pending-backward 8 --zero-bubble-v-schedule", "--zero-bubble-v-schedule"),
        ("--zero-bubble-adaptive-memory-limit-percentile 85 --fp32 --lr=1", "--lr=1"),
        ("--enable-zb-runtime --profile-memory-iter=3 x", "x"),
    ],
)
def test_it_becomes(words: str, ours: str) -> None:
    kept, note = in_our_flags(words.split())
    assert kept == ours.split()
    assert (note is None) == (words == ours)
    if note is not None:
        changed = {word.partition("=")[0] for word in words.split() if word.startswith("--")} - set(
            ours.replace("=", " ").split()
        )
        assert all(flag in note for flag in changed)


def test_flags_that_may_be_anothers_stay_in_its_script() -> None:
    words = ["--fp32", "--cpu-offload", "--profile-memory-iter=3"]
    assert in_our_flags([*words, "--enable-zb-runtime"], is_ours=False)[0] == words
    assert in_our_flags(["--enable-1f1b-v"], is_ours=False)[0] == ["--zero-bubble-schedule", "1f1b-v"]


def test_offloading_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^--cpu-offload, --offload-time: .*--zero-bubble-memory-limit$"):
        in_our_flags(["--lr", "1", "--cpu-offload", "--offload-time=0.5"])


def test_the_page_has_the_same_answers() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "fork.md").read_text("utf-8")
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|$", page, re.MULTILINE)
    answers = {flag: answer for flags, answer in rows for flag in re.findall(r"`(--[^`]+)`", flags)}
    for flag in LEFT_OUT:
        assert answers[flag].startswith("left out"), flag
    for flag in REFUSED:
        assert answers[flag].startswith("refused"), flag
    for old, new in REPLACED.items():
        assert answers[" ".join(old)] == f"becomes `{' '.join(new)}`"


def test_a_program_that_gives_both_is_refused() -> None:
    with pytest.raises(ConfigError, match="--zero-bubble-v-schedule are both given"):
        ZeroBubbleConfig(zero_bubble_v_schedule=True, zero_bubble_max_pending_backward="2p")
