"""The package's kernels, compiled for AMD's chips and executed, keep their contracts."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch

from ci.cdna.launch import CHIPS, executing
from inkling_portable.agreement import disagreements
from inkling_portable.backends.triton import OFFERS
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import contract

T = TypeVar("T")
ROWS = {row.op: row for row in OFFERS}
# Of each op, seeds that reach its different kernels without long loops.
SEEDS = dict.fromkeys(ROWS, (1,)) | {"rel_attention": (4, 5), "routed_experts": (1, 3)}


class Served(SeededDraw):
    """Draws of the types that AMD serves; what `fixed` holds is chosen wherever it is offered."""

    def __init__(self, seed: int, fixed: Sequence[Any] = ()) -> None:
        super().__init__(seed)
        self.fixed = fixed

    def choice(self, values: Sequence[T]) -> T:
        offered = [v for v in values if v in self.fixed]
        served = [v for v in values if v is not torch.float32]
        return super().choice(offered or served or values)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("op", "seed"), [(op, s) for op, seeds in SEEDS.items() for s in seeds])
def test_executed_code_keeps_the_contract(op: str, seed: int, chip: str) -> None:
    arguments = contract(op).inputs(Served(seed))
    with executing(chip) as executed:
        assert disagreements(contract(op), ROWS[op].load(), arguments) == []
    assert executed.kernels


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_one_token_of_four_bit_experts(form: str, chip: str) -> None:
    """The matrix-vector kernels, which serve single tokens."""
    arguments = contract("routed_experts").inputs(Served(3, (form, torch.bfloat16)))
    for name in ("x", "ids", "weights"):
        arguments[name] = arguments[name][:1].contiguous()
    assert len(arguments["x"]) == 1
    with executing(chip) as executed:
        assert (
            disagreements(contract("routed_experts"), ROWS["routed_experts"].load(), arguments)
            == []
        )
    assert any(name.startswith("gemv") for name in executed.kernels), executed.kernels
