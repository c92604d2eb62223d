"""The fold plan of the vision tower: which neighbourhoods each linear stage merges, as pure data.

The tower turns a patch of `temporal x patch x patch` pixels into one vector by folding neighbours
into channels, stage by stage. A config names only the number of stages; the folds follow from the
prime factors of the patch, so that checkpoints with any patch size load with the right shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise

CHANNEL_MULTIPLE = 64
"""Widths between stages are rounded up to this, for the matrix units."""


@dataclass(frozen=True)
class Scale:
    """How much of a patch one cell holds: frames, pixels along a side, channels."""

    time: int
    side: int
    channels: int

    @property
    def cells(self) -> int:
        """Input pixels (over all frames) that one cell covers."""
        return self.time * self.side * self.side


@dataclass(frozen=True)
class Stage:
    """One linear stage: fold `time x side x side` cells into channels, then project."""

    time: int
    side: int
    in_features: int
    out_features: int


def prime_factors(number: int) -> list[int]:
    """Prime factors of `number` >= 1 with repetition, largest first; 1 has none."""
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return factors[::-1]


def candidate_scales(patch: int, temporal: int, channels: int) -> list[Scale]:
    """Every scale between one pixel and the whole patch: first space grows, then time."""
    scales = [Scale(1, 1, channels)]
    side, time = 1, 1
    for factor in prime_factors(patch):
        side *= factor
        scales.append(Scale(1, side, _rounded(side * side * channels)))
    for factor in prime_factors(temporal):
        time *= factor
        scales.append(Scale(time, side, _rounded(time * side * side * channels)))
    return scales


def choose_scales(patch: int, temporal: int, channels: int, stages: int) -> list[Scale]:
    """The `stages + 1` scales that the tower passes through, first and last included.

    Targets are equally spaced in the logarithm of the number of input values. They include the
    channels although a candidate's own coordinate does not: checkpoints were trained that way.

    Raises:
        ValueError: a size is below 1, or the patch has a single pixel per side.
    """
    if patch < 2 or min(temporal, channels, stages) < 1:
        raise ValueError(
            "the vision tower needs patch_size >= 2 and temporal_patch_size, n_channels and "
            f"n_layers >= 1, but the config says {patch}, {temporal}, {channels} and {stages}; "
            "correct vision_config"
        )
    candidates = candidate_scales(patch, temporal, channels)
    step = math.log(patch * patch * temporal * channels) / stages
    cost = [[_tied(i * step - math.log(scale.cells)) for scale in candidates]
            for i in range(stages + 1)]  # fmt: skip
    if stages >= len(candidates):
        chosen = [row.index(min(row)) for row in cost]
    else:
        # Costs are distances on a line, so among the best assignments one is increasing.
        subsets = combinations(range(len(candidates)), stages + 1)
        best = min(subsets, key=lambda subset: _tied(sum(map(_at, cost, subset))))
        chosen = list(best)
    chosen[0], chosen[-1] = 0, len(candidates) - 1
    return [candidates[index] for index in chosen]


def plan_stages(
    patch: int, temporal: int, channels: int, stages: int, out_width: int
) -> tuple[Stage, ...]:
    """The linear stages of a tower whose last one projects to `out_width`.

    For the released checkpoints (40, 2, 3, 4) the folds are (1,5,5), (1,2,2), (1,4,4), (2,1,1).

    Raises:
        ValueError: as `choose_scales`.
    """
    scales = choose_scales(patch, temporal, channels, stages)
    plan = []
    for index, (start, end) in enumerate(pairwise(scales)):
        time, side = end.time // start.time, end.side // start.side
        width = out_width if index == stages - 1 else end.channels
        plan.append(Stage(time, side, start.channels * time * side * side, width))
    return tuple(plan)


def _rounded(width: int) -> int:
    return -(-width // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE


def _tied(difference: float) -> float:
    """Distance without the last digits: equally near scales must tie, and the smaller one win."""
    return round(abs(difference), 9)


def _at(row: list[float], index: int) -> float:
    return row[index]
