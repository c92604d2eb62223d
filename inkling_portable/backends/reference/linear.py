"""Contract of skinny_linear: a product of few rows with a large matrix, read once."""

from typing import Any

import torch
from torch import Tensor

from inkling_portable.backends.reference._common import acc, store
from inkling_portable.inputs import Draw
from inkling_portable.numerics import within_twice_baseline
from inkling_portable.registry import op

MOST_ROWS = 128
"""More rows than this are an ordinary matrix product, which the engine's library does well."""


def _skinny_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows = draw.choice((torch.float32, torch.bfloat16)), draw.integer(0, 16)
    inner, outer = draw.choice((64, 96, 40, 1024, 3072)), draw.choice((16, 96, 33, 416))
    return {"x": draw.tensor((rows, inner), dtype),
            "weight": draw.tensor((outer, inner), dtype, "small"),
            "scale": draw.choice((1.0, 0.03125, 0.3))}  # fmt: skip


@op(inputs=_skinny_inputs, tolerance=within_twice_baseline())
def skinny_linear(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Linear layer without bias for at most 128 rows: x [M, K], weight [N, K] -> [M, N].

    Sums in float32, times `scale` (the head's), one rounding to the dtype of x. Raises ValueError
    for more rows.
    """
    check_skinny(x, weight)
    return store(acc(x) @ acc(weight).T * scale, x)


def check_skinny(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError for arguments outside the contract; every provider calls it."""
    if x.shape[0] > MOST_ROWS:
        raise ValueError(f"skinny_linear: x has {x.shape[0]} rows where at most {MOST_ROWS} are "
                         "meant; use the engine's linear layer")  # fmt: skip
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"skinny_linear: x has {x.shape[1]} columns and weight "
                         f"{weight.shape[1]}; they need the same inner size")  # fmt: skip
