"""The steps that a warm-up runs, as data: enough of them that serving meets no new kernel.

Kernels and their tiles are chosen by host integers: rows, requests, new tokens of the longest chunk
and the bound on lengths. A test compares what these steps compile with what random steps would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

EACH_TO = 80
"""Up to so many rows every count runs: the tuning of small steps has most of its steps there."""


@dataclass(frozen=True)
class Bounds:
    """What the engine's settings allow in one step."""

    rows: int  # padding and drafts included
    requests: int
    fresh: int  # new tokens of a decoding request: drafts and one
    length: int  # tokens of one request


@dataclass(frozen=True)
class Step:
    """`requests` with up to `fresh` new tokens each, `rows` in all; none is longer than `longest`,
    the host's bound, which a captured graph sets to the longest context that is allowed."""

    rows: int
    requests: int
    fresh: int
    longest: int


@dataclass(frozen=True)
class Call:
    """A part of a model: `run(ids [T], positions [T], rows [T, H])`, the attention and conv caches
    whose metadata it reads, whether layers of the engine with inner choices run in it, its name."""

    run: Callable[[Tensor, Tensor, Tensor], Any]
    caches: tuple[Any, ...] = ()
    engine: bool = False
    name: str = "the embedding"


def row_counts(most: int) -> list[int]:
    """Rows of the steps that run: each small count, then powers of two and what lies between.

    Triton also tells multiples of 16 apart, of rows times choices among others: hence the fours,
    which vLLM's experts in BF16 need above each number of rows where their tiles grow.
    """
    counts = set(range(1, min(most, EACH_TO) + 1)) | {most}
    power = 64
    while power < most:
        between = power + power // 2
        counts |= {power - 1, power, power + 1, power + 4, between, between + 1, between + 4}
        power *= 2
    return sorted(count for count in counts if count <= most)


def geometric(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... below last, and last."""
    found = []
    while first < last:
        found.append(first)
        first *= factor
    return [*found, last]


def steps_of_layers(bounds: Bounds) -> Iterator[Step]:
    """One step for each row count."""
    for rows in row_counts(bounds.rows):
        requests = min(rows, bounds.requests)
        yield Step(rows, requests, min(-(-rows // requests), bounds.length), bounds.length)


def both_sides(most: int) -> list[int]:
    """Powers of two and their successors, up to `most` and with it: tables and tiles grow there."""
    counts = {n for power in geometric(1, most, 2) for n in (power, power + 1)}
    return sorted(n for n in counts if n <= most)


def steps_of_attention(bounds: Bounds) -> Iterator[Step]:
    """What attention plans by: requests, new tokens of the longest chunk, bound on lengths."""
    most = min(bounds.rows, bounds.length)
    chunks = sorted({
        *range(1, min(bounds.fresh, most) + 1),
        *both_sides(min(most, 256)),
        *geometric(min(512, most), most, 2),
        most - most // 4,
    })  # fmt: skip
    for requests in both_sides(bounds.requests):
        for fresh in chunks:
            # A mixed step: one chunk of `fresh`, the other requests decode. Or all are as long.
            for rows in {min(bounds.rows, n) for n in (fresh + requests - 1, fresh * requests)}:
                for longest in geometric(max(fresh, 512), bounds.length, 4):
                    yield Step(rows, requests, fresh, max(fresh, longest))
