"""The repository stays small: lines of Python per folder within a budget, no long files and no long functions.

`size.toml` has the budgets, their sums, and the files and functions that are too long. A budget follows its folder downwards, and
the sums only fall. After a merge `python -m tests.test_size > tests/size.toml` writes the file as it has to be; a total that is
higher than in both branches before says how many lines to take out.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE_LINES, FUNCTION_LINES = 450, 80
AREAS = ("megatron/zerobubble", "tests", "tools")
TABLE = Path(__file__).with_name("size.toml")
DEFINITION = re.compile(r"( *)(?:async def|def|class) ")


def tables() -> dict[str, Any]:
    """The tables of size.toml."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def sources() -> dict[str, str]:
    """Path -> text of every Python file of the areas that git tracks; of every one where there is no git."""
    command = ["git", "ls-files", "-z", "--", *(f"{area}/*.py" for area in AREAS)]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = []
    if not any(names):
        found = [Path(folder, name) for area in AREAS for folder, _, files in os.walk(ROOT / area) for name in files]
        names = [path.relative_to(ROOT).as_posix() for path in found if path.suffix == ".py"]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in sorted(names) if name and (ROOT / name).exists()}


def lines_by_folder(texts: dict[str, str]) -> Counter[str]:
    """Lines of each folder below an area, with its loose files as `.`; all of tools are one."""
    lines: Counter[str] = Counter()
    for name, text in texts.items():
        area = next(each for each in AREAS if name.startswith(f"{each}/"))
        folder, slash, _ = name.removeprefix(f"{area}/").partition("/")
        lines[area if area == "tools" else f"{area}/{folder if slash else '.'}"] += text.count("\n")
    return lines


def sums(lines: dict[str, int]) -> dict[str, int]:
    """Lines of each area."""
    return {area: sum(number for folder, number in lines.items() if f"{folder}/".startswith(f"{area}/")) for area in AREAS}


def may_be_long(text: str) -> bool:
    """Whether a function seems too long by indentation: parsing every file takes a hundred times as long.

    A script in a string with a definition of its own may end a function too early.
    """
    begun: list[tuple[int, int]] = []
    for number, line in enumerate([*text.splitlines(), "def end"]):
        if match := DEFINITION.match(line):
            while begun and begun[-1][0] >= len(match[1]):
                if number - begun.pop()[1] > FUNCTION_LINES:
                    return True
            begun.append((len(match[1]), number))
    return False


def too_long(texts: dict[str, str]) -> dict[str, int]:
    """Files, and functions as `path: name`, that are longer than the limits."""
    found = {name: text.count("\n") for name, text in texts.items() if text.count("\n") > FILE_LINES}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)) if may_be_long(text) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                number = (node.end_lineno or node.lineno) - node.lineno + 1
                if number > FUNCTION_LINES:
                    found[f"{name}: {node.name}"] = max(number, found.get(f"{name}: {node.name}", 0))
    return dict(sorted(found.items()))


def test_every_folder_is_within_its_budget_and_the_sums_only_fall() -> None:
    lines, table, problems = lines_by_folder(sources()), tables(), []
    for folder in sorted(lines | table["budgets"]):
        number, budget = lines[folder], table["budgets"].get(folder, 0)
        head = f"{folder} has {number} lines, its budget is {budget}: "
        if number > budget:
            problems.append(head + "take something out, or take lines from another folder's budget; the sum only falls")
        elif budget > 1.02 * number + 20:
            problems.append(head + f"lower it to {number}, and the total with it")
    for area, number in sums(table["budgets"]).items():
        total = table["totals"][area]
        head = f"the budgets of {area} are {number} lines in sum, their total is {total}: "
        if number != total:
            problems.append(head + ("take lines from a budget" if number > total else f"lower the total to {number}"))
    assert not problems, "\n".join([*problems, "see the top of tests/test_size.py, and tests/size.toml"])


def test_no_file_and_no_function_is_long() -> None:
    """Files have at most 450 lines, functions 80; what was longer may not grow, and leaves the table once it is shorter."""
    found, known = too_long(sources()), tables()["long"]
    problems = [f"{name} has {number} lines: split it" for name, number in found.items() if number > known.get(name, 0)]
    problems += [f"{name} is no longer too long: take it out of tests/size.toml" for name in known if name not in found]
    assert not problems, "\n".join(problems)


if __name__ == "__main__":
    now = sources()
    budgets = dict(sorted(lines_by_folder(now).items()))
    sys.stdout.write("# Lines of Python, read by tests/test_size.py. The totals only fall.\n")
    for title, table in (("totals", sums(budgets)), ("budgets", budgets), ("long", too_long(now))):
        sys.stdout.write(f"\n[{title}]\n" + "".join(f'"{name}" = {number}\n' for name, number in table.items()))
