"""Contracts of the norms: rms_norm, embed_norm, embed_norm_chain, concat_norms."""

from typing import Any

import torch
from torch import Tensor

from inkling_portable.backends.reference._common import acc, rms, store
from inkling_portable.inputs import Draw
from inkling_portable.numerics import within_twice_baseline
from inkling_portable.registry import op

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (64, 128, 96, 33, 1, 1024, 6144)


def _rms_norm_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = draw.choice(DTYPES), draw.integer(0, 9), draw.choice(WIDTHS)
    residual = draw.tensor((rows, width), dtype) if draw.choice((True, False)) else None
    return {"x": draw.tensor((rows, width), dtype), "weight": draw.tensor((width,), dtype, "gain"),
            "eps": 1e-6, "residual": residual}  # fmt: skip


@op(inputs=_rms_norm_inputs, tolerance=within_twice_baseline())
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """RMS norm, after adding a residual if there is one (spec 2.0, one-step rounding).

    x, residual [T, H]; weight [H] -> (normed [T, H], sum [T, H]); the sum is `x` itself without a
    residual, else rounded to the dtype of x before it is normed.
    """
    total = x if residual is None else store(acc(x) + acc(residual), x)
    return rms(total, weight, eps), total


def _table_inputs(draw: Draw, dtype: torch.dtype, rows: int, width: int) -> dict[str, Any]:
    vocabulary = draw.integer(1, 40)
    ids = torch.tensor([draw.integer(0, vocabulary - 1) for _ in range(rows)], dtype=torch.int64)
    return {"ids": ids, "table": draw.tensor((vocabulary, width), dtype), "eps": 1e-6}


def _embed_norm_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = draw.choice(DTYPES), draw.integer(0, 9), draw.choice(WIDTHS)
    return {
        **_table_inputs(draw, dtype, rows, width),
        "weight": draw.tensor((width,), dtype, "gain"),
    }


@op(inputs=_embed_norm_inputs, tolerance=within_twice_baseline())
def embed_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Embedding lookup and RMS norm (spec 2.1): ids [T] int, table [V, H], weight [H] -> [T, H]."""
    return rms(table[ids.long()], weight, eps)


def _chain_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = draw.choice(DTYPES), draw.integer(0, 9), draw.choice(WIDTHS)
    gains = {name: draw.tensor((width,), dtype, "gain")
             for name in ("backbone_weight", "hidden_weight", "embed_weight")}  # fmt: skip
    return {
        **_table_inputs(draw, dtype, rows, width),
        **gains,
        "hidden": draw.tensor((rows, width), dtype),
    }


@op(inputs=_chain_inputs, tolerance=within_twice_baseline())
def embed_norm_chain(
    hidden: Tensor,
    ids: Tensor,
    table: Tensor,
    backbone_weight: Tensor,
    hidden_weight: Tensor,
    embed_weight: Tensor,
    eps: float,
) -> Tensor:
    """Input of a draft depth from token ids (spec 4.2): hidden half first, embedding half second.

    hidden [T, H]; ids [T] int; table [V, H]; weights [H] -> [T, 2H]. The embedding passes the
    backbone's norm and then the depth's own.
    """
    rows = rms(table[ids.long()], backbone_weight, eps)
    return torch.cat([rms(hidden, hidden_weight, eps), rms(rows, embed_weight, eps)], dim=-1)


def _concat_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = draw.choice(DTYPES), draw.integer(0, 9), draw.choice(WIDTHS)
    shape = (rows, width)
    return {"hidden": draw.tensor(shape, dtype), "embeds": draw.tensor(shape, dtype),
            "hidden_weight": draw.tensor((width,), dtype, "gain"),
            "embed_weight": draw.tensor((width,), dtype, "gain"), "eps": 1e-6}  # fmt: skip


@op(inputs=_concat_inputs, tolerance=within_twice_baseline())
def concat_norms(
    hidden: Tensor, embeds: Tensor, hidden_weight: Tensor, embed_weight: Tensor, eps: float
) -> Tensor:
    """Input of a draft depth from given rows: hidden, embeds [T, H]; weights [H] -> [T, 2H]."""
    return torch.cat([rms(hidden, hidden_weight, eps), rms(embeds, embed_weight, eps)], dim=-1)
