"""Names in the package: no two files and no two classes are called alike, so a search or a traceback leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron" / "zerobubble"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
SHARED_FILES = {
    "__init__.py": "a package has one",
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
