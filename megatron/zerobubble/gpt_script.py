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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import arguments, get_args, get_timers, training, yaml_arguments
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import refuse
from megatron.zerobubble.mcore.attention.torch_attention import use_torch_attention
from megatron.zerobubble.mcore.compat import with_arguments
from megatron.zerobubble.overlay import add_zero_bubble_args

_ON_CPU = (
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
_ELSEWHERE = (
    "--fim-data --hybrid-context-parallel --logits-load-dir --logits-save-dir --inprocess-restart --allow-padding-num-layers"
)


def main(zero_bubble: argparse.Namespace) -> None:
    """Train by the flags of the process.

    Args:
        zero_bubble: the flags in force, for `--help` and for what the loop prints and saves, and `cpu`: whether there is no CUDA.

    Raises:
        ConfigError: a flag is wrong, or asks for what Megatron-LM's own script has, and this one has not.
    """
    refused = [word for word in sys.argv[1:] if word.partition("=")[0] in _ELSEWHERE.split()]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: not in this script. Megatron-LM's own pretrain_gpt.py has filled-in samples, distillation "
            "and restarts in place: start that by zerobubble run. For --allow-padding-num-layers give a layout, or "
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
        )
    if zero_bubble.cpu:
        sys.argv[1:1] = _ON_CPU.split()
    if not (Path(dataset_tools.__file__).parent / "Makefile").is_file():  # a wheel has the compiled helpers instead
        dataset_tools.compile_helpers = lambda: None
    flags = partial(_add_flags, zero_bubble)
    _check_packing(arguments.parse_args(flags))
    provided = {"extra_args_provider": flags, "args_defaults": {"tokenizer_type": "GPT2BPETokenizer"}}
    ours = {"model_provider": model, "forward_step_func": forward_step, "get_embedding_ranks": embedding_ranks}
    if "cfg_container" in inspect.signature(training.pretrain).parameters:  # from 0.18 on
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        ours["cfg_container"] = pretrain_cfg_container_from_args(arguments.parse_and_validate_args(**provided))
        provided = {}
    training.pretrain(train_valid_test_dataset_provider=samples, model_type=ModelType.encoder_or_decoder, **ours, **provided)


def _add_flags(zero_bubble: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    known = {action.dest for action in add_zero_bubble_args(parser)._actions}
    parser.set_defaults(**{name: value for name, value in vars(zero_bubble).items() if name in known})
    for action in parser._actions:  # 0.19 has a text with a bare percent sign, with which --help fails
        if action.help and "%(" not in action.help:
            action.help = action.help.replace("%%", "%").replace("%", "%%")
    parser.error = _refuse  # type: ignore[method-assign]  # argparse's prints the usage of 800 flags first
    return parser


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message} (--help lists all flags)")


def _packing_flag(args: argparse.Namespace) -> str | None:
    """The flag that packs sequences, which do not attend to each other, into rows of --seq-length tokens."""
    if getattr(args, "dataloader_inter_document_masking", False):  # from 0.19 on
        return "--dataloader-inter-document-masking"
    return "--sft" if args.sft else None


def _check_packing(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that packed sequences do not go with."""
    flag, context = _packing_flag(args), args.context_parallel_size
    if flag is None:
        return
    if args.micro_batch_size != 1:
        raise ConfigError(f"{flag} puts several sequences into one row: give --micro-batch-size 1, not {args.micro_batch_size}")
    problems = {
        f"--context-parallel-size {context}: ranks share one sequence, not several": context > 1,
        "--multi-latent-attention": args.multi_latent_attention,
        "--mtp-num-layers": args.mtp_num_layers,
        "--hybrid-layer-pattern": args.hybrid_layer_pattern is not None,
        "--attention-backend local, which has no packed sequences; choose auto": args.attention_backend.name == "local",
    }
    refuse(f"{flag} does not go with", problems)


def model(config: Any = None, vp_stage: int | None = None, **place: Any) -> Any:
    """One chunk of a GPT, or of a hybrid model where the flags have its pattern."""
    args, config = get_args(), config or model_config()
    if args.record_memory_history:
        torch.cuda.memory._record_memory_history()  # the loop writes the snapshots
    named = place | {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "rope_scaling": args.use_rope_scaling,
        "vp_stage": vp_stage,
    }
    spec = import_module(args.spec) if args.spec else None
    if args.hybrid_layer_pattern:
        from megatron.core.models.hybrid.hybrid_model import HybridModel  # from 0.18 on

        return with_arguments(HybridModel, vars(args) | named)(hybrid_stack_spec=spec)
    layers, mtp_layers = layer_specs(config, vp_stage)
    chunk = with_arguments(GPTModel, vars(args) | named)(transformer_layer_spec=spec or layers, mtp_block_spec=mtp_layers)
    if _packing_flag(args):
        use_torch_attention(chunk)  # megatron-core's own has no packed sequences; Transformer Engine's stays
    return chunk


def model_config() -> Any:
    """A TransformerConfig by the flags."""
    args = get_args()
    if args.yaml_cfg:
        return yaml_arguments.core_transformer_config_from_yaml(args, "language_model")
    return arguments.core_transformer_config_from_args(args)


def layer_specs(config: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """megatron-core's specs of a chunk's layers, and of its MTP layers, each of which contains a layer like the model's last."""
    with_te = config.transformer_impl == "transformer_engine"
    if config.experimental_attention_variant:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        block = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        last = variants.get_transformer_layer_with_experimental_attention_variant_spec(config)[-1]
    elif get_args().heterogeneous_layers_config_path:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec

        block = last = get_gpt_heterogeneous_layer_spec(config, with_te)
    else:
        norms = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
        block = gpt_layer_specs.get_gpt_decoder_block_spec(config, with_te, vp_stage=vp_stage, **norms)
        last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, with_te, **norms)[-1]
    has_mtp = config.mtp_num_layers is not None
    return block, gpt_layer_specs.get_gpt_mtp_block_spec(config, last, with_te, vp_stage=vp_stage) if has_mtp else None


def samples(sizes: Sequence[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Training, validation and test samples, where a chunk takes some. All ranks of a tensor-parallel group read the same."""
    args, config = get_args(), model_config()
    asked = {"config": config, "layout": config.pipeline_model_parallel_layout, "mtp_num_layers": config.mtp_num_layers}
    has_mtp = with_arguments(mtp.mtp_on_this_rank, asked)(ignore_virtual=False, vp_stage=vp_stage)
    reads = is_first_or_last_pipeline_stage(vp_stage) or has_mtp or _packing_flag(args) is not None
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
        "inter_document_masking": getattr(args, "dataloader_inter_document_masking", False),
        "tokenizer": build_tokenizer(args),
    }
    fields = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    given = GPTDatasetConfig(**{name: settings[name] for name in fields & settings.keys()})
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return tuple(BlendedMegatronDatasetBuilder(kind, sizes, lambda: reads, given).build())


samples.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it


def batch(data: Iterator[dict[str, torch.Tensor]] | None) -> dict[str, Any]:
    """This rank's part of the next microbatch, as a model takes it; None for each where a chunk reads no samples."""
    names = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    read = {} if data is None else next(data)
    found = {name: read[name].cuda(non_blocking=True) if name in read else None for name in names}
    group = parallel_state.get_context_parallel_group()
    found = with_arguments(get_batch_on_this_cp_rank, {"is_hybrid_cp": False})(found, cp_group=group)
    if "cu_seqlens" in read:
        found["packed_seq_params"] = _packed_sequences(read["cu_seqlens"])
    return found


def _packed_sequences(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """What attention needs to keep the sequences of a packed row apart.

    Args:
        cu_seqlens: [1, k + 1] int32, on the host: where each sequence of the row begins, and s, which may be repeated.
    """
    begins = cu_seqlens[0].unique_consecutive()
    longest = int(begins.diff().max())  # on the host: nothing waits for the device
    on_device = begins.cuda(non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=on_device, cu_seqlens_kv=on_device, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over tokens, the number of tokens, and both for the log."""
    args, machine = get_args(), get_rerun_state_machine()
    mask = mask.view(-1).float()
    total, count = torch.sum(output.view(-1).float() * mask), mask.sum().detach().to(torch.int)
    bad = {"NaN": torch.isnan, "Inf": torch.isinf} if args.check_for_nan_in_loss_and_grad else {}
    for name, is_bad in bad.items():
        machine.validate_result(total, is_bad, message=f"the loss of a microbatch is {name}", tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(machine.is_unexpectedly_large, threshold=10, context="loss")  # times the largest so far
        machine.validate_result(total, is_spike, message="the loss of a microbatch is a spike", tolerance=0.0, fatal=False)
    return total, count, {"lm loss": torch.stack([total.detach(), count])}


def forward_step(data: Any, chunk: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One microbatch of one chunk."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    given = batch(data)
    timer.stop()
    inputs = [given.pop(name) for name in ("tokens", "position_ids", "attention_mask")]
    run = chunk.build_schedule_plan if return_schedule_plan else chunk
    return run(*inputs, **given), partial(loss, given["loss_mask"])


def embedding_ranks(pipeline: Sequence[int]) -> list[int]:
    """The ranks of a pipeline that hold the embedding's weight: the first, one with MTP layers, and the last if it is tied."""
    ranks = {pipeline[0], *(mtp.get_mtp_ranks(pipeline, model_config()) if len(pipeline) > 1 else ())}
    return sorted(ranks if get_args().untie_embeddings_and_output_weights else {*ranks, pipeline[-1]})
