"""A loop as reinforcement learning has it, on stock megatron-core with a zero-bubble schedule: two models in one process.

::

    torchrun --nproc-per-node 2 examples/rl_loop.py --zero-bubble-schedule stock
    torchrun --nproc-per-node 2 examples/rl_loop.py --enable-zero-bubble
    torchrun --nproc-per-node 2 examples/rl_loop.py --virtual-pipeline-model-parallel-size 2 --zero-bubble-v-schedule

The first runs megatron-core's own 1F1B, the second ZB-H1, the third ZBV; the losses are the same. In every step

1. responses are packed into microbatches (THD), each of its own length, and each step has its own number of them;
2. a reference model without DistributedDataParallel, and the actor as it is, compute log-probabilities in forward-only passes of
   the same schedule;
3. the actor is trained on them, with a clipped ratio and a penalty for leaving the reference;
4. the actor's weights are read by name, as for an engine that generates the next responses.

Lengths vary in every microbatch, so megatron-core gets `variable_seq_lengths` and a sequence length of 1 that means nothing. A
zero-bubble schedule has to know them before an iteration begins: `MicrobatchLengths("thd")` reads them off the batches.

Needs GPUs, as megatron-core does; not run on a GPU yet. Without GPUs, on two ranks of a laptop: `zerobubble run
--nproc-per-node 2 --cpu --microbatch-tokens thd --enable-zero-bubble examples/rl_loop.py --distributed-backend gloo`. Responses
are random tokens, to keep the generating of them out. Attention is torch's, which runs packed sequences on CPUs, too.
"""

from __future__ import annotations

import argparse
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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from stock_megatron_core import initialize_weights

import megatron.zerobubble

VOCABULARY, LONGEST, ROW = 96, 24, 64
"""Number of tokens, the longest response, and the most tokens of a microbatch."""

Batch = dict[str, Any]
"""A packed microbatch: tokens, labels, positions, advantages [1, length], cu_seqlens; later log-probabilities: reference, old."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags of this loop and the zero-bubble flags."""
    parser = argparse.ArgumentParser(description="Train an actor against a reference model.", allow_abbrev=False)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=2)
    parser.add_argument("--virtual-pipeline-model-parallel-size", type=int)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: nccl where there are GPUs")
    megatron.zerobubble.add_zero_bubble_args(parser)
    return parser.parse_args(argv)


def build_model(args: argparse.Namespace, *, is_trained: bool) -> list[Any]:
    """This rank's chunks of a model, wrapped in DistributedDataParallel to be trained. All begin with the same weights."""
    interleaves = args.virtual_pipeline_model_parallel_size is not None
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=4,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # what megatron-core asks for beside variable_seq_lengths
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        overlap_p2p_comm=interleaves,
        batch_p2p_comm=not interleaves,
    )
    chunks: list[Any] = []
    for number in range(args.virtual_pipeline_model_parallel_size or 1):
        vp_stage = number if interleaves else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LONGEST,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        initialize_weights(chunk)
        megatron.zerobubble.use_torch_attention(chunk)
        chunks.append(chunk.cuda(torch.cuda.current_device()))
    if not is_trained:
        return chunks
    return [
        DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            module=chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]


def rollouts(step: int) -> list[Batch]:
    """The responses of a step with their advantages, packed into rows of at most `ROW` tokens."""
    # Replicas must agree on the number of microbatches, as they have to where a model has experts. Here they have equal lengths.
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, LONGEST + 1, (8 + 3 * (step % 3),), generator=generator).tolist()
    generator.manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    responses = [torch.randint(0, VOCABULARY, (length + 1,), generator=generator) for length in lengths]
    rewards = torch.stack([(response % 2 == 0).float().mean() for response in responses])  # even tokens are the better ones
    rows: list[list[int]] = [[]]
    for number, length in enumerate(lengths):
        if sum(lengths[each] for each in rows[-1]) + length > ROW:
            rows.append([])
        rows[-1].append(number)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return [_packed([responses[each] for each in row], advantages[row]) for row in rows]


def _packed(responses: list[torch.Tensor], advantages: torch.Tensor) -> Batch:
    lengths = torch.tensor([len(response) - 1 for response in responses])
    rows = {
        "tokens": torch.cat([response[:-1] for response in responses]),
        "labels": torch.cat([response[1:] for response in responses]),
        "positions": torch.cat([torch.arange(len(response) - 1) for response in responses]),
        "advantages": advantages.repeat_interleave(lengths),
    }
    device = torch.cuda.current_device()
    batch: Batch = {name: row.unsqueeze(0).to(device) for name, row in rows.items()}
    # In host memory, where the schedule reads the squared lengths too.
    return batch | {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()}


def forward_step(loss_function: Any, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one microbatch through one model chunk, as megatron-core's schedules call it."""
    batch = next(data_iterator)
    bounds = batch["cu_seqlens"].to(batch["tokens"].device)
    longest = int(batch["cu_seqlens"].diff().max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=packed)
    return output, partial(loss_function, batch)


def report_log_probs(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """In forward-only passes: the log-probability of each token, [1, length]."""
    return losses.sum(), {"log_probs": -losses.detach()}


def policy_loss(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped policy loss, and a penalty for the distance to the reference, as means over the tokens of a microbatch."""
    log_probs, away = -losses, batch["reference"] + losses
    ratio = (log_probs - batch["old"]).exp()
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
    penalty = (away.exp() - away - 1).mean()
    loss = 0.1 * penalty - gain.mean()
    return loss, {"loss": loss.detach(), "kl": penalty.detach()}


def run(model: list[Any], batches: list[Batch], loss_function: Any, *, forward_only: bool) -> list[Any]:
    """One call of the schedule. Its results, on the last pipeline rank, are those of the microbatches in their order."""
    iterators = [iter(batches) for _ in model]
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(forward_step, loss_function),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model,
        num_microbatches=len(batches),
        seq_length=1,  # every microbatch has its own
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


@torch.no_grad()
def log_probs(model: list[Any], batches: list[Batch]) -> list[torch.Tensor]:
    """Log-probabilities of the tokens of each microbatch, on every pipeline rank."""
    reports = run(model, batches, report_log_probs, forward_only=True)
    found = [report["log_probs"] for report in reports] or [torch.empty_like(batch["advantages"]) for batch in batches]
    group, last = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_pipeline_model_parallel_last_rank()
    for each in found:
        dist.broadcast(each, src=last, group=group)
    return found


@torch.no_grad()
def hand_over(model: list[Any]) -> float:
    """Read the weights, as to send them to an engine that generates. Their norm, on every rank of the pipeline."""
    megatron.zerobubble.settle()  # with post-validation the last step may be redone until here; on every rank
    weights = [weight for chunk in model for _, weight in chunk.named_parameters()]
    squares = torch.stack([weight.float().square().sum() for weight in weights]).sum()
    dist.all_reduce(squares, group=parallel_state.get_pipeline_model_parallel_group())
    return float(squares.sqrt())


def train(args: argparse.Namespace) -> None:
    """The loop. The last pipeline rank prints a line per step."""
    if not dist.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(args.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    parallel_state.initialize_model_parallel(1, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size)
    model_parallel_cuda_manual_seed(1234)
    actor, reference = build_model(args, is_trained=True), build_model(args, is_trained=False)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0), actor)
    config = actor[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    for step in range(args.steps):
        batches = rollouts(step)
        for batch, of_reference, old in zip(batches, log_probs(reference, batches), log_probs(actor, batches), strict=True):
            batch.update(reference=of_reference, old=old)
        for chunk in actor:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = run(actor, batches, policy_loss, forward_only=False)
        optimizer.step()
        norm = hand_over(actor)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True) and parallel_state.get_data_parallel_rank() == 0:
            means = {name: float(torch.stack([report[name] for report in reports]).mean()) for name in ("loss", "kl")}
            print(json.dumps({"step": step + 1, "microbatches": len(batches), "weights": norm} | means), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags, install the schedule, train, clean up."""
    args = parse(argv)
    megatron.zerobubble.install(args, lengths=megatron.zerobubble.MicrobatchLengths("thd"))
    train(args)
    megatron.zerobubble.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
