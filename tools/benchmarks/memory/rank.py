"""One rank of the benchmark. Not in `__main__`: processes that are spawned cannot import a function from there."""

from __future__ import annotations

import argparse

import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from tools.benchmarks.memory.ledger import RankLedger, watch
from tools.benchmarks.schedules.contenders import ContenderSpec, Sizes


def serve(rank: int, spec: ContenderSpec, sizes: Sizes, args: argparse.Namespace, on_gpu: bool) -> RankLedger:
    """Run one rank."""
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    host = HostDevice(enabled=not on_gpu)
    with quiet_third_parties():
        # Here, because the process that starts the ranks builds no model.
        from tools.benchmarks.schedules.gpt import GPTContender, set_up, tear_down

        set_up(host, args.num_ranks)
        contender = GPTContender(spec, sizes, args.num_ranks, host)
    ledger = watch(
        contender.schedule,
        lambda: contender.iterate(args.num_microbatches),
        num_microbatches=args.num_microbatches,
        num_iterations=args.num_iterations,
        warmup=args.warmup,
    )
    contender.close()
    tear_down(host)
    return ledger
