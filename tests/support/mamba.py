"""Stand-ins for the CUDA kernels of a Mamba mixer, so that the rest of it runs on a CPU.

They take the place of two things of the package mamba_ssm: the kernel that runs convolution, scan and gate, and the norm before
`out_proj`. Both are plain torch, and autograd derives their gradients. `rearrange` of the package einops is replaced, too. So a
test with them covers megatron-core's MambaMixer and what this package does with it (the split of `in_proj` and `out_proj`, the
parameters that stay in B, the schedule), and says nothing about the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


@contextmanager
def stand_ins() -> Iterator[None]:
    """While it is entered, Mamba mixers can be built, and run on the CPU."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    kernels = {"HAVE_MAMBA_SSM": True, "mamba_split_conv1d_scan_combined": _scan, "ExtendedRMSNorm": _Norm}
    einops = {"HAVE_EINOPS": True, "rearrange": _rearrange}
    with (
        mock.patch.multiple(mamba_mixer, create=True, **kernels, **einops),  # create: without einops there is no rearrange
        mock.patch.multiple(mamba_context_parallel, HAVE_EINOPS=True),
    ):
        yield


def _rearrange(x: Tensor, pattern: str) -> Tensor:
    return {
        "l b d -> b l d": lambda: x.transpose(0, 1),
        "b l d -> l b d": lambda: x.transpose(0, 1),
        "d 1 w -> d w": lambda: x.squeeze(1),
    }[pattern]()


def _scan(
    zxbcdt_bsd: Tensor,
    conv_weight_cw: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    *,
    D: Tensor,  # noqa: N803 -- the kernel's name
    headdim: int,
    ngroups: int,
    **_: Any,
) -> Tensor:
    """Mamba 2 (arXiv 2405.21060), one position after the other. Sizes: b samples, s positions, h heads, p per head, n states."""
    batch, length, width = zxbcdt_bsd.shape
    heads = a.numel()
    inner = heads * headdim
    states = (width - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt_bsd.split([inner, inner + 2 * ngroups * states, heads], dim=-1)
    convolved = conv1d(
        xbc.transpose(1, 2),
        conv_weight_cw.unsqueeze(1),
        conv_bias,
        padding=conv_weight_cw.shape[1] - 1,
        groups=conv_weight_cw.shape[0],
    )
    x, b, c = silu(convolved[..., :length].transpose(1, 2)).split([inner, ngroups * states, ngroups * states], dim=-1)
    x_bshp = x.reshape(batch, length, heads, headdim)
    b_bshn, c_bshn = (each.reshape(batch, length, ngroups, states).repeat_interleave(heads // ngroups, dim=2) for each in (b, c))
    dt_bsh = softplus(dt + dt_bias)
    state = x.new_zeros(batch, heads, headdim, states)
    outputs = []
    for now in range(length):
        entering = (dt_bsh[:, now, :, None] * x_bshp[:, now]).unsqueeze(-1) * b_bshn[:, now].unsqueeze(2)
        state = state * torch.exp(dt_bsh[:, now] * a)[..., None, None] + entering
        outputs.append((state * c_bshn[:, now].unsqueeze(2)).sum(-1) + D[:, None] * x_bshp[:, now])
    return (torch.stack(outputs, dim=1).reshape(batch, length, inner) * silu(z)).to(zxbcdt_bsd.dtype)


class _Norm(torch.nn.Module):
    """RMSNorm over all channels: the kernel's has groups."""

    def __init__(self, width: int, *, eps: float, device: Any, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
