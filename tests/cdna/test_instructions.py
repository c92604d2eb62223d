"""Single instructions against arithmetic that is not the executor's own."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from ci.cdna import floats
from tests.cdna.hand_written import execute

GENERATOR = np.random.default_rng(7)
LOAD = "buffer_load_dword v{to}, v1, s[4:7], 0 offen offset:{at}\n"


def _apply(code: str, *sources: np.ndarray, chip: str = "gfx942") -> np.ndarray:
    """Load sources (32-bit, 64 each) to v10, v11, ..., run `code`, return v2 as uint32."""
    data = np.concatenate([x.view(np.uint32) for x in sources])
    loads = "".join(LOAD.format(to=10 + k, at=256 * k) for k in range(len(sources)))
    body = f"{loads}s_waitcnt vmcnt(0)\n{code}\nbuffer_store_dword v2, v1, s[4:7], 0 offen\n"
    return execute(body, data, chip=chip)[:64]


def _floats(scale: int = 20) -> np.ndarray:
    values = GENERATOR.standard_normal(64) * 2.0 ** GENERATOR.integers(-scale, scale, 64)
    return values.astype(np.float32)


def test_fma_rounds_once() -> None:
    """Against exact rational arithmetic, including sums that cancel."""
    a, b = _floats(), _floats()
    c = (-(a.astype(np.float64) * b)).astype(np.float32)
    c[::2] = _floats()[::2]
    found = _apply("v_fma_f32 v2, v10, v11, v12", a, b, c).view(np.float32)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        above, below = np.nextafter(got, np.float32(np.inf)), np.nextafter(got, -np.float32(np.inf))
        error = abs(Fraction(float(got)) - exact)
        assert error <= abs(Fraction(float(above)) - exact)
        assert error <= abs(Fraction(float(below)) - exact)


def test_division_as_the_compiler_writes_it_is_correctly_rounded() -> None:
    """Six instructions that scale, approximate, correct and repair: together a / b."""
    a, b = _floats(60), _floats(60)
    a[:4], b[:4] = [0, np.inf, 1, np.nan], [2, 3, 0, 1]
    code = """
        v_div_scale_f32 v3, s[8:9], v11, v11, v10
        v_rcp_f32_e32 v4, v3
        v_fma_f32 v5, -v3, v4, 1.0
        v_fmac_f32_e32 v4, v5, v4
        v_div_scale_f32 v5, vcc, v10, v11, v10
        v_mul_f32_e32 v6, v5, v4
        v_fma_f32 v7, -v3, v6, v5
        v_fmac_f32_e32 v6, v7, v4
        v_fma_f32 v3, -v3, v6, v5
        v_div_fmas_f32 v3, v3, v4, v6
        v_div_fixup_f32 v2, v3, v11, v10"""
    with np.errstate(all="ignore"):
        expected = a / b
    normal = (np.abs(expected) > 2.0**-120) | ~np.isfinite(expected) | (expected == 0)
    found = _apply(code, a, b).view(np.float32)
    np.testing.assert_array_equal(found[normal], expected[normal])


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_every_eight_bit_code_is_torchs(chip: str, name: str) -> None:
    kinds = {
        ("gfx942", "fp8"): torch.float8_e4m3fnuz,
        ("gfx942", "bf8"): torch.float8_e5m2fnuz,
        ("gfx950", "fp8"): torch.float8_e4m3fn,
        ("gfx950", "bf8"): torch.float8_e5m2,
    }
    codes = np.arange(256, dtype=np.uint32)
    expected = torch.arange(256, dtype=torch.uint8).view(kinds[chip, name]).float().numpy()
    for part in range(4):
        mine = codes[64 * part : 64 * part + 64]
        found = _apply(f"v_cvt_f32_{name}_e32 v2, v10", mine, chip=chip).view(np.float32)
        np.testing.assert_array_equal(found, expected[64 * part : 64 * part + 64])
    table = (floats.FP8 if name == "fp8" else floats.BF8)[chip]
    x = np.concatenate([_floats(8) for _ in range(8)])
    x = x[np.abs(x) < np.nanmax(table[np.isfinite(table)])]
    wanted = torch.from_numpy(x).to(kinds[chip, name]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(floats.encode8(x, table, np.True_), wanted)


def test_lanes_move_as_documented() -> None:
    """DPP rows, bpermute and readlane on lane numbers."""
    lane = np.arange(64, dtype=np.uint32)
    tail = "row_mask:0xf bank_mask:0xf bound_ctrl:1"
    shifted = _apply(f"s_nop 1\nv_mov_b32_dpp v2, v10 row_shr:3 {tail}", lane)
    np.testing.assert_array_equal(shifted, np.where(lane % 16 >= 3, lane - 3, 0))
    turned = _apply(f"s_nop 1\nv_mov_b32_dpp v2, v10 row_ror:3 {tail}", lane)
    np.testing.assert_array_equal(turned, lane // 16 * 16 + (lane % 16 - 3) % 16)
    order = GENERATOR.permutation(64).astype(np.uint32)
    fetched = _apply("ds_bpermute_b32 v2, v10, v11\ns_waitcnt lgkmcnt(0)", order * 4, lane)
    np.testing.assert_array_equal(fetched, order)
    last = _apply("v_readlane_b32 s8, v10, 63\nv_mov_b32_e32 v2, s8", lane)
    assert (last == 63).all()


@pytest.mark.parametrize("size", [16, 32])
def test_matrix_product_has_the_documented_layout(size: int) -> None:
    """D = A B with small integers, whose layout comes from AMD's matrix instruction calculator."""
    depth = 64 * 4 // size
    a = GENERATOR.integers(-4, 5, (size, depth)).astype(np.float16)
    b = GENERATOR.integers(-4, 5, (depth, size)).astype(np.float16)
    lane = np.arange(64)
    k = 4 * (lane // size)[:, None] + np.arange(4)
    words_a = np.ascontiguousarray(a[(lane % size)[:, None], k]).view(np.uint32)
    words_b = np.ascontiguousarray(b[k, (lane % size)[:, None]]).view(np.uint32)
    sources = [np.ascontiguousarray(w[:, i]) for w in (words_a, words_b) for i in range(2)]
    product = a.astype(np.float32) @ b.astype(np.float32)
    name = f"v_mfma_f32_{size}x{size}x{depth}_f16"
    count = size * size // 64
    for register in (0, count - 1):
        # The sources are in v[10:13]; the result goes beside them.
        code = f"{name} v[32:{31 + count}], v[10:11], v[12:13], 0\ns_nop 15\ns_nop 7\n"
        found = _apply(code + f"v_mov_b32_e32 v2, v{32 + register}", *sources).view(np.float32)
        row = 4 * (64 // size) * (register // 4) + 4 * (lane // size) + register % 4
        np.testing.assert_array_equal(found, product[row, lane % size])


def test_a_product_may_overlap_its_addend() -> None:
    """Registers of the addend are all read before the result is written."""
    ones = np.full(64, 0x3C003C00, np.uint32)
    setup = "".join(f"v_mov_b32_e32 v{20 + k}, {float(k + 1)}\n" for k in range(4))
    code = setup + "v_mfma_f32_16x16x16_f16 v[22:25], v[10:11], v[12:13], v[20:23]\ns_nop 15\n"
    for k in range(4):
        found = _apply(code + f"v_mov_b32_e32 v2, v{22 + k}", ones, ones, ones, ones)
        assert (found.view(np.float32) == 16 + k + 1).all()
