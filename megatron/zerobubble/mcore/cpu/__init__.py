"""megatron-core on a machine without CUDA: its `torch.cuda` calls run on the CPU, its collectives on gloo."""
