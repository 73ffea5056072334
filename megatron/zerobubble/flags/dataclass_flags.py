"""Command-line flags from dataclasses: one field is one flag, and the docstring under the field is its help text.

The spelling follows Megatron-LM: ``num_layers`` is ``--num-layers``. A bool is False by default, and its flag a switch.

Standard library only, and fast: this runs before torch is loaded.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, Union

from megatron.zerobubble.messages import quoted, shown

__all__ = ["READERS", "add_group", "field_docs", "flag_of", "from_namespace"]

Config = TypeVar("Config")

_LARGEST = 2**63 - 1
"""Largest whole number of a flag: torch and numpy hold no larger one."""


def flag_of(name: str) -> str:
    """The flag that sets the field of this name."""
    return "--" + name.replace("_", "-")


def add_group(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add the flags of `config_class` to `parser` as one argument group, titled by the first line of its docstring.

    Args:
        parser: receives the group.
        config_class: a dataclass whose fields are flags.
    """
    title, _, rest = (inspect.getdoc(config_class) or config_class.__name__).partition("\n")
    group = parser.add_argument_group(title.rstrip("."), rest.strip() or None)
    hints = typing.get_type_hints(config_class)
    docs = field_docs(config_class)
    for field in _fields(config_class):
        help_text = docs[field.name].replace("%", "%%")
        if hints[field.name] is bool:
            group.add_argument(flag_of(field.name), action="store_true", dest=field.name, help=help_text)
        else:
            group.add_argument(flag_of(field.name), dest=field.name, **_value_options(field, hints[field.name], help_text))


def from_namespace(config_class: type[Config], namespace: argparse.Namespace) -> Config:
    """Make a `config_class` from the parsed flags.

    Raises:
        ConfigError: from the dataclass's `__post_init__`.
    """
    return config_class(**{field.name: getattr(namespace, field.name) for field in _fields(config_class)})


@functools.cache  # reading the source takes most of the time of a parse
def field_docs(config_class: type) -> dict[str, str]:
    """Field name -> the docstring under the field, as one line. Every field of a config class has one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, below in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(below.value.value).split())
    return docs


def _fields(config_class: type) -> Iterator[dataclasses.Field[Any]]:
    return (field for field in dataclasses.fields(config_class) if field.init)


def _value_options(field: dataclasses.Field[Any], hint: Any, help_text: str) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for a flag that takes a value."""
    options: dict[str, Any] = {"metavar": field.metadata.get("metavar"), "default": field.default}
    options["help"] = help_text if field.default is None else f"{help_text} Default: {field.default}."
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is Literal and options["metavar"] is not None:
        options["type"] = READERS[str]  # the config names what is allowed, and what was meant
    elif typing.get_origin(hint) is Literal:
        options["choices"] = typing.get_args(hint)
    else:
        options["type"] = READERS[hint]
        options["metavar"] = options["metavar"] or {int: "N", float: "X", str: "TEXT"}[hint]
    return options


def _whole_number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:  # also above 4,300 digits
        raise argparse.ArgumentTypeError(f"invalid int value: {quoted(text)}") from None
    if abs(value) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{shown(text)} is too large; give at most {_LARGEST:,}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid float value: {quoted(text)}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a finite number")
    return value


def _text(text: str) -> str:
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{quoted(text)} has a NUL character, which no file name may have")
    return text


READERS: dict[type, Callable[[str], Any]] = {int: _whole_number, float: _number, str: _text}
"""Type of a field -> how its flag's text is read. Raises ArgumentTypeError, which argparse reports with the flag."""
