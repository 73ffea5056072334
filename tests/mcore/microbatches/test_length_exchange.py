"""The lengths of microbatches: what a function of the user's may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.microbatches.length_exchange import Lengths, lengths_of


@pytest.mark.parametrize("found", [5, np.int64(5), (5, 25), (np.int32(5), np.float32(25.0))])
def test_whole_numbers_of_any_type_are_lengths(found: Any) -> None:
    lengths = lengths_of(lambda item: item, found, 0)
    assert lengths == Lengths(5, 25.0)
    assert list(map(type, lengths)) == [int, float]


@pytest.mark.parametrize("found", [0, -3, 5.0, float("nan"), None, True, "5", [5, 25.0], (5,), torch.tensor(5), (0, 1.0)])
def test_other_lengths_are_refused_as_they_were_returned(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"microbatch 3: microbatch_tokens returned .*; it must return .* 1 or more") as caught:
        lengths_of(lambda item: item, found, 3)
    assert f"returned {found!r};" in str(caught.value)


@pytest.mark.parametrize("squares", [0, -1.0, float("nan"), float("inf"), "25", [25.0]])
def test_other_squares_are_refused(squares: Any) -> None:
    with pytest.raises(ConfigError, match=r"microbatch 3: microbatch_tokens returned .* squared lengths; give a number above 0"):
        lengths_of(lambda item: item, (5, squares), 3)
