"""Shapes of the layers that the benchmarks measure, with their FLOPs and the bytes that W needs.

s sequence, b microbatch, h hidden, a heads. Counts follow arXiv 2401.10241, Table 1, but use the shapes of the linears instead of
24sbh, so that they also hold for grouped-query attention and gated MLPs; for the paper's own models, of which 1.5B is one, the
two agree. Causal attention counts in full, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.zerobubble.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One weight, [out, in]."""

    name: str
    out: int
    in_: int

    def flops(self, tokens: int) -> int:
        """FLOPs of one of its three GEMMs (F, B or W) for `tokens` tokens."""
        return 2 * tokens * self.out * self.in_


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape of a transformer layer and its microbatch."""

    name: str
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    is_llama: bool = False
    """GQA, SwiGLU, RMSNorm, rotary positions, no biases."""
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int | None = None
    """Head size, where it is not the hidden size over the heads: a tensor-parallel shard has a part of the heads."""

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.seq_length * self.micro_batch_size

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of a layer in forward order. megatron-core has one for Q, K and V and one for both halves of SwiGLU."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        queries, keys = (self.head_size * heads for heads in (self.num_attention_heads, self.num_query_groups))
        return (
            Linear(name="qkv", out=queries + 2 * keys, in_=hidden),
            Linear(name="proj", out=hidden, in_=queries),
            Linear(name="fc1", out=ffn * (2 if self.is_llama else 1), in_=hidden),
            Linear(name="fc2", out=hidden, in_=ffn),
        )

    @property
    def linear_flops(self) -> int:
        """FLOPs of one GEMM of every linear: of W, and of the linears in F and in B."""
        return sum(linear.flops(self.tokens) for linear in self.linears)

    @property
    def attention_flops(self) -> int:
        """FLOPs of attention (QK^T, and scores times V) in F; B takes twice that number."""
        return 4 * self.tokens * self.seq_length * self.num_attention_heads * self.head_size

    def held_bytes(self, bytes_per_element: int) -> int:
        """Bytes that W needs: each linear's input and output gradient, once. ``32 sbh`` for the paper's layers."""
        return bytes_per_element * self.tokens * sum(linear.in_ + linear.out for linear in self.linears)

    def scaled(self, scale: float) -> LayerShape:
        """A smaller layer of the same kind: heads and tokens times `scale`, at least one head per query group and 8 tokens.

        Raises:
            ConfigError: `scale` is outside of (0, 1].
        """
        if not 0 < scale <= 1:
            raise ConfigError(f"--scale is {scale}; it must be more than 0 and at most 1, where 1 is the whole layer")
        if scale == 1:
            return self
        width = self.hidden_size // self.num_attention_heads
        group = self.num_attention_heads // self.num_query_groups
        groups = max(1, round(self.num_query_groups * scale))
        heads = groups * group
        return replace(
            self,
            name=f"{self.name} x {scale:g}",
            hidden_size=heads * width,
            num_attention_heads=heads,
            num_query_groups=groups,
            ffn_hidden_size=self.ffn_hidden_size * heads // self.num_attention_heads,
            seq_length=max(8, round(self.seq_length * scale)),
            micro_batch_size=1,
        )


_SHAPES = (
    LayerShape(
        name="1.5B",
        hidden_size=2304,
        num_attention_heads=24,
        seq_length=1024,
        micro_batch_size=6,
        ffn_hidden_size=4 * 2304,
        num_query_groups=24,
    ),
    LayerShape(
        name="Llama-3-8B",
        hidden_size=4096,
        num_attention_heads=32,
        seq_length=4096,
        micro_batch_size=1,
        is_llama=True,
        ffn_hidden_size=14336,
        num_query_groups=8,
    ),
)


def shape_named(name: str) -> LayerShape:
    """The shape of this name."""
    return {shape.name: shape for shape in _SHAPES}[name]
