"""Sequences of unequal length in Megatron-LM's loop, by flags of `pretrain_gpt.py`.

================================================  ===========================================================================
`--variable-seq-lengths`, `--pack-sequences`      documents are samples, as in the reference trainer (`documents`)
`--sft`, `--dataloader-inter-document-masking`    Megatron-LM's own rows of --seq-length tokens, in which sequences are packed
================================================  ===========================================================================
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.core.datasets.utils import Split

from megatron.zerobubble.flags.dataclass_flags import add_group
from megatron.zerobubble.flags.require import refuse
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.training.config.data import DataConfig
from megatron.zerobubble.training.data.documents import PaddedDocuments, document_dataset
from megatron.zerobubble.training.data.microbatch_lengths import length_multiple

__all__ = ["add_flags", "check_flags", "document_samples", "has_own_lengths", "packs"]

_OWN_LENGTHS = "zero_bubble_variable_seq_lengths"
"""Attribute of --variable-seq-lengths: Megatron-LM's validation of flags turns its own, variable_seq_lengths, off."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the two flags that Megatron-LM does not have."""
    add_group(parser, DataConfig, only=("variable_seq_lengths", "pack_sequences"))
    parser._option_string_actions["--variable-seq-lengths"].dest = _OWN_LENGTHS
    parser.set_defaults(**{_OWN_LENGTHS: False})


def has_own_lengths(args: argparse.Namespace) -> bool:
    """Whether microbatches have lengths of their own."""
    return bool(getattr(args, _OWN_LENGTHS))


def packs(args: argparse.Namespace) -> bool:
    """Whether a row has several sequences that do not attend to each other."""
    return bool(args.pack_sequences or _packing_flag(args))


def check_flags(args: argparse.Namespace, zero_bubble: ZeroBubbleConfig) -> None:
    """Raise ConfigError for flags that do not go with sequences of unequal length.

    Args:
        args: parsed flags of Megatron-LM, with those of `add_flags`.
        zero_bubble: the schedule.
    """
    data, flag = _documents(args), _packing_flag(args)
    if data is not None:
        data.check_documents(args)  # type: ignore[arg-type]  # flags have the same names
        data.check_lengths(args, args, zero_bubble)  # type: ignore[arg-type]
        draws_apart = args.dataloader_type == "cyclic" and args.micro_batch_size > 1 and has_own_lengths(args)
        problems = {
            f"--data-path with {len(args.data_path)} words, as it reads one dataset": len(args.data_path) > 1,
            "--dataloader-type cyclic, which draws the samples of a microbatch apart; give --micro-batch-size 1": draws_apart,
            "--full-validation": args.full_validation,
            "--multiple-validation-sets": args.multiple_validation_sets,
        }
        refuse(f"{data.document_flag} does not go with", problems)
    if packs(args):
        flag = flag or "--pack-sequences"
        rows = data or DataConfig(micro_batch_size=args.micro_batch_size, mock_data=True)
        rows.check_packing(args, args, args, flag=flag)  # type: ignore[arg-type]
        others = {
            "--hybrid-layer-pattern": args.hybrid_layer_pattern is not None,
            "--attention-backend local, which has no packed sequences; choose auto": args.attention_backend.name == "local",
        }
        refuse(f"{flag} does not go with", others)


def document_samples(args: argparse.Namespace, sizes: Sequence[int], tokenizer: Any) -> tuple[Any, ...] | None:
    """Training, validation and test samples, if they are documents.

    Args:
        args: flags of Megatron-LM, in force.
        sizes: samples of each.
        tokenizer: of the run.
    """
    data = _documents(args)
    if data is None:
        return None
    evaluated = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size  # from 0.19 on
    read = {
        Split.train: (args.micro_batch_size, args.consumed_train_samples),
        Split.valid: (evaluated, args.consumed_valid_samples),
        Split.test: (evaluated, 0),
    }
    found: list[Any] = []
    for split, (micro_batch_size, consumed) in read.items():
        if not sizes[split.value] or not data.split_weights[split.value]:
            found.append(None)
            continue
        size, seq_length = sizes[split.value], args.seq_length
        documents = document_dataset(data, split, size, seq_length=seq_length, seed=args.seed, tokenizer=tokenizer)
        rows = PaddedDocuments(
            documents,
            micro_batch_size=micro_batch_size,
            first=consumed,
            length=None if has_own_lengths(args) else seq_length,
            multiple=length_multiple(args),  # type: ignore[arg-type]
            split=split,
        )
        found.append(rows)
    return tuple(found)


def _documents(args: argparse.Namespace) -> DataConfig | None:
    """How documents become samples; None if they do not."""
    if not has_own_lengths(args) and not args.pack_sequences:
        return None
    return DataConfig(
        micro_batch_size=args.micro_batch_size,
        data_path=args.data_path[0] if args.data_path else None,
        split=args.split,
        mock_data=args.mock_data,
        variable_seq_lengths=has_own_lengths(args),
        pack_sequences=args.pack_sequences,
    )


def _packing_flag(args: argparse.Namespace) -> str | None:
    """Megatron-LM's own flag that packs sequences, if one is given."""
    if getattr(args, "dataloader_inter_document_masking", False):  # from 0.19 on
        return "--dataloader-inter-document-masking"
    return "--sft" if args.sft else None
