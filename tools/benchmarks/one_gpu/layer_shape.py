"""The shape of the layer that is measured, with its FLOPs and the bytes that W needs.

s sequence, b microbatch, h hidden. Counts follow arXiv 2401.10241, Table 1, but use the shapes of the linears instead of 24sbh,
so that they also hold for grouped-query attention and gated MLPs.
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

    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    seq_length: int
    micro_batch_size: int = 1
    is_llama: bool = True
    """GQA, SwiGLU, RMSNorm, rotary positions, no biases."""

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.seq_length * self.micro_batch_size

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of a layer in forward order. megatron-core has one for Q, K and V and one for both halves of SwiGLU."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        keys = hidden // self.num_attention_heads * self.num_query_groups
        return (
            Linear(name="qkv", out=hidden + 2 * keys, in_=hidden),
            Linear(name="proj", out=hidden, in_=hidden),
            Linear(name="fc1", out=ffn * (2 if self.is_llama else 1), in_=hidden),
            Linear(name="fc2", out=hidden, in_=ffn),
        )

    @property
    def linear_flops(self) -> int:
        """FLOPs of one GEMM of every linear: of W, and of the linears in F and in B."""
        return sum(linear.flops(self.tokens) for linear in self.linears)

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
        groups = max(1, round(self.num_query_groups * scale))
        heads = groups * (self.num_attention_heads // self.num_query_groups)
        return replace(
            self,
            hidden_size=heads * (self.hidden_size // self.num_attention_heads),
            num_attention_heads=heads,
            num_query_groups=groups,
            ffn_hidden_size=self.ffn_hidden_size * heads // self.num_attention_heads,
            seq_length=max(8, round(self.seq_length * scale)),
        )


def llama_3_8b(tokens: int) -> LayerShape:
    """A layer of Llama-3-8B with one sample of this length."""
    return LayerShape(hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336, seq_length=tokens)
