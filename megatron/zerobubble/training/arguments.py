"""The command line of the reference trainer: its own flags, and those that are fields of megatron-core's dataclasses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import READERS, add_group, flag_of
from megatron.zerobubble.flags.require import not_negative, positive
from megatron.zerobubble.messages import closest, one_line, shown
from megatron.zerobubble.overlay import add_flags
from megatron.zerobubble.script import add_seeds
from megatron.zerobubble.training.configs import Configs, make_configs, refused_in_one_line
from megatron.zerobubble.training.core_flags import add_fields
from megatron.zerobubble.training.tokenizer import TokenizerConfig

__all__ = ["build_parser", "parse_arguments"]

_ELSEWHERE = "megatron-core 0.17 (Python 3.12), where pretrain_gpt.py is Megatron-LM's own loop"
"""Where a flag of Megatron-LM runs that this trainer does not have."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(one_line(f"{message} (--help lists all flags)"))


def build_parser(*, is_latent: bool = False) -> argparse.ArgumentParser:
    """The parser of all flags.

    Args:
        is_latent: whether the model has multi-latent attention, and megatron-core's class of such models the fields.
    """
    parser = _Parser(
        prog="zerobubble train", description="Train a GPT by a plain loop for megatron-core, with torchrun.", allow_abbrev=False
    )
    add_flags(parser)
    add_seeds(parser.add_argument_group("Comparing schedules"))
    _add_own(parser)
    add_group(parser, TokenizerConfig)
    for config_class in (
        MLATransformerConfig if is_latent else TransformerConfig,
        OptimizerConfig,
        DistributedDataParallelConfig,
    ):
        add_fields(parser, config_class)
    return parser


def _add_own(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the trainer's own: of the model, the data, the run and its checkpoints."""
    for group, flags in _OWN.items():
        added = parser.add_argument_group(group)
        for flag, (kind, default, text) in flags.items():
            if kind is bool:
                added.add_argument(flag, action="store_true", help=text)
            elif isinstance(kind, tuple):
                added.add_argument(flag, choices=kind, default=default, help=text)
            else:
                metavar = {int: "N", float: "X", str: "TEXT"}[kind]
                added.add_argument(flag, type=READERS[kind], default=default, metavar=metavar, help=text)


_OWN: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "Model": {
        "--seq-length": (int, None, "Tokens per sample. Required."),
        "--max-position-embeddings": (int, None, "Positions of learned position embeddings. Default: --seq-length."),
        "--position-embedding-type": (("learned_absolute", "rope", "none"), "learned_absolute", "Position embedding."),
        "--rotary-base": (int, 10000, "Base period of rotary position embeddings."),
        "--group-query-attention": (bool, False, "Share keys and values between --num-query-groups groups of query heads."),
        "--swiglu": (bool, False, "SwiGLU in the MLP instead of GELU."),
        "--untie-embeddings-and-output-weights": (bool, False, "Give the output layer weights of its own."),
        "--make-vocab-size-divisible-by": (int, 128, "Pad the vocabulary to a multiple of this times the tensor-parallel size."),
        "--recompute-activations": (bool, False, "The same as --recompute-granularity selective."),
    },
    "Parallel layout": {
        "--num-virtual-stages-per-pipeline-rank": (int, None, "Model chunks per pipeline rank."),
        "--num-layers-per-virtual-pipeline-stage": (int, None, "The same, by the layers of a chunk."),
        "--distributed-backend": (("nccl", "gloo"), None, "Default: nccl where there are GPUs."),
        "--distributed-timeout-minutes": (float, 10.0, "Timeout of the process groups."),
    },
    "Data": {
        "--micro-batch-size": (int, None, "Samples per microbatch. Required."),
        "--global-batch-size": (int, None, "Samples per iteration. Default: one microbatch per data-parallel rank."),
        "--data-path": (str, None, "Path prefix of a dataset, without .bin and .idx (tools/preprocess_data.py)."),
        "--split": (str, "969, 30, 1", "Proportions of training, validation and test documents."),
        "--mock-data": (bool, False, "Train on synthetic data instead of --data-path."),
        "--num-workers": (int, 0, "Processes per rank that read samples; 0: the rank itself."),
    },
    "Learning rate": {
        "--lr": (float, None, "Maximum learning rate, reached after warm-up. Required."),
        "--min-lr": (float, 0.0, "Learning rate at the end of the decay."),
        "--lr-decay-style": (("constant", "linear", "cosine", "inverse-square-root"), "linear", "Decay function."),
        "--lr-decay-iters": (int, None, "Iterations of decay. Default: --train-iters."),
        "--lr-warmup-iters": (int, 0, "Iterations of linear warm-up."),
        "--lr-warmup-fraction": (float, None, "The same, as a fraction of the iterations of decay."),
    },
    "Run": {
        "--train-iters": (int, None, "Iterations to train. Required."),
        "--eval-interval": (int, 1000, "Iterations between evaluations; the last iteration is always followed by one."),
        "--eval-iters": (int, 100, "Global batches per evaluation, always the same ones; 0: no evaluation."),
        "--exit-interval": (int, None, "Save and end after an iteration that is divisible by this."),
        "--exit-duration-in-mins": (float, None, "Save and end after this many minutes."),
        "--exit-signal-handler": (bool, False, "On SIGTERM finish the iteration, save and end."),
        "--seed": (int, 1234, "Seed of weights, order of samples and dropout."),
        "--log-interval": (int, 100, "Iterations between lines of the log."),
        "--metrics-jsonl": (str, None, "File of one JSON object per iteration, written with each line of the log."),
    },
    "Checkpoints": {
        "--save": (str, None, "Directory to save checkpoints to, at the end and every --save-interval iterations."),
        "--save-interval": (int, None, "Iterations between checkpoints."),
        "--load": (str, None, "Directory to load the latest checkpoint from. Only that of --save may have none yet."),
        "--ckpt-step": (int, None, "Load the checkpoint of this iteration instead of the latest."),
        "--override-opt_param-scheduler": (bool, False, "Learning rates by the flags, not as the checkpoint's run had them."),
        "--no-load-optim": (bool, False, "Load the weights alone: optimizer, learning rate and generators begin anew."),
    },
}
"""Group -> flag -> (type or choices, default, help)."""
_REQUIRED = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    *("micro_batch_size", "lr", "train_iters"),
)
_POSITIVE = (
    *("seq_length", "max_position_embeddings", "micro_batch_size", "global_batch_size", "train_iters", "lr_decay_iters"),
    *("eval_interval", "exit_interval", "log_interval", "save_interval", "ckpt_step", "make_vocab_size_divisible_by"),
    *("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "rotary_base"),
    *("distributed_timeout_minutes", "exit_duration_in_mins"),
)
_NOT_NEGATIVE = ("lr", "min_lr", "lr_warmup_iters", "lr_warmup_fraction", "eval_iters", "num_workers", "seed")


def parse_arguments(
    words: Sequence[str], *, world_size: int, on_cpu: bool, defaults: argparse.Namespace | None = None
) -> Configs:
    """Parse and check the flags.

    Args:
        words: the command line.
        world_size: ranks of the job.
        on_cpu: whether there are no GPUs.
        defaults: zero-bubble flags that were taken off the command line, for --help.

    Raises:
        ConfigError: a flag is unknown or missing, or has a value with which nothing can run.
    """
    parser = build_parser(is_latent="--multi-latent-attention" in words)
    if defaults is not None:
        parser.set_defaults(**{name: value for name, value in vars(defaults).items() if parser.get_default(name) is not None})
    args, unknown = parser.parse_known_args(words, argparse.Namespace(on_cpu=on_cpu))
    if unknown:
        parser.error(f"unrecognized arguments: {_described(unknown, list(parser._option_string_actions))}")
    missing = [name for name in _REQUIRED if getattr(args, name, None) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(map(flag_of, missing))}")
    positive(args, *_POSITIVE)
    not_negative(args, *_NOT_NEGATIVE)
    _set_sizes(args, world_size)
    return make_configs(args)


def _described(unknown: Sequence[str], known: Sequence[str]) -> str:
    """The flags among what argparse does not know, likely typos first; or if there are none, all of it."""
    flags = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("--"))
    meant = {flag: closest(flag, known, cutoff=0.85) for flag in flags}
    typos = [f"{flag} (did you mean {likely}?)" for flag, likely in meant.items() if likely]
    others = [shown(flag) for flag in flags if not meant[flag]]
    listed = ", ".join([*typos, *others] or map(shown, unknown))
    return f"{listed}, which need{'s' if len(others) == 1 else ''} {_ELSEWHERE}" if others else listed


def _set_sizes(args: argparse.Namespace, world_size: int) -> None:
    """Add to `args` the sizes and lengths that follow from flags and the number of ranks. Raises ConfigError."""
    tensor, pipeline = getattr(args, "tensor_model_parallel_size", 1), getattr(args, "pipeline_model_parallel_size", 1)
    of_model = tensor * pipeline * getattr(args, "context_parallel_size", 1)
    if of_model < 1 or world_size % of_model:
        raise ConfigError(
            f"{world_size} ranks do not divide by the tensor-, pipeline- and context-parallel sizes, together {of_model}"
        )
    args.data_parallel_size = world_size // of_model
    each = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or each
    if args.global_batch_size % each:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{args.data_parallel_size} data-parallel ranks = {each}"
        )
    args.num_microbatches = args.global_batch_size // each
    with refused_in_one_line():
        args.num_chunks = _num_chunks(args, pipeline)
    if args.min_lr > args.lr:
        raise ConfigError(f"--min-lr {args.min_lr} is larger than --lr {args.lr}")
    args.decay_iters = args.lr_decay_iters or args.train_iters
    args.warmup_iters = args.lr_warmup_iters if args.lr_warmup_fraction is None else args.lr_warmup_fraction * args.decay_iters
    if args.warmup_iters >= args.decay_iters:
        raise ConfigError(f"the warm-up of {args.warmup_iters:g} iterations must be shorter than the decay of {args.decay_iters}")
    if args.mock_data == bool(args.data_path):
        raise ConfigError("give either --data-path PREFIX (see tools/preprocess_data.py) or --mock-data")
    if args.save is None and args.save_interval is not None:
        raise ConfigError("--save-interval needs --save DIR")
    if args.load is None and args.ckpt_step is not None:
        raise ConfigError("--ckpt-step needs --load DIR")


def _num_chunks(args: argparse.Namespace, pipeline: int) -> int:
    layout, layers = getattr(args, "pipeline_model_parallel_layout", None), args.num_layers_per_virtual_pipeline_stage
    if layout is not None:
        num_stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        if num_stages % pipeline:
            raise ConfigError(f"--pipeline-model-parallel-layout {layout} has {num_stages} stages, no multiple of {pipeline}")
        return int(num_stages // pipeline)
    if layers is not None:
        if args.num_layers % (layers * pipeline):
            raise ConfigError(
                f"--num-layers {args.num_layers} is no multiple of --num-layers-per-virtual-pipeline-stage {layers} x {pipeline}"
            )
        return int(args.num_layers // (layers * pipeline))
    return args.num_virtual_stages_per_pipeline_rank or 1
