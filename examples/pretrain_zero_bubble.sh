#!/usr/bin/env bash
# Train a GPT through a zero-bubble pipeline. Without GPUs: a small one on the CPU, in a few minutes.
#
#   bash examples/pretrain_zero_bubble.sh                        ZBV on CPU ranks (4, or 2 on less than 4 cores), or on all GPUs
#   ENABLE_ZERO_BUBBLE=1 bash examples/pretrain_zero_bubble.sh   ZB-H1
#   ENABLE_ZERO_BUBBLE=0 bash examples/pretrain_zero_bubble.sh   megatron-core's own 1F1B
#
# Switches (environment variables):
#   ZERO_BUBBLE_V_SCHEDULE=1            ZBV: no bubble at 1F1B's activation memory (the default)
#   ENABLE_ZERO_BUBBLE=1|0              ZB-H1 | megatron-core's own 1F1B
#   ZERO_BUBBLE_MAX_PENDING_BACKWARD    1p (ZB-H1), 2p (ZB-H2) or a number of microbatches; ZERO_BUBBLE_MEM_LIMIT is the same
#   INTERLEAVED_1F1B=1                  megatron-core's own interleaved 1F1B, one layer per chunk
#   PIPELINE_SIZE TP_SIZE CP_SIZE       pipeline-, tensor- and context-parallel size; the remaining ranks are data parallel
#   GPUS_PER_NODE                       ranks per machine
#   NNODES NODE_RANK                    number of machines, and the number of this one (not needed if MASTER_ADDR is its name)
#   MASTER_ADDR MASTER_PORT             rendezvous address, with several machines, on a private network: who reaches it can run code as you
#   RDZV_ID                             with several machines: random letters for this job, the same on each (openssl rand -hex 16)
#   MAX_RESTARTS                        times that torchrun starts all ranks again after a failure, from the latest checkpoint
#   HIDDEN_SIZE LAYERS ATTENTION_HEADS SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS LR
#   MODEL=deepseek-like                 multi-latent attention (on GPUs), experts with a shared one behind a dense layer, an MTP layer
#   TRANSFORMER_IMPL=transformer_engine Transformer Engine's layers, on GPUs; FP8_FORMAT=hybrid or e4m3 with them
#   ATTENTION_BACKEND                   auto, flash, fused, unfused or local
#   DATA_PATH (or DATASET)              path prefix of an indexed dataset (tools/preprocess_data.py)
#   TOKENIZER_MODEL TOKENIZER_TYPE      the tokenizer of that dataset, HuggingFaceTokenizer by default; without one its tokens are bytes
#   RUN_DIR                             directory of checkpoints; runs/<schedule> by default
#   LAUNCHER=slurm                      be one rank that srun started, without torchrun (pretrain_zero_bubble.slurm sets it)
#   BENCH=1                             compare schedules on this job (benchmark.sh), also in pretrain_zero_bubble.slurm
#   EXIT_INTERVAL FP32=1                exit after this iteration; fp32 on GPUs too
# Megatron-LM's loop runs where megatron-core has it (0.17 or newer, for Python 3.12), otherwise the reference trainer, which has no
# tokenizers besides bytes.
# On GPUs gpu_environment.sh is sourced; it leaves variables that are set.
# Further arguments are passed to pretrain_gpt.py and override these: ... pretrain_zero_bubble.sh --train-iters 20
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python_bin=""
[[ -x "$here/.venv/bin/torchrun" ]] && python_bin="$here/.venv/bin/"
command -v torchrun >/dev/null && python_bin=""

# -- the machine --------------------------------------------------------------------------------------------------------
launcher="${LAUNCHER:-torchrun}"
if [[ "$launcher" != torchrun && "$launcher" != slurm ]]; then
    echo "LAUNCHER is $launcher; it must be torchrun or slurm" >&2
    exit 2
fi
gpus=0
command -v nvidia-smi >/dev/null && gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
nodes="${NNODES:-}" node_rank="${NODE_RANK:-}" older=()
if [[ "$launcher" == torchrun ]]; then # RANK and WORLD_SIZE are machines in scripts of the papers, and processes in schedulers
    [[ -z "$nodes" && "${WORLD_SIZE:-1}" != 1 ]] && nodes="$WORLD_SIZE" older+=("WORLD_SIZE=$WORLD_SIZE (give NNODES)")
    [[ -z "$node_rank" && -n "${RANK:-}" && -n "$nodes" && "${RANK:-}" -lt "${nodes:-1}" ]] && ((nodes > 1)) && node_rank="$RANK" older+=("RANK=$RANK (give NODE_RANK)")
    ((${#older[@]})) && echo "warning: numbers of machines are taken from ${older[*]}; schedulers set these to processes" >&2
fi
nodes="${nodes:-1}"
if ((gpus * nodes >= 2)); then
    backend=nccl
    ranks_per_node="${GPUS_PER_NODE:-$gpus}"
else # a pipeline needs two devices; with one GPU or none the ranks share the CPU
    backend=gloo
    few="$(($(nproc) < 4 ? 2 : 4))" least="$((2 * ${TP_SIZE:-1} * ${CP_SIZE:-1}))" # ranks that share cores show no schedule's gain
    ranks_per_node="${GPUS_PER_NODE:-$((few > least ? few : least))}"
fi
ranks=$((nodes * ranks_per_node))
tensor="${TP_SIZE:-1}" context="${CP_SIZE:-1}"
pipeline="${PIPELINE_SIZE:-$((ranks / tensor / context))}"
replicas=$((ranks / tensor / context / pipeline))

# Which loop pretrain_gpt.py runs
loop=reference
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
found="$("${python_bin}python" -c 'import importlib.util as find; print(find.find_spec("megatron.training") is not None)' 2>/dev/null || true)"
[[ "$found" == True ]] && loop=megatron
entry=("$here/pretrain_gpt.py")

# -- the schedule -------------------------------------------------------------------------------------------------------
pending="${ZERO_BUBBLE_MAX_PENDING_BACKWARD:-${ZERO_BUBBLE_MEM_LIMIT:-}}"
is_on() { [[ -n "${1:-}" && "$1" != 0 ]]; }
if is_on "${ZERO_BUBBLE_V_SCHEDULE:-}"; then
    name=zbv schedule=(--zero-bubble-v-schedule)
elif is_on "${INTERLEAVED_1F1B:-}"; then
    name=interleaved schedule=(--num-layers-per-virtual-pipeline-stage 1)
elif [[ -n "$pending" ]]; then
    name="zb-$pending" schedule=(--zero-bubble-max-pending-backward "$pending")
elif [[ -z "${ENABLE_ZERO_BUBBLE:-}" ]]; then
    name=zbv schedule=(--zero-bubble-v-schedule)
elif is_on "$ENABLE_ZERO_BUBBLE"; then
    name=zb-h1 schedule=(--enable-zero-bubble)
else
    name=1f1b schedule=()
fi

schedule+=(--zero-bubble-weights-seed 1234) # all schedules begin with the same weights, so that their losses can be compared
run="${RUN_DIR:-$here/runs/$name${MODEL:+-$MODEL}}"

# -- the model ----------------------------------------------------------------------------------------------------------
if [[ $backend == nccl ]]; then
    hidden="${HIDDEN_SIZE:-2048}" layers="${LAYERS:-$((pipeline * 4))}" heads="${ATTENTION_HEADS:-16}" length="${SEQ_LENGTH:-2048}"
    micro="${MICRO_BATCH_SIZE:-1}" iterations="${TRAIN_ITERS:-200}" lr="${LR:-3e-4}"
    batch="${GLOBAL_BATCH_SIZE:-$((replicas * pipeline * 3 * micro))}"
    device=()
    is_on "${FP32:-}" || device+=(--bf16)
    # shellcheck source=examples/gpu_environment.sh
    TP_SIZE="$tensor" source "$here/examples/gpu_environment.sh"
else
    hidden="${HIDDEN_SIZE:-128}" layers="${LAYERS:-$((pipeline * 2))}" heads="${ATTENTION_HEADS:-4}" length="${SEQ_LENGTH:-256}"
    micro="${MICRO_BATCH_SIZE:-2}" iterations="${TRAIN_ITERS:-120}" lr="${LR:-2e-3}"
    batch="${GLOBAL_BATCH_SIZE:-$((replicas * 8 * micro))}"
    device=(--exit-duration-in-mins "$([[ $loop == megatron ]] && echo 4 || echo 3.5)")
    # A short run: profile and re-plan early, and briefly; and a trace of what ran.
    if [[ $name == zb* && -z "${BENCH:-}" ]]; then
        device+=(--zero-bubble-pipeline-timers-start-iter 20 --zero-bubble-planning-seconds 2 --zero-bubble-trace "$run/trace")
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    export CUDA_VISIBLE_DEVICES= # the sizes above are for the CPU; with gloo, ranks would use visible GPUs
fi
model=()
if [[ "${MODEL:-}" == deepseek-like ]]; then
    if [[ $backend == gloo ]]; then
        echo "MODEL=deepseek-like has attention of Transformer Engine, which needs GPUs" >&2
        exit 2
    fi
    head=$((hidden / heads))
    model=(--multi-latent-attention --rope-type rope --q-lora-rank $((hidden / 2)) --kv-lora-rank $((hidden / 4)) --qk-layernorm
        --qk-head-dim "$head" --qk-pos-emb-head-dim $((head / 2)) --v-head-dim "$head"
        --num-experts 8 --moe-layer-freq "[0]+[1]*$((layers - 1))" --moe-ffn-hidden-size $((hidden / 2))
        --moe-shared-expert-intermediate-size $((hidden / 2)) --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5
        --moe-router-num-groups 4 --moe-router-group-topk 2 --mtp-num-layers 1 --untie-embeddings-and-output-weights)
    ((tensor > 1)) && model+=(--sequence-parallel)
elif [[ -n "${MODEL:-}" ]]; then
    echo "MODEL is $MODEL; it must be deepseek-like or unset" >&2
    exit 2
fi
[[ -n "${TRANSFORMER_IMPL:-}" ]] && model+=(--transformer-impl "$TRANSFORMER_IMPL")
[[ -n "${FP8_FORMAT:-}" ]] && model+=(--fp8-format "$FP8_FORMAT")
[[ -n "${ATTENTION_BACKEND:-}" ]] && model+=(--attention-backend "$ATTENTION_BACKEND")
if [[ -n "${TOKENIZER_MODEL:-}" ]]; then
    tokens=(--tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}" --tokenizer-model "$TOKENIZER_MODEL")
elif [[ $loop == megatron ]]; then
    tokens=(--tokenizer-type NullTokenizer --vocab-size 256)
else
    tokens=(--tokenizer-type ByteLevelTokenizer)
fi
data="${DATA_PATH:-${DATASET:-$here/data/python-stdlib}}"

if [[ $loop == megatron ]]; then
    log=(--save-interval 1000)
    [[ $backend == gloo ]] && log+=(--num-workers 0)
else
    log=(--metrics-jsonl "$run/metrics.jsonl")
fi

# -- go -----------------------------------------------------------------------------------------------------------------
if [[ "$launcher" == slurm ]]; then
    export RANK="${SLURM_PROCID:?LAUNCHER=slurm is for the tasks of a Slurm step}" WORLD_SIZE="$SLURM_NTASKS"
    export LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE="$ranks_per_node"
    export MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the first machine}" MASTER_PORT="${MASTER_PORT:-29500}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}" # as torchrun does
    start=("${python_bin}python" -u)
else
    start=("${python_bin}torchrun" --nproc-per-node "$ranks_per_node")
    if ((nodes > 1)); then
        start+=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-id "${RDZV_ID:?set RDZV_ID to the same random letters on each machine, from: openssl rand -hex 16}"
            --rdzv-endpoint "${MASTER_ADDR:?set MASTER_ADDR to the first machine}:${MASTER_PORT:-29500}")
        [[ -n "$node_rank" ]] && start+=(--rdzv-conf "is_host=$((node_rank == 0))")
    elif [[ -n "${MASTER_PORT:-}" ]]; then
        start+=(--master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$MASTER_PORT")
    else
        start+=(--standalone) # takes a free port
    fi
    if is_on "${MAX_RESTARTS:-}"; then
        start+=(--max-restarts "$MAX_RESTARTS")
        device+=(--load "$run/checkpoints")
    fi
    unset WORLD_SIZE RANK # torchrun sets them
fi

if is_on "${BENCH:-}"; then
    entry=(-m megatron.zerobubble.cli.bench --bench-dir "${RUN_DIR:-$here/runs/bench}")
    [[ $backend == gloo ]] && entry+=(--cpu)
    entry+=("$@" -- "$here/pretrain_gpt.py") schedule=() # what is given here are options of the comparison
    set --
fi
exec "${start[@]}" "${entry[@]}" \
    --distributed-backend "$backend" "${device[@]}" \
    --tensor-model-parallel-size "$tensor" --context-parallel-size "$context" \
    --pipeline-model-parallel-size "$pipeline" "${schedule[@]}" \
    --num-layers "$layers" --hidden-size "$hidden" --num-attention-heads "$heads" --seq-length "$length" --max-position-embeddings "$length" \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --hidden-dropout 0 --attention-dropout 0 "${model[@]}" \
    --micro-batch-size "$micro" --global-batch-size "$batch" --train-iters "$iterations" \
    --lr "$lr" --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$data" --split 98,2,0 "${tokens[@]}" \
    --log-interval 10 --eval-interval 1000 --eval-iters 8 "${log[@]}" --save "$run/checkpoints" \
    ${EXIT_INTERVAL:+--exit-interval "$EXIT_INTERVAL"} "$@"
