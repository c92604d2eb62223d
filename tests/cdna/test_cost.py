"""The cost estimate counts what was executed, and multiplies it as it says."""

import json
from typing import Any

import pytest
import torch

from ci import cdna_cost
from ci.cdna.launch import CHIPS
from ci.cdna_cost import FILE, RATES, Counts, counted, matrix_cycles, width
from inkling_portable.backends.triton import norm
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.routed_experts_tuning import gemv_to
from inkling_portable.target import Target


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
    waves = {"soon": 0, "late": 0}
    assert us == pytest.approx(
        {"matrix": 1, "issue": 0, "lds": 1, "cache": 0, "memory": 1, **waves}
    )
    counts = Counts(soon=2 * 2100, late=3 * 2100)
    assert counts.microseconds("gfx942", slots=2)["soon"] == pytest.approx(1)
    assert counts.microseconds("gfx942", slots=2)["late"] == pytest.approx(1.5)


def test_waves_wait_for_what_they_load() -> None:
    """A wave of rms_norm goes to memory a whole number of times, whatever one trip takes."""
    x, weight = torch.ones(4, 2048).bfloat16(), torch.ones(2048).bfloat16()
    with counted("gfx942") as counts:
        norm.rms_norm(x, weight, 1e-6, None)
    (found,) = counts
    waves = 4 * 4
    trips = (found.late - found.soon) / (waves * 400 * RATES["gfx942"].ghz)
    assert trips == pytest.approx(round(trips), abs=0.05) and 1 <= trips <= 3
    assert found.soon > found.issue + waves * 400 * RATES["gfx942"].ghz


def longest(row: dict[str, Any]) -> tuple[float, float]:
    """The longest of a row at either latency."""
    us = dict(row["us"])
    soon, late = us.pop("soon"), us.pop("late")
    return max(*us.values(), soon), max(*us.values(), late)


def test_the_stored_estimate_speaks_for_what_is_chosen() -> None:
    """By more than 20 % at both latencies wherever the tiles are not the former ones."""
    rows = {(r["case"], r["chip"]): longest(r) for r in json.loads(FILE.read_text())["rows"]}
    changed = 0
    for (name, chip), former in rows.items():
        case, former_tiles, _ = name.partition(", former tiles")
        if former_tiles and former != rows[case, chip]:
            changed += 1
            assert all(b > 1.2 * a for a, b in zip(rows[case, chip], former, strict=True)), name
    assert changed == 6
    # Tiles read an expert that several tokens chose once: of n pairs, as many are expected.
    for chip in CHIPS:
        found = {}
        for tokens in range(10, 17):
            pairs = 6 * tokens
            shared = 256 * (1 - (1 - 1 / 256) ** pairs) / pairs
            found[tokens] = all(
                shared * tiles > 1.2 * vector
                for form in ("MXFP4", "NVFP4")
                for tiles, vector in zip(
                    *(rows[f"experts, {form}, 16 tokens, {how}", chip]
                      for how in ("tiles", "without matrix units")),
                    strict=True,
                )
            )  # fmt: skip
        with launching_for(Target.parse(CHIPS[chip])):
            assert gemv_to() == max([9, *(n for n, clear in found.items() if clear)])


def test_the_stored_table_has_every_case() -> None:
    stored = json.loads(cdna_cost.FILE.read_text())
    assert {(r["case"], r["chip"]) for r in stored["rows"]} == {
        (case.name, chip) for case in cdna_cost.CASES for chip in CHIPS
    }
    assert all(r["us"][r["bound"]] == max(r["us"].values()) for r in stored["rows"])
