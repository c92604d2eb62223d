"""The dense MLP: gate and up rows alternate in one projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inkling_portable.model.engine import (
    ColumnParallelLinear,
    QuantizationConfig,
    RowParallelLinear,
)
from inkling_portable.model.settings import Settings
from inkling_portable.model.warm_up_steps import Call


class DenseMLP(nn.Module):
    """Returns this rank's partial sum; the branch's convolution sums over ranks.

    A contiguous row slab of the alternating projection keeps each gate with its up row, so a plain
    column-parallel linear shards it.
    """

    def __init__(
        self, settings: Settings, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        text = settings.text
        self.ops = settings.ops()
        self.gate_up_proj = ColumnParallelLinear(
            text.hidden_size, 2 * text.dense_width, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj", return_bias=False,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            text.dense_width, text.hidden_size, bias=False, quant_config=quant_config,
            reduce_results=False, prefix=f"{prefix}.down_proj", return_bias=False,
        )  # fmt: skip
        self.global_scale = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [T, H] -> (partial [T, H], no second part)."""
        inner = self.ops.swiglu(self.gate_up_proj(x), True, None)
        return self.down_proj(inner).mul_(self.global_scale), None

    def warm_up_calls(self) -> list[Call]:
        return [Call(lambda ids, positions, rows: self(rows))]
