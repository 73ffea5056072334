"""megatron-core's DistributedDataParallel around split chunks: buckets, ZeRO-2 gradients, recorded reductions."""
