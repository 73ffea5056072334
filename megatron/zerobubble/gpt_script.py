"""A GPT for Megatron-LM's training loop: model, data and loss, all by its flags and with megatron-core's own functions.

`pretrain_gpt.py` runs it. It needs `megatron.training`, which comes with megatron-core from 0.17 on.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_tools
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import arguments, get_args, get_timers, training, yaml_arguments
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import with_arguments
from megatron.zerobubble.overlay import add_zero_bubble_args

_ON_CPU = (
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
_LEFT_OUT = (
    "--sft --fim-data --dataloader-inter-document-masking --hybrid-context-parallel --logits-load-dir --logits-save-dir "
    "--inprocess-restart"
)
_SPIKE = 10  # times the largest loss so far, for --check-for-spiky-loss


def main(zero_bubble: argparse.Namespace) -> None:
    """Train by the flags of the process.

    Args:
        zero_bubble: the flags in force, for `--help` and for what the loop prints and saves, and `cpu`: whether there is no CUDA.

    Raises:
        ConfigError: a flag asks for what Megatron-LM's own script has, and this one has not.
    """
    refused = [word for word in sys.argv[1:] if word.partition("=")[0] in _LEFT_OUT.split()]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: packed and filled-in samples, distillation and restarts in place are parts of Megatron-LM's "
            "own pretrain_gpt.py, from its checkout: start that by zerobubble run"
        )
    if "--allow-padding-num-layers" in sys.argv:
        raise ConfigError(
            "--allow-padding-num-layers is a flag of the reference trainer (zerobubble train); Megatron-LM's loop has "
            "--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split and --pipeline-model-parallel-layout"
        )
    if not (Path(dataset_tools.__file__).parent / "Makefile").is_file():  # a wheel has the compiled helpers instead
        dataset_tools.compile_helpers = _do_nothing
    provided = {"extra_args_provider": partial(_add_flags, zero_bubble), "args_defaults": {"tokenizer_type": "GPT2BPETokenizer"}}
    jobs = {"model_provider": model, "get_embedding_ranks": embedding_ranks}
    kind = ModelType.encoder_or_decoder
    if "cfg_container" in inspect.signature(training.pretrain).parameters:  # from 0.18 on
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        config = pretrain_cfg_container_from_args(arguments.parse_and_validate_args(**provided))
        training.pretrain(config, samples, model_type=kind, forward_step_func=forward_step, **jobs)
    else:
        training.pretrain(samples, model_type=kind, forward_step_func=forward_step, **jobs, **provided)


def _add_flags(zero_bubble: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the zero-bubble flags with what is in force, and change defaults to what a CPU needs."""
    known = {action.dest for action in add_zero_bubble_args(parser)._actions}
    parser.set_defaults(**{name: value for name, value in vars(zero_bubble).items() if name in known})
    if zero_bubble.cpu:
        actions = [parser._option_string_actions[flag] for flag in _ON_CPU.split()]
        turned_off = {action.dest: action.const for action in actions}
        parser.set_defaults(transformer_impl="local", distributed_backend="gloo", **turned_off)
    for action in parser._actions:  # 0.19 has a text with a bare percent sign, with which --help fails
        if action.help and "%(" not in action.help:
            action.help = action.help.replace("%%", "%").replace("%", "%%")
    parser.error = _refuse  # type: ignore[method-assign]  # argparse's prints the usage of 800 flags first
    return parser


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message} (--help lists all flags)")


def _do_nothing() -> None:
    pass


def model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None, **groups: Any
) -> Any:
    """One chunk of a GPT, or of a hybrid model where the flags have its pattern."""
    args, config = get_args(), config or model_config()
    if args.record_memory_history:
        torch.cuda.memory._record_memory_history()  # the loop writes the snapshots
    common = {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "vp_stage": vp_stage,
        **groups,
    }
    spec = import_module(args.spec) if args.spec else None
    if args.hybrid_layer_pattern:
        from megatron.core.models.hybrid.hybrid_model import HybridModel  # from 0.18 on

        return HybridModel(config, spec, hybrid_layer_pattern=args.hybrid_layer_pattern, **common)
    layers, mtp_layers = layer_specs(config, vp_stage)
    return GPTModel(config, spec or layers, rope_scaling=args.use_rope_scaling, mtp_block_spec=mtp_layers, **common)


def model_config() -> Any:
    """A TransformerConfig by the flags."""
    args = get_args()
    if args.yaml_cfg:
        return yaml_arguments.core_transformer_config_from_yaml(args, "language_model")
    return arguments.core_transformer_config_from_args(args)


def layer_specs(config: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """megatron-core's specs of a chunk's layers, and of its MTP layers."""
    args = get_args()
    with_te = args.transformer_impl == "transformer_engine"
    if args.experimental_attention_variant:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        block = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        last = variants.get_transformer_layer_with_experimental_attention_variant_spec(config)[-1]
    elif args.heterogeneous_layers_config_path:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec

        block = last = get_gpt_heterogeneous_layer_spec(config, with_te)
    else:
        norms = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
        block = gpt_layer_specs.get_gpt_decoder_block_spec(config, with_te, vp_stage=vp_stage, **norms)
        last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, with_te, **norms)[-1]
    has_mtp = args.mtp_num_layers is not None
    return block, gpt_layer_specs.get_gpt_mtp_block_spec(config, last, with_te, vp_stage=vp_stage) if has_mtp else None


def reads_data(vp_stage: int | None) -> bool:
    """Whether a chunk of this rank takes tokens or labels: the first one, the last one, and one with MTP layers."""
    config = model_config()
    asked = {"config": config, "layout": config.pipeline_model_parallel_layout, "mtp_num_layers": config.mtp_num_layers}
    has_mtp = with_arguments(mtp.mtp_on_this_rank, asked)
    return is_first_or_last_pipeline_stage(vp_stage) or has_mtp(ignore_virtual=False, vp_stage=vp_stage)


def samples(sizes: Sequence[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Training, validation and test samples, on the ranks that read them."""
    args = get_args()

    def is_reader() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and reads_data(vp_stage)

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    per_dataset = args.per_dataset_sequences_path
    settings = vars(args) | {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "sequences_per_dataset": json.loads(Path(per_dataset).read_text("utf-8")) if per_dataset else None,
        "tokenizer": build_tokenizer(args),
    }
    fields = [field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init]
    config = GPTDatasetConfig(**{name: settings[name] for name in fields if name in settings})
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return tuple(BlendedMegatronDatasetBuilder(kind, sizes, is_reader, config).build())


samples.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it


def batch(data: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> dict[str, Any]:
    """This rank's part of the next microbatch, which the first tensor-parallel rank reads; in the middle of the model None."""
    args = get_args()
    names = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    if not reads_data(vp_stage):
        return dict.fromkeys(names)
    shape = (args.micro_batch_size, args.seq_length)
    shapes = dict.fromkeys(names, shape) | {"attention_mask": (shape[0], 1, shape[1], shape[1])}
    kinds = dict.fromkeys(names, torch.int64) | {"loss_mask": torch.float32, "attention_mask": torch.bool}
    found: dict[str, Any] = {"attention_mask": None}
    read = next(data) if data is not None else None
    device = torch.cuda.current_device()
    for name in names if args.create_attention_mask_in_dataloader else names[:-1]:
        empty = torch.empty(shapes[name], dtype=kinds[name], device=device)
        found[name] = empty if read is None else read[name].cuda(non_blocking=True)
        source = parallel_state.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(found[name], source, group=parallel_state.get_tensor_model_parallel_group())
    group = parallel_state.get_context_parallel_group()
    return with_arguments(get_batch_on_this_cp_rank, {"is_hybrid_cp": False})(found, cp_group=group)


def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over tokens, the number of tokens, and both for the log."""
    args, machine = get_args(), get_rerun_state_machine()
    mask = mask.view(-1).float()
    total, count = torch.sum(output.view(-1).float() * mask), mask.sum().detach().to(torch.int)
    bad = {"NaN": torch.isnan, "Inf": torch.isinf} if args.check_for_nan_in_loss_and_grad else {}
    for name, is_bad in bad.items():
        machine.validate_result(total, is_bad, message=f"the loss of a microbatch is {name}", tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss")
        machine.validate_result(total, is_spike, message="the loss of a microbatch is a spike", tolerance=0.0, fatal=False)
    return total, count, {"lm loss": torch.stack([total.detach(), count])}


def forward_step(data: Any, chunk: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One microbatch of one chunk."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    given = batch(data, get_attr_wrapped_model(chunk, "vp_stage"))
    timer.stop()
    run = chunk.build_schedule_plan if return_schedule_plan else chunk
    inputs = (given["tokens"], given["position_ids"], given["attention_mask"])
    return run(*inputs, labels=given["labels"], loss_mask=given["loss_mask"]), partial(loss, given["loss_mask"])


def embedding_ranks(pipeline: Sequence[int]) -> list[int]:
    """The ranks of a pipeline that hold the embedding's weight: the first, one with MTP layers, and the last if it is tied."""
    ranks = {pipeline[0], *(mtp.get_mtp_ranks(pipeline, model_config()) if len(pipeline) > 1 else ())}
    return sorted(ranks if get_args().untie_embeddings_and_output_weights else {*ranks, pipeline[-1]})
