"""megatron-core on a machine without CUDA: its calls to `torch.cuda` answered by the CPU, collectives by gloo."""
