"""Executed AMD kernels on inputs that Hypothesis draws: `python -m ci.amd_sweep --drawn 100`.

Seeds stay what they are; these inputs are new each time, and one that breaks a contract shrinks:
what is told is the smallest call that still does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ci.cdna.launch import executing
from inkling_portable.agreement import disagreements
from inkling_portable.backends.triton import OFFERS
from inkling_portable.registry import Facts, contract
from tests.hypothesis_draw import HypothesisDraw

T = TypeVar("T")


class ServedDraw(HypothesisDraw):
    """Of types, draws those that AMD serves."""

    def choice(self, values: Sequence[T]) -> T:
        return super().choice([v for v in values if v is not torch.float32] or values)


def drawn(op: str, chip: str, examples: int) -> list[str]:
    """What an op does wrong on a chip within `examples` inputs, in either order of its sums."""
    row = next(row for row in OFFERS if row.op == op)
    call: list[str] = []

    @settings(max_examples=examples, deadline=None, database=None, report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        arguments = contract(op).inputs(ServedDraw(data))
        fixed = data.draw(st.booleans())
        call[:] = _told(arguments, fixed)
        with executing(chip):
            reports = disagreements(
                contract(op), row.under(Facts(batch_invariant=fixed)).load(), arguments
            )
        assert not reports, reports[0]

    try:
        holds()
    except Exception as error:  # of a contract, of the executor or of a launcher
        text = " ".join(str(error).partition("\nassert")[0].split())
        return [f"{type(error).__name__}: {text[:400]}, given {', '.join(call)}"]
    return []


def _told(arguments: dict[str, Any], fixed: bool) -> Iterator[str]:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            yield f"{name} {kind} {list(value.shape)}"
        else:
            yield f"{name}={value!r}"
    yield f"batch_invariant={fixed}"
