"""How far apart the same training may be where its sums are taken in another order, on any processor.

The last bits of a float32 sum depend on the order of its terms. A kernel adds in 4, 8 or 16 lanes and in blocks that depend on
the number of rows, so another instruction set takes another order: what two runs differ by on one processor is no bound for
another. These bounds count roundings instead. Where both sides take every sum in the same order, as most schedules and their
references do, the bits are the same on every processor, and a test asks for them.

`.ci/run` draws an instruction set for all tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ROUNDING = 2.0**-24
"""Of float32: a result is off by at most this share of it."""

OTHER_ORDER = 64 * ROUNDING
"""Between outputs and gradients, relative to a tensor's largest entry, and between losses and norms, relative: 3.8e-6.

A gradient has been through some 200 sums and products one after the other (the models here have 2 to 8 layers of about ten ops,
there and back, and a few microbatches), and a sum of hundreds of terms is a few partial sums, of a few roundings each.
Independent errors add as squares do: the square root of 200 times 4 is 57. Seen were up to 0.6e-6 in gradients and 1.9e-6 in
norms.
"""

STEEPNESS = 350.0
"""The sum over all weights of each tensor's largest gradient, relative to the loss: 150 to 340 in the models of these tests."""


def after_steps(num_steps: int, lr: float) -> float:
    """Relative bound for a loss, or a norm, after steps of Adam on gradients that are OTHER_ORDER apart.

    Adam divides a gradient by its own size and steps by up to `lr`: a gradient g that is off by d moves its weight by lr * d / g
    too far (by 2 * lr, where g is no more than rounding), which changes the loss by g times that: by lr * d per step and weight.
    """
    return OTHER_ORDER * (1.0 + STEEPNESS * lr * num_steps)


def curve(losses: Iterable[float], lr: float, *, num_steps: int = 0) -> list[Any]:
    """What the losses of successive iterations of Adam are compared with, the first of them after `num_steps` steps."""
    return [pytest.approx(loss, rel=after_steps(done, lr)) for done, loss in enumerate(losses, num_steps)]
