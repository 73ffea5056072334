"""ZB-W: two Vs, one after the other, with four stages per rank, B and W split.

As in a V (arXiv 2401.10241, section 6) the first and the last stage are on rank 0, and every rank has early and late stages; with
twice as many stages each is half as long, so that warm-up and cool-down are shorter, for twice the messages. Short stages also
divide layers of unequal kinds over the ranks more evenly. There is no hand-written pattern: the order is searched for. p=2,
stages 0..7::

    rank 0  0     3 4     7
    rank 1    1 2     5 6

Activation memory without a limit of its own: 1F1B's.
"""

from __future__ import annotations

from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.ir import Plan


def zb_w(request: Request) -> Plan:
    """ZB-W for any p >= 1 and m >= 1."""
    return request.searched(1.0)
