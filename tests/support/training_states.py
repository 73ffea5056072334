"""A training job's set-up on the ranks of a `RankPool`: from flags to a `TrainingState` that trains, saves and loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.job.meeting import Attempt
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.runtime.watch import Watch
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.initialize import Job
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider
from megatron.zerobubble.training.setup import build_training_state
from megatron.zerobubble.training.step import Trainer, TrainingState
from tests.support.gpt import _destroy_groups
from tests.training.launch import LR

VOCABULARY = 64
SEQUENCE = 16
MODEL = f"--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length {SEQUENCE} --no-bias-gelu-fusion"
RUN = f"--mock-data --micro-batch-size 1 --global-batch-size 8 --lr {LR} --train-iters 10 --eval-iters 0 --attention-dropout 0"
RUN += " --hidden-dropout 0 --use-cpu-initialization"


@contextmanager
def training_state_of(rank: int, flags: Sequence[str]) -> Iterator[TrainingState]:
    """This rank's part of a job with `flags` beside `MODEL` and `RUN`. All ranks must call this."""
    with quiet_third_parties(), _training_state_of(rank, flags) as training_state:
        yield training_state


@contextmanager
def _training_state_of(rank: int, flags: Sequence[str]) -> Iterator[TrainingState]:
    world_size = dist.get_world_size()
    settings = settings_from_argv([*MODEL.split(), *RUN.split(), *flags], world_size=world_size)
    store = dist.PrefixStore(f"job {_turn()}", dist.distributed_c10d._get_default_store())
    host = HostDevice()
    host.install()  # where the rank has not
    launch = Launch(rank=rank, local_rank=rank, ranks_on_host=world_size, world_size=world_size, has_threads_set=True)
    job = Job(launch=launch, attempt=Attempt.alone(), host=host, store=store, watch=Watch(host.device))  # type: ignore[arg-type]
    if parallel_state.model_parallel_is_initialized():  # by a test that ended early
        _destroy_groups()
    training_state = build_training_state(
        settings,
        job,
        vocab_size=VOCABULARY,
        model_provider=model_provider,
        forward_step_provider=forward_step_provider,
    )
    try:
        yield training_state
    finally:  # a test may expect an error, and this process may be that of other tests
        if training_state.post_validation is not None:
            training_state.post_validation.close()
        for chunk in training_state.chunks:  # cycles that Python cannot see, as in tests.support.gpt
            chunk.grad_accs.clear()
        for part in getattr(training_state.optimizer, "chained_optimizers", [training_state.optimizer]):
            vars(part).clear()
        vars(training_state.schedule).clear()
        _destroy_groups()
        host.uninstall()


def train(training_state: TrainingState, *, first: int, last: int) -> list[float]:
    """Iterations `first` to `last` on data that depends on their number only; the sum of losses of each, over all ranks."""
    training, losses = Trainer(training_state), []
    for iteration in range(first, last + 1):
        iterators = [_batches(training_state.settings, iteration) for _ in training_state.chunks]
        results = training.iterate(iterators if len(iterators) > 1 else iterators[0])
        (result,) = results or training.flush()
        loss = result.loss.clone()
        dist.all_reduce(loss)
        losses.append(float(loss[0] / loss[1]))
    return losses


def _batches(settings: Settings, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's share of the global batch, one microbatch at a time."""
    rank, size = parallel_state.get_data_parallel_rank(), settings.data_parallel_size
    for number in range(settings.num_microbatches):
        generator = torch.Generator().manual_seed(1000 * iteration + number * size + rank)
        text = torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(1, SEQUENCE),
            "position_ids": torch.arange(SEQUENCE).unsqueeze(0),
        }


def _turn() -> int:
    """How many jobs these ranks have run: a store keeps the keys of earlier ones."""
    return int(dist.distributed_c10d._get_default_store().add(f"turn of rank {dist.get_rank()}", 1))
