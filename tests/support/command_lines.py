"""Command lines that people start training with: flags and values of published scripts, with sizes for four CPU ranks.

What needs a tokenizer's file, a data set or CUDA is replaced by what a test has, for all of them alike (`on_cpu`).
"""

from __future__ import annotations

FORK = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 "
    "--exit-interval 10 --seq-length 32 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 "
    "--group-query-attention --num-query-groups 2 --train-samples 800 --lr-decay-samples 600 --lr-warmup-samples 16 --lr 6.0e-5 "
    "--min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1 --eval-iters 1 --eval-interval 1000 --data-path DATA "
    "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model MODEL --split 98,2,0 --clip-grad 8.0 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --no-barrier-with-level-1-timing --profile-step-start 15 "
    "--profile-step-end 17 --untie-embeddings-and-output-weights --use-legacy-models --sequence-parallel --use-flash-attn "
    "--transformer-impl local --use-distributed-optimizer --enable-zb-runtime --no-create-attention-mask-in-dataloader "
    "--profile-ranks 0 1 --enable-exactly-numeric-match --attention-dropout 0.0 --hidden-dropout 0.0 --fp16"
)
"""The example of the zero-bubble authors' fork of Megatron-LM, without a schedule."""
FORK_ZB = (
    "--enable-zero-bubble --zero-bubble-pipeline-timers-start-iter 4 --zero-bubble-pipeline-timers-end-iter 5 "
    "--zero-bubble-max-pending-backward 4 --enable-optimizer-post-validation"
)
"""What it adds with ENABLE_ZERO_BUBBLE."""
FORK_ZBV = f"--zero-bubble-v-schedule {FORK_ZB}"
"""What it adds with ZERO_BUBBLE_V_SCHEDULE."""
GPT3 = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 "
    "--lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--data-path DATA --vocab-file FILE --merge-file FILE --split 949,50,1 --log-interval 1 --eval-interval 1000 --eval-iters 1 "
    "--tensorboard-dir FOLDER"
)
"""Megatron-LM's example for GPT-3 175B, but for its batch-size schedule, which other tests have."""
LLAMA3 = (
    "--use-mcore-models --num-layers 4 --hidden-size 32 --ffn-hidden-size 112 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 8 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
    "--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm "
    "--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights "
    "--disable-bias-linear --micro-batch-size 1 --global-batch-size 8 --train-samples 80 --lr-decay-samples 1949218748 "
    "--lr-warmup-samples 16 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 "
    "--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 "
    "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
    "--exit-duration-in-mins 235 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --data-path DATA "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL --data-cache-path FOLDER --split 99,1,0 "
    "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 1 "
    "--eval-interval 100 --log-throughput --profile --profile-step-start 40 --profile-step-end 60 --ckpt-format torch_dist "
    "--distributed-timeout-minutes 60 --tensorboard-dir FOLDER"
)
"""Megatron-LM's example for Llama-3 8B in FP8, over a pipeline, its schedule of warm-up short."""
MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 32 --max-position-embeddings 64 --num-layers 4 --hidden-size 32 "
    "--ffn-hidden-size 112 --num-attention-heads 4 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 2 --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 "
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer "
    "--tokenizer-model MODEL --data-path DATA --split 99990,8,2 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 "
    "--train-iters 10 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 "
    "--clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--use-distributed-optimizer --sequence-parallel --log-interval 1 --eval-interval 1000 --eval-iters 1 "
    "--tensorboard-dir FOLDER --no-load-optim --no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B"
)
"""Megatron-LM's example for Mixtral 8x7B."""
EVERYDAY = {"fork": FORK, "gpt-3": GPT3, "llama-3": LLAMA3, "mixtral": MIXTRAL}

_NEEDS_FILES = {"--tokenizer-type": 1, "--tokenizer-model": 1, "--vocab-file": 1, "--merge-file": 1, "--data-path": 1}
_NEEDS_CUDA = {
    "--fp8-format": 1,
    "--fp8-amax-history-len": 1,
    "--fp8-amax-compute-algo": 1,
    "--fp8-param-gather": 0,
    "--moe-grouped-gemm": 0,
    "--profile": 0,
    "--attention-backend": 1,
    "--apply-layernorm-1p": 0,
}
_NEEDS_PACKAGES = {
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
    "--wandb-exp-name": 1,
    "--data-cache-path": 1,
    "--num-workers": 1,
}


def without(line: str, left_out: dict[str, int]) -> str:
    """A command line without some flags, each with this number of values."""
    words, kept = line.split(), []
    while words:
        word = words.pop(0)
        if word in left_out:
            del words[: left_out[word]]
        else:
            kept.append(word)
    return " ".join(kept)


def on_cpu(line: str) -> str:
    """A command line with drawn tokens in place of files, and without what needs CUDA, and packages that are not installed."""
    return without(line, _NEEDS_FILES | _NEEDS_CUDA | _NEEDS_PACKAGES) + (
        " --mock-data --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 90 --make-vocab-size-divisible-by 4"
    )
