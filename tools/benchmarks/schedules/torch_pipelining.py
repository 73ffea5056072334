"""`torch.distributed.pipelining` on layers of the same shape, as its users run it: plain modules, torch's stages and schedules.

The layers are not megatron-core's: torch's zero-bubble schedules run the backward of a custom autograd function twice, once for
the input's gradient and once for the weights', and megatron-core's linears are such functions. These are the same matrices,
biases, norms and attention (without fused kernels on either side) as plain modules. Compare torch's schedules with each other,
not their milliseconds with megatron-core's.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.simulate import TimedOp
from tools.benchmarks.schedules.contenders import ContenderSpec, Sizes
from tools.benchmarks.schedules.gpt import LEARNING_RATE, SEED, VOCABULARY, WEIGHT_DECAY, text

CPU = torch.device("cpu")


class Attention(nn.Module):
    """Causal self-attention with materialized scores. [b, s, h] -> [b, s, h]"""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_attention_heads
        self.query_key_value = nn.Linear(sizes.hidden_size, 3 * sizes.hidden_size)
        self.output = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        future = torch.ones(sizes.seq_length, sizes.seq_length, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Apply attention."""
        batch, sequence, hidden = x_bsh.shape
        heads = self.query_key_value(x_bsh).view(batch, sequence, self.num_heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(hidden // self.num_heads)
        attended = scores.masked_fill(self.future, -torch.inf).softmax(dim=-1) @ value
        mixed: Tensor = self.output(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return mixed


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(sizes)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Apply attention and MLP, each with a residual connection."""
        x_bsh = x_bsh + self.attention(self.attention_norm(x_bsh))
        added: Tensor = x_bsh + self.mlp(self.mlp_norm(x_bsh))
        return added


class Embedding(nn.Module):
    """Tokens and their positions. [b, s] -> [b, s, h]"""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, sizes.hidden_size)
        self.position = nn.Embedding(sizes.seq_length, sizes.hidden_size)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Embed the tokens."""
        embedded: Tensor = self.word(tokens_bs) + self.position.weight
        return embedded


def stage_module(sizes: Sizes, *, stage: int, num_stages: int, num_layers: int) -> nn.Sequential:
    """Build one stage: its layers, with the embedding before the first stage's, norm and head after the last stage's."""
    modules: list[nn.Module] = [Embedding(sizes)] if stage == 0 else []
    modules += [Block(sizes) for _ in range(num_layers)]
    if stage == num_stages - 1:
        modules += [nn.LayerNorm(sizes.hidden_size), nn.Linear(sizes.hidden_size, VOCABULARY, bias=False)]
    return nn.Sequential(*modules)


class TorchContender:
    """A rank's stages, their optimizer, and one of torch's schedules. Every rank must construct it at the same point.

    Args:
        spec: a contender of torch's runtime; its schedule is `1f1b` or `zbv`.
        sizes: sizes of the model.
        num_ranks: pipeline size.
    """

    def __init__(self, spec: ContenderSpec, sizes: Sizes, num_ranks: int) -> None:
        self._sizes = sizes
        placement = spec.placement(num_ranks)
        layers = StageLayers.spread(sizes.num_layers, placement).per_stage
        self._num_stages = placement.num_stages
        torch.manual_seed(SEED)
        self._modules = {
            stage: stage_module(sizes, stage=stage, num_stages=self._num_stages, num_layers=layers[stage])
            for stage in placement.rank_to_stages[dist.get_rank()]
        }
        parameters = [parameter for module in self._modules.values() for parameter in module.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self._schedules: dict[int, PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self._losses: list[Tensor] = []

    def iterate(self, num_microbatches: int) -> None:
        """Run forward, backward and the optimizer step."""
        if num_microbatches not in self._schedules:  # in the warm-up round, which is not counted
            self._schedules[num_microbatches] = self._schedule(num_microbatches)
        self._optimizer.zero_grad()
        tokens, labels = text(self._sizes, num_microbatches)
        self._losses = []
        inputs = (tokens,) if 0 in self._modules else ()
        self._schedules[num_microbatches].step(*inputs, target=labels, losses=self._losses, return_outputs=False)
        self._optimizer.step()

    def timed_ops(self) -> list[TimedOp]:
        """Empty: torch does not record its ops."""
        return []

    def loss(self) -> float | None:
        """Mean loss of the last iteration on the rank with the last stage, otherwise None."""
        return float(torch.stack(self._losses).mean()) if self._losses else None

    def close(self) -> None:
        """Do nothing: torch's stages use the world's process group."""

    def _schedule(self, num_microbatches: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        stages = [PipelineStage(module, stage, self._num_stages, CPU) for stage, module in self._modules.items()]
        if len(stages) == 1:
            return Schedule1F1B(stages[0], num_microbatches, loss_fn=_cross_entropy)
        return ScheduleZBVZeroBubble(list(stages), num_microbatches, loss_fn=_cross_entropy)


def _cross_entropy(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten())
