"""megatron-core's tokenizers, made alike for the releases that are supported. It loads `transformers` only where it is used.

Importing megatron-core's tokenizer classes imports `transformers` wherever that is installed, which takes seconds on every rank;
most tokenizers never use it.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["gpt2_tokenizer", "load_tokenizer"]

_LIBRARIES = "megatron.core.tokenizers.text.libraries"


def load_tokenizer(library: str, path: str | None = None, **options: Any) -> Any:
    """A megatron-core tokenizer.

    Args:
        library: megatron-core's name of the tokenizer's library. ``null`` is called ``null-text`` in later releases.
        path: the tokenizer's file, directory or name; None for libraries without files.
        **options: of the library's class.

    Raises:
        Exception: whatever megatron-core or the library raises for wrong files or options.
    """
    _import_libraries(uses_transformers=library == "huggingface")
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES

    name = library if library in TOKENIZER_MAPPING_LIBRARIES else f"{library}-text"
    return MegatronTokenizer.from_pretrained(path, {"library": name}, **options)


def gpt2_tokenizer(vocab_file: str, merge_file: str, **options: Any) -> Any:
    """GPT-2's byte-pair tokenizer from its two files.

    megatron-core's own needs the Hugging Face hub besides, and 0.16 ignores the given merges. Here a directory as the hub has it
    is made of the files. Cached sample indices depend on the names of the files, as with megatron-core's.

    Args:
        vocab_file: vocab.json.
        merge_file: merges.txt.
        **options: of megatron-core's Hugging Face tokenizer.
    """
    end_of_text = "<|endoftext|>"
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end_of_text)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_bytes(Path(vocab_file).read_bytes())
        Path(folder, "merges.txt").write_bytes(Path(merge_file).read_bytes())
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **special}))
        tokenizer = load_tokenizer("huggingface", folder, **options)
    tokenizer.path = "GPT2BPETokenizer"
    tokenizer.additional_args = {"vocab_file": vocab_file, "merges_file": merge_file, **options}
    return tokenizer


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
