"""A double of `torch.cuda` for a build of torch without CUDA.

Streams and events, tensors that say they are on the device, threads that must choose a device, and a record of every host
synchronization with its place.

===========  ==================================================================================================
`machine`    what every part shares: the devices, and what CUDA keeps per host thread
`streams`    `Stream`, `Event` and the current stream of each thread
`tensors`    which tensors are on the device, and what reading one of them on the host costs
`module`     the names of `torch.cuda`, installed for the length of a `with` block
===========  ==================================================================================================
"""
