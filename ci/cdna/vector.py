"""Reading and writing vector operands (types, DPP, SDWA), and the arithmetic done lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ci.cdna import floats
from ci.cdna.machine import HANDLERS, LANES, Machine, constant, handles
from ci.cdna.parse import VCC, Instruction, Operand

Array = np.ndarray[Any, Any]
TYPES = {"u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64,
         "f64": np.float64, "u16": np.uint16, "i16": np.int16, "f16": np.float16}  # fmt: skip
_LANE = np.arange(LANES)
_DPP = ("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror",
        "row_bcast", "row_newbcast", "wave_shl", "wave_shr", "wave_ror", "wave_rol")  # fmt: skip


def raw(m: Machine, of: Operand, kind: str, lanes: Array | None = None) -> Array:
    """The bits of a source, uint32 or (64-bit kinds) uint64, [n, 64] or [n, 1]."""
    wide = kind.endswith("64")
    if of.kind == "v":
        low = m.vector(of.index, lanes)
        if not wide:
            return low
        high = m.vector(of.index + 1, lanes)
        return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    if of.kind == "s":
        return (m.scalar64(of) if wide else m.scalar32(of))[:, None]
    if of.kind in ("int", "float"):
        literal = wide and of.kind == "int" and not -16 <= of.value <= 64
        if literal and (kind == "f64" or not 0 <= of.value < 1 << 31):
            raise m.fault("a 64-bit literal of unclear extension is not supported")
        return np.full((1, 1), constant(of, kind), np.uint64 if wide else np.uint32)
    raise m.fault(f"operand {of.name} is not supported here")


def typed(m: Machine, of: Operand, bits: Array, kind: str) -> Array:
    """Bits as numbers of `kind`, with the operand's negation and absolute value."""
    if kind in ("u16", "i16", "f16"):
        bits = bits.astype(np.uint16)
    value = np.ascontiguousarray(bits).view(TYPES[kind])
    if of.absolute or of.negate:
        if kind[0] != "f":
            raise m.fault("negation of an integer operand is not supported")
        value = np.abs(value) if of.absolute else value
        value = -value if of.negate else value
    return value


def source(m: Machine, i: Instruction, position: int, kind: str) -> Array:
    """Operand `position` as numbers, sub-word selection applied."""
    of = i.operands[position]
    bits = raw(m, of, kind)
    if i.encoding == "sdwa":
        bits = _subword(bits, i.modifiers.get(f"src{position - 1}_sel", "DWORD"), of.sext)
    return typed(m, of, bits, kind)


def _subword(bits: Array, selection: str, sext: bool) -> Array:
    if selection == "DWORD":
        return bits
    unit, _, number = selection.partition("_")
    width = 8 if unit == "BYTE" else 16
    field = bits >> np.uint32(width * int(number)) & np.uint32((1 << width) - 1)
    if sext:
        sign = np.uint32(1 << (width - 1))
        field = (field ^ sign) - sign
    return field


def _moved(m: Machine, i: Instruction) -> tuple[Array, Array]:
    """(lane each lane reads from [64], whether that lane exists [64]) of a DPP control."""
    row, place = _LANE // 16, _LANE % 16
    key = next((k for k in _DPP if k in i.modifiers), None)
    amount = int(i.modifiers[key]) if key and key.startswith(("row_s", "row_r", "row_b", "row_n")) \
        else 0  # fmt: skip
    everywhere = np.ones(LANES, bool)
    if key == "quad_perm":
        order = np.array([int(x) for x in i.modifiers[key].strip("[]").split(",")])
        return _LANE // 4 * 4 + order[_LANE % 4], everywhere
    if key == "row_shr":
        return np.maximum(_LANE - amount, 0), place >= amount
    if key == "row_shl":
        return np.minimum(_LANE + amount, 63), place + amount < 16
    if key == "row_ror":
        return row * 16 + (place - amount) % 16, everywhere
    if key == "row_mirror":
        return row * 16 + 15 - place, everywhere
    if key == "row_half_mirror":
        return _LANE // 8 * 8 + 7 - _LANE % 8, everywhere
    if key == "row_newbcast":
        return row * 16 + amount, everywhere
    if key == "row_bcast" and amount == 15:
        return np.maximum(row * 16 - 1, 0), row > 0
    if key == "row_bcast" and amount == 31:
        return np.full(LANES, 31), row > 1
    raise m.fault("this DPP control is not supported")


def dpp(m: Machine, i: Instruction, kind: str) -> tuple[Array, Array]:
    """(source 0 moved between lanes, lanes that are written [n, 64])."""
    of = i.operands[1]
    lane, exists = _moved(m, i)
    valid = exists & m.mask[:, lane]
    rows, banks = int(i.modifiers["row_mask"], 0), int(i.modifiers["bank_mask"], 0)
    enabled = (rows >> _LANE // 16 & 1) & (banks >> _LANE % 16 // 4 & 1)
    written = m.mask & (enabled == 1)
    needed = np.zeros_like(m.mask)
    wave, reader = np.nonzero(valid & written)
    needed[wave, lane[reader]] = True
    bits = np.where(valid, raw(m, of, kind, needed)[:, lane], np.uint32(0))
    if i.modifiers.get("bound_ctrl", "0") == "0":
        written = written & valid
    return typed(m, of, bits, kind), written


def put(m: Machine, i: Instruction, value: Array, kind: str, lanes: Array | None = None) -> None:
    """Write numbers to the first operand: clamp, output factor and SDWA destination applied."""
    if "mul" in i.modifiers or "div" in i.modifiers:
        if kind != "f32":
            raise m.fault("an output factor of this type is not supported")
        value = (
            value * np.float32(i.modifiers.get("mul", 1)) / np.float32(i.modifiers.get("div", 1))
        )
    if "clamp" in i.modifiers:
        if kind != "f32":
            raise m.fault("clamping this type is not supported")
        value = np.where(np.isnan(value), 0, np.clip(value, 0, 1))
    value = np.ascontiguousarray(value, TYPES[kind])
    to = i.operands[0].index
    if kind.endswith("64"):
        words = value.view(np.uint64)
        m.put_vector(to, (words & np.uint64(0xFFFFFFFF)).astype(np.uint32), lanes)
        m.put_vector(to + 1, (words >> np.uint64(32)).astype(np.uint32), lanes)
        return
    if kind.endswith("16"):
        bits = value.view(np.uint16).astype(np.uint32)
    else:
        bits = value.view(np.uint32)
    if i.encoding == "sdwa" and i.modifiers.get("dst_sel", "DWORD") != "DWORD":
        unit, _, number = i.modifiers["dst_sel"].partition("_")
        width = 8 if unit == "BYTE" else 16
        field = np.uint32((1 << width) - 1)
        shift = np.uint32(width * int(number))
        rest: Any = np.uint32(0)
        if i.modifiers["dst_unused"] == "UNUSED_PRESERVE":
            rest = m.vector(to) & ~np.uint32(int(field) << int(shift))
        elif i.modifiers["dst_unused"] != "UNUSED_PAD":
            raise m.fault("sign extension around an SDWA destination is not supported")
        bits = rest | (bits & field) << shift
    m.put_vector(to, bits, lanes)


def _i64(x: Array) -> Array:
    return x.astype(np.int64)


def _u64(x: Array) -> Array:
    return x.astype(np.uint64)


def _low24(x: Array, signed: bool) -> Array:
    field = _i64(x) & 0xFFFFFF
    return (field ^ 0x800000) - 0x800000 if signed else field


def _low(x: Array) -> Array:
    return (_i64(x) & 0xFFFFFFFF).astype(np.uint32)


def _legacy_bfe(x: Array, offset: Array, width: Array) -> Array:
    o, w = _i64(offset) & 31, _i64(width) & 31
    field = _i64(x) >> o & (np.left_shift(np.int64(1), w) - 1)
    if x.dtype == np.int32:
        sign = np.where(w > 0, np.left_shift(np.int64(1), np.maximum(w - 1, 0)), 0)
        field = (field ^ sign) - sign
    return field


def _reverse(x: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, 4), axis=-1,
                         bitorder="little")  # fmt: skip
    return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(np.uint32)[..., 0]


def _leading(x: Array) -> Array:
    """Zeros above the highest set bit of uint32, all ones for none."""
    wide = np.where(x == 0, 1, x).astype(np.float64)
    return np.where(x == 0, 0xFFFFFFFF, 32 - np.frexp(wide)[1]).astype(np.uint32)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    data = _u64(a) << np.uint64(32) | _u64(b)
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint32)
    for byte in range(4):
        pick = selector >> np.uint32(8 * byte) & np.uint32(0xFF)
        value = data >> _u64(8 * (pick & 7)) & np.uint64(0xFF)
        half = np.clip(pick.astype(np.int64) - 8, 0, 3)
        signs = (data >> (16 * half + 15).astype(np.uint64) & np.uint64(1)) * np.uint64(0xFF)
        value = np.where(pick < 8, value, np.where(pick < 12, signs,
                         np.where(pick == 12, np.uint64(0), np.uint64(0xFF))))  # fmt: skip
        out = out | value.astype(np.uint32) << np.uint32(8 * byte)
    return out


def _wide(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function evaluated in float64: its float32 result is within the documented error."""

    def evaluate(x: Array) -> Array:
        with np.errstate(all="ignore"):
            return f(x.astype(np.float64)).astype(np.float32)

    return evaluate


def _sqrt_inverse(x: Array) -> Array:
    return np.where(x == 0, np.copysign(np.inf, x), 1 / np.sqrt(x))


def _ldexp(x: Array, n: Array) -> Array:
    return np.ldexp(x.astype(np.float64), np.clip(n, -400, 400)).astype(np.float32)


def _fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The special cases of a division that fma steps get wrong."""
    q, d, n = np.broadcast_arrays(quotient, denominator, numerator)
    sign = np.where(np.signbit(d) ^ np.signbit(n), np.float32(-1), np.float32(1))
    out = sign * np.abs(q)
    out = np.where(np.isinf(d) | (n == 0), sign * np.float32(0), out)
    out = np.where((d == 0) | np.isinf(n), sign * np.float32(np.inf), out)
    bad = (d == 0) & (n == 0) | np.isinf(d) & np.isinf(n) | np.isnan(d) | np.isnan(n)
    return np.where(bad, np.float32(np.nan), out)


# name: (result, sources..., function); the type letters are u, i, f and the bits.
# fmt: off
_TABLE: dict[str, tuple[str, str, Callable[..., Array]]] = {
    "v_mov_b32": ("u32", "u32", lambda a: a),
    "v_mov_b64": ("u64", "u64", lambda a: a),
    "v_accvgpr_read_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_write_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_mov_b32": ("u32", "u32", lambda a: a),
    "v_not_b32": ("u32", "u32", lambda a: ~a),
    "v_bfrev_b32": ("u32", "u32", _reverse),
    "v_ffbh_u32": ("u32", "u32", _leading),
    "v_ffbh_i32": ("u32", "u32", lambda a: _leading_signed(a)),
    "v_cvt_f32_i32": ("f32", "i32", lambda a: a.astype(np.float32)),
    "v_cvt_f32_u32": ("f32", "u32", lambda a: a.astype(np.float32)),
    "v_cvt_i32_f32": ("u32", "f32", lambda a: floats.to_integer(a, True)),
    "v_cvt_u32_f32": ("u32", "f32", lambda a: floats.to_integer(a, False)),
    "v_cvt_f32_f16": ("f32", "f16", lambda a: a.astype(np.float32)),
    "v_cvt_f16_f32": ("f16", "f32", lambda a: a.astype(np.float16)),
    "v_cvt_f32_bf16": ("f32", "u16", floats.from_bfloat16),
    **{
        f"v_cvt_f32_ubyte{n}": (
            "f32", "u32", lambda a, n=n: (a >> np.uint32(8 * n) & np.uint32(255)).astype(np.float32)
        )
        for n in range(4)
    },
    "v_exp_f32": ("f32", "f32", lambda a: floats.flush(_wide(np.exp2)(a))),
    "v_log_f32": ("f32", "f32", lambda a: _wide(np.log2)(floats.flush(a))),
    "v_rcp_f32": ("f32", "f32", _wide(lambda a: 1 / a)),
    "v_rcp_iflag_f32": ("f32", "f32", _wide(lambda a: 1 / a)),
    "v_rsq_f32": ("f32", "f32", _wide(_sqrt_inverse)),
    "v_sqrt_f32": ("f32", "f32", _wide(np.sqrt)),
    "v_trunc_f32": ("f32", "f32", np.trunc),
    "v_rndne_f32": ("f32", "f32", np.rint),
    "v_floor_f32": ("f32", "f32", np.floor),
    "v_ceil_f32": ("f32", "f32", np.ceil),
    "v_add_f32": ("f32", "f32 f32", lambda a, b: a + b),
    "v_sub_f32": ("f32", "f32 f32", lambda a, b: a - b),
    "v_subrev_f32": ("f32", "f32 f32", lambda a, b: b - a),
    "v_mul_f32": ("f32", "f32 f32", lambda a, b: a * b),
    "v_max_f32": ("f32", "f32 f32", lambda a, b: floats.extreme(a, b, True)),
    "v_min_f32": ("f32", "f32 f32", lambda a, b: floats.extreme(a, b, False)),
    "v_ldexp_f32": ("f32", "f32 i32", _ldexp),
    "v_fma_f32": ("f32", "f32 f32 f32", floats.fma32),
    "v_fmaak_f32": ("f32", "f32 f32 f32", floats.fma32),
    "v_fmamk_f32": ("f32", "f32 f32 f32", floats.fma32),
    "v_fmac_f32": ("f32", "f32 f32 +", floats.fma32),
    "v_max3_f32": (
        "f32", "f32 f32 f32",
        lambda a, b, c: floats.extreme(floats.extreme(a, b, True), c, True),
    ),
    "v_min3_f32": (
        "f32", "f32 f32 f32",
        lambda a, b, c: floats.extreme(floats.extreme(a, b, False), c, False),
    ),
    "v_minimum3_f32": ("f32", "f32 f32 f32", lambda a, b, c: floats.propagating(
        floats.propagating(a, b, False), c, False)),
    "v_maximum3_f32": ("f32", "f32 f32 f32", lambda a, b, c: floats.propagating(
        floats.propagating(a, b, True), c, True)),
    "v_med3_f32": ("f32", "f32 f32 f32", floats.median),
    **{
        f"v_{name}3_{kind}": (kind, " ".join([kind] * 3), lambda a, b, c, f=f: f(f(a, b), c))
        for name, f in (("min", np.minimum), ("max", np.maximum))
        for kind in ("i32", "u32")
    },
    "v_med3_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.maximum(
        np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "v_div_fixup_f32": ("f32", "f32 f32 f32", _fixup),
    "v_add_u32": ("u32", "u32 u32", lambda a, b: a + b),
    "v_sub_u32": ("u32", "u32 u32", lambda a, b: a - b),
    "v_subrev_u32": ("u32", "u32 u32", lambda a, b: b - a),
    "v_mul_lo_u32": ("u32", "u32 u32", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32", "u32 u32", lambda a, b: _u64(a) * _u64(b) >> np.uint64(32)),
    "v_mul_hi_i32": ("u32", "i32 i32", lambda a, b: _low(_i64(a) * _i64(b) >> 32)),
    "v_mul_u32_u24": ("u32", "u32 u32", lambda a, b: _low(_low24(a, False) * _low24(b, False))),
    "v_mul_i32_i24": ("u32", "i32 i32", lambda a, b: _low(_low24(a, True) * _low24(b, True))),
    "v_mad_u32_u24": (
        "u32", "u32 u32 u32",
        lambda a, b, c: _low(_low24(a, False) * _low24(b, False) + _i64(c)),
    ),
    "v_mad_i32_i24": (
        "u32", "i32 i32 i32", lambda a, b, c: _low(_low24(a, True) * _low24(b, True) + _i64(c))
    ),
    "v_and_b32": ("u32", "u32 u32", np.bitwise_and),
    "v_or_b32": ("u32", "u32 u32", np.bitwise_or),
    "v_xor_b32": ("u32", "u32 u32", np.bitwise_xor),
    "v_xnor_b32": ("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("u32", "u32 u32", lambda a, b: b << (a & 31)),
    "v_lshrrev_b32": ("u32", "u32 u32", lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": ("i32", "i32 i32", lambda a, b: b >> (a & 31)),
    "v_lshlrev_b16": ("u16", "u16 u16", lambda a, b: b << (a & 15)),
    "v_lshrrev_b16": ("u16", "u16 u16", lambda a, b: b >> (a & 15)),
    "v_lshlrev_b64": ("u64", "u32 u64", lambda a, b: b << _u64(a & 63)),
    "v_lshrrev_b64": ("u64", "u32 u64", lambda a, b: b >> _u64(a & 63)),
    "v_ashrrev_i64": ("i64", "u32 i64", lambda a, b: b >> _i64(a & 63)),
    "v_add_u16": ("u16", "u16 u16", lambda a, b: a + b),
    "v_sub_u16": ("u16", "u16 u16", lambda a, b: a - b),
    "v_subrev_u16": ("u16", "u16 u16", lambda a, b: b - a),
    "v_mul_lo_u16": ("u16", "u16 u16", lambda a, b: a * b),
    "v_max_u16": ("u16", "u16 u16", np.maximum),
    "v_min_u16": ("u16", "u16 u16", np.minimum),
    "v_max_i16": ("i16", "i16 i16", np.maximum),
    "v_min_i16": ("i16", "i16 i16", np.minimum),
    "v_ashrrev_i16": ("i16", "i16 i16", lambda a, b: b >> (a & 15)),
    "v_max_i32": ("i32", "i32 i32", np.maximum),
    "v_min_i32": ("i32", "i32 i32", np.minimum),
    "v_max_u32": ("u32", "u32 u32", np.maximum),
    "v_min_u32": ("u32", "u32 u32", np.minimum),
    "v_med3_i32": ("i32", "i32 i32 i32", lambda a, b, c: np.maximum(
        np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "v_add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a + b) << (c & 31)),
    "v_lshl_add_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & 31)) + c),
    "v_lshl_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & 31)) | c),
    "v_and_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | c),
    "v_or3_b32": ("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_bfi_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    "v_bfe_u32": ("u32", "u32 u32 u32", _legacy_bfe),
    "v_bfe_i32": ("i32", "i32 i32 i32", _legacy_bfe),
    "v_alignbit_b32": ("u32", "u32 u32 u32", lambda a, b, c: _low(
        (_u64(a) << np.uint64(32) | _u64(b)) >> _u64(c & 31))),
    "v_perm_b32": ("u32", "u32 u32 u32", _permute),
    "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << _u64(b & 7)) + c),
    "v_cvt_pk_bf16_f32": ("u32", "f32 f32", lambda a, b: floats.to_bfloat16(a).astype(np.uint32)
                          | floats.to_bfloat16(b).astype(np.uint32) << 16),
    "v_pack_b32_f16": ("u32", "u16 u16", lambda a, b: a.astype(np.uint32)
                       | b.astype(np.uint32) << np.uint32(16)),
    "v_cvt_pk_f16_f32": ("u32", "f32 f32", lambda a, b: floats.to_float16(a)
                         | floats.to_float16(b) << np.uint32(16)),
    "v_bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: np.bitwise_count(a).astype(np.uint32) + b),
    "v_add_f16": ("f16", "f16 f16", lambda a, b: a + b),
    "v_sub_f16": ("f16", "f16 f16", lambda a, b: a - b),
    "v_mul_f16": ("f16", "f16 f16", lambda a, b: a * b),
    "v_fma_f16": ("f16", "f16 f16 f16", floats.fma16),
}
# fmt: on


def _leading_signed(x: Array) -> Array:
    """Equal bits below the sign bit's run: index from the top of the first that differs."""
    folded = np.where(x >> 31 == 1, ~x, x)
    return _leading(folded)


@handles(*_TABLE)
def _lane_by_lane(m: Machine, i: Instruction) -> None:
    result, kinds, compute = _TABLE[i.name]
    lanes = None
    values: list[Array] = []
    for position, kind in enumerate(kinds.split(), 1):
        if kind == "+":
            values.append(typed(m, i.operands[0], raw(m, i.operands[0], "f32"), "f32"))
        elif position == 1 and i.encoding.endswith("dpp"):
            value, lanes = dpp(m, i, kind)
            values.append(value)
        else:
            values.append(source(m, i, position, kind))
    if "op_sel" in i.modifiers:
        raise m.fault("op_sel of this instruction is not supported")
    if "clamp" in i.modifiers and i.name in ("v_sub_u32", "v_add_u32"):
        wide = _i64(values[0]) + (_i64(values[1]) if "add" in i.name else -_i64(values[1]))
        m.put_vector(i.operands[0].index, np.clip(wide, 0, 0xFFFFFFFF).astype(np.uint32), lanes)
        return
    with np.errstate(all="ignore"):
        put(m, i, compute(*values), result, lanes)


_FLOAT_RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b), "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b), "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
}  # fmt: skip


def _compare(m: Machine, i: Instruction) -> None:
    _, _, name, kind = i.name.split("_")
    relation = np.not_equal if name == "ne" else _FLOAT_RELATIONS[name]
    # Under SDWA the sources are numbered from the first operand after the mask.
    a, b = source(m, i, 1, kind), source(m, i, 2, kind)
    with np.errstate(invalid="ignore"):
        m.put_lane_bits(i.operands[0].index, relation(a, b) & m.mask)


for _name in _FLOAT_RELATIONS:
    for _kind in ("f32", "f64", "f16"):
        HANDLERS[f"v_cmp_{_name}_{_kind}"] = _compare
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _kind in ("u32", "i32", "u64", "i64", "u16", "i16"):
        HANDLERS[f"v_cmp_{_name}_{_kind}"] = _compare


@handles("v_cndmask_b32")
def _choose(m: Machine, i: Instruction) -> None:
    picked = m.lane_bits(i.operands[3].index)
    lanes = None
    if i.encoding == "dpp":
        first, lanes = dpp(m, i, "f32")
    else:
        first = _one_of(m, i, 1, m.mask & ~picked)
    second = _one_of(m, i, 2, m.mask & picked)
    put(m, i, np.where(picked, second.view(np.uint32), first.view(np.uint32)), "u32", lanes)


def _one_of(m: Machine, i: Instruction, position: int, needed: Array) -> Array:
    """A choice: only the lanes that take it have to hold something."""
    of = i.operands[position]
    bits = raw(m, of, "f32", needed)
    if i.encoding == "sdwa":
        bits = _subword(bits, i.modifiers.get(f"src{position - 1}_sel", "DWORD"), of.sext)
    return typed(m, of, bits, "f32")


@handles("v_readfirstlane_b32", "v_readlane_b32")
def _read_lane(m: Machine, i: Instruction) -> None:
    if i.name == "v_readlane_b32":
        lane = (m.scalar32(i.operands[2]) & 63).astype(np.int64)
    else:
        lane = m.mask.argmax(axis=1)  # with EXEC empty, lane 0
    used = lane[:, None] == _LANE
    value = m.vector(i.operands[1].index, used)
    m.put_scalar(i.operands[0].index, value[np.arange(m.count), lane])


@handles("v_writelane_b32")
def _write_lane(m: Machine, i: Instruction) -> None:
    lane = m.scalar32(i.operands[2]) & 63
    m.put_vector(i.operands[0].index, m.scalar32(i.operands[1])[:, None], lane[:, None] == _LANE)


@handles("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32",
         "v_subbrev_co_u32")  # fmt: skip
def _carry(m: Machine, i: Instruction) -> None:
    a, b = (_i64(raw(m, of, "u32")) for of in i.operands[2:4])
    carry = m.lane_bits(i.operands[4].index).astype(np.int64) if len(i.operands) > 4 else 0
    if "rev" in i.name:
        a, b = b, a
    wide = a + b + carry if i.name.startswith("v_add") else a - b - carry
    m.put_lane_bits(i.operands[1].index, ((wide < 0) | (wide > 0xFFFFFFFF)) & m.mask)
    m.put_vector(i.operands[0].index, _low(wide))


@handles("v_mad_u64_u32", "v_mad_i64_i32")
def _wide_product(m: Machine, i: Instruction) -> None:
    a, b = (raw(m, of, "u32") for of in i.operands[2:4])
    third = i.operands[4]
    if third.kind == "v":
        # The low word of the sum does not depend on the high word of the addend.
        c = _u64(m.vector(third.index))
        certain = m.unknown
        c = c | _u64(m.vector(third.index + 1)) << np.uint64(32)
    else:
        c = raw(m, third, "u64")
        certain = m.unknown
    if i.name == "v_mad_i64_i32":
        a, b = _i64(a.view(np.int32)).view(np.uint64), _i64(b.view(np.int32)).view(np.uint64)
    product = _u64(a) * _u64(b)
    total = product + c
    if i.name == "v_mad_u64_u32":
        over = total < product
    else:
        # Signed overflow: both of one sign and the sum of the other.
        over = ((product ^ total) & (c ^ total)) >> np.uint64(63) == 1
    unknown, m.unknown = m.unknown, None  # the carry is not looked at where that matters
    m.put_lane_bits(i.operands[1].index, over & m.mask)
    m.unknown = unknown
    to, total = i.operands[0].index, np.broadcast_to(total, m.mask.shape)
    high_unknown, m.unknown = m.unknown, certain
    m.put_vector(to, (total & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    m.unknown = high_unknown
    m.put_vector(to + 1, (total >> np.uint64(32)).astype(np.uint32))


@handles("v_div_scale_f32")
def _scale(m: Machine, i: Instruction) -> None:
    s0, d, n = (typed(m, of, raw(m, of, "f32"), "f32") for of in i.operands[2:5])
    s0, d, n = np.broadcast_arrays(s0, d, n)
    tiny = 2.0**-126
    exponent = {k: (v.view(np.uint32) >> 23 & 255).astype(np.int64) for k, v in
                (("n", np.ascontiguousarray(n)), ("d", np.ascontiguousarray(d)))}  # fmt: skip
    with np.errstate(all="ignore"):
        inverse_small = np.abs(1 / d.astype(np.float64)) < 2.0**-1022
        quotient = np.abs(n.astype(np.float64) / d.astype(np.float64))
        quotient_small = (quotient < tiny) & (quotient > 0)
    is_d, is_n = s0 == d, s0 == n
    up, down = (np.ldexp(s0, k).astype(np.float32) for k in (64, -64))
    cases = [
        ((n == 0) | (d == 0), np.full_like(s0, np.nan), False),
        (exponent["n"] - exponent["d"] >= 96, np.where(is_d, up, s0), True),
        ((np.abs(d) < tiny) & (d != 0), up, False),
        (inverse_small & quotient_small, np.where(is_d, up, s0), True),
        (inverse_small, down, False),
        (quotient_small, np.where(is_n, up, s0), True),
        (exponent["n"] <= 23, up, False),
    ]
    conditions = [case[0] for case in cases]
    value = np.select(conditions, [case[1] for case in cases], s0)
    flag = np.select(conditions, [np.full(s0.shape, case[2]) for case in cases], False)
    m.put_lane_bits(i.operands[1].index, np.broadcast_to(flag, m.mask.shape) & m.mask)
    m.put_vector(i.operands[0].index, np.ascontiguousarray(value, np.float32).view(np.uint32))


@handles("v_div_fmas_f32")
def _scaled_fma(m: Machine, i: Instruction) -> None:
    """Undoes what v_div_scale did where it set VCC.

    CDNA's documents print a factor of 2**32, with which no scaled quotient would be right; the
    factors of RDNA3's, 2**64 or its inverse by the size of the addend, undo both ways of scaling.
    """
    a, b, c = (source(m, i, k, "f32") for k in (1, 2, 3))
    with np.errstate(all="ignore"):
        total = floats.fma32(a, b, c)
        large = np.abs(c) >= 2
        back = np.where(large, np.float32(2.0**64), np.float32(2.0**-64))
        put(m, i, np.where(m.lane_bits(VCC), total * back, total), "f32")


@handles("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _lanes_below(m: Machine, i: Instruction) -> None:
    bits, start = raw(m, i.operands[1], "u32"), raw(m, i.operands[2], "u32")
    low = i.name == "v_mbcnt_lo_u32_b32"
    below = np.clip(_LANE - (0 if low else 32), 0, 32).astype(np.uint64)
    mask = ((np.uint64(1) << below) - np.uint64(1)).astype(np.uint32)
    m.put_vector(i.operands[0].index, np.bitwise_count(bits & mask).astype(np.uint32) + start)


@handles("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _swap(m: Machine, i: Instruction) -> None:
    if not m.mask.all():
        raise m.fault("a swap of lanes with some inactive is not supported")
    to, of = i.operands[0].index, i.operands[1].index
    a, b = m.vector(to).copy(), m.vector(of).copy()
    width = 32 if "32_swap" in i.name else 16
    low = _LANE % (2 * width) < width
    high = ~low
    a[:, high], b[:, low] = m.vector(of)[:, low], m.vector(to)[:, high]
    m.put_vector(to, a)
    m.put_vector(of, b)


@handles("v_bitop3_b32", "v_bitop3_b16")
def _truth_table(m: Machine, i: Instruction) -> None:
    a, b, c = (raw(m, of, "u32") for of in i.operands[1:4])
    table = int(i.modifiers["bitop3"], 0)
    out = np.zeros(m.mask.shape, np.uint32)
    for row in range(8):
        if table >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    if i.name.endswith("b16"):
        if "op_sel" in i.modifiers:
            raise m.fault("op_sel of this instruction is not supported")
        out &= np.uint32(0xFFFF)
    m.put_vector(i.operands[0].index, out)


@handles("v_nop")
def _nothing(m: Machine, i: Instruction) -> None:
    """Time is not modelled."""
