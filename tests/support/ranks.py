"""A pool of ranks that tests reuse: importing torch and megatron-core four times costs more than most tests.

`RankPool.run(function, *args)` calls `function(rank, *args)` on every rank and returns the results in rank order. The function
must be importable. If any rank raises, the pool is torn down (the others may be waiting for it) and the first rank's traceback
is raised here; the next call starts fresh ranks.

Ranks are forked from a process that has imported what they need (`rank_imports`), so that fresh ones take half a second. All of
them then hash strings with one seed: what depends on the order of a set is seen by jobs that start cold. With a GPU, which does
not survive a fork, each rank starts by itself.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from tools.gpu import share

IMPORTS = "tests.support.rank_imports"
START_TIMEOUT_S = 120
RUN_TIMEOUT_S = 180


class RankPool:
    """`size` processes with a world of their own, started at the first `run`.

    Args:
        size: of the world.
        on_gpu: rank r takes GPU r over NCCL, or with fewer GPUs than ranks all share the first one (`tools.gpu.share`);
            otherwise all are on the CPU, over gloo.
        imports: a module that imports what the ranks need, before they are forked.
    """

    def __init__(self, size: int, *, on_gpu: bool = False, imports: str = IMPORTS) -> None:
        self.size = size
        self._on_gpu = on_gpu
        self._imports = imports
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._crashes: Any = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` on every rank."""
        if not self._processes:
            self._start()
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, args))
            except OSError:
                raise self._dead(rank, self._how_it_died(rank) + "; it died before this test") from None
        results: dict[int, Any] = {}
        while len(results) < self.size:
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in results], RUN_TIMEOUT_S)
            if not ready:
                silent = sorted(set(range(self.size)) - set(results))
                self._show_where(silent)
                self.stop()
                raise TimeoutError(f"ranks {silent} did not answer in {RUN_TIMEOUT_S} s; where they were is on stderr")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    ok, value = False, self._how_it_died(rank)
                if not ok:
                    raise self._dead(rank, value)
                results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def _dead(self, rank: int, why: str) -> AssertionError:
        self.stop()
        return AssertionError(f"rank {rank} failed:\n{why}")

    def _how_it_died(self, rank: int) -> str:
        self._processes[rank].join()
        code = self._processes[rank].exitcode
        how = f"with exit code {code}" if code >= 0 else f"of {signal.Signals(-code).name}"
        return f"the process died {how}\n{self._crash_file(rank).read_text()}"

    def _crash_file(self, rank: int) -> Path:
        """Where a rank's stacks are if it crashes: the standard error of this process may be captured for another test."""
        return Path(self._crashes.name, str(rank))

    def _show_where(self, ranks: Sequence[int]) -> None:
        """Make ranks write the stacks of their threads to stderr."""
        for rank in ranks:
            sys.stderr.write(f"rank {rank} was here:\n")
            sys.stderr.flush()
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
                time.sleep(1)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._crashes is not None:
            self._crashes.cleanup()
        self._processes, self._pipes, self._store, self._crashes = [], [], None, None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("spawn" if self._on_gpu else "forkserver")
        server = _fork_server(self._imports)
        self._crashes = tempfile.TemporaryDirectory()
        # Here, not on rank 0: a port that is free when asked for may be taken when rank 0 has started.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=self._arguments(there, rank), daemon=True)
            with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        for pipe in self._pipes:
            if not pipe.poll(START_TIMEOUT_S):
                self.stop()
                raise TimeoutError("the ranks did not start")
            pipe.recv()

    def _arguments(self, pipe: Connection, rank: int) -> tuple[Any, ...]:
        return pipe, rank, self.size, self._store.port, str(self._crash_file(rank)), self._on_gpu, self._imports


@functools.cache
def _fork_server(imports: str) -> forkserver.ForkServer:
    """Forks ranks from a process that has imported this module. `multiprocessing` itself has one such process for all."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([imports])
    return server


def _serve(pipe: Connection, rank: int, size: int, port: int, crash_file: str, on_gpu: bool, imports: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    faulthandler.enable(open(crash_file, "w"))  # noqa: SIM115 -- open as long as the process
    faulthandler.register(signal.SIGUSR1)
    importlib.import_module(imports)
    import torch
    import torch.distributed as dist

    from megatron.zerobubble.mcore.cpu.device import HostDevice

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if on_gpu:
        is_shared = torch.cuda.device_count() < size
        os.environ.update(share.variables(rank) if is_shared else {})
        torch.cuda.set_device(0 if is_shared else rank)
    HostDevice(enabled=not on_gpu).install()
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    pipe.send("ready")
    while True:
        num_modules = len(sys.modules)
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:  # noqa: BLE001  - whatever it is, the parent shows it
            pipe.send((False, traceback.format_exc()))
        del function, args
        _forget_groups()
        if len(sys.modules) > num_modules:
            gc.freeze()  # what was imported since


def _forget_groups() -> None:
    """Free process groups that a test has destroyed: each has threads, sockets and buffers of gloo's.

    Some are in cycles, and megatron-core caches what its rotary embeddings computed, with the modules and so their groups.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    owners = {id(owner): owner for module in modules for owner in (module, *filter(inspect.isclass, vars(module).values()))}
    for owner in owners.values():  # by id: some classes of frameworks refuse to be hashed
        for value in vars(owner).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    gc.collect()
