"""Plain linear layers of few rows through the op `skinny_linear`, where it is chosen.

It then gets qkvr, o_proj, the dense MLP and the head, for at most 16 rows (what a decode step has),
the layers for more where the provider is fast with them; other rows stay with the engine's library.
Chosen without being asked is only what was timed beside that library on the chip;
`INKLING_PORTABLE=skinny_linear=engine` leaves all rows with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inkling_portable.model.engine import UnquantizedLinearMethod, on_accelerator
from inkling_portable.registry import SelectionError

OP = "skinny_linear"
FEW = 16
"""Rows up to which a layer is the op's, and of the head's."""
MORE: dict[tuple[str, ...], int] = {("wgmma",): 64}
"""The same for layers alone, by provider, as timed beside the engine's library."""


class SkinnyLinearMethod(UnquantizedLinearMethod):
    """The engine's way with a plain matrix, but for few rows. Which way is fixed in a graph."""

    most_rows = FEW

    def __init__(self, op: Callable[..., Tensor], most_rows: int) -> None:
        super().__init__()
        self.op, self.most_rows = op, most_rows

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        # On a CPU the engine would keep the matrix in a packed form only.
        if on_accelerator():
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None and x.dim() == 2 and x.shape[0] <= self.most_rows:
            return self.op(x, layer.weight)
        if on_accelerator():
            return super().apply(layer, x, bias)
        return torch.nn.functional.linear(x, layer.weight, bias)


def check_skinny_request(
    requests: Mapping[str, str], lora: bool, batch_invariant: bool = False
) -> None:
    """Raise SelectionError beside adapters, which are added to the same layers, and beside batch
    invariance, for which few rows may not be summed otherwise than many."""
    found = "--enable-lora" if lora else "VLLM_BATCH_INVARIANT=1" if batch_invariant else ""
    if requests.get(OP, "engine") != "engine" and found:
        kind = "linear layers without adapters" if lora else "sums that may depend on the batch"
        raise SelectionError(
            f"{OP}={requests[OP]} needs {kind}; found {found}; leave one of the two out"
        )


def take_over(model: Any) -> None:
    """Give every plain linear layer of `model`, and its head, the op for few rows.

    The reference, which serves where nothing else can, is for those who ask for this op by name.
    """
    settings = model.settings
    op, named = settings.ops().skinny_linear, OP in dict(settings.requests)
    chosen = settings.chosen()[OP]
    if op is None or not (named or chosen != ("reference",)):
        return
    for layer in model.modules():
        if type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod:
            layer.quant_method = SkinnyLinearMethod(op, MORE.get(chosen, FEW))
    model.logits_processor.few_rows, model.logits_processor.few = op, FEW
