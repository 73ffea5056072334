"""docs/tested.md: generated from the claims at the tests, and up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import tested

TEST = "\n\ndef test_it() -> None:\n    pass\n"
CLAIM = "@pytest.mark.claims('Layers', 'a thing', 'works', also=('plan',))"


def test_the_page_is_up_to_date() -> None:
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


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (CLAIM.replace("Layers", "Wishes"), "no section .* that is called Wishes"),
        (CLAIM.replace("'plan'", "'none'"), "also shown by none"),
    ],
)
def test_a_claim_of_an_unknown_section_or_place_is_an_error(
    claim: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "test_x.py").write_text(claim + TEST)
    monkeypatch.setattr(tested, "TESTS", tmp_path)
    with pytest.raises(ValueError, match=message):
        tested.page()
