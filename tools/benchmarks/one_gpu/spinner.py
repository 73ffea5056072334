"""CTAs that hold SMs while passes run, as those of a transfer of NCCL do from its start to its end."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.zerobubble.errors import ConfigError
from tools.benchmarks.reports import Row

SHARED_BYTES = 80 * 1024
"""Dynamic shared memory of a CTA, about that of NCCL's kernels. Assumed, as are its 544 threads (`spinner.cu`)."""
LIMIT_S = 0.4
"""A CTA ends by itself after this time."""
ARRIVAL_S = 1.0
MOST_CTAS = 64


class Spinner:
    """Holds SMs between `start` and `stop`; this one, for the CPU, holds nothing."""

    def start(self, ctas: int) -> None:
        """Hold `ctas` SMs. Returns when all of them are held."""

    def stop(self) -> bool:
        """Wait for the work on the current stream, then free the SMs. Returns whether all were held until then."""
        return True

    def describe(self) -> Row:
        """What a CTA holds."""
        return {"spins": False}


class CudaSpinner(Spinner):
    """Runs the kernel of `spinner.cu`, built by nvcc, on a stream of high priority.

    Raises:
        ConfigError: there is no nvcc, or it cannot build the kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = _load(torch.cuda.get_device_capability(device))
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._signals = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._over = torch.zeros(1, dtype=torch.int32, device=device)
        self._words = torch.zeros(1 + 2 * MOST_CTAS, dtype=torch.int32, pin_memory=True)
        self._ctas = 0
        self.start(1)  # loads the kernel, for which the device must be idle
        if not self.stop():
            raise RuntimeError("the spinning kernel does not see the host's signal to end")

    def start(self, ctas: int) -> None:
        """Launch the CTAs and wait until each of them runs. Raises RuntimeError if one does not."""
        self._over.zero_()
        torch.cuda.synchronize()
        self._words.zero_()
        self._ctas = ctas
        if not ctas:
            return
        words = self._over.data_ptr(), self._words.data_ptr()
        self._check(self._library.hold_sms(self._stream.cuda_stream, ctas, *words, SHARED_BYTES, int(LIMIT_S * 1e9)))
        end = time.monotonic() + ARRIVAL_S
        while len(set(self._sms())) < ctas:
            if time.monotonic() > end:
                sms = self._sms()
                self.stop()
                raise RuntimeError(f"{len(sms)} of {ctas} spinning CTAs run, on {len(set(sms))} SMs")

    def stop(self) -> bool:
        """Wait for the current stream, end the CTAs and wait for them."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()
        with torch.cuda.stream(self._signals):
            self._over.fill_(1)
        self._stream.synchronize()
        ends = self._words[2 : 2 + 2 * self._ctas : 2]
        return bool((ends == 1).all())

    def describe(self) -> Row:
        """What a CTA holds."""
        registers, threads = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.describe(ctypes.byref(registers), ctypes.byref(threads)))
        return {"spins": True, "threads": threads.value, "registers": registers.value, "shared_bytes": SHARED_BYTES}

    def _sms(self) -> list[int]:
        """The SM of each CTA that has begun."""
        return [word - 1 for word in self._words[1 : 1 + 2 * self._ctas : 2].tolist() if word]

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the spinning kernel: {self._library.text_of(code).decode()}")


def _load(capability: Sequence[int]) -> ctypes.CDLL:
    """Build `spinner.cu` for a GPU of this compute capability."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        raise ConfigError(f"no nvcc on PATH or in {home}/bin: it builds the kernel that stands in for a transfer")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "spinner.so")
        options = ["-O2", f"-arch=sm_{''.join(map(str, capability))}", "-shared", "-Xcompiler", "-fPIC"]
        command = [nvcc, *options, "-o", str(library), str(Path(__file__).with_name("spinner.cu"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise ConfigError(
                f"nvcc cannot build the kernel that stands in for a transfer: {' '.join(done.stderr.split())[:300]}"
            )
        loaded = ctypes.CDLL(str(library))
    pointer = ctypes.c_void_p
    loaded.hold_sms.argtypes = [pointer, ctypes.c_int, pointer, pointer, ctypes.c_int, ctypes.c_ulonglong]
    loaded.describe.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.text_of.argtypes, loaded.text_of.restype = [ctypes.c_int], ctypes.c_char_p
    return loaded
