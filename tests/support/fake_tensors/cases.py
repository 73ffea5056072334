"""The jobs whose ranks run on FakeTensors: models at their true sizes, as flags of `pretrain_gpt.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["CASES", "RESERVED", "Case"]

_LLAMA = (
    "--group-query-attention --num-query-groups 8 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 --hidden-dropout 0"
)
LLAMA_8B = f"{_LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
LLAMA_70B = f"{_LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"
GPT = "--hidden-dropout 0.1 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50257"
LATENT = (
    "--num-layers 32 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 129280 --hidden-dropout 0"
)
"""DeepSeek-V3's layers, 32 of them, so that all stages have as many."""
EXPERTS = (
    "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-topk-scaling-factor 2.5"
)

_ALWAYS = (
    "--attention-dropout 0 --micro-batch-size 1 --init-by-rank --mock-data --eval-iters 0 --lr 1e-4 "
    "--train-iters 10 --tokenizer-type NullTokenizer --zero-bubble-watchdog-seconds 0 --no-gradient-accumulation-fusion"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank of a job."""

    name: str
    """In the table."""
    model: str
    """Flags of the model."""
    seq_length: int = 8192
    schedule: str = "zb-h1"
    num_ranks: int = 8
    """Pipeline ranks."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    rank: int = 1
    """Pipeline rank."""
    num_microbatches: int = 3
    others: str = ""
    """More flags."""
    reads: tuple[str, ...] = ()
    """What the host may read in F, and in B where F is recomputed."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_ranks * self.tensor_parallel * self.context_parallel * self.data_parallel

    @property
    def global_rank(self) -> int:
        """The first rank of the stage, as megatron-core counts them."""
        return self.rank * self.tensor_parallel * self.context_parallel * self.data_parallel

    @property
    def argv(self) -> list[str]:
        """The flags."""
        return (
            f"{self.model} --seq-length {self.seq_length} "
            f"--pipeline-model-parallel-size {self.num_ranks} --tensor-model-parallel-size {self.tensor_parallel} "
            f"--context-parallel-size {self.context_parallel} "
            f"--global-batch-size {self.num_microbatches * self.data_parallel} --zero-bubble-schedule {self.schedule} "
            f"{_ALWAYS} {self.others} {'' if '--fp16' in self.others else '--bf16'}"
        ).split()

    @property
    def fused(self) -> Case:
        """The same with the full backward (BW) in place of B and W, in the same placement."""
        return replace(self, schedule="1f1b-v" if self.schedule in ("zbv", "v-half") else "1f1b")


_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_REPLICAS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_ROUTED = (
    "masked_select at core/transformer/moe/moe_utils.py:permute",
    "synchronize at core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize",
)
"""The number of routed tokens, twice in a layer, and the split sizes of the all-to-all."""

CASES = [
    Case(name="Llama-3-8B, ZB-H1", model=LLAMA_8B),
    Case(name="Llama-3-8B, ZBV, embedding and head", model=LLAMA_8B, schedule="zbv", rank=0),
    Case(
        name="Llama-3-8B, 32k, ZBV, tensor and sequence parallel 2",
        model=LLAMA_8B,
        seq_length=32768,
        schedule="zbv",
        tensor_parallel=2,
        others="--sequence-parallel",
    ),
    Case(name="Llama-3-8B, tensor parallel 2", model=LLAMA_8B, tensor_parallel=2),
    Case(
        name="Llama-3-8B, sequence parallel 2, 2 replicas, distributed optimizer, overlapped",
        model=LLAMA_8B,
        tensor_parallel=2,
        data_parallel=2,
        others=f"--sequence-parallel {_REPLICAS}",
    ),
    Case(name="Llama-3-8B, full recomputation", model=LLAMA_8B, others=_FULL),
    Case(
        name="Llama-3-8B, V-Half, fp16, post-validation, recomputed core attention",
        model=LLAMA_8B,
        schedule="v-half",
        others="--fp16 --enable-optimizer-post-validation --recompute-granularity selective",
    ),
    Case(
        name="Llama-3-8B, ZB-H2",
        model=LLAMA_8B,
        schedule="zb-h2",
        rank=0,
    ),
    Case(
        name="Llama-3-8B, 32k, context parallel 4",
        model=LLAMA_8B,
        seq_length=32768,
        context_parallel=4,
    ),
    Case(
        name="Llama-3-70B, 32k, tensor and sequence parallel 8",
        model=LLAMA_70B,
        seq_length=32768,
        tensor_parallel=8,
        others="--sequence-parallel",
    ),
    Case(
        name="Llama-3-70B, ZBV, tensor and sequence parallel 8, embedding and head",
        model=LLAMA_70B,
        schedule="zbv",
        tensor_parallel=8,
        rank=0,
        others="--sequence-parallel",
    ),
    Case(name="Llama-3-8B, MTP layer and head", model=LLAMA_8B, rank=7, others="--mtp-num-layers 1"),
    Case(name="GPT with LayerNorm, biases and tied embeddings, dropout, head", model=GPT, rank=7, seq_length=2048),
    Case(name="DeepSeek-V3's attention (MLA), dense", model=LATENT, seq_length=4096),
    Case(
        name="DeepSeek-V3-like, MLA, 256 experts over 32 ranks, all-to-all",
        model=f"{LATENT} {EXPERTS}",
        seq_length=4096,
        data_parallel=32,
        others="--expert-model-parallel-size 32 --moe-token-dispatcher-type alltoall",
        reads=_ROUTED,
    ),
    Case(
        name="DeepSeek-V3-like, ZBV, MLA, 256 experts over 64 ranks, all-to-all, recomputed",
        model=f"{LATENT} {EXPERTS}",
        seq_length=4096,
        schedule="zbv",
        data_parallel=64,
        others=f"--expert-model-parallel-size 64 --moe-token-dispatcher-type alltoall {_FULL}",
        reads=_ROUTED,
    ),
]
"""All, each with `fused`."""

RESERVED = [
    Case(name=name, model=model, schedule=schedule, rank=0, num_microbatches=16, **others)
    for name, model, others in (
        ("Llama-3-8B", LLAMA_8B, {}),
        ("Llama-3-8B, full recomputation", LLAMA_8B, {"others": _FULL}),
        ("Llama-3-70B, 32k, TP 8", LLAMA_70B, {"seq_length": 32768, "tensor_parallel": 8, "others": "--sequence-parallel"}),
        (
            "DeepSeek-V3-like, EP 64",
            f"{LATENT} {EXPERTS}",
            {
                "seq_length": 4096,
                "data_parallel": 64,
                "others": f"--expert-model-parallel-size 64 --moe-token-dispatcher-type alltoall {_REPLICAS}",
            },
        ),
    )
    for schedule in ("1f1b", "zb-h1", "zb-h2", "1f1b-v", "zbv", "v-half", "v-min")
    if name != "DeepSeek-V3-like, EP 64" or schedule in ("1f1b", "zb-h1", "zbv")  # each takes a minute or two
]
"""Those whose allocations are replayed: rank 0, which has the embedding, and in a V the head, too."""
