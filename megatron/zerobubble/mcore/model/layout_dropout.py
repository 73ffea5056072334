"""Dropout masks that do not depend on the layout: drawn by layer and sample, for any schedule and numbers of ranks.

megatron-core draws masks from a generator per rank, in the order in which the rank's forward passes run. Then two layouts with
dropout are two different runs even if their weights and samples are the same.

Here the device's generator is seeded before every layer by a hash of the run's seed, the number of the microbatch's first sample
since `install`, and the layer's number. So the masks are those of the layer and the samples. They depend on the microbatch size,
whose samples share one draw, and on the slices of a microbatch, each of which has a draw of its own.

Activation recomputation runs a layer again later, when other microbatches are under way, with the generator's state restored to
that before the layer. So what a layer needs to know about its microbatch is kept in that state: the layer's number is the low
part of the seed, and the rest is the microbatch's and is read from the generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_attr_wrapped_model
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.zerobubble.errors import ConfigError

__all__ = ["LayoutDropout", "check_layout_dropout"]

_LAYER_BITS = 14
_ATTENTION = 1 << (_LAYER_BITS - 1)
"""Added to the number of a layer in the seed of its attention dropout."""
_TRACKED = "model-parallel-rng"
"""Name of the generator that attention dropout draws from, in megatron-core's tracker."""


def check_layout_dropout(config: Any) -> None:
    """Check that no mask depends on a rank.

    Args:
        config: TransformerConfig of the model.

    Raises:
        ConfigError: ranks share the tensors that dropout masks, and each would draw a mask of its own.
    """
    refuse = "masks would still depend on the layout"
    if config.attention_dropout and config.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"layout-independent dropout with tensor parallelism: attention heads are shared over ranks, and {refuse}; set "
            "--attention-dropout 0"
        )
    if config.hidden_dropout and (config.sequence_parallel or config.context_parallel_size > 1):
        kind = "sequence" if config.sequence_parallel else "context"
        raise ConfigError(
            f"layout-independent dropout with {kind} parallelism: sequences are shared over ranks, and {refuse}; set "
            "--hidden-dropout 0 and --attention-dropout 0"
        )


class LayoutDropout:
    """Seeds the generators of one rank before every layer of its chunks.

    Args:
        chunks: this rank's model chunks, which get hooks. They do nothing in evaluation.
        seed: of the run, the same on all ranks.
        device: of the model.
        slice_offset: returns the number of tokens before the slice that runs; None: microbatches are not cut.

    Raises:
        ConfigError: a chunk that embeds tokens has no layer, so that nothing says which microbatch it is at.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], *, seed: int, device: torch.device, slice_offset: Callable[[], int] | None = None
    ) -> None:
        self._slice_offset = slice_offset
        self._seed, self._device = seed, device
        self._first_sample, self._stride = 0, 0
        self._hooks: list[RemovableHandle] = []
        for chunk in chunks:
            self._hook(chunk)

    def begin(self, *, first_sample: int, samples_apart: int) -> None:
        """An iteration begins.

        Args:
            first_sample: number of the first sample of this rank's first microbatch, since the start of training.
            samples_apart: samples from one of its microbatches to the next: of all data-parallel ranks together.
        """
        self._first_sample, self._stride = first_sample, samples_apart

    def _hook(self, chunk: nn.Module) -> None:
        model: Any = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        layers = list(model.decoder.layers)
        mtp = getattr(model, "mtp", None)
        layers += [] if mtp is None else [layer.transformer_layer for layer in mtp.layers]
        embedding = getattr(model, "embedding", None)
        if embedding is not None and not layers:
            raise ConfigError(
                "layout-independent dropout: a stage has the embedding and no layer; give it a layer "
                "(--pipeline-model-parallel-layout), or set --hidden-dropout 0 and --attention-dropout 0"
            )
        begins = [] if embedding is None else [embedding]
        for module in [*begins, model.decoder]:
            hook = partial(self._begin_microbatch, layers[0] if layers else None)
            self._hooks.append(module.register_forward_pre_hook(hook))
        self._hooks += [layer.register_forward_pre_hook(self._begin_layer) for layer in layers]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin_microbatch(self, layer: Any, module: nn.Module, _: object) -> None:
        """Seed by the microbatch. megatron-core's schedules, and ours, set its number on every layer."""
        if not module.training or layer is None:
            return
        sample = self._first_sample + layer.current_microbatch * self._stride
        offset = self._slice_offset() if self._slice_offset is not None else 0
        text = f"{self._seed} {sample} {offset}" if offset else f"{self._seed} {sample}"
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
        self._set(int.from_bytes(digest, "little") << _LAYER_BITS)

    def _begin_layer(self, layer: Any, _: object) -> None:
        if layer.training:
            begun = torch.cuda.initial_seed() if self._device.type == "cuda" else torch.initial_seed()
            self._set(begun >> _LAYER_BITS << _LAYER_BITS | layer.layer_number)

    def _set(self, seed: int) -> None:
        """Seed the device's generator, and that of attention dropout by another number, so that their masks differ."""
        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        if _TRACKED in states:
            state = states[_TRACKED]
            if isinstance(state, torch.Tensor):
                torch.cuda.manual_seed(seed | _ATTENTION)  # the CPU's generator, where that stands in for CUDA
                states[_TRACKED] = torch.cuda.get_rng_state()
                tracker.set_states(states)
            else:
                state.manual_seed(seed | _ATTENTION)
        torch.cuda.manual_seed(seed)
