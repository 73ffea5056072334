"""A small GPT with optimizer and data in a loop for megatron-core, whose pieces a test changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from tests.support.stock import example

SIZES = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
_LAYERS = "decoder.layers."


class Loop:
    """A model, its optimizer and its data.

    Args:
        flags: of the example, besides the sizes.
        prepare: called with each chunk before DDP wraps it.
        overlap_param_gather: as of the optimizer.
        settings: fields of the TransformerConfig.
    """

    def __init__(
        self, flags: str, prepare: Callable[[Any], None] | None = None, overlap_param_gather: bool = False, **settings: Any
    ) -> None:
        self.overlap_param_gather = overlap_param_gather
        self.args = example().parse(f"{SIZES} {flags}".split())
        self.config = example().transformer_config(self.args)
        for name, value in settings.items():
            setattr(self.config, name, value)
        initialize = example().initialize_weights

        def initialized(chunk: Any) -> None:
            initialize(chunk)
            if prepare is not None:
                prepare(chunk)

        with mock.patch.object(example(), "initialize_weights", initialized):
            self.model: list[Any] = example().build_model(self.args, self.config)
        self.seen: list[Any] = []
        self.adopt_optimizer()

    def adopt_optimizer(self) -> None:
        """Make a new optimizer, and set what a loop sets for it."""
        options = {
            "lr": 1e-2,
            "clip_grad": 0.0,
            "use_distributed_optimizer": self.args.use_distributed_optimizer,
            "overlap_param_gather": self.overlap_param_gather,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **options), self.model)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.data = [self.batches() for _ in self.model]

    def batches(self, rows: int = 2, length: int = 8, seed: int = 7) -> Iterator[Tensor]:
        """Random tokens without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(0, example().VOCABULARY, (rows, length + 1), generator=generator)

    def one_or_list(self, values: list[Any]) -> Any:
        """A value for each chunk, as megatron-core takes them."""
        return values if len(values) > 1 else values[0]

    def passes(self, num_microbatches: int = 4, **given: Any) -> list[Any]:
        """One call of the schedule."""
        arguments = {
            "forward_step_func": forward_step,
            "data_iterator": self.one_or_list(self.data),
            "model": self.model,
            "seq_length": 8,
            "micro_batch_size": 2,
            "forward_only": False,
        }
        results: list[Any] = get_forward_backward_func()(num_microbatches=num_microbatches, **(arguments | given))
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self.seen.append(plain(results))
        return results

    def evaluate(self, num_microbatches: int = 3, **given: Any) -> list[Any]:
        """Forward passes only, in evaluation mode."""
        for chunk in self.model:
            chunk.eval()
        with torch.no_grad():
            results = self.passes(num_microbatches, forward_only=True, **given)
        for chunk in self.model:
            chunk.train()
        return results

    def zero(self) -> None:
        """Zero gradients."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def train(self, num_microbatches: int = 4, **given: Any) -> None:
        """One iteration."""
        self.zero()
        self.passes(num_microbatches, **given)
        self.optimizer.step()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by names that do not depend on the layout."""
        for chunk in self.model:
            for name, parameter in chunk.module.named_parameters():
                words = name.split(".")
                if name.startswith(_LAYERS):
                    words[2] = str(chunk.module.decoder.layers[int(words[2])].layer_number)
                yield ".".join(words), parameter

    def state(self) -> dict[str, Any]:
        """Weights and gradients."""
        found = {name: plain(parameter) for name, parameter in self.named()}
        gradients = {f"{name} gradient": plain(getattr(parameter, "main_grad", None)) for name, parameter in self.named()}
        return found | gradients


def plain(value: Any) -> Any:
    """With copies as numpy arrays in place of tensors."""
    if isinstance(value, Tensor):
        return [plain(row) for row in value.unbind()] if value.is_nested else value.detach().clone().numpy()
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
