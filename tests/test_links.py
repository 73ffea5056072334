"""Links between the pages of this repository: every target exists. The README is PyPI's page too, and has no relative ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
REPOSITORY = URLS["Repository"]
ON_GITHUB = re.compile(
    rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/(?P<page>.+)"
    rf"|{re.escape(REPOSITORY.replace('https://github.com', 'https://raw.githubusercontent.com'))}/main/(?P<image>.+)"
)
INLINE = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
DEFINED = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
REFERENCE = re.compile(r"(!?)\[([^\]]+)\](?:\[([^\]]+)\])?(?![(\[:])")


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def targets(page: Path) -> list[str]:
    """Where a page's links and images point."""
    text = prose(page)
    return [*INLINE.findall(text), *(target for _, target in DEFINED.findall(text))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def missing(target: str, folder: Path) -> str | None:
    """Why a target inside this repository does not exist; None if it does."""
    name, _, anchor = target.partition("#")
    path = folder / name
    if not path.exists():
        return f"{target}: no such file"
    if anchor and anchor not in anchors(path):
        return f"{target}: no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_target_of_every_link_exists(page: Path) -> None:
    problems = []
    for target in targets(page):
        on_github = ON_GITHUB.fullmatch(target)
        if on_github:
            problems.append(missing(on_github["page"] or on_github["image"], ROOT))
        elif not target.startswith(("https://", "#")):
            problems.append(missing(target, page.parent))
    assert not [problem for problem in problems if problem]


def test_the_readme_has_absolute_links_only() -> None:
    """PyPI shows it without the repository around it."""
    relative = [target for target in targets(ROOT / "README.md") if not target.startswith("https://")]
    assert not relative


def test_the_readme_defines_every_reference_and_uses_every_definition() -> None:
    text = prose(ROOT / "README.md")
    defined = {name.lower(): target for name, target in DEFINED.findall(text)}
    used = {(name or shown).lower(): bool(is_image) for is_image, shown, name in REFERENCE.findall(DEFINED.sub("", text))}
    assert set(used) == set(defined)
    for name, is_image in used.items():
        match = ON_GITHUB.fullmatch(defined[name])
        assert match is not None, defined[name]
        assert bool(match["image"]) == is_image, f"{name}: images are raw files, links are pages"


@pytest.mark.parametrize("name", URLS)
def test_the_project_urls_are_in_one_repository(name: str) -> None:
    url = URLS[name]
    assert url.startswith(REPOSITORY)
    match = ON_GITHUB.fullmatch(url)
    assert match is None or (ROOT / match["page"]).exists()
