"""The reference trainer: a training loop for stock megatron-core, which knows of no schedule.

`zerobubble train` runs it, and `pretrain_gpt.py` where megatron-core has no training loop of its own, both through `run_itself`:
zero-bubble flags are taken off the command line and installed before this begins. A loop of your own needs nothing else.

The phases of `main`: flags; data; process groups and seeds; model, DistributedDataParallel, optimizer; checkpoint; loop.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron.zerobubble.job.launch import read_launch
from megatron.zerobubble.mcore.compat import define_missing_te_gemm
from megatron.zerobubble.overlay import schedule_of
from megatron.zerobubble.training.arguments import parse_arguments
from megatron.zerobubble.training.checkpoint.save_load import load_checkpoint, save_checkpoint, starting_point
from megatron.zerobubble.training.configs import Configs
from megatron.zerobubble.training.data import build_datasets, check_dataset, chunk_reads, iterators, next_batch, proportions
from megatron.zerobubble.training.models.layer_specs import mtp_layers, stage_layers
from megatron.zerobubble.training.progress import Iteration, Progress, mean_losses
from megatron.zerobubble.training.tokenizer import build_tokenizer

__all__ = ["main"]

_log = logging.getLogger(__name__)

LOSS = "lm loss"
"""Key under which the loss function reports [sum of losses, number of tokens] of a microbatch."""


_STANDS_IN = (
    "this megatron-core has no training loop, so the reference trainer runs: Megatron-LM's loop comes with "
    "megatron-core from 0.17 on (pip install 'megatron-core>=0.17,<0.20' with Python 3.12)"
)


def main(zero_bubble: argparse.Namespace, *, stands_in: bool = False) -> None:
    """Train by the flags of the process. All ranks must call this.

    Args:
        zero_bubble: the flags in force, `cpu`: whether there is no CUDA, and `attempt`: which one of the job this is.
        stands_in: whether this runs in place of Megatron-LM's loop, which is then logged.

    Raises:
        UserError: a flag or the data is wrong; before a process group exists.
    """
    launch = read_launch()
    _set_up_logging(is_first=launch.rank == 0, is_last=launch.rank == launch.world_size - 1)
    if stands_in:
        _log.info("%s", _STANDS_IN)
    configs = parse_arguments(sys.argv[1:], world_size=launch.world_size, on_cpu=zero_bubble.cpu, defaults=zero_bubble)
    args = configs.args
    tokenizer = build_tokenizer(configs.tokenizer)
    if args.data_path:
        check_dataset(args.data_path, proportions(args.split)[: 2 if args.eval_iters else 1])
    _initialize(configs, local_rank=launch.local_rank)
    trainer = Trainer(configs, tokenizer, schedule=schedule_of(zero_bubble), attempt=zero_bubble.attempt)
    trainer.train()
    dist.barrier()  # a rank that leaves alone would be taken for one that failed


def _set_up_logging(*, is_first: bool, is_last: bool) -> None:
    """Log to standard output: from the first and the last rank, only warnings from others. megatron-core's info is muted."""
    logging.basicConfig(level=logging.INFO if is_first or is_last else logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    logging.getLogger("torch").setLevel(logging.WARNING)
    if not is_first:
        logging.getLogger("megatron.zerobubble").setLevel(logging.WARNING)
        logging.getLogger(_PROGRESS).setLevel(logging.INFO if is_last else logging.WARNING)
        warnings.simplefilter("ignore")  # the first rank prints the same ones


_PROGRESS = "megatron.zerobubble.training.progress"


def _initialize(configs: Configs, *, local_rank: int) -> None:
    """Process groups and seeds. Seeds are Megatron-LM's: different per pipeline rank, the same for all replicas."""
    args, config = configs.args, configs.model
    torch.cuda.set_device(local_rank)
    backend = args.distributed_backend or ("gloo" if args.on_cpu else "nccl")
    dist.init_process_group(backend, timeout=timedelta(minutes=args.distributed_timeout_minutes))
    atexit.register(_destroy_groups)  # a schedule writes its trace after the script has ended
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def build_chunk(configs: Configs, vocab_size: int, vp_stage: int | None) -> Any:
    """One chunk of the model, on this rank's device.

    Args:
        configs: of the model.
        vocab_size: of the tokenizer, before padding.
        vp_stage: index among the chunks of the rank; None if it has one.
    """
    args, config = configs.args, configs.model
    multiple = args.make_vocab_size_divisible_by * config.tensor_model_parallel_size
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=stage_layers(config, vp_stage=vp_stage),
        vocab_size=-(-vocab_size // multiple) * multiple,
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp_layers(config, vp_stage=vp_stage),
        vp_stage=vp_stage,
    ).cuda(torch.cuda.current_device())
    return Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk


def build_model(configs: Configs, vocab_size: int) -> list[Any]:
    """This rank's model chunks, wrapped in DistributedDataParallel."""
    config, chunks = configs.model, []
    if config.num_moe_experts is not None:
        define_missing_te_gemm()
    for number in range(configs.args.num_chunks):
        chunks.append(build_chunk(configs, vocab_size, number if configs.args.num_chunks > 1 else None))
    return [
        DistributedDataParallel(config=config, ddp_config=configs.ddp, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def build_scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay, in samples, as in Megatron-LM."""
    decay = args.lr_decay_iters or args.train_iters
    warmup = args.lr_warmup_iters if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay
    weight_decay = optimizer.config.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup * args.global_batch_size,
        lr_decay_steps=decay * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )


def forward_step(batches: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through one chunk, as megatron-core's schedules call it."""
    batch = next_batch(batches)
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(loss_function, batch["loss_mask"])


def loss_function(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of losses over tokens [b, s] whose loss counts, the number of these, and both for the log."""
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.to(torch.int), {LOSS: torch.stack([total.detach(), count]).to(torch.float64)}


class Trainer:
    """One run: its model, optimizer and data, and how far it is.

    Args:
        configs: the flags.
        tokenizer: of the data.
        schedule: name of the schedule, for the log.
        attempt: which attempt of the job this is.
    """

    def __init__(self, configs: Configs, tokenizer: Any, *, schedule: str, attempt: Any) -> None:
        self.args, self.config = configs.args, configs.model
        self.configs = configs
        self.schedule = schedule
        self.vocab_size = max(int(tokenizer.vocab_size), configs.tokenizer.known_vocab_size)
        self.chunks = build_model(configs, self.vocab_size)
        self.optimizer = get_megatron_optimizer(configs.optimizer, self.chunks, use_gloo_process_groups=False)
        self.scheduler = build_scheduler(self.args, self.optimizer)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if configs.ddp.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        reads = any(map(chunk_reads, self.chunks))
        self.train_samples, self.valid_samples = build_datasets(self.args, tokenizer, reads=reads)
        self.iteration = 0
        self.run = attempt.job
        self.stop = _Stop(self.args)
        checkpoint = starting_point(self.args, attempt)
        if checkpoint is not None:
            self._load(checkpoint, loads_optimizer=attempt.is_restart or not self.args.no_load_optim)

    def train(self) -> None:
        """Iterate, evaluate, save and log. All ranks must call this."""
        args = self.args
        self.progress = Progress(args, self.schedule, start=self.iteration)
        _log.info("%s", self._description())
        data = self._batches(self.train_samples, consumed=self.iteration * args.global_batch_size)
        is_last = self.iteration >= args.train_iters
        while not is_last:
            self.progress.add(self.iterate(data))
            is_last = self.stop.is_due(self.iteration) or self.iteration == args.train_iters
            evaluates = args.eval_iters and (is_last or self.iteration % args.eval_interval == 0)
            saves = args.save and (is_last or (args.save_interval and self.iteration % args.save_interval == 0))
            loss = self.evaluate() if evaluates and not self.stop.is_urgent else None
            if is_last or saves or loss is not None or self.iteration % args.log_interval == 0:
                self.progress.log(validation_loss=loss)
            if saves:
                self._save()
        _log.info("done: %d iterations", self.iteration)

    def iterate(self, data: Any) -> Iteration:
        """One iteration: all passes and the optimizer step."""
        begin = time.perf_counter()
        self._zero_gradients()
        loss = self._run_passes(data, forward_only=False)
        lr, scale = _learning_rate(self.optimizer), self.optimizer.get_loss_scale()
        loss_scale = float(scale) if self.config.fp16 else 1.0
        is_stepped, norm, _ = self.optimizer.step()
        if is_stepped:
            self.scheduler.step(increment=self.args.global_batch_size)
        self.iteration += 1
        return Iteration(
            number=self.iteration,
            loss=loss,
            is_stepped=bool(is_stepped),
            grad_norm=None if norm is None or not is_stepped else float(norm),
            lr=lr,
            loss_scale=loss_scale,
            seconds=time.perf_counter() - begin,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss per token over --eval-iters global batches, always the same ones. All ranks must call this."""
        self._zero_gradients()  # as before any pass: DDP then gathers weights that were stepped since
        for chunk in self.chunks:
            chunk.eval()
        data = self._batches(self.valid_samples, consumed=0)
        total = sum(self._run_passes(data, forward_only=True) for _ in range(self.args.eval_iters))
        for chunk in self.chunks:
            chunk.train()
        assert isinstance(total, torch.Tensor)
        return mean_losses(total.unsqueeze(0))[0]

    def _load(self, checkpoint: Path, *, loads_optimizer: bool) -> None:
        self.iteration = load_checkpoint(
            checkpoint,
            self.chunks,
            self.optimizer,
            self.scheduler,
            loads_optimizer=loads_optimizer,
            ddp_config=self.configs.ddp,
        )

    def _save(self) -> None:
        save_checkpoint(
            self.args.save,
            self.chunks,
            self.optimizer,
            self.scheduler,
            iteration=self.iteration,
            ddp_config=self.configs.ddp,
            run=self.run,
        )

    def _run_passes(self, data: Any, *, forward_only: bool) -> torch.Tensor:
        """All passes of one global batch; [sum of losses, number of tokens] of this rank, float64."""
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.args.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        none = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        return sum((report[LOSS] for report in reports), start=none)

    def _zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _batches(self, samples: Any, *, consumed: int) -> Any:
        return iterators(samples, self.args, self.chunks, consumed=consumed, vocab_size=self.vocab_size)

    def _description(self) -> str:
        args, config = self.args, self.config
        precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"
        return (
            f"training with {self.schedule}: {dist.get_world_size()} ranks = {config.pipeline_model_parallel_size} pipeline x "
            f"{config.tensor_model_parallel_size} tensor x {config.context_parallel_size} context x {args.data_parallel_size} "
            f"data, {args.num_microbatches} microbatches of {args.micro_batch_size} x {args.seq_length} tokens, {precision} on "
            f"{'CPU' if args.on_cpu else 'GPU'}"
        )


class _Stop:
    """Whether a run ends before its last iteration: --exit-interval, a time limit, or SIGTERM on any rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._interval = args.exit_interval
        self._until = None if args.exit_duration_in_mins is None else time.monotonic() + 60.0 * args.exit_duration_in_mins
        self._asks = args.exit_signal_handler or self._until is not None
        self.is_urgent = False
        """Whether it is due to SIGTERM, so that little time is left: no evaluation."""
        self._is_signaled = False
        if args.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def is_due(self, iteration: int) -> bool:
        """Whether to end after this iteration; the same on all ranks, which must call it after every iteration."""
        if self._interval is not None and iteration % self._interval == 0:
            _log.info("exiting at iteration %d (--exit-interval)", iteration)
            return True
        if not self._asks:
            return False
        is_late = self._until is not None and time.monotonic() >= self._until
        asked = torch.tensor([self._is_signaled, is_late], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(asked)
        self.is_urgent, is_late = map(bool, asked.tolist())
        if self.is_urgent or is_late:
            why = "on SIGTERM" if self.is_urgent else "--exit-duration-in-mins"
            _log.info("exiting at iteration %d (%s)", iteration, why)
        return self.is_urgent or is_late

    def _on_signal(self, *_: object) -> None:
        self._is_signaled = True


def _learning_rate(optimizer: Any) -> float:
    """The learning rate of the parameters that follow the default schedule."""
    return next((float(group["lr"]) for group in optimizer.param_groups if group.get("default_config", False)), float("nan"))
