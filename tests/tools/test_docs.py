"""The documentation: generated pages are up to date, plans that it shows are what the command prints, prose is wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import flags, hosted, npm, tested, wrap

DOCS = Path(__file__).parents[2] / "docs"


def test_the_concepts_show_the_first_plan_of_the_planner_page() -> None:
    """Its commands run in test_doc_commands."""
    shown = (DOCS / "planner.md").read_text(encoding="utf-8").partition("```console\n")[2].partition("```")[0]
    timeline = [line for line in shown.splitlines() if line.startswith(("ms ", "rank "))]
    assert "\n".join(timeline) in (DOCS / "concepts.md").read_text(encoding="utf-8")


FROZEN = Path(__file__).parents[1] / "training" / "flags.txt"


def test_the_page_of_flags_is_up_to_date() -> None:
    assert flags.PAGE.read_text(encoding="utf-8") == flags.page(), f"docs/flags.md is out of date: run `{flags.COMMAND}`"


def test_every_flag_has_one_row() -> None:
    rows = [line.split("`")[1] for line in flags.page().splitlines() if line.startswith("| `")]
    frozen = [flag for flag in FROZEN.read_text().split() if flag not in ("-h", "--help")]
    assert sorted(rows) == sorted(frozen)


TEST = "\n\ndef test_it() -> None:\n    pass\n"
CLAIM = "@pytest.mark.claims('Layers', 'a thing', 'works', also=('plan',))"


def test_the_page_of_tests_is_up_to_date() -> None:
    assert tested.PAGE.read_text(encoding="utf-8") == tested.page(), f"docs/tested.md is out of date: run `{tested.COMMAND}`"


def test_a_claim_is_a_row_that_names_its_test() -> None:
    text = f"import pytest\npytestmark = [pytest.mark.claims('Schedules', 'a ' 'file', 'rejected')]\n\n\n{CLAIM}{TEST}"
    first, second = tested.claims_of(text, "plan/test_x.py")
    assert first == ("Schedules", "a file", "rejected", ("plan/test_x.py",))
    assert second.row == "| a thing | works | `plan/test_x.py`, `plan` |"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CLAIM + "\ndef helper() -> None:\n    pass\n", "a file with a test"),
        (f"@pytest.mark.claims('Layers', WHAT, 'works'){TEST}", "x.py:1: a claim takes a section, a sentence and a state"),
        (f"@pytest.mark.claims('Layers', 'a thing'){TEST}", "a section, a sentence and a state"),
        (f"@pytest.mark.claims('Layers', 'a thing', 'works', too=('plan',)){TEST}", "no option but also"),
    ],
)
def test_a_claim_without_a_test_or_a_sentence_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(tested.claims_of(text, "x.py"))


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


@pytest.mark.parametrize(
    ("html", "loaded"),
    [
        ('<script src="https://x.org/shim"></script>', ["https://x.org/shim"]),
        ("<link href='//x.org/a.css' rel=stylesheet>", ["//x.org/a.css"]),
        ('<IMG alt="a" SRC=https://x.org/a.png>', ["https://x.org/a.png"]),
        ('<a href="https://x.org">x</a> <link rel="canonical" href="https://x.org/y"><script src="a/iframe-worker.js">', []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(html: str, loaded: list[str]) -> None:
    assert hosted.from_elsewhere(html) == loaded


def test_another_package_than_the_tested_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a-1.0.tgz"
    file.write_bytes(b"")
    with pytest.raises(SystemExit, match=r"a@1\.0 from the npm registry is not the package that was tested"):
        npm.package("a@1.0", "AAAA", tmp_path)
    assert not file.exists()
