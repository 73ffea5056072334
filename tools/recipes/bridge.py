"""Recipes of Megatron-Bridge: functions without arguments that return a configuration.

They are run from a checkout, on a machine that has none of Bridge's dependencies. Only its modules of recipes are executed, and
those of `_EXECUTED` that decide an option; any other module that they import is empty, and a name taken from it is a class whose
instances keep what they are given (`Kept`). So sections of a configuration, providers of models and the model that a recipe loads
from Hugging Face are records of what the recipe sets. What the loaded model has, such as its number of layers, is not known.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.recipes.checks import DEFAULTS
from tools.recipes.files import Recipe

__all__ = ["bridge"]

_PACKAGE = "megatron.bridge"
_RECIPES = (f"{_PACKAGE}.recipes", f"{_PACKAGE}.perf_recipes")
_EXECUTED = (*_RECIPES, f"{_PACKAGE}.training.flex_dispatcher_backend", f"{_PACKAGE}.utils.cuda_graph")
_METHODS = ("to_", "with_", "get_model_config", "finalize", "validate")
"""How names begin that are called on an object and return another one: here the object itself."""
_UNKNOWN = {"vocab_size": 1, "rotary_base": 1.0}
"""What recipes calculate with and a model that is not loaded lacks; no check asks for it."""


class _Class(type):
    """Of a class of Bridge's: what it has not, such as `from_pretrained`, is a function that returns an instance."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: cls()


class Kept(metaclass=_Class):
    """An object of Bridge's: attributes are what was given or set. Others have megatron-core's default, or are None."""

    def __init__(self, *_: Any, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(_METHODS):
            return lambda *_, **__: self
        if type(self).__name__ == "ConfigContainer":  # a section of which no part was given
            setattr(self, name, Kept())
            return getattr(self, name)
        return _UNKNOWN.get(name, DEFAULTS.get(name))

    def __call__(self, *_: Any, **__: Any) -> Kept:
        """Itself: an instance is also what stands for a function of a module that is empty."""
        return self

    def __class_getitem__(cls, _: Any) -> type[Kept]:
        return cls


class _Empty(types.ModuleType):
    """A module that has any name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (Kept,), {}))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a checkout's recipes, and an empty module for everything else of Bridge and for what is not installed."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.missing: set[str] = set()

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """See importlib."""
        is_bridge = name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
        if is_bridge and any(name == each or name.startswith(f"{each}.") for each in _EXECUTED):
            return importlib.machinery.PathFinder.find_spec(name, [str(self.source.joinpath(*name.split(".")[:-1]))])
        if not is_bridge and name.partition(".")[0] not in self.missing:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """See importlib."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """See importlib."""


def bridge(checkout: Path) -> Iterator[Recipe]:
    """The recipes of a checkout."""
    source = checkout / "src"
    finder = _Finder(source)
    sys.meta_path.insert(0, finder)
    if not hasattr(typing, "override"):  # Python 3.12 has it
        typing.override = lambda method: method  # type: ignore[attr-defined]
    try:
        for package in _RECIPES:
            folder = source.joinpath(*package.split("."))
            for file in sorted(folder.rglob("*.py")):
                parts = file.relative_to(source).with_suffix("").parts
                if parts[3] == "utils":
                    continue  # parts of recipes
                module = _imported(".".join(parts[:-1] if parts[-1] == "__init__" else parts), finder)
                yield from _recipes(module, family=parts[3])
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty) or name.startswith(_RECIPES)]:
            del sys.modules[name]


def _imported(name: str, finder: _Finder) -> types.ModuleType:
    """A module, imported again until all that it lacks is empty."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if not missing or missing in finder.missing or missing == "megatron":
                raise
            finder.missing.add(missing)
        except ImportError as error:  # of an installed release that lacks it
            found = re.search(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if found is None or hasattr(sys.modules.get(found[2]), found[1]):
                raise
            setattr(sys.modules[found[2]], found[1], type(found[1], (Kept,), {}))


def _recipes(module: types.ModuleType, *, family: str) -> Iterator[Recipe]:
    """The recipes that a module defines: public functions of no arguments that end in _config."""
    for name, function in vars(module).items():
        if not name.endswith("_config") or name.startswith("_") or not inspect.isfunction(function):
            continue
        if function.__module__ != module.__name__ or _needs_arguments(function):
            continue
        where = f"{module.__name__.removeprefix(_PACKAGE + '.').partition('.')[0]}/{name}"
        try:
            made = function()
            values = _values(made)
        except Exception as error:  # noqa: BLE001 -- somebody else's code, which gets records in place of its objects
            yield Recipe(name=where, family=family, values={}, unread=f"{type(error).__name__}: {error}")
            continue
        yield Recipe(name=where, family=family, values=values)


def _needs_arguments(function: types.FunctionType) -> bool:
    return any(each.default is each.empty and each.kind < each.VAR_POSITIONAL for each in _parameters(function))


def _parameters(function: types.FunctionType) -> Sequence[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _values(made: Any) -> dict[str, Any]:
    """What a configuration sets in the model, in its overlap of communication, which overrides that, and in DDP."""
    values = dict(vars(made.model))
    for section in filter(None, (made.ddp, made.optimizer, made.comm_overlap)):
        values |= {name: value for name, value in vars(section).items() if value is not None}
    return values
