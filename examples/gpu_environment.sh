# The environment that GPUs want. Sourced by the scripts beside it; what is already set stays as it is. Not run on a GPU.
# shellcheck shell=bash
#
# Arguments: the tensor-parallel size, the context-parallel size.

gpu_environment() {
    local tensor="${1:-1}" context="${2:-1}"

    # CUDA loads a kernel at its first use otherwise, and waits for the whole device then, in the middle of the first passes.
    export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-EAGER}"

    # The allocator grows its segments instead of returning them: no cudaFree, which waits for the device, when memory runs short.
    # torch 2.9 and later read PYTORCH_ALLOC_CONF, earlier ones PYTORCH_CUDA_ALLOC_CONF; all read the second.
    if [[ -z "${PYTORCH_ALLOC_CONF:-}" ]]; then
        export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    fi

    # NCCL's errors and time-outs end the process, so that torchrun or Slurm ends the job. It is torch's default since 2.2.
    export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

    if ((tensor > 1 || context > 1)); then
        # megatron-core overlaps the collectives of these by the order of one hardware queue, and warns where it is not set.
        export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    else
        # A queue for nearly every stream: a transfer that waits for its peer then holds up no kernel behind it.
        export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
    fi
}
