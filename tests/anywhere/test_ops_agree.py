"""Every provider that runs on this machine obeys every contract, on drawn inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inkling_portable.agreement import disagreements
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import contract, op_names
from tests.hypothesis_draw import HypothesisDraw


@pytest.mark.parametrize("name", op_names())
@given(data=st.data())
def test_reference_meets_its_own_bound(name: str, data: st.DataObject) -> None:
    """The baseline is finite where the truth is, deterministic, and leaves its inputs alone."""
    op = contract(name)
    arguments = op.inputs(HypothesisDraw(data))
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    assert not disagreements(op, op.reference, arguments)
    for key, value in before.items():
        assert torch.equal(
            value.double().nan_to_num(7e7), arguments[key].double().nan_to_num(7e7)
        ), key


@pytest.mark.parametrize("name", op_names())
def test_seeded_driver_repeats(name: str) -> None:
    op = contract(name)
    first, second = op.inputs(SeededDraw(3)), op.inputs(SeededDraw(3))
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(
                value.double().nan_to_num(7e7), second[key].double().nan_to_num(7e7)
            ), key
            assert value.stride() == second[key].stride(), key
        else:
            assert value == second[key], key
