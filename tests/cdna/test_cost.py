"""The cost estimate counts what was executed, and multiplies it as it says."""

import json

import pytest
import torch

from ci import cdna_cost
from ci.cdna.launch import CHIPS
from ci.cdna_cost import Counts, counted, matrix_cycles, width
from inkling_portable.backends.triton import norm


def test_counts_of_a_kernel_that_can_be_counted_by_hand() -> None:
    """rms_norm of bfloat16 rows: rows are read and written once, weights by every row."""
    found = {}
    for rows in (4, 8):
        x, weight = torch.ones(rows, 2048).bfloat16(), torch.ones(2048).bfloat16()
        with counted("gfx942") as counts:
            norm.rms_norm(x, weight, 1e-6, None)
        (found[rows],) = counts
    bytes_of_row = 2 * 2048
    each = (found[8] + found[4].times(-1)).times(1 / 4)
    assert each.cache == 3 * bytes_of_row  # the row, its weights and the result
    assert each.lines == 2 * bytes_of_row
    assert each.matrix == 0 and each.issue > 0
    assert found[4].at(4, found[8], 8, 12).cache == 12 * 3 * bytes_of_row


def test_counting_leaves_the_executor_as_it_was() -> None:
    from ci.cdna import machine, memory

    before, locate = dict(machine.HANDLERS), memory.Memory._index
    with pytest.raises(RuntimeError), counted("gfx942"):
        raise RuntimeError
    assert before == machine.HANDLERS and memory.Memory._index is locate


@pytest.mark.parametrize(
    ("name", "chip", "cycles"),
    [
        ("v_mfma_f32_32x32x8_bf16", "gfx942", 32),
        ("v_mfma_f32_16x16x16_bf16", "gfx942", 16),
        ("v_mfma_f32_32x32x16_bf16", "gfx950", 32),
    ],
)
def test_matrix_cycles_follow_from_the_published_peak(name: str, chip: str, cycles: float) -> None:
    """The passes that AMD's ISA documents state, in cycles: 8 and 4 passes of four."""
    assert matrix_cycles(name, chip) == cycles


def test_unknown_rates_are_errors_and_widths_are_bytes() -> None:
    with pytest.raises(ValueError, match="the rate of v_mfma_i32"):
        matrix_cycles("v_mfma_i32_16x16x32_i8", "gfx942")
    names = {"ds_read_b128": 16, "ds_read2_b64": 16, "ds_write_b8": 1, "ds_read_u16": 2,
             "buffer_load_dwordx4": 16, "buffer_load_dword": 4, "global_load_ushort": 2,
             "buffer_load_ubyte": 1, "buffer_store_short": 2, "ds_read_b64_tr_b16": 8}  # fmt: skip
    assert {name: width(name) for name in names} == names


def test_microseconds_are_counts_over_rates() -> None:
    us = Counts(matrix=4 * 304 * 2100, lds=128 * 304 * 2100, lines=5300e3).microseconds("gfx942")
    assert us == pytest.approx({"matrix": 1, "issue": 0, "lds": 1, "cache": 0, "memory": 1})


def test_the_stored_table_has_every_case() -> None:
    stored = json.loads(cdna_cost.FILE.read_text())
    assert {(r["case"], r["chip"]) for r in stored["rows"]} == {
        (case.name, chip) for case in cdna_cost.CASES for chip in CHIPS
    }
    assert all(r["us"][r["bound"]] == max(r["us"].values()) for r in stored["rows"])
