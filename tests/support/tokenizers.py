"""Tiny tokenizers of every kind, trained in a second on this package's own source: no file is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron.zerobubble.training.config.tokenizer import TokenizerConfig

ROOT = Path(__file__).parents[2]
END = "<|endoftext|>"
VOCAB_SIZE = 400
"""Of the Hugging Face tokenizer, which has an end-of-text token among them."""
SENTENCEPIECE_VOCAB_SIZE = 450


def texts() -> Iterator[str]:
    """Some source files of this package."""
    for path in sorted((ROOT / "megatron" / "zerobubble" / "training" / "config").glob("*.py")):
        yield path.read_text(encoding="utf-8")


def hugging_face(folder: Path) -> TokenizerConfig:
    """Train byte pairs; as a Hugging Face tokenizer in a directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    directory = folder / "hugging-face"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(directory))


def sentencepiece(folder: Path) -> TokenizerConfig:
    """Train a SentencePiece model."""
    from sentencepiece import SentencePieceTrainer

    lines = (line for text in texts() for line in text.splitlines() if line.strip())
    path = folder / "sentencepiece.model"
    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=file,
            vocab_size=SENTENCEPIECE_VOCAB_SIZE,
            model_type="bpe",
            byte_fallback=True,
            num_threads=1,
            minloglevel=2,
        )
    return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))
