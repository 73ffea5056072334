"""Doubles of Transformer Engine's linears, as far as the contract of deferred weight gradients goes. They are not the real thing.

What is doubled, from the interface of transformer_engine.pytorch 2.8 and later, as megatron-core drives it
(`megatron/core/extensions/transformer_engine.py`, `distributed/distributed_data_parallel.py`):

- built with `delay_wgrad_compute=True`, a module marks its weights and biases `skip_backward_post_hook`;
- its backward returns no weight gradient and puts what one needs into a queue of the module, first in, first out;
- `backward_dw()` takes the oldest entry out and computes; an empty queue is an error;
- with `fuse_wgrad_accumulation` the GEMM adds to `weight.main_grad`, backward has set `weight.grad_added_to_main_grad` and
  returned a tensor without meaning as the weight's gradient; otherwise `backward_dw` puts the gradient of this microbatch into
  `weight.grad`, over whatever is there;
- a bias that is returned instead of added (`return_bias`) gets its gradient from autograd; `backward_dw` wants to find it there;
- then `backward_dw` calls the hooks that `register_wgrad_accumulation_and_reduce_hooks` was given, one for each parameter;
- built without, backward returns the gradients and `backward_dw` does nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class TransformerEngineContractDouble(nn.Module):
    """Linears of several weights that share an input, split by rows as GroupedLinear splits it; one weight is Linear.

    Args:
        in_features: columns of each weight.
        out_features: rows of each weight.
        num_gemms: how many weights. One is called `weight`, more `weight0`, `weight1` ...
        bias: whether each has one.
        return_bias: return it instead of adding it; of a single weight.
        delay_wgrad_compute: leave weight gradients for `backward_dw`.
        fuse_wgrad_accumulation: add them to `main_grad` in the GEMM.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_gemms: int = 1,
        bias: bool = False,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delays = delay_wgrad_compute
        self.queue: deque[tuple[Tensor, Tensor, list[int]]] = deque()
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.num_computed = 0
        names = [""] if num_gemms == 1 else [str(number) for number in range(num_gemms)]
        self.weight_names = [f"weight{name}" for name in names]
        self.bias_names = [f"bias{name}" for name in names] if bias else []
        self.return_bias = bias and return_bias
        for name in self.weight_names:
            self.register_parameter(name, nn.Parameter(torch.empty(out_features, in_features).normal_(0.0, 0.02)))
        for name in self.bias_names:
            self.register_parameter(name, nn.Parameter(torch.zeros(out_features)))
        if delay_wgrad_compute:
            for parameter in self.parameters():
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, m_splits: Sequence[int] | None = None) -> Any:
        """[..., in] -> [..., out]; with several weights [tokens, in] -> [tokens, out], `m_splits` tokens for each."""
        rows = [x.numel() // x.shape[-1]] if m_splits is None else list(m_splits)
        names = self.weight_names if self.return_bias else [*self.weight_names, *self.bias_names]
        output = _Double.apply(x, self, rows, *(getattr(self, name) for name in names))
        return (output, self.bias) if self.return_bias else output

    def need_backward_dw(self) -> bool:
        """Whether the caller has to call `backward_dw`."""
        return self.delays

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """`hook` is called after each `backward_dw`."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest entry."""
        if not self.delays:
            return
        if not self.queue:
            raise RuntimeError("the queue of weight gradients is empty")
        computed = self.gradients(*self.queue.popleft())
        for name, gradient in zip([*self.weight_names, *self.bias_names], computed, strict=False):
            if gradient is not None:
                getattr(self, name).grad = gradient
        if self.return_bias and self.bias.grad is None:
            raise RuntimeError("the bias was added elsewhere and has no gradient")
        self.num_computed += 1
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def gradients(self, x: Tensor, grad_output: Tensor, rows: list[int]) -> list[Tensor | None]:
        """The gradient of each parameter; None if it is added to `main_grad` here."""
        xs, grads = x.split(rows), grad_output.split(rows)
        found: list[Tensor | None] = []
        for name, part, grad in zip(self.weight_names, xs, grads, strict=True):
            gradient = grad.t().matmul(part)
            if self.fuse_wgrad_accumulation:
                getattr(self, name).main_grad.add_(gradient)
            found.append(None if self.fuse_wgrad_accumulation else gradient)
        return (
            found if self.return_bias else [*found, *(grad.sum(dim=0) for _, grad in zip(self.bias_names, grads, strict=False))]
        )


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: TransformerEngineContractDouble, rows: list[int], *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module, ctx.rows = module, rows
        weights = [getattr(module, name) for name in module.weight_names]
        biases = [] if module.return_bias else [getattr(module, name) for name in module.bias_names]
        if len(weights) == 1:
            output = torch.matmul(x, weights[0].t())
            return output + biases[0] if biases else output
        parts = [part.matmul(weight.t()) for part, weight in zip(x.split(rows), weights, strict=True)]
        return torch.cat([part + bias for part, bias in zip(parts, biases, strict=True)] if biases else parts)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        (x,), module, rows = ctx.saved_tensors, ctx.module, ctx.rows
        weights = [getattr(module, name) for name in module.weight_names]
        if len(weights) == 1:
            grad_input = grad_output.matmul(weights[0])
        else:
            grad_input = torch.cat([grad.matmul(weight) for grad, weight in zip(grad_output.split(rows), weights, strict=True)])
        operands = x.reshape(-1, x.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1]), rows
        if module.delays:
            module.queue.append(operands)
            gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad[3:])
        else:
            gradients = module.gradients(*operands)
        if module.fuse_wgrad_accumulation:
            for number, weight in enumerate(weights):
                weight.grad_added_to_main_grad = True
                gradients[number] = torch.full_like(weight, float("nan"))  # without meaning, and it would be seen
        return grad_input, None, None, *gradients


class TransformerEngineContractDoubleParallel(TransformerEngineContractDouble):
    """The double with the constructor and result of megatron-core's wrappers (TELinear ...), on one tensor-parallel rank."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool, skip_bias_add: bool, **_: Any
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            return_bias=skip_bias_add,
            delay_wgrad_compute=config.delay_wgrad_compute,
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        )
        init_method(self.weight)
        self.config = config

    def forward(self, x: Tensor, m_splits: Sequence[int] | None = None) -> Any:
        """(output, bias); None for a bias that is in the output, or is not."""
        output = super().forward(x)
        return output if self.return_bias else (output, None)

    def backward_dw(self) -> None:
        """Asks the configuration first, as megatron-core's wrappers do."""
        if self.config.delay_wgrad_compute:
            super().backward_dw()
