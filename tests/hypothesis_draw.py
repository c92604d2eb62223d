"""The Hypothesis driver of `Draw`: the same inputs as the seeded one, but failures shrink."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from hypothesis import strategies as st

from inkling_portable.inputs import fill

T = TypeVar("T")


class HypothesisDraw:
    """Wraps the `data()` strategy's object."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def choice(self, values: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(list(values)))

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, kind: str = "normal"
    ) -> torch.Tensor:
        # Elements come from a seed: drawing each would be slow and shrinking them says little.
        return fill(shape, dtype, kind, self._data.draw(st.integers(0, 2**31 - 1)))
