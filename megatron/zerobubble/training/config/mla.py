"""Multi-latent attention (MLA, arXiv 2405.04434, section 2.1): the flags of the group "Multi-latent attention"."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.flags.require import at_most, divides, positive, refuse
from megatron.zerobubble.training.config.model import ModelConfig
from megatron.zerobubble.training.config.parallel import ParallelConfig

__all__ = ["MlaConfig"]


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-latent attention."""

    multi_latent_attention: bool = False
    """Use multi-latent attention (MLA): keys and values, and with --q-lora-rank queries, are projected up from a vector of low
    rank per token. It rotates a part of each head itself, for any --position-embedding-type. Without it no other flag of this
    group may be given."""
    q_lora_rank: int | None = None
    """Rank of the queries' low-rank representation. Default: none, queries are projected in one step."""
    kv_lora_rank: int = 32
    """Rank of the low-rank representation that keys and values share."""
    qk_head_dim: int = 128
    """Size of the part of a query and key head that is not rotated."""
    qk_pos_emb_head_dim: int = 64
    """Size of the part of a query and key head that carries the rotary position embedding. All key heads share it."""
    v_head_dim: int = 128
    """Size of a value head."""

    def __post_init__(self) -> None:
        positive(self, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        at_most(self, 2**24, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        if not self.multi_latent_attention:
            self._refuse_the_rest()
        elif self.qk_pos_emb_head_dim % 2:
            raise ConfigError(
                f"--qk-pos-emb-head-dim {self.qk_pos_emb_head_dim} is odd; rotary embeddings rotate pairs of channels"
            )

    def _refuse_the_rest(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(f"{flag_of(field)} needs --multi-latent-attention")

    def check(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        """Raise ConfigError for flags of the model that multi-latent attention does not have, or that only it has."""
        if not self.multi_latent_attention:
            if "mla_up_proj" in model.recompute_modules:
                raise ConfigError("--recompute-modules mla_up_proj needs --multi-latent-attention")
            model.check_rotary()
            return
        problems = {
            "--group-query-attention: its heads share a latent vector instead of keys and values": model.group_query_attention,
        }
        refuse("--multi-latent-attention does not go with", problems)
        size = parallel.tensor_model_parallel_size
        if size > 1 and not parallel.sequence_parallel:
            raise ConfigError(
                f"--multi-latent-attention with --tensor-model-parallel-size {size} needs --sequence-parallel: without it "
                "nothing sums the gradient of the key that all heads share over the tensor-parallel ranks"
            )
        if model.transformer_impl == "transformer_engine":
            return
        needs = {"--kv-lora-rank plus --qk-pos-emb-head-dim": self.kv_lora_rank + self.qk_pos_emb_head_dim}
        if self.q_lora_rank is not None:
            needs["--q-lora-rank"] = self.q_lora_rank
        divides(size, "--tensor-model-parallel-size", needs)
        if model.qk_layernorm and self.q_lora_rank is None:
            raise ConfigError(
                "--qk-layernorm with --multi-latent-attention normalizes low-rank queries: give --q-lora-rank, or leave it out"
            )
