"""megatron-core's DistributedDataParallel around chunks with split B and W: buckets, recorded collectives."""
