"""megatron-core's DistributedDataParallel around chunks with split B and W: buckets, ZeRO-2 gradients, recorded collectives."""
