"""The words of `docs/glossary.md` are found where an engineer greps for them, and the ones they replaced are gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("megatron", "tools", "tests", "docs", "examples")
SUFFIXES = {".py", ".md", ".js", ".html", ".sh", ".cpp", ".hpp"}
REPLACED = re.compile(
    r"further[- ]token|\btrainees?\b|\bentrants?\b|\bdepartures?\b|extra[ _]losses|steps? taken early|\bis told\b|stages? a rank"
    r"|copies of the model|colour|behaviour|neighbour|honour",
    re.IGNORECASE,
)
FIELD = (
    *("all-reduce", "reduce-scatter", "all-gather", "headroom", "headroom_bytes", "data-parallel replica", "MTP layers"),
    *("multi-token prediction", "early exit", "EarlyExit", "auxiliary losses", "AuxLosses", "post-validation", "optimistic step"),
    *("optimistic=True", "snapshot", "rollback", "redo", "finalize", "drop_snapshot", "recv_prefix", "send_next", "send_prev"),
    *(
        "recv_global",
        "global gradient statistics",
        "deviation",
        "dgrad",
        "wgrad",
        "contender",
        "training state",
        "search options",
    ),
    *("seed order", "hand-written pattern", "GEMM", "optimizer state", "activation memory", "ZB-H1 (ZB-1p)", "ZB-H2 (ZB-2p)"),
)


def texts() -> Iterator[tuple[Path, str]]:
    """Every file that a person reads, without this one and what others have written."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted([*files, *ROOT.glob("*.md"), *ROOT.glob("*.py")]):
        if path.suffix in SUFFIXES and "vendor" not in path.parts and path != Path(__file__):
            yield path, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("word", FIELD)
def test_a_word_of_the_field_is_in_the_glossary(word: str) -> None:
    assert word.lower() in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").lower()


def test_replaced_words_are_gone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if REPLACED.search(line)
    ]
    assert not found, "use the words of docs/glossary.md instead:\n" + "\n".join(found)
