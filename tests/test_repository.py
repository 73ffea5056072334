"""The repository as a reader finds it: names that lead to one place, words of the glossary, links and records that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

PACKAGE = Path(__file__).parents[1] / "megatron" / "zerobubble"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
SHARED_FILES = {
    "__init__.py": "a package has one",
    "__main__.py": "`python -m` of a package runs it",
    "run.py": "`python -m megatron.zerobubble.run` is the command of cli/run.py, under a name that torchrun can start",
}
SHARED_CLASSES: dict[str, str] = {}
"""Name -> why several files or classes have it."""


def test_no_two_files_of_the_package_have_one_base_name() -> None:
    found = defaultdict(list)
    for name, path in FILES.items():
        found[path.name].append(name)
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in SHARED_FILES} == {}
    assert [name for name in SHARED_FILES if len(found[name]) < 2] == []


def test_no_two_classes_of_the_package_have_one_name() -> None:
    found = defaultdict(list)
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{name}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in SHARED_CLASSES} == {}
    assert [name for name in SHARED_CLASSES if len(found[name]) < 2] == []


ROOT = Path(__file__).parents[1]
FOLDERS = ("megatron", "tools", "tests", "docs", "examples")
SUFFIXES = {".py", ".md", ".js", ".html", ".sh", ".cpp", ".hpp"}
REPLACED = re.compile(
    r"further[- ]token|\btrainees?\b|\bentrants?\b|\bdepartures?\b|extra[ _]losses|steps? taken early|\bis told\b|stages? a rank"
    r"|copies of the model|colour|behaviour|neighbour|honour",
    re.IGNORECASE,
)


def texts() -> Iterator[tuple[Path, str]]:
    """Every file that a person reads, without this one and what others have written."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted([*files, *ROOT.glob("*.md"), *ROOT.glob("*.py")]):
        if path.suffix in SUFFIXES and "vendor" not in path.parts and path != Path(__file__):
            yield path, path.read_text(encoding="utf-8")


def test_replaced_words_are_gone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if REPLACED.search(line)
    ]
    assert not found, "use the words of docs/glossary.md instead:\n" + "\n".join(found)


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


FOLDER = Path(__file__).parents[1] / "docs" / "adr"
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
ROWS = {int(number): row for number, row in re.findall(r"^\| (\d+) \| (.*)$", INDEX, re.MULTILINE)}
RECORDS = {int(path.name[:4]): path for path in FOLDER.glob("[0-9]*.md")}


def test_the_index_has_a_row_for_every_record_and_names_the_numbers_without_one() -> None:
    assert all(f"]({RECORDS[number].name})" in row for number, row in ROWS.items())
    assert ROWS.keys() == RECORDS.keys()
    unused = re.search(r"^Numbers ([\d, and]+) have no record", INDEX, re.MULTILINE)
    assert unused is not None
    named = set(map(int, re.findall(r"\d+", unused[1])))
    assert named == set(range(1, max(RECORDS) + 1)) - RECORDS.keys()


def test_a_withdrawn_record_says_so_in_the_index_and_why_in_its_status() -> None:
    for number, path in RECORDS.items():
        status = path.read_text(encoding="utf-8").split("\n## ", 1)[0]
        assert ("withdrawn" in ROWS[number]) == ("withdrawn" in status), path.name
        assert "withdrawn" not in status or "because" in status, path.name


TOUR = re.compile(r"^\| `([\w/]+\.py)` \| `(?:(\w+)\.)?(\w+)` \|", re.MULTILINE)


def test_every_station_of_the_tour_exists() -> None:
    stations = TOUR.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(stations) >= 10
    for file, owner, name in stations:
        body: list[ast.stmt] = ast.parse((PACKAGE / file).read_text()).body
        if owner:
            (body,) = [each.body for each in body if isinstance(each, ast.ClassDef) and each.name == owner]
        assert any(isinstance(each, ast.FunctionDef) and each.name == name for each in body), (file, owner, name)


def test_what_others_read_of_the_repository_is_current() -> None:
    """CITATION.cff has the version, and hosted CI and the hooks before a commit run what is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["repository-code"] == project["urls"]["Repository"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            for command in (step["run"] for step in job["steps"] if step.get("run", "").startswith("make ")):
                named = {word for word in command.split()[1:] if "=" not in word}
                assert named <= targets, (file, command)
    (hooks,) = (each["hooks"] for each in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"])
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert {hook["entry"].split()[0].rpartition("/")[2] for hook in hooks} == set(re.findall(r"\$\(BIN\)/([\w-]+)", lint))


def test_the_readme_is_short() -> None:
    """At most 850 words, without the addresses of links."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(" ".join(line for line in lines if not re.match(r"\[[^]]+\]: ", line)).split()) <= 850
