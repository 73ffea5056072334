"""Flags from megatron-core's own dataclasses: one field of plain values is one flag, spelled as Megatron-LM spells it.

`num_layers` is `--num-layers`; the switch `--sequence-parallel` can be turned off again by `--no-sequence-parallel`; a list takes
its elements one after the other. What is not given keeps the default of its class, and what is given is checked by its class.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from megatron.zerobubble.flags.dataclass_flags import READERS, field_docs

__all__ = ["add_fields", "given_fields"]

_SPELLED: Mapping[str, tuple[str, ...]] = {
    "num_moe_experts": ("--num-experts",),
    "layernorm_epsilon": ("--norm-epsilon",),
    "fp8": ("--fp8-format",),
    "bias_activation_fusion": ("--bias-gelu-fusion", "--bias-swiglu-fusion"),
    "apply_rope_fusion": ("--rope-fusion",),
    "grad_reduce_in_fp32": ("--accumulate-allreduce-grads-in-fp32",),
    "check_for_nan_in_grad": ("--check-for-nan-in-loss-and-grad",),
    "bucket_size": ("--ddp-bucket-size",),
    "average_in_collective": ("--ddp-average-in-collective",),
}
"""Fields whose flag Megatron-LM spells in another way, and megatron-core 0.16.1 does not say so."""
_TURNED_OFF = {"add_bias_linear": "--disable-bias-linear", "perform_initialization": "--no-initialization"}
"""Fields that one switch turns off, and nothing turns on."""
_EXPRESSION = re.compile(r"[\[\]\d\s,+*()]+")


def add_fields(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add a flag per field of `config_class` that takes a plain value and that the parser does not have yet.

    Args:
        parser: receives them, as a group that is named after the class.
        config_class: a dataclass of megatron-core. Its docstrings under fields become help texts.
    """
    group = parser.add_argument_group(f"megatron.core's {config_class.__name__}")
    hints = typing.get_type_hints(config_class)
    docs = {name: text for each in reversed(config_class.__mro__[:-1]) for name, text in field_docs(each).items()}
    known = {action.dest for action in parser._actions}
    for field in dataclasses.fields(config_class):
        options = _options(hints[field.name])
        if options is None or field.name in known or not field.init or field.name.startswith("_"):
            continue
        text = docs.get(field.name, "").replace("%", "%%")
        flags = _SPELLED.get(field.name, ("--" + field.name.replace("_", "-"),))
        if field.name in _TURNED_OFF:
            options, flags = {"action": "store_false"}, (_TURNED_OFF[field.name],)
        if "action" not in options and "metavar" not in options and "choices" not in options:
            options["metavar"] = "VALUE"
        group.add_argument(*flags, dest=field.name, default=argparse.SUPPRESS, help=text, **options)


def given_fields(config_class: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `config_class` that flags have set, by name."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(config_class) if hasattr(args, field.name)}


def _options(hint: Any) -> dict[str, Any] | None:
    """How `add_argument` reads a value of this type; None: it is no plain one."""
    kinds = set(typing.get_args(hint)) if typing.get_origin(hint) in (Union, types.UnionType) else {hint}
    kinds.discard(type(None))
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    lists = {kind for kind in kinds if typing.get_origin(kind) is list}
    plain, elements = kinds - lists, {element for kind in lists for element in typing.get_args(kind)}
    if lists and plain == {int}:
        return {"type": _whole_number_or_list}
    for element in (int, float, str):
        if element in elements:
            return {"type": READERS[element], "nargs": "+", "action": _OneOrMore if plain else None}
    if len(kinds) == 1:
        (kind,) = kinds
        if typing.get_origin(kind) is Literal:
            return {"choices": typing.get_args(kind)}
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return {"type": _member(kind), "metavar": "|".join(kind.__members__)}
    return next(({"type": READERS[kind]} for kind in (int, float, str) if kind in kinds), None)


class _OneOrMore(argparse.Action):
    """Stores a single value as it is, and several as a list: what megatron-core takes for a field of either type."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def _member(kind: type[enum.Enum]) -> Any:
    def read(text: str) -> enum.Enum:
        if text not in kind.__members__:
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(kind.__members__)})")
        return kind[text]

    return read


def _whole_number_or_list(text: str) -> int | list[int]:
    """A number, or a list in Megatron-LM's notation, such as `[0]+[1]*3`."""
    if not _EXPRESSION.fullmatch(text) or len(text) > 1000 or "**" in text:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is neither a number nor a list such as [0]+[1]*3")
    try:
        value: int | list[int] = eval(text, {"__builtins__": {}})  # digits, brackets, commas, + and * alone
    except (SyntaxError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as [0]+[1]*3: {error}") from None
    return value
