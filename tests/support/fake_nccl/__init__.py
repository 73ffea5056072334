"""A double of NCCL and of the memory under it, on the CPU: order, waiting and lifetimes as on GPUs.

It stands for what gloo does not have: sends without any buffer, work that runs later on a stream of its own, one ordered channel
per communicator, communicators made at first use while the host and the device wait, a device-wide synchronization that waits for
receives that spin, and an allocator that hands memory out again while a transfer may still need it.

The ranks are threads of one process, one of which runs at a time, in an order that a seed picks (`engine`). So a run is repeated
exactly by its seed, a deadlock is seen when it is there, and a run costs milliseconds. Vector clocks (`clocks`, `memory`) find
accesses that nothing orders even in a run in which all went well.

    ranks -> process_group -> communicators -> device -> memory -> clocks
                                            \\-> engine

What it cannot show: times, bandwidth, kernels that share multiprocessors; a host that runs ahead of its compute stream
(computation is done where it is issued, and where that stream waits the host waits with it); rings and trees in a collective;
errors and timeouts of NCCL itself. `torch.cuda._sanitizer` keeps clocks of streams, too, but knows one host thread and no
receives; `torch.cuda` itself has its double in `tests.support.fake_cuda`, for one device per process, in real time.
"""
