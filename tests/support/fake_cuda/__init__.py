"""A double of `torch.cuda` for a build of torch without CUDA: streams and events with vector clocks, tensors that say they are on
the device, threads that must choose a device, and a record of every host synchronization with its place.

===========  ==================================================================================================
`clocks`     what every part shares: the order of work on streams and host threads, and work that ends later
`streams`    `Stream`, `Event` and the current stream of each thread
`tensors`    which tensors are on the device, and what reading one of them on the host costs
`module`     the names of `torch.cuda`, installed for the length of a `with` block
===========  ==================================================================================================
"""
