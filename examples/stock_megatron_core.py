"""A training loop for stock megatron-core, and one call that makes it run a zero-bubble schedule.

::

    torchrun --nproc-per-node 2 examples/stock_megatron_core.py --pipeline-model-parallel-size 2
    torchrun --nproc-per-node 2 examples/stock_megatron_core.py --pipeline-model-parallel-size 2 --enable-zero-bubble
    torchrun --nproc-per-node 2 examples/stock_megatron_core.py --pipeline-model-parallel-size 2 \\
        --virtual-pipeline-model-parallel-size 2 --zero-bubble-v-schedule

The first runs megatron-core's own 1F1B, the second ZB-H1, the third ZBV; the losses are the same. Two lines use
megatron.zerobubble: one adds its flags, one installs the schedule that they choose. The rest is a usual megatron-core loop.

Needs GPUs, as megatron-core does. Without GPUs: `zerobubble run --nproc-per-node 2 --cpu --enable-zero-bubble
examples/stock_megatron_core.py --distributed-backend gloo --pipeline-model-parallel-size 2`. The data is random, the same for all
schedules.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import megatron.zerobubble

VOCABULARY = 96


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags of this loop and the zero-bubble flags."""
    parser = argparse.ArgumentParser(description="Train a small GPT on random tokens with megatron.core.", allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--virtual-pipeline-model-parallel-size", type=int)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--train-iters", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip-grad", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--tie-embeddings-and-output-weights", action="store_true")
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: nccl where there are GPUs")
    megatron.zerobubble.add_zero_bubble_args(parser)
    return parser.parse_args(argv)


def initialize(args: argparse.Namespace) -> None:
    """Process groups and seeds."""
    if not dist.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(args.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    )
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """megatron-core's configuration of the model and its parallelism."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    interleaves = args.virtual_pipeline_model_parallel_size is not None
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.bf16,
        fp16=args.fp16,
        calculate_per_token_loss=args.calculate_per_token_loss,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        overlap_p2p_comm=interleaves,
        batch_p2p_comm=not interleaves,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    """This rank's model chunks, wrapped in DistributedDataParallel: one, or --virtual-pipeline-model-parallel-size."""
    interleaves = args.virtual_pipeline_model_parallel_size is not None
    chunks: list[Any] = []
    for number in range(args.virtual_pipeline_model_parallel_size or 1):
        vp_stage = number if interleaves else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=args.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=args.tie_embeddings_and_output_weights,
            vp_stage=vp_stage,
        )
        initialize_weights(chunk)
        chunks.append(chunk.cuda(torch.cuda.current_device()))
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    return [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


@torch.no_grad()
def initialize_weights(chunk: GPTModel) -> None:
    """Initialize each layer by its global number, so that runs with other numbers of ranks and chunks are comparable."""
    for name, weight in chunk.named_parameters():
        if weight.dim() < 2:
            continue
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(chunk.decoder.layers[int(words[2])].layer_number)
        elif name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            words = ["embedding", "word_embeddings", "weight"]  # tied: the same weights
        seed = hashlib.blake2b(".".join(words).encode(), digest_size=6).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
        weight.copy_(torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator))


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield [micro batch size, sequence length + 1] tokens forever, different ones per data-parallel replica."""
    generator = torch.Generator().manual_seed(77 + parallel_state.get_data_parallel_rank())
    device = torch.cuda.current_device()
    while True:
        first = torch.randint(0, 8, (args.micro_batch_size, 1), generator=generator)
        later = 3 * torch.arange(args.seq_length + 1)  # all tokens follow from the first: something to learn
        yield (first + later).remainder(VOCABULARY).to(device)


def forward_step(args: argparse.Namespace, data_iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one microbatch through one model chunk, as megatron-core's schedules call it."""
    text = next(data_iterator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), loss_function


def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of losses over tokens, the number of tokens, and the mean loss for the log."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, {"lm loss": total.detach() / losses.numel()}


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The training loop. Returns the logged iterations on ranks with the last stage; one of these prints them, too."""
    initialize(args)
    config = transformer_config(args)
    model = build_model(args, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            fp16=args.fp16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        model,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in model]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    iterators = [batches(args) for _ in model]
    history = []
    for iteration in range(args.train_iters):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=partial(forward_step, args),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=model,
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            losses = [float(report["lm loss"]) for report in reports]
            history.append({"iteration": iteration + 1, "losses": losses, "grad norm": None if norm is None else float(norm)})
            if parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
                print(json.dumps(history[-1]), flush=True)
    return history


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags, install the schedule, train, clean up."""
    args = parse(argv)
    megatron.zerobubble.install(args)
    train(args)
    megatron.zerobubble.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
