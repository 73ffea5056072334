"""Whole ranks at true sizes on FakeTensors of `cuda:0`, on a machine without a GPU: shapes, devices and memory, but no values.

===========  ==================================================================================================
`guard`      compiles and loads the C++ that tells torch about the device
`device`     the names of `torch.cuda`, and counts of kernels, bytes, host reads and tensors elsewhere
`allocator`  a model of torch's caching allocator, on which allocations and frees are replayed
`rank`       runs iterations of one rank through the reference trainer's set-up and the real schedule
`cases`      the jobs
===========  ==================================================================================================
"""
