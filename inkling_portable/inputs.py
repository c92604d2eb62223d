"""How ops draw their test inputs: three verbs, and the seeded driver that ships with the package.

A contract's `inputs(draw)` returns keyword arguments for its reference. The tests add a second
driver on Hypothesis, which shrinks failures; `verify` and `record` use the seeded one here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class Draw(Protocol):
    """The three verbs."""

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        ...

    def choice(self, values: Sequence[T]) -> T:
        """One of `values`; the first is the simplest, towards which failures shrink."""
        ...

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, kind: str = "normal") -> Tensor:
        """A CPU tensor whose values are exactly representable in `dtype`.

        kind "normal": standard normal; "small": normal times 0.05, for weights; "gain": near 1,
        for norm weights; "grid": small integers over 4, on which short sums are exact.
        """
        ...


def fill(shape: Sequence[int], dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    """The tensor both drivers use: the same bytes for the same arguments on every machine."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    if kind == "grid":
        return (torch.randint(-8, 9, tuple(shape), generator=generator) / 4).to(dtype)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
    if kind == "small":
        values *= 0.05
    elif kind == "gain":
        values = 1 + 0.2 * values
    elif kind != "normal":
        raise ValueError(f"unknown tensor kind {kind!r}; use normal, small, gain or grid")
    return values.to(dtype)


class SeededDraw:
    """A `Draw` that needs no test library: everything follows from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, values: Sequence[T]) -> T:
        return values[self._random.randrange(len(values))]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, kind: str = "normal") -> Tensor:
        return fill(shape, dtype, kind, self._random.randrange(2**31))
