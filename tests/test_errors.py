"""The tree drawn in the docstring of `errors` is the tree of its classes."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

from megatron.zerobubble import errors

LINE = re.compile(
    r"^ {4}(?P<indent>(?:[| ] {3})*)(?:(?:\|--|`--) )?(?P<name>\w+)(?: \((?P<builtin>\w+)\))?(?: {2,}(?P<text>.+))?$"
)


def drawn_tree() -> dict[str, tuple[str, ...]]:
    """Class -> the names of its bases, as drawn: the parent, then a built-in exception where one is given."""
    drawing = (errors.__doc__ or "").split("::", 1)[1].strip("\n").split("\n\n")[0]
    tree: dict[str, tuple[str, ...]] = {}
    path: list[str] = []
    for line in drawing.splitlines():
        match = LINE.match(line)
        assert match, f"not a line of the tree: {line!r}"
        depth = len(match["indent"]) // 4 + ("--" in line.split(match["name"])[0])
        del path[depth:]
        tree[match["name"]] = (*path[-1:], *([match["builtin"]] if match["builtin"] else []))
        path.append(match["name"])
    return tree


def classes() -> dict[str, type[BaseException]]:
    return {name: value for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__}


def test_the_drawing_is_the_tree() -> None:
    assert drawn_tree() == {name: tuple(base.__name__ for base in value.__bases__) for name, value in classes().items()}


def test_every_error_is_exported_and_explained() -> None:
    assert sorted(errors.__all__) == sorted(classes())
    for value in classes().values():
        assert inspect.getdoc(value) != inspect.getdoc(value.__bases__[0])


@pytest.mark.parametrize("name", sorted(drawn_tree()))
def test_families(name: str) -> None:
    """User errors are ValueError, execution errors RuntimeError, nothing is both, and the root catches all."""
    error = classes()[name]
    assert issubclass(error, errors.ZeroBubbleError)
    assert issubclass(error, ValueError) == issubclass(error, errors.UserError)
    assert issubclass(error, RuntimeError) == issubclass(error, errors.ExecutionError)
    assert not (issubclass(error, ValueError) and issubclass(error, RuntimeError))
    assert str(error("what, where, remedy")) == "what, where, remedy"


def test_no_name_hides_a_built_in() -> None:
    assert not set(classes()) & set(dir(builtins))
