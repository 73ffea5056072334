# shellcheck shell=bash
# The environment that a run on GPUs wants: source it before the ranks start. A variable that is set already stays as it is.
# TP_SIZE is the tensor-parallel size (1 by default). docs/clusters.md has the reasons at length. Not run on a GPU.

# Load every kernel at the start. Loaded at its first use, a kernel may wait for the whole device in the middle of a pass.
export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING-EAGER}"

# Let segments grow, instead of freeing some (cudaFree waits for the device) when microbatches come and go in another order.
# By its old name: torch 2.9 ignores PYTORCH_ALLOC_CONF here, older ones do not know it, and megatron-core reads the old one.
if [[ -z "${PYTORCH_ALLOC_CONF+set}" ]]; then
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}"
fi

# As many hardware queues as there can be: a rank has 25 to 40 streams, and two that share a queue wait for each other.
# Tensor parallelism wants one queue: it starts a GEMM behind a communication kernel, in the order of launch. Not from
# Blackwell (compute capability 10) on, where Megatron-LM drops that rule.
queues=32
if ((${TP_SIZE:-1} > 1)); then
    generation="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | cut -d . -f 1 | sort -n | head -n 1 || true)"
    [[ "$generation" =~ ^[0-9]+$ ]] && ((generation >= 10)) || queues=1
fi
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS-$queues}"

# SMs that Transformer Engine's norms and GEMMs leave to transfers between stages: up to four ends with 4 CTAs each, and the 4 of one
# (--zero-bubble-p2p-max-ctas). The reasons: docs/benchmarks/settled.md.
export NVTE_FWD_LAYERNORM_SM_MARGIN="${NVTE_FWD_LAYERNORM_SM_MARGIN-16}"
export NVTE_BWD_LAYERNORM_SM_MARGIN="${NVTE_BWD_LAYERNORM_SM_MARGIN-16}"
export NVTE_EXT_MARGIN_SM="${NVTE_EXT_MARGIN_SM-4}"

# With a torch before 2.8 set TORCH_NCCL_AVOID_RECORD_STREAMS=1, too; later ones need nothing.
