"""A loop for megatron-core's synchronous optimizer, written as Megatron-LM's: learning rate, decay, evaluation, checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

import megatron.zerobubble
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.optimizer.post_validation import PostValidation
from tests.support.gpt import _destroy_groups
from tests.support.stock import example


def train(rank: int, flags: str, evaluate_at: int = -1, save_at: int = -1, overflows: Sequence[int] = ()) -> dict[str, Any]:
    """Train with what the flags install.

    Args:
        rank: of the pool.
        flags: of the example, zero-bubble flags among them.
        evaluate_at: iteration after whose step the loop evaluates.
        save_at: iteration after whose step the loop reads the weights by `state_dict`; in fp32 it loads them after later ones.
        overflows: iterations in which a gradient of the last pipeline rank, of no other, is infinite.

    Returns:
        Losses and norms of this rank (norms: the maximum over the pipeline, as Megatron-LM reduces them), learning rate and loss
        scale of each step, what the scheduler has counted, the weights at the end by name, those that were read at `save_at`, and
        for each step that was validated afterwards whether it was redone and which ranks rolled it back.
    """
    loop = example()
    args = loop.parse(flags.split())
    _destroy_groups()
    redone: list[bool] = []
    rolled_back: list[tuple[int, ...]] = []
    original = PostValidation.validate

    def counting(self: PostValidation) -> Any:
        was_unvalidated = self.is_unvalidated
        verdict = original(self)
        if was_unvalidated and verdict is not None:
            redone.append(verdict.is_redone)
            rolled_back.append(verdict.rolled_back)
        return verdict

    with HostDevice().on_host():
        megatron.zerobubble.install(args)
        PostValidation.validate = counting  # type: ignore[method-assign]
        try:
            loop.initialize(args)
            result = _train(loop, args, evaluate_at, save_at, overflows)
            megatron.zerobubble.uninstall()  # validates the last step
            result["weights"] = _weights(result.pop("chunks"))
            result["advanced"] = result.pop("scheduler").num_steps
        finally:
            PostValidation.validate = original  # type: ignore[method-assign]
            megatron.zerobubble.uninstall()
            _destroy_groups()
    return result | {"redone": redone, "rolled back": rolled_back}


def _train(loop: Any, args: Any, evaluate_at: int, save_at: int, overflows: Sequence[int]) -> dict[str, Any]:
    chunks = loop.build_model(args, loop.transformer_config(args))
    config = get_model_config(chunks[0])
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=0.0,
        weight_decay=0.01,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        fp16=args.fp16,
        initial_loss_scale=2.0**20,  # overflows in the first step
        loss_scale_window=2,
        hysteresis=1,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=0.0,
        lr_warmup_steps=2,
        lr_decay_steps=args.train_iters + 2,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=args.train_iters,
        wd_incr_style="linear",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    iterators = [loop.batches(args) for _ in chunks]
    call = partial(
        get_forward_backward_func(),
        forward_step_func=partial(loop.forward_step, args),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=chunks,
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    losses, norms, steps, saved = [], [], [], {}
    for iteration in range(1, 1 + args.train_iters):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append([float(report["lm loss"]) for report in call(forward_only=False)])
        if iteration in overflows and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            next(chunks[0].parameters()).main_grad.fill_(torch.inf)
        steps.append((*{group["lr"] for group in optimizer.param_groups}, float(optimizer.get_loss_scale())))
        is_stepped, norm, _ = optimizer.step()
        norms.append(_largest(norm))
        if is_stepped:
            scheduler.step(increment=1)
        if iteration == evaluate_at:
            with torch.no_grad():
                losses.append([float(report["lm loss"]) for report in call(forward_only=True)])
        if iteration == save_at:
            for number, chunk in enumerate(chunks):
                chunk_state = chunk.state_dict()
                saved |= {
                    f"{number}.{name}": value.clone() for name, value in chunk_state.items() if isinstance(value, torch.Tensor)
                }
        if iteration > save_at and saved and not (args.bf16 or args.fp16):
            for number, chunk in enumerate(chunks):
                own = {name.partition(".")[2]: value for name, value in saved.items() if name.startswith(f"{number}.")}
                chunk.load_state_dict(own, strict=False)
    return {"losses": losses, "norms": norms, "steps": steps, "saved": saved, "chunks": chunks, "scheduler": scheduler}


def _largest(norm: float | None) -> float:
    value = torch.tensor([-1.0 if norm is None else float(norm)], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
    return float(value)


def _weights(chunks: list[Any]) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
