"""Checks of the data, and of how documents become samples. `validate.check_settings` calls them."""

from __future__ import annotations

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.corpus import read_corpus_info, split_documents
from megatron.zerobubble.training.data.index import DatasetIndex, check_dataset, file_bytes

__all__ = ["check_data", "check_documents"]


def check_documents(settings: Settings) -> None:
    """Raise for flags that do not go with samples that are documents."""
    data, flag = settings.data, settings.data.document_flag
    if flag is None:
        return
    if not settings.optim.calculate_per_token_loss:
        raise ConfigError(
            f"{flag} needs --calculate-per-token-loss: microbatches have unequal numbers of tokens that count, and without it "
            "they weigh the same; add it"
        )
    if settings.logging.log_throughput:
        raise ConfigError(
            f"--log-throughput counts the FLOPs of samples of --seq-length tokens, and with {flag} they differ; leave it out"
        )
    if data.variable_seq_lengths:
        _check_lengths(settings)
    if data.pack_sequences:
        _check_packing(settings)


def _check_lengths(settings: Settings) -> None:
    """Check --variable-seq-lengths."""
    flag, multiple, seq_length = "--variable-seq-lengths", settings.data.pad_length_multiple, settings.model.seq_length
    if seq_length % multiple:
        raise ConfigError(
            f"--seq-length {seq_length} is not divisible by --pad-length-multiple {multiple}, to which samples are padded; "
            f"{seq_length // multiple * multiple or multiple} would be"
        )
    sends = settings.zero_bubble.schedule == "stock" and settings.pipeline_size > 1  # megatron-core then refuses that dispatcher
    shares = settings.moe.expert_model_parallel_size > 1  # by ranks with other microbatches
    if settings.moe.num_experts is not None and settings.moe.moe_token_dispatcher_type == "allgather" and (sends or shares):
        raise ConfigError(f"{flag} does not go with --moe-token-dispatcher-type allgather; choose alltoall")


def _check_packing(settings: Settings) -> None:
    """Check --pack-sequences."""
    model, context, rows = settings.model, settings.parallel.context_parallel_size, settings.batch.micro_batch_size
    if rows != 1:
        raise ConfigError(f"--pack-sequences puts several documents into one row: give --micro-batch-size 1, not {rows}")
    problems = {
        f"--context-parallel-size {context}: ranks share one sequence, not several": context > 1,
        "--multi-latent-attention": settings.mla.multi_latent_attention,
        "--hybrid-layer-pattern": model.hybrid_layer_pattern is not None,
        "--mtp-num-layers": bool(model.mtp_num_layers),
        "--attention-backend local, which has no packed sequences; choose auto": (
            model.attention_backend == "local" and model.transformer_impl == "local"
        ),
    }
    for problem, is_given in problems.items():
        if is_given:
            raise ConfigError(f"--pack-sequences does not go with {problem}")


def check_data(settings: Settings, *, reads_all: bool) -> None:
    """Raise unless the dataset is whole, was made with the tokenizer of the run, and every split that is read has samples.

    Args:
        settings: the flags.
        reads_all: whether to read the whole index.
    """
    prefix = settings.data.data_path
    if prefix is None:
        return
    index = check_dataset(prefix, reads_all=reads_all)
    info = read_corpus_info(prefix)
    if info is not None:
        info.check_matches(settings.tokenizer.tokenizer_type, settings.tokenizer.known_vocab_size)
        info.check_index(index, bin_bytes=file_bytes(index.bin_path))
    splits = split_documents(index.num_sequences, settings.data.split_weights)
    _check_splits(settings, prefix, splits)
    if reads_all and settings.data.reads_documents:
        _check_labels(settings, index, splits)


def _check_labels(settings: Settings, index: DatasetIndex, splits: tuple[range, ...]) -> None:
    """Raise if the documents of a split that the run reads have one token each: there is nothing to predict."""
    lengths, _, _ = index.entries()
    is_read = {"train": not settings.run.skip_train, "valid": settings.run.eval_iters > 0}
    for (name, reads), documents in zip(is_read.items(), splits, strict=False):
        own = lengths[documents.start : documents.stop]
        if reads and len(own) and own.max() < 2:
            raise DataError(
                f"{index.prefix}: none of the {len(own)} document(s) for {name} has a second token, to predict from the first; "
                "give more documents"
            )


def _check_splits(settings: Settings, prefix: str, splits: tuple[range, ...]) -> None:
    """Raise if a split that the run reads has no documents: megatron-core would search for its samples forever."""
    data, run = settings.data, settings.run
    counts = [len(documents) for documents in splits]

    def check(name: str, count: int, is_read: bool, remedy: str) -> None:
        if is_read and count == 0:
            raise DataError(
                f"--split {data.split_text!r} leaves none of the {sum(counts)} document(s) of {prefix} for {name}; give a larger "
                f"share, such as --split 90,10,0, {remedy}or more documents"
            )

    training, validation, _ = counts
    check("training", training, not run.skip_train or data.split_weights[0] > 0.0, "a share of 0, " if run.skip_train else "")
    check("validation", validation, run.eval_iters > 0, "--eval-iters 0, ")
