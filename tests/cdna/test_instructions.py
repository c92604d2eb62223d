"""Single instructions against arithmetic that is not the executor's own."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from ci.cdna import floats
from ci.cdna.parse import CodeError
from tests.cdna.hand_written import TESTED, execute, of

__all__ = ["TESTED"]
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


@of("v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32")
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


@of("v_cvt_f32_fp8", "v_cvt_f32_bf8")
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


_ALL = "row_mask:0xf bank_mask:0xf"
_L = np.arange(64)
# DPP controls: the lane that each lane reads, -1 where there is none.
DPP = {
    "quad_perm:[3,1,0,2]": _L // 4 * 4 + np.array([3, 1, 0, 2])[_L % 4],
    "row_shl:5": np.where(_L % 16 + 5 < 16, _L + 5, -1),
    "row_shr:3": np.where(_L % 16 >= 3, _L - 3, -1),
    "row_ror:3": _L // 16 * 16 + (_L % 16 - 3) % 16,
    "row_mirror": _L // 16 * 16 + 15 - _L % 16,
    "row_half_mirror": _L // 8 * 8 + 7 - _L % 8,
    "row_newbcast:6": _L // 16 * 16 + 6,
    "row_bcast:15": np.where(_L >= 16, _L // 16 * 16 - 1, -1),
    "row_bcast:31": np.where(_L >= 32, 31, -1),
}


@pytest.mark.parametrize("control", DPP)
def test_dpp_moves_lanes_as_documented(control: str) -> None:
    """A lane without a source reads zero with bound_ctrl, and is left alone without or masked."""
    lane = _L.astype(np.uint32) + 100
    source = DPP[control]
    moved = _apply(f"s_nop 1\nv_mov_b32_dpp v2, v10 {control} {_ALL} bound_ctrl:1", lane)
    np.testing.assert_array_equal(moved, np.where(source >= 0, lane[source], 0))
    start = "v_mov_b32 v2, 7\ns_nop 1\n"
    kept = _apply(f"{start}v_mov_b32_dpp v2, v10 {control} {_ALL}", lane)
    np.testing.assert_array_equal(kept, np.where(source >= 0, lane[source], 7))
    some = _apply(f"{start}v_mov_b32_dpp v2, v10 {control} row_mask:0xa bank_mask:0x5", lane)
    written = (_L // 16 % 2 == 1) & (_L // 4 % 2 == 0) & (source >= 0)
    np.testing.assert_array_equal(some, np.where(written, lane[source], 7))
    total = _apply(f"{start}v_add_u32_dpp v2, v10, v11 {control} {_ALL} bound_ctrl:1", lane, lane)
    np.testing.assert_array_equal(total, np.where(source >= 0, lane[source], 0) + lane)


def test_sdwa_picks_and_places_parts() -> None:
    a, b = (GENERATOR.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(2))
    parts = {f"BYTE_{k}": (8 * k, 0xFF) for k in range(4)} | {
        "WORD_0": (0, 0xFFFF), "WORD_1": (16, 0xFFFF), "DWORD": (0, 0xFFFFFFFF)}  # fmt: skip
    for first, (shift, mask) in parts.items():
        for second, (shift_b, mask_b) in parts.items():
            code = f"v_add_u32_sdwa v2, v10, v11 dst_sel:DWORD src0_sel:{first} src1_sel:{second}"
            expected = (a >> shift & mask) + (b >> shift_b & mask_b)
            np.testing.assert_array_equal(_apply(code, a, b), expected)
    for place, (shift, mask) in parts.items():
        for unused, rest in (("UNUSED_PAD", 0), ("UNUSED_PRESERVE", 0x12345678)):
            code = (f"v_mov_b32 v2, 0x12345678\nv_add_u32_sdwa v2, v10, v11 dst_sel:{place} "
                    f"dst_unused:{unused} src0_sel:DWORD src1_sel:DWORD")  # fmt: skip
            field = np.uint32(mask << shift & 0xFFFFFFFF)
            expected = np.uint32(rest) & ~field | (a + b) << np.uint32(shift) & field
            np.testing.assert_array_equal(_apply(code, a, b), expected)
    code = "v_mov_b32_sdwa v2, sext(v10) dst_sel:DWORD src0_sel:BYTE_2"
    np.testing.assert_array_equal(
        _apply(code, a).view(np.int32), (a >> 16).astype(np.uint8).view(np.int8).astype(np.int32)
    )


@of("ds_bpermute_b32", "v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32")
def test_values_pass_between_lanes() -> None:
    lane = _L.astype(np.uint32)
    order = GENERATOR.permutation(64).astype(np.uint32)
    fetched = _apply("ds_bpermute_b32 v2, v10, v11\ns_waitcnt lgkmcnt(0)", order * 4, lane)
    np.testing.assert_array_equal(fetched, order)
    last = _apply("v_readlane_b32 s8, v10, 63\nv_mov_b32_e32 v2, s8", lane)
    assert (last == 63).all()
    code = "s_mov_b32 exec_lo, 0x50\ns_mov_b32 exec_hi, 0\nv_readfirstlane_b32 s8, v10\n" \
           "s_mov_b64 exec, -1\nv_mov_b32_e32 v2, s8"  # fmt: skip
    assert (_apply(code, lane) == 4).all()
    written = _apply("v_mov_b32 v2, v10\ns_mov_b32 s8, 9\nv_writelane_b32 v2, s8, 17", lane)
    np.testing.assert_array_equal(written, np.where(_L == 17, 9, lane))


@of("ds_swizzle_b32")
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_swizzle_swaps_neighbours(width: int) -> None:
    """Runs of `width` lanes change places; a lane that is switched off is read as zero."""
    lane = _L.astype(np.uint32) + 100
    swapped = lane.reshape(-1, 2, width)[:, ::-1].ravel()
    code = f"ds_swizzle_b32 v2, v10 offset:swizzle(SWAP,{width})\ns_waitcnt lgkmcnt(0)"
    np.testing.assert_array_equal(_apply(code, lane), swapped)
    some = "v_mov_b32 v2, 7\ns_mov_b32 exec_lo, 0xffffff0f\n{}\ns_mov_b64 exec, -1"
    off = (_L >= 4) & (_L < 8)
    expected = np.where(off, 7, np.where(off[_L ^ width], 0, swapped))
    np.testing.assert_array_equal(_apply(some.format(code), lane), expected)
    with pytest.raises(CodeError, match="this swizzle is not supported"):
        _apply(code.replace(f"SWAP,{width}", 'BITMASK_PERM,"0pi01"'), lane)


@of("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def test_lanes_below_are_counted() -> None:
    a, b = (GENERATOR.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(2))
    code = "v_mbcnt_lo_u32_b32 v2, v10, v11\nv_mbcnt_hi_u32_b32 v2, v11, v2"
    expected = [
        (int(x) & (1 << min(n, 32)) - 1).bit_count() + int(y)
        + (int(y) & (1 << max(n - 32, 0)) - 1).bit_count()
        for n, (x, y) in enumerate(zip(a, b, strict=True))
    ]  # fmt: skip
    np.testing.assert_array_equal(_apply(code, a, b), np.array(expected).astype(np.uint32))


@of("v_permlane16_swap_b32", "v_permlane32_swap_b32")
@pytest.mark.parametrize("width", [16, 32])
def test_swap_exchanges_rows(width: int) -> None:
    """The upper rows of the destination and the lower ones of the source change places."""
    a, b = _L.astype(np.uint32), _L.astype(np.uint32) + 100
    up = _L // width % 2 == 1
    code = f"s_nop 1\nv_permlane{width}_swap_b32 v10, v11\ns_nop 1\nv_mov_b32 v2, v{{}}"
    first = _apply(code.format(10), a, b, chip="gfx950")
    np.testing.assert_array_equal(first, np.where(up, b[_L - width * up], a))
    second = _apply(code.format(11), a, b, chip="gfx950")
    np.testing.assert_array_equal(second, np.where(up, b, a[(_L + width) % 64]))


@of("v_bitop3_b32", "v_bitop3_b16")
def test_truth_tables() -> None:
    a, b, c = (GENERATOR.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(3))
    for table in (0x00, 0xFF, 0x96, 0xE8, 0xCA, 0x01, 0x80, 0x6B):
        expected = np.zeros(64, np.uint32)
        for bit in range(32):
            row = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
            expected |= (np.uint32(table) >> row & 1) << np.uint32(bit)
        for form, mask in (("b32", 0xFFFFFFFF), ("b16", 0xFFFF)):
            code = f"v_bitop3_{form} v2, v10, v11, v12 bitop3:{table:#x}"
            found = _apply(code, a, b, c, chip="gfx950")
            np.testing.assert_array_equal(found, expected & np.uint32(mask))


@of("v_perm_b32")
def test_bytes_are_picked() -> None:
    """Selector 0 .. 7 a byte, 8 .. 11 the sign of a half, 12 zero, above it ones."""
    a, b, c = (GENERATOR.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(3))
    c &= np.uint32(0x0F0F0F0F)
    expected = []
    for x, y, chosen in zip(a, b, c.view(np.uint8).reshape(-1, 4), strict=True):
        data = [*np.array([y, x]).view(np.uint8).tolist()]
        signs = [255 * (data[2 * k + 1] >> 7) for k in range(4)]
        table = [*data, *signs, 0, 255, 255, 255]
        expected.append(sum(table[s] << 8 * k for k, s in enumerate(chosen)))
    found = _apply("v_perm_b32 v2, v10, v11, v12", a, b, c)
    np.testing.assert_array_equal(found, np.array(expected, np.uint32))


@of("v_rndne_f32")
def test_rounding_to_even() -> None:
    x = np.concatenate([_floats(8)[:40], np.arange(-12, 12, dtype=np.float32) + np.float32(0.5)])
    np.testing.assert_array_equal(_apply("v_rndne_f32 v2, v10", x).view(np.float32), np.round(x))


@of("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32", "v_pk_mov_b32")
def test_moves() -> None:
    a, b = (GENERATOR.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(2))
    code = "v_accvgpr_write_b32 a3, v10\ns_nop 1\nv_accvgpr_mov_b32 a5, a3\ns_nop 1\n" \
           "v_accvgpr_read_b32 v2, a5"  # fmt: skip
    np.testing.assert_array_equal(_apply(code, a), a)
    sources = {"v[10:11]": (a, b), "v[12:13]": (b, ~a)}
    for low in (0, 1):
        for high in (0, 1):
            code = f"v_not_b32 v13, v10\nv_mov_b32 v12, v11\nv_pk_mov_b32 v[2:3], v[10:11], " \
                   f"v[12:13] op_sel:[{low},{high}]\n"  # fmt: skip
            np.testing.assert_array_equal(_apply(code, a, b), sources["v[10:11]"][low])
            code += "v_mov_b32 v2, v3"
            np.testing.assert_array_equal(_apply(code, a, b), sources["v[12:13]"][high])


@of("s_branch", "s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz", "s_cbranch_vccnz",
    "s_cbranch_execz", "s_cbranch_execnz", "s_endpgm")  # fmt: skip
def test_branches() -> None:
    """A taken branch leaves 0 where the next line would put 1."""
    ways = {"scc1": "s_cmp_eq_u32 s8, {}", "scc0": "s_cmp_lg_u32 s8, {}",
            "vccnz": "s_mov_b32 vcc_hi, 0\ns_cmp_eq_u32 s8, {}\ns_cselect_b32 vcc_lo, 4, 0",
            "vccz": "s_mov_b32 vcc_hi, 0\ns_cmp_eq_u32 s8, {}\ns_cselect_b32 vcc_lo, 0, 4",
            "execnz": "s_mov_b32 exec_hi, 0\ns_cmp_eq_u32 s8, {}\ns_cselect_b32 exec_lo, 4, 0",
            "execz": "s_mov_b32 exec_hi, 0\ns_cmp_eq_u32 s8, {}\ns_cselect_b32 exec_lo, 0, 4",
            }  # fmt: skip
    end = "s_mov_b64 exec, -1\nv_mov_b32 v2, s9"
    for name, setting in ways.items():
        for taken, value in ((1, 5), (0, 6)):
            code = f"s_mov_b32 s8, 5\ns_mov_b32 s9, 0\n{setting.format(value)}\n" \
                   f"s_cbranch_{name} .Lout\ns_mov_b32 s9, 1\n.Lout:\n{end}"  # fmt: skip
            assert (_apply(code, _L.astype(np.uint32)) == 1 - taken).all(), name
    code = f"s_mov_b32 s9, 0\ns_branch .Lout\ns_mov_b32 s9, 1\n.Lout:\n{end}"
    assert (_apply(code, _L.astype(np.uint32)) == 0).all()


@of("s_nop", "v_nop", "s_setprio", "s_sleep", "s_icache_inv", "s_sethalt", "s_inst_prefetch",
    "s_waitcnt", "s_barrier", "buffer_inv", "buffer_wbl2")  # fmt: skip
def test_what_changes_no_register() -> None:
    code = "s_nop 7\nv_nop\ns_setprio 1\ns_sleep 1\ns_icache_inv\ns_waitcnt vmcnt(0)\n" \
           "s_barrier\nbuffer_inv sc1\nbuffer_wbl2 sc1\nv_mov_b32 v2, v10"  # fmt: skip
    lane = _L.astype(np.uint32)
    np.testing.assert_array_equal(_apply(code, lane), lane)


@of(*(f"s_load_dword{n}" for n in ("", "x2", "x4", "x8", "x16")))
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count: int) -> None:
    data = GENERATOR.integers(0, 1 << 32, 64, dtype=np.uint32)
    name = f"s_load_dword{f'x{count}' if count > 1 else ''}"
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    for word in (0, count - 1):
        code = f"s_mov_b32 s9, 8\n{name} {target}, s[4:5], s9 offset:0x10\n" \
               f"s_waitcnt lgkmcnt(0)\nv_mov_b32 v2, s{16 + word}"  # fmt: skip
        assert (_apply(code, data) == data[6 + word]).all()


PRODUCTS = [
    *((size, depth, kind) for kind in ("f16", "bf16") for size, depth in
      ((16, 16), (32, 8), (16, 32), (32, 16))),
    (16, 8, "xf32"), (32, 4, "xf32"), (16, 4, "f32"), (32, 2, "f32"),
]  # fmt: skip


@of(*(f"v_mfma_f32_{s}x{s}x{d}_{k}" for s, d, k in PRODUCTS))
@pytest.mark.parametrize(("size", "depth", "kind"), PRODUCTS)
def test_matrix_product_has_the_documented_layout(size: int, depth: int, kind: str) -> None:
    """D = A B + C with small integers, whose layout comes from AMD's matrix instruction calculator.

    Of 32 x 32 results a lane holds runs of four rows that are eight apart: the case that a public
    emulator gets wrong.
    """
    each = size * depth // 64
    a = GENERATOR.integers(-4, 5, (size, depth)).astype(np.float32)
    b = GENERATOR.integers(-4, 5, (depth, size)).astype(np.float32)
    k = each * (_L // size)[:, None] + np.arange(each)
    parts_a, parts_b = a[(_L % size)[:, None], k], b[k, (_L % size)[:, None]]

    def words(x: np.ndarray) -> np.ndarray:
        if kind == "f16":
            return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32)
        if kind == "bf16":
            half = (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
            return np.ascontiguousarray(half).view(np.uint32)
        return np.ascontiguousarray(x).view(np.uint32)

    sources = [np.ascontiguousarray(w[:, i]) for w in (words(parts_a), words(parts_b))
               for i in range(w.shape[1])]  # fmt: skip
    held = len(sources) // 2
    name, count = f"v_mfma_f32_{size}x{size}x{depth}_{kind}", size * size // 64
    new = (size, depth) in ((16, 32), (32, 16))

    def block(first: int) -> str:
        return f"v[{first}:{first + held - 1}]" if held > 1 else f"v{first}"

    product = a @ b
    for register in range(count):
        # The sources are in v10, v11, ...; the result goes beside them, on top of 3.
        code = "".join(f"v_mov_b32 v{32 + r}, 0x40400000\n" for r in range(count))
        code += f"s_nop 4\n{name} v[32:{31 + count}], {block(10)}, {block(10 + held)}, " \
                f"v[32:{31 + count}]\ns_nop 15\ns_nop 7\n"  # fmt: skip
        found = _apply(code + f"v_mov_b32_e32 v2, v{32 + register}", *sources,
                       chip="gfx950" if new else "gfx942").view(np.float32)  # fmt: skip
        row = 4 * (64 // size) * (register // 4) + 4 * (_L // size) + register % 4
        np.testing.assert_array_equal(found, product[row, _L % size] + 3)
        if register % 4 == 0:
            assert row.min() >= 0 and row.max() < size


def test_a_product_may_overlap_its_addend() -> None:
    """Registers of the addend are all read before the result is written."""
    ones = np.full(64, 0x3C003C00, np.uint32)
    setup = "".join(f"v_mov_b32_e32 v{20 + k}, {float(k + 1)}\n" for k in range(4))
    code = setup + "v_mfma_f32_16x16x16_f16 v[22:25], v[10:11], v[12:13], v[20:23]\ns_nop 15\n"
    for k in range(4):
        found = _apply(code + f"v_mov_b32_e32 v2, v{22 + k}", ones, ones, ones, ones)
        assert (found.view(np.float32) == 16 + k + 1).all()


EIGHT = {
    ("gfx942", "fp8"): torch.float8_e4m3fnuz, ("gfx942", "bf8"): torch.float8_e5m2fnuz,
    ("gfx950", "fp8"): torch.float8_e4m3fn, ("gfx950", "bf8"): torch.float8_e5m2,
}  # fmt: skip
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _eight(chip: str, name: str) -> np.ndarray:
    """The 256 values of a format, torch's."""
    return torch.arange(256, dtype=torch.uint8).view(EIGHT[chip, name]).float().numpy()


@of("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
@pytest.mark.parametrize(("chip", "name"), EIGHT)
def test_two_codes_at_once(chip: str, name: str) -> None:
    table = _eight(chip, name)
    for start in range(0, 256, 64):
        code = (_L + start).astype(np.uint32)
        packed = code | (255 - code) << 8 | (code ^ 1) << 16 | (code ^ 128) << 24
        for word in (0, 1):
            for half in (0, 1):
                text = f"v_cvt_pk_f32_{name}_sdwa v[2:3], v10 src0_sel:WORD_{word}\n"
                found = _apply(text + f"v_mov_b32 v2, v{2 + half}", packed, chip=chip)
                expected = table[packed >> (16 * word + 8 * half) & 255]
                np.testing.assert_array_equal(found.view(np.float32), expected)


@of("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32", "s_setreg_imm32_b32")
@pytest.mark.parametrize(("chip", "name"), EIGHT)
def test_narrowing_rounds_to_even(chip: str, name: str) -> None:
    """Against torch within the format; beyond it the largest number where MODE says so."""
    table = _eight(chip, name)
    finite = np.sort(np.unique(np.abs(table[np.isfinite(table)])))
    most = finite[-1]
    # Values, their midpoints, and what is just beside those.
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    x = np.concatenate([finite, middle, np.nextafter(middle, np.float32(0)),
                        np.nextafter(middle, np.float32(1e9))])  # fmt: skip
    x = np.resize(np.concatenate([x, -x]), 64 * 17).astype(np.float32)
    for part in x.reshape(-1, 64):
        wanted = torch.from_numpy(part.copy()).to(EIGHT[chip, name]).view(torch.uint8).numpy()
        code = f"v_mov_b32 v2, 0x12345678\nv_cvt_pk_{name}_f32 v2, v10, -v10{{}}"
        other = torch.from_numpy(-part).to(EIGHT[chip, name]).view(torch.uint8).numpy()
        pair = wanted.astype(np.uint32) | other.astype(np.uint32) << 8
        low = _apply(code.format(""), part, chip=chip)
        np.testing.assert_array_equal(low, pair | np.uint32(0x12340000))
        high = _apply(code.format(" op_sel:[0,0,1]"), part, chip=chip)
        np.testing.assert_array_equal(high, pair << np.uint32(16) | np.uint32(0x5678))
    large = np.full(64, most * 4, np.float32)
    code = "v_mov_b32 v2, 0\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {}\n" \
           f"v_cvt_pk_{name}_f32 v2, v10, v10\nv_and_b32 v2, 0xff, v2"  # fmt: skip
    kept = table[_apply(code.format(1), large, chip=chip)]
    assert (kept == most).all()
    assert not np.isfinite(table[_apply(code.format(0), large, chip=chip)]).any()


@of(*(f"v_cvt_scalef32_pk_{a}_{b}" for a in ("f32", "f16", "bf16")
      for b in ("fp4", "fp8", "bf8")))  # fmt: skip
@pytest.mark.parametrize("source", ["fp4", "fp8", "bf8"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16"])
def test_scaled_codes(source: str, target: str) -> None:
    """Every code times powers of two, the exponent of the scale alone counting."""
    four = source == "fp4"
    table = FP4 if four else _eight("gfx950", source)
    width, places = (4, 4) if four else (8, 2)
    for exponent in (-3, 0, 2):
        scale = np.full(64, 1.75 * 2.0**exponent, np.float32)
        for start in range(0, 256, 64):
            code = (_L + start).astype(np.uint32) * np.uint32(0x01010101)
            code ^= np.uint32(0x3C5A9600)
            for place in range(places):
                chosen = f"op_sel:[{place % 2},{place // 2},0]" if four else f"op_sel:[{place},0,0]"
                text = f"v_cvt_scalef32_pk_{target}_{source} "
                text += f"v[2:3], v10, v11 {chosen}" if target == "f32" else \
                    f"v2, v10, v11 {chosen}"  # fmt: skip
                field = code >> np.uint32((8 if four else 16) * place)
                values = [table[field >> np.uint32(width * k) & np.uint32((1 << width) - 1)]
                          * np.float32(2.0**exponent) for k in (0, 1)]  # fmt: skip
                if target == "f32":
                    for k in (0, 1):
                        found = _apply(
                            f"{text}\nv_mov_b32 v2, v{2 + k}", code, scale, chip="gfx950"
                        )
                        np.testing.assert_array_equal(found.view(np.float32), values[k])
                    continue
                kind = torch.float16 if target == "f16" else torch.bfloat16
                found = _apply(text, code, scale, chip="gfx950")
                got = torch.from_numpy(found.view(np.int16).reshape(-1, 2).copy()).view(kind)
                want = torch.from_numpy(np.stack(values, -1)).to(kind)
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@of("v_cvt_scalef32_pk_fp8_f32", "v_cvt_scalef32_pk_bf8_f32")
@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_scaled_narrowing_with_scale_one(name: str) -> None:
    x = _floats(6)
    code = torch.from_numpy(x).to(EIGHT["gfx950", name]).view(torch.uint8).numpy().astype(np.uint32)
    text = f"v_mov_b32 v2, 0\nv_cvt_scalef32_pk_{name}_f32 v2, v10, v10, 1.0"
    np.testing.assert_array_equal(_apply(text, x, chip="gfx950"), code | code << 8)


@of("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def test_mixed_multiply_add() -> None:
    """Sources of 16 bits where op_sel_hi says so: exact in float64 and rounded once."""
    a, b = _floats(4), _floats(4)
    halves = GENERATOR.standard_normal(128).astype(np.float16)
    packed = halves.view(np.uint32)
    low, high = halves[::2].astype(np.float64), halves[1::2].astype(np.float64)
    with np.errstate(over="ignore"):
        found = _apply("v_fma_mix_f32 v2, v10, v12, v11 op_sel_hi:[0,1,0]", a, b, packed)
        exact = a.astype(np.float64) * low + b
        np.testing.assert_array_equal(found.view(np.float32), exact.astype(np.float32))
        text = "v_mov_b32 v2, 0x11112222\nv_fma_mix{}_f16 v2, v12, v12, -v12 op_sel:[0,1,0] " \
               "op_sel_hi:[1,1,1]"  # fmt: skip
        half = (low * high - low).astype(np.float16).view(np.uint16).astype(np.uint32)
        found = _apply(text.format("lo"), a, b, packed)
        np.testing.assert_array_equal(found, half | np.uint32(0x11110000))
        found = _apply(text.format("hi"), a, b, packed)
        np.testing.assert_array_equal(found, half << np.uint32(16) | np.uint32(0x2222))


@of("ds_read_b64_tr_b16", "ds_read_b64_tr_b8")
@pytest.mark.parametrize("bits", [8, 16])
def test_transposed_reads(bits: int) -> None:
    """Rows of a 16-lane block come back as columns, whatever the addresses of the rows."""
    each = 64 // bits
    data = GENERATOR.integers(0, 1 << 32, 128, dtype=np.uint32)
    order = GENERATOR.permutation(64).astype(np.uint32) * 8
    body = "v_lshlrev_b32 v5, 1, v1\n" \
           "buffer_load_dwordx2 v[20:21], v5, s[4:7], 0 offen\ns_waitcnt vmcnt(0)\n" \
           "ds_write_b64 v5, v[20:21]\ns_waitcnt lgkmcnt(0)\n" \
           "buffer_load_dword v6, v1, s[4:7], 0 offen offset:512\ns_waitcnt vmcnt(0)\n" \
           f"ds_read_b64_tr_b{bits} v[20:21], v6\ns_waitcnt lgkmcnt(0)\n" \
           "buffer_store_dwordx2 v[20:21], v5, s[4:7], 0 offen\n"  # fmt: skip
    found = execute(body, np.concatenate([data, order]), chip="gfx950")[:128]
    kind = np.uint16 if bits == 16 else np.uint8
    memory = data.view(kind)
    rows = np.stack([memory[int(o) * 8 // bits :][:each] for o in order])  # [lane, value]
    expected = np.zeros((64, each), kind)
    for lane in range(64):
        block, place = lane // 16 * 16, lane % 16
        # Sixteen lanes hold `each` rows of 16 values; lane l gets value l of every row.
        matrix = rows[block : block + 16].reshape(each, 16)
        expected[lane] = matrix[:, place]
    np.testing.assert_array_equal(found.view(kind).reshape(64, each), expected)


@of("global_load_lds_dword", "global_load_lds_dwordx3", "global_load_lds_dwordx4")
@pytest.mark.parametrize("count", [1, 3, 4])
def test_loads_that_go_to_lds(count: int) -> None:
    """Lanes one after another from M0 on; reading before the wait is a fault."""
    data = GENERATOR.integers(0, 1 << 32, 64 * 5, dtype=np.uint32)
    order = GENERATOR.permutation(64).astype(np.uint32)
    suffix = f"x{count}" if count > 1 else ""
    body = "buffer_load_dword v5, v1, s[4:7], 0 offen\ns_waitcnt vmcnt(0)\n" \
           f"v_mul_u32_u24 v5, {4 * count}, v5\ns_mov_b32 m0, 64\ns_nop 0\n" \
           f"global_load_lds_dword{suffix} v5, s[4:5] offset:256\n{{}}\n" \
           f"v_mul_u32_u24 v6, {4 * count}, v0\n" \
           "ds_read_b32 v2, v6 offset:64\ns_waitcnt lgkmcnt(0)\n" \
           "buffer_store_dword v2, v1, s[4:7], 0 offen\n"  # fmt: skip
    whole = np.concatenate([order, data])
    chip = "gfx942" if count == 1 else "gfx950"
    # The offset of the instruction counts for LDS too.
    shifted = body.replace("offset:64\n", "offset:320\n")
    found = execute(shifted.format("s_waitcnt vmcnt(0)"), whole, chip=chip, lds=4096)[:64]
    np.testing.assert_array_equal(found, data[order * count])
    with pytest.raises(CodeError, match="still being loaded"):
        execute(shifted.format("s_nop 0"), whole, chip=chip, lds=4096)
