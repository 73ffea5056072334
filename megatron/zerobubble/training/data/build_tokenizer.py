"""Builds the tokenizer that the flags name, through megatron-core. The byte-level one needs no files and is the default."""

from __future__ import annotations

from typing import Any

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.tokenizers import load_tokenizer
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from megatron.zerobubble.training.data.corpus import read_corpus_info
from megatron.zerobubble.training.data.token_ids import check_small_dataset

__all__ = ["build_tokenizer", "check_data_matches", "end_of_document"]


def build_tokenizer(config: TokenizerConfig) -> Any:
    """Make a tokenizer.

    Raises:
        UserError: its package or a file is missing, it cannot be loaded, or it has more tokens than --vocab-size.
    """
    config.check()
    try:
        tokenizer = _load(config)
    except DataError:
        raise
    except Exception as error:  # libraries raise all kinds: their files are the user's
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        name = "it" if config.tokenizer_model is None else f"--tokenizer-model {config.tokenizer_model}"
        raise DataError(f"--tokenizer-type {config.tokenizer_type}: {name} cannot be loaded: {reason}") from error
    if config.tokenizer_type != "NullTokenizer" and config.vocab_size is not None and tokenizer.vocab_size > config.vocab_size:
        raise DataError(
            f"--vocab-size {config.vocab_size} is too small for the tokenizer, which has {tokenizer.vocab_size} tokens; "
            "leave it out to take the tokenizer's own"
        )
    return tokenizer


def check_data_matches(settings: Settings, tokenizer: Any, *, is_first: bool = True) -> None:
    """Raise DataError unless the dataset was made with, and the flags need, a tokenizer such as this one.

    Args:
        settings: names the dataset.
        tokenizer: of `build_tokenizer`.
        is_first: whether to search a small dataset for tokens that it does not have; one rank of a job does it for all.
    """
    data = settings.data
    info = None if data.data_path is None else read_corpus_info(data.data_path)
    if info is not None and settings.tokenizer.tokenizer_type != "NullTokenizer":  # its size depends on megatron-core
        info.check_vocabulary(tokenizer.vocab_size, prefix=str(data.data_path), given=settings.tokenizer.vocab_size)
    if is_first:
        check_small_dataset(settings, tokenizer)
    if data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss:
        end_of_document(tokenizer, "--reset-position-ids, --reset-attention-mask and --eod-mask-loss look")
    elif settings.tokenizer.package == "transformers":  # which raises where megatron-core asks for a token that is not there
        end_of_document(tokenizer, "megatron-core's datasets look")


def end_of_document(tokenizer: Any, who_looks: str) -> int:
    """The id of the token that ends a document.

    Args:
        tokenizer: of `build_tokenizer`.
        who_looks: subject and verb of the error: the flags that need the token.

    Raises:
        DataError: the tokenizer has none.
    """
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError, TypeError):
        eod = None
    if eod is None or eod < 0:
        raise DataError(f"{who_looks} for an end-of-document token, and the tokenizer has none (no eos token)")
    return int(eod)


def _load(config: TokenizerConfig) -> Any:
    kind, model = config.tokenizer_type, config.tokenizer_model
    if kind == "ByteLevelTokenizer":
        return load_tokenizer("byte-level", vocab_size=config.known_vocab_size)
    if kind == "NullTokenizer":
        return load_tokenizer("null", vocab_size=config.vocab_size)
    if kind == "HuggingFaceTokenizer":
        included = config.tokenizer_hf_include_special_tokens
        return load_tokenizer("huggingface", model, include_special_tokens=included, trust_remote_code=config.trust_remote_code)
    return load_tokenizer("sentencepiece", model)
