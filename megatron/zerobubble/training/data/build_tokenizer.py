"""Builds the tokenizer that the flags name, through megatron-core."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from megatron.zerobubble.training.config.tokenizer import TokenizerConfig

__all__ = ["build_tokenizer"]


def build_tokenizer(config: TokenizerConfig) -> Any:
    """Make a tokenizer, of megatron-core's class."""
    _import_libraries()
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES

    library = {"ByteLevelTokenizer": "byte-level", "NullTokenizer": "null"}[config.tokenizer_type]
    name = library if library in TOKENIZER_MAPPING_LIBRARIES else f"{library}-text"  # later releases say null-text
    return MegatronTokenizer.from_pretrained(None, {"library": name}, vocab_size=config.known_vocab_size)


def _import_libraries() -> None:
    """Import megatron-core's tokenizer classes without `transformers`.

    They import it wherever it is installed, which takes seconds on every rank, and these two never use it.
    """
    hides = "transformers" not in sys.modules
    if hides:
        sys.modules["transformers"] = None  # type: ignore[assignment]  # an import of it fails as if it were not installed
    try:
        importlib.import_module("megatron.core.tokenizers.text.libraries")
    finally:
        if hides:
            del sys.modules["transformers"]
