"""megatron-core's tokenizers, made alike for the releases that are supported. It loads `transformers` only where it is used.

Importing megatron-core's tokenizer classes imports `transformers` wherever that is installed, which takes seconds on every rank;
most tokenizers never use it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

__all__ = ["load_tokenizer"]

_LIBRARIES = "megatron.core.tokenizers.text.libraries"


def load_tokenizer(library: str, path: str | None = None, **options: Any) -> Any:
    """A megatron-core tokenizer.

    Args:
        library: megatron-core's name of the tokenizer's library. ``null`` is called ``null-text`` in later releases.
        path: the tokenizer's file, directory or name; None for libraries without files.
        **options: of the library's class.

    Raises:
        Exception: what megatron-core or the library raises for wrong files or options.
    """
    _import_libraries(uses_transformers=library == "huggingface")
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES

    name = library if library in TOKENIZER_MAPPING_LIBRARIES else f"{library}-text"
    return MegatronTokenizer.from_pretrained(path, {"library": name}, **options)


def _import_libraries(*, uses_transformers: bool) -> None:
    """Import megatron-core's tokenizer classes; `transformers`, if it is not imported yet, only where it is used."""
    if not uses_transformers:
        hides = "transformers" not in sys.modules
        if hides:
            sys.modules["transformers"] = None  # type: ignore[assignment]  # an import of it fails as if it were not installed
        try:
            importlib.import_module(_LIBRARIES)
        finally:
            if hides:
                del sys.modules["transformers"]
        return
    from transformers import AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of documents longer than a model's sequences
    module: Any = importlib.import_module(f"{_LIBRARIES}.huggingface_tokenizer")
    module.AutoTokenizer = AutoTokenizer  # missing if the classes were imported without it before
