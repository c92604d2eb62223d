"""Plain linear layers of few rows through the op `skinny_linear`: qkvr, o_proj, dense MLP, head.

`INKLING_PORTABLE=skinny_linear=triton` hands it up to 16 rows, what a decode step has; more stay
with the engine's library. Unasked, it gets what `PAYS_TO` says, and nothing beside adapters or
batch invariance. The sinks' op reads its matrices in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inkling_portable.backends.reference.linear import MOST_ROWS
from inkling_portable.model.engine import UnquantizedLinearMethod, on_accelerator
from inkling_portable.registry import SelectionError

if TYPE_CHECKING:
    from inkling_portable.model.settings import Settings

OP = "skinny_linear"
PAYS_TO = {"sm90": 8}
"""By chip: rows up to which bfloat16 layers go to the op unasked. On an H200 one row is faster in
every layer, and 16 are in all but o_proj, 6.4 us for 6.2 (`benchmarks/results/small_ops-h200`)."""


class SkinnyLinearMethod(UnquantizedLinearMethod):
    """The engine's way with a plain matrix, but for few rows. Which way is fixed in a graph."""

    def __init__(self, op: Callable[..., Tensor], most: int) -> None:
        super().__init__()
        self.op, self.most = op, most

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        # On a CPU the engine would keep the matrix in a packed form only.
        if on_accelerator():
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None and x.dim() == 2 and x.shape[0] <= self.most:
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
    if OP in requests and found:
        kind = "linear layers without adapters" if lora else "sums that may depend on the batch"
        raise SelectionError(
            f"{OP}={requests[OP]} needs {kind}; found {found}; leave one of the two out"
        )


def most_rows(settings: Settings) -> int:
    """Rows that the op gets: what was asked for, else what is known to be faster; 0 is none."""
    if OP in dict(settings.requests):
        return MOST_ROWS
    facts = settings.facts
    if facts.lora or facts.batch_invariant or settings.dtype != torch.bfloat16:
        return 0
    return PAYS_TO.get(settings.target.arch, 0)


def take_over(model: Any) -> None:
    """Give every plain linear layer of `model`, and its head, the op for few rows."""
    most = most_rows(model.settings)
    if not most:
        return
    op = model.settings.ops().skinny_linear
    for layer in model.modules():
        if type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod:
            layer.quant_method = SkinnyLinearMethod(op, most)
    model.logits_processor.few_rows, model.logits_processor.few = op, most
