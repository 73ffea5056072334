"""Every --tokenizer-type, with tiny tokenizers that are trained here, and what is said where one cannot be used."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from megatron.zerobubble.training.data.corpus import CorpusInfo
from tests.support import tokenizers as tiny
from tests.training.launch import TINY_BATCH, TINY_MODEL

with quiet_third_parties():
    from megatron.zerobubble.mcore.tokenizers import load_tokenizer
    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer, check_data_matches, end_of_document

TEXT = "def f(x): return 'é', \"the end\""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerConfig]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = [TokenizerConfig(), tiny.hugging_face(folder), tiny.sentencepiece(folder)]
    return {config.tokenizer_type: config for config in made}


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [
        ("ByteLevelTokenizer", 256),
        ("HuggingFaceTokenizer", tiny.VOCAB_SIZE),
        ("SentencePieceTokenizer", tiny.SENTENCEPIECE_VOCAB_SIZE),
    ],
)
def test_a_tokenizer_loses_nothing(configs: dict[str, TokenizerConfig], kind: str, vocab_size: int) -> None:
    tokenizer = build_tokenizer(configs[kind])
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer.vocab_size == vocab_size
    assert 0 <= min(ids) <= max(ids) < vocab_size
    assert 0 <= end_of_document(tokenizer, "a test looks") < vocab_size
    assert end_of_document(tokenizer, "a test looks") not in ids
    assert tokenizer.detokenize(ids) == TEXT


def test_transformers_is_loaded_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes seconds on every rank, and megatron-core would wherever it is installed."""
    package = importlib.import_module("megatron.core.tokenizers.text")
    monkeypatch.setattr(package, "libraries", package.libraries)  # what is imported anew below is taken away at the end
    for name in list(sys.modules):
        if name.split(".")[0] == "transformers" or name.startswith("megatron.core.tokenizers.text.libraries"):
            monkeypatch.delitem(sys.modules, name)
    assert load_tokenizer("byte-level", vocab_size=256).vocab_size == 256
    assert "transformers" not in sys.modules


def without_end(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """The Hugging Face tokenizer without an end-of-text token."""
    assert config.tokenizer_model is not None
    (folder / "tokenizer.json").write_bytes(Path(config.tokenizer_model, "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return replace(config, tokenizer_model=str(folder))


def test_a_tokenizer_without_an_end_of_document(configs: dict[str, TokenizerConfig], tmp_path: Path) -> None:
    tokenizer = build_tokenizer(without_end(configs["HuggingFaceTokenizer"], tmp_path))
    with pytest.raises(DataError, match="--append-eod looks for an end-of-document token, and the tokenizer has none"):
        end_of_document(tokenizer, "--append-eod looks")
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path), "--mock-data"]
    given = settings_from_argv([*TINY_MODEL, *TINY_BATCH, "--train-iters", "1", *flags], world_size=1)
    with pytest.raises(DataError, match="megatron-core's datasets look for an end-of-document token"):
        check_data_matches(given, tokenizer)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "HuggingFaceTokenizer",
            {"tokenizer_model": "/absent"},
            "HuggingFaceTokenizer: --tokenizer-model /absent cannot be loaded: ",
        ),
        ("HuggingFaceTokenizer", {"vocab_size": 300}, "--vocab-size 300 is too small for the tokenizer, which has 400 tokens"),
        ("SentencePieceTokenizer", {"tokenizer_model": "/absent"}, "--tokenizer-model /absent: there is no such file"),
        ("SentencePieceTokenizer", {"tokenizer_model": __file__}, r"test_build_tokenizer\.py cannot be loaded: "),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    configs: dict[str, TokenizerConfig], kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as raised:
        build_tokenizer(replace(configs[kind], **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("package", ["transformers", "sentencepiece"])
def test_a_missing_package_is_named(configs: dict[str, TokenizerConfig], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    config = next(config for config in configs.values() if config.package == package)
    with pytest.raises(ConfigError, match=rf"needs the package {package}, .* pip install {package}, .*\[tokenizers\]"):
        config.check()


def test_data_of_a_tokenizer_with_another_vocabulary_is_refused() -> None:
    info = CorpusInfo(tokenizer_type="HuggingFaceTokenizer", vocab_size=400, num_documents=1, num_tokens=1)
    info.check_vocabulary(400, prefix="data", given=None)
    with pytest.raises(DataError, match="the tokenizer has 401 tokens, and the one that made data had 400"):
        info.check_vocabulary(401, prefix="data", given=None)
