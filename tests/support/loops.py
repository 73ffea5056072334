"""A training loop for megatron-core, in pieces that a test changes: a small GPT, its optimizer and its data, on a pool's ranks.

The model, the flags and the loss are those of the example of a stock loop. Weights are drawn by name, so that each schedule
trains the same model.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

import megatron.zerobubble
from megatron.zerobubble.mcore.post_validation.optimizer import MegatronRollbackOptimizer
from megatron.zerobubble.optimizer.post_validation import PostValidation
from tests.support.stock import example, installed

SIZES = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-2"


class Loop:
    """A model, its optimizer and its data.

    Args:
        args: flags of the example.
        prepare: called with each chunk before DDP wraps it.
        has_ddp: without DDP there is no optimizer either.
        groups: handed to the model, to DDP, to the optimizer, to `finalize_model_grads` and with a communicator to every call of
            the schedule, as Megatron-Bridge does.
        optimizer: fields of the OptimizerConfig.
        settings: fields of the TransformerConfig.
    """

    def __init__(
        self,
        args: Namespace,
        prepare: Callable[[Any], None] = lambda chunk: None,
        *,
        has_ddp: bool = True,
        groups: ProcessGroupCollection | None = None,
        optimizer: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.args, self._groups, self._options = args, groups, optimizer or {}
        self.config = example().transformer_config(args)
        for name, value in settings.items():
            setattr(self.config, name, value)
        initialize, given = example().initialize_weights, {} if groups is None else {"pg_collection": groups}

        def initialized(chunk: Any) -> None:
            initialize(chunk)
            prepare(chunk)

        with (
            mock.patch.object(example(), "initialize_weights", initialized),
            mock.patch.object(example(), "GPTModel", functools.partial(GPTModel, **given)),
            mock.patch.object(
                example(),
                "DistributedDataParallel",
                functools.partial(DistributedDataParallel, **given) if has_ddp else lambda *, module, **_: module,
            ),
        ):
            self.model: list[Any] = example().build_model(args, self.config)
        self.seen: list[Any] = []
        self.restart_data()
        if has_ddp:
            self.adopt_optimizer()

    def adopt_optimizer(self) -> None:
        """Make a new optimizer, and set what a loop sets for it."""
        options: dict[str, Any] = {
            "lr": self.args.lr,
            "clip_grad": self.args.clip_grad,
            "bf16": self.args.bf16,
            "fp16": self.args.fp16,
            "params_dtype": self.config.params_dtype,
            "use_distributed_optimizer": self.args.use_distributed_optimizer,
        }
        given = {} if self._groups is None else {"pg_collection": self._groups}
        gloo = {"use_gloo_process_groups": False} if given else {}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(**{"optimizer": "adam"} | options | self._options), self.model, **gloo, **given
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = functools.partial(finalize_model_grads, **given)

    def restart_data(self) -> None:
        self.data = [self.batches(self.args.micro_batch_size, self.args.seq_length) for _ in self.model]

    def batches(self, rows: int = 2, length: int = 8, seed: int = 7) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed + parallel_state.get_data_parallel_rank())
        while True:
            yield torch.randint(0, example().VOCABULARY, (rows, length + 1), generator=generator)

    def one_or_list(self, values: list[Any]) -> Any:
        """A value for each chunk, as megatron-core takes them."""
        return values if len(values) > 1 else values[0]

    def overlap_reductions(self, *, is_aligned: bool) -> None:
        self.config.no_sync_func = self.one_or_list([chunk.no_sync for chunk in self.model])
        if is_aligned:
            self.config.grad_sync_func = self.one_or_list([chunk.start_grad_sync for chunk in self.model])

    def passes(self, num_microbatches: int | None = None, **given: Any) -> list[Any]:
        arguments: dict[str, Any] = {
            "forward_step_func": forward_step,
            "data_iterator": self.one_or_list(self.data),
            "model": self.model,
            "num_microbatches": num_microbatches or self.args.num_microbatches,
            "seq_length": self.args.seq_length,
            "micro_batch_size": self.args.micro_batch_size,
            "forward_only": False,
        }
        if self._groups is not None:
            communicator = P2PCommunicator(pp_group=self._groups.pp, config=self.config)
            arguments |= {"pg_collection": self._groups, "p2p_communicator": communicator, "adjust_tensor_shapes_fn": None}
        results: list[Any] = get_forward_backward_func()(**(arguments | given))
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self.seen.append(plain(results))
        return results

    def evaluate(self, num_microbatches: int | None = None, **given: Any) -> list[Any]:
        """Forward passes only, in evaluation mode."""
        for chunk in self.model:
            chunk.eval()
        with torch.no_grad():
            results = self.passes(num_microbatches, forward_only=True, **given)
        for chunk in self.model:
            chunk.train()
        return results

    def zero(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def train(self, num_microbatches: int | None = None, **given: Any) -> None:
        self.zero()
        self.passes(num_microbatches, **given)
        self.optimizer.step()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by names that do not depend on the layout."""
        for chunk in self.model:
            yield from named(chunk)

    def state(self) -> dict[str, Any]:
        found = {name: plain(parameter) for name, parameter in self.named()}
        gradients = {f"{name} gradient": plain(getattr(parameter, "main_grad", None)) for name, parameter in self.named()}
        return found | gradients


def named(chunk: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """A chunk's parameters, with the layer's number in the whole model."""
    model = chunk
    while hasattr(model, "module"):
        model = model.module
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(model.decoder.layers[int(words[2])].layer_number)
        yield ".".join(words), parameter


def plain(value: Any) -> Any:
    """With copies as numpy arrays in place of tensors."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [plain(row) for row in value.unbind()]
        return value.detach().to(torch.float32 if value.dtype is torch.bfloat16 else value.dtype).clone().numpy()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def forward_step(data_iterator: Iterator[Tensor], model: Any, loss_function: Any = None) -> tuple[Tensor, Any]:
    """A microbatch of any shape."""
    text = next(data_iterator)
    positions = torch.arange(text.size(1) - 1).expand(len(text), -1)
    output = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
    return output, loss_function or example().loss_function


def with_loss(loss_function: Any) -> Any:
    """`forward_step` with another loss function."""
    return functools.partial(forward_step, loss_function=loss_function)


def train_with_groups(rank: int, flags: str, schedule: str | None) -> dict[str, Any]:
    """As Megatron-Bridge: results of every iteration and of an evaluation at the end, weights and gradients at the end."""
    with installed(flags, schedule) as args:
        loop = Loop(args, groups=ProcessGroupCollection.use_mpu_process_groups())
        if args.overlap_grad_reduce:
            loop.overlap_reductions(is_aligned=True)
        for _ in range(args.train_iters):
            loop.train(decoder_seq_length=args.seq_length)
        loop.evaluate()
        return {"results": loop.seen, **loop.state()}


def merged(results: list[dict[str, Any]], *, names: str = "results") -> dict[str, Any]:
    """What all ranks have: `names` of each, and weights and gradients by name, which are the same on every replica."""
    found: dict[str, Any] = {}
    for result in results:
        for name, value in result.items():
            if name != names and value is not None:
                assert (found.setdefault(name, value) == value).all(), name
    return found | {names: [result[names] for result in results]}


def train_optimistically(
    rank: int, flags: str, evaluate_at: int = -1, save_at: int = -1, overflows: Sequence[int] = ()
) -> dict[str, Any]:
    """Train with what the flags install, with a learning rate and a weight decay that change.

    Forward steps take their batches apart and change tensors of them in place, and layers assign a buffer: a forward that runs
    again must see neither.

    Args:
        rank: of the pool.
        flags: of the example, zero-bubble flags among them.
        evaluate_at: iteration after whose step the loop evaluates.
        save_at: iteration after whose step the loop reads the weights by `state_dict`; in fp32 it loads them after later ones.
        overflows: iterations in which a gradient of the last pipeline rank, of no other, is infinite.

    Returns:
        Losses and norms of this rank (norms: the maximum over the pipeline, as Megatron-LM reduces them), learning rate and loss
        scale of each step, what the scheduler has counted, the weights at the end by name, those that were read at `save_at`, and
        for each step that was validated afterwards whether it was redone, and the numbers of those that this rank rolled back.
    """
    validated: list[Any] = []
    rolled_back: list[int] = []
    original, redo = PostValidation.validate, MegatronRollbackOptimizer.redo

    def counting(self: PostValidation) -> Any:
        was_unvalidated = self.is_unvalidated
        verdict = original(self)
        if was_unvalidated and verdict is not None:
            validated.append(verdict)
        return verdict

    def noting(self: MegatronRollbackOptimizer, statistics: Any, *, roll_back: bool) -> None:
        rolled_back.extend([len(validated) + 1] * roll_back)
        redo(self, statistics, roll_back=roll_back)

    with (
        installed(flags, by_flags=True) as args,
        mock.patch.object(PostValidation, "validate", counting),
        mock.patch.object(MegatronRollbackOptimizer, "redo", noting),
    ):
        # A first loss scale that overflows in the first step
        scaling = {"initial_loss_scale": 2.0**20, "loss_scale_window": 2, "hysteresis": 1}
        loop = Loop(args, _add_average, optimizer={"min_lr": 0.0, "weight_decay": 0.01, **scaling})
        loop.data = [_nested(example().batches(args)) for _ in loop.model]  # to learn from: norms on both sides of CLIP
        result = _schedule(loop, args, evaluate_at, save_at, overflows)
        megatron.zerobubble.uninstall()  # validates the last step
        result["weights"] = dict(_tensors(loop, "named_parameters")) | dict(_tensors(loop, "named_buffers"))
        result["advanced"] = result.pop("scheduler").num_steps
    return result | {"redone": [each.is_redone for each in validated], "rolled back": rolled_back}


def _schedule(loop: Loop, args: Namespace, evaluate_at: int, save_at: int, overflows: Sequence[int]) -> dict[str, Any]:
    scheduler = OptimizerParamScheduler(
        loop.optimizer,
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
    norms, steps, saved = [], [], {}
    for iteration in range(1, 1 + args.train_iters):
        loop.zero()
        loop.passes(forward_step_func=_taking_apart)
        if iteration in overflows and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            next(loop.model[0].parameters()).main_grad.fill_(torch.inf)
        steps.append((*{group["lr"] for group in loop.optimizer.param_groups}, float(loop.optimizer.get_loss_scale())))
        is_stepped, norm, _ = loop.optimizer.step()
        norms.append(_largest(norm))
        if is_stepped:
            scheduler.step(increment=1)
        if iteration == evaluate_at:
            loop.evaluate(forward_step_func=_taking_apart)
        if iteration == save_at:
            saved = dict(_tensors(loop, "state_dict"))
        if iteration > save_at and saved and not (args.bf16 or args.fp16):
            for number, chunk in enumerate(loop.model):
                own = {name.partition(".")[2]: value for name, value in saved.items() if name.startswith(f"{number}.")}
                chunk.load_state_dict(own, strict=False)
    losses = [[float(report["lm loss"]) for report in results] for results in loop.seen]
    return {"losses": losses, "norms": norms, "steps": steps, "saved": saved, "scheduler": scheduler}


def _nested(batches: Iterator[Tensor]) -> Iterator[Any]:
    """Objects with nested containers of views of one tensor."""
    for text in batches:
        yield SimpleNamespace(text=text, rows=[{"tokens": text[:, :-1], "labels": text[:, 1:]}])


def _taking_apart(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    batch = next(data)
    row = batch.rows.pop()
    row["tokens"].add_(1)  # a second time they were others
    del batch.text
    return forward_step(iter([torch.cat([row.pop("tokens") - 1, row.pop("labels")[:, -1:]], dim=1)]), model)


def _add_average(chunk: Any) -> None:
    """Let each layer keep a moving average of its output in a buffer that its forward assigns."""

    def average(layer: Any, given: Any, output: Any) -> None:
        layer.average = 0.5 * layer.average + 0.5 * output[0].detach().float().abs().mean()

    for layer in chunk.decoder.layers:
        layer.register_buffer("average", torch.zeros(()), persistent=False)
        layer.register_forward_hook(average)


def _largest(norm: float | None) -> float:
    value = torch.tensor([-1.0 if norm is None else float(norm)], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
    return float(value)


def _tensors(loop: Loop, method: str) -> Iterator[tuple[str, Tensor]]:
    """Copies of what a method of every chunk returns by name."""
    for number, chunk in enumerate(loop.model):
        for name, value in dict(getattr(chunk, method)()).items():
            if isinstance(value, Tensor):
                yield f"{number}.{name}", value.detach().clone()
