"""The ops whose tiles follow the number of rows, with tiles that do not: for batch invariance."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from inkling_portable.backends.triton import experts, short_conv
from inkling_portable.backends.triton import gated_sinks as gating
from inkling_portable.backends.triton import qkvr_prep as prep
from inkling_portable.backends.triton import routed_experts as routed
from inkling_portable.backends.triton import skinny_linear as skinny
from inkling_portable.backends.triton._common import fixed_order


def _fixed(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with fixed_order():
            return function(*args, **kwargs)

    return run


qkvr_prep = _fixed(prep.qkvr_prep)
conv_residual_norm = _fixed(short_conv.conv_residual_norm)
gate_logits = _fixed(experts.gate_logits)
sink_experts = _fixed(experts.sink_experts)
gated_sinks = _fixed(gating.gated_sinks)
routed_experts = _fixed(routed.routed_experts)
skinny_linear = _fixed(skinny.skinny_linear)
