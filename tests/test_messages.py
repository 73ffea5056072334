"""What a message shows of a value: one line, at most 80 characters, whatever the value is."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.zerobubble.messages import MOST_SHOWN, one_line, quoted, shown


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, "\n" * 79, "a\udcffb" * 30, 10**4000, 10**6000, nested(5000), "\x1b[31m", {"a": "\u2028" * 500}, b"\0" * 99],
    ids=range(9),
)
def test_any_value_is_one_printable_line(value: object) -> None:
    for text in (shown(value), quoted(value)):
        assert 0 < len(text) <= MOST_SHOWN
        assert text.isprintable()


def test_short_values_are_shown_as_they_are_and_long_ones_keep_both_ends() -> None:
    assert (shown("a b"), quoted("a b"), shown(3.5)) == ("a b", "'a b'", "3.5")
    assert shown("a\nb") == r"a\nb"
    path = "/data/" + "x" * 300 + "/run.yaml"
    assert shown(path).startswith("/data/xx")
    assert shown(path).endswith("/run.yaml")


def test_a_message_is_one_line_and_what_was_given_is_cut_in_it() -> None:
    words = ["y " * 200, "a\nb"]
    text = one_line(f"--x {words[0]!r} and {words[1]}\n  and {'z' * 500} are wrong", words)
    assert "\n" not in text
    assert r"a\nb" in text
    assert "are wrong" in text
    assert len(text) < 4 * MOST_SHOWN
