"""Lines of the pages: prose is wrapped at 120 characters, and wrapping it changes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import wrap


@pytest.mark.parametrize("page", wrap.pages(), ids=lambda page: page.relative_to(wrap.ROOT).as_posix())
def test_the_prose_of_a_page_is_wrapped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert wrap.wrapped(text) == text, f"run `{wrap.COMMAND}`"


def test_long_prose_is_wrapped_and_lists_are_indented() -> None:
    words = " ".join(["word"] * 40)
    first, second = wrap.wrapped(words).split("\n")
    assert len(first) <= wrap.WIDTH < len(first) + len(" word")
    assert f"{first} {second}" == words
    assert wrap.wrapped(f"- {words}\n- short").split("\n")[1].startswith("  word")
    assert wrap.wrapped(f"10. {words}").split("\n")[1].startswith("    word")


@pytest.mark.parametrize("text", ["| a | table |", "# A heading", "[name]: https://", "<!-- HTML -->", "![an image](x.png)"])
def test_what_is_no_prose_stays(text: str) -> None:
    long = f"{text} {'word ' * 40}end"
    assert wrap.wrapped(long) == long
    assert wrap.wrapped(f"```\n{'word ' * 40}end\n```") == f"```\n{'word ' * 40}end\n```"


@pytest.mark.parametrize("piece", ["`some code`", "[the text](link.md)", "and - more", "about 5 %", "row 1. This", "a # sign"])
def test_no_break_makes_something_else_of_a_word(piece: str) -> None:
    for length in range(wrap.WIDTH - len(piece) - 2, wrap.WIDTH + 2):
        for line in wrap.wrapped("x" * length + f" {piece} end of it").split("\n"):
            assert not line.startswith(("-", "%", "1.", "#", "code", "text", "text]"))
            assert not line.endswith(("`some", "[the"))
