"""Kernels that leave some shapes to another provider's, and tests that want the kernel itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_alone = False


@contextmanager
def alone(on: bool = True) -> Iterator[None]:
    """Have kernels refuse what they would leave to others, by ValueError, or (`on` False) not."""
    global _alone
    before, _alone = _alone, on
    try:
        yield
    finally:
        _alone = before


def hand_over(op: str) -> None:
    """Said by a kernel before it leaves a call to another's; ValueError where it stands alone."""
    if _alone:
        raise ValueError(f"{op}: another provider's kernel computes this shape here")
