"""Reading and writing vector operands (types, DPP, SDWA), and the arithmetic done lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ci.cdna import floats, integers
from ci.cdna.integers import low, low24, signed64, unsigned64
from ci.cdna.machine import HANDLERS, LANES, Machine, constant, handles
from ci.cdna.parse import VCC, Instruction, Operand

Array = np.ndarray[Any, Any]
TYPES = {"u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64,
         "f64": np.float64, "u16": np.uint16, "i16": np.int16, "f16": np.float16}  # fmt: skip
_LANE = np.arange(LANES)


def raw(m: Machine, of: Operand, kind: str, lanes: Array | None = None) -> Array:
    """The bits of a source, uint32 or (64-bit kinds) uint64, [n, 64] or [n, 1]."""
    wide = kind.endswith("64")
    if of.kind == "v":
        word = m.vector(of.index, lanes)
        return integers.joined(word, m.vector(of.index + 1, lanes)) if wide else word
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


def source(m: Machine, i: Instruction, position: int, kind: str, lanes: Array | None = None
           ) -> Array:  # fmt: skip
    """Operand `position` as numbers, sub-word selection applied; `lanes` are those used."""
    of = i.operands[position]
    bits = raw(m, of, kind, lanes)
    if i.encoding == "sdwa":
        bits = _subword(bits, i.modifiers.get(f"src{position - 1}_sel", "DWORD"), of.sext)
    return typed(m, of, bits, kind)


def _subword(bits: Array, selection: str, sext: bool) -> Array:
    if selection == "DWORD":
        return bits
    unit, _, number = selection.partition("_")
    width = 8 if unit == "BYTE" else 16
    field = bits >> np.uint32(width * int(number)) & np.uint32((1 << width) - 1)
    return integers.extended(field, width) if sext else field


_ROW, _PLACE, _ALL = _LANE // 16 * 16, _LANE % 16, _LANE >= 0
# Of each DPP control and its number: the lane that each lane reads, and whether there is one.
_DPP: dict[str, Callable[[int], tuple[Array, Array]]] = {
    "row_shr": lambda n: (np.maximum(_LANE - n, 0), n <= _PLACE),
    "row_shl": lambda n: (np.minimum(_LANE + n, 63), _PLACE + n < 16),
    "row_ror": lambda n: (_ROW + (_PLACE - n) % 16, _ALL),
    "row_mirror": lambda n: (_ROW + 15 - _PLACE, _ALL),
    "row_half_mirror": lambda n: (_LANE // 8 * 8 + 7 - _LANE % 8, _ALL),
    "row_newbcast": lambda n: (_ROW + n, _ALL),
    # The last lane of each row to the next row, or lane 31 to both rows behind it.
    "row_bcast": lambda n: (np.maximum((_ROW if n == 15 else _ROW // 32 * 32) - 1, 0), n < _LANE),
}


def _moved(m: Machine, i: Instruction) -> tuple[Array, Array]:
    """(lane each lane reads from [64], whether that lane exists [64]) of a DPP control."""
    if "quad_perm" in i.modifiers:
        return _LANE // 4 * 4 + np.array(i.bits("quad_perm", 0, 4))[_LANE % 4], _ALL
    for key, move in _DPP.items():
        if key in i.modifiers and (key != "row_bcast" or i.number(key) in (15, 31)):
            return move(i.number(key))
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
        m.put_vector(to, low(words), lanes)
        m.put_vector(to + 1, integers.high(words), lanes)
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


def _wide(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function evaluated in float64: its float32 result is within the documented error."""
    return lambda x: f(x.astype(np.float64)).astype(np.float32)


def _fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The special cases of a division that fma steps get wrong."""
    q, d, n = np.broadcast_arrays(quotient, denominator, numerator)
    sign = np.where(np.signbit(d) ^ np.signbit(n), np.float32(-1), np.float32(1))
    out = sign * np.abs(q)
    out = np.where(np.isinf(d) | (n == 0), sign * np.float32(0), out)
    out = np.where((d == 0) | np.isinf(n), sign * np.float32(np.inf), out)
    bad = (d == 0) & (n == 0) | np.isinf(d) & np.isinf(n) | np.isnan(d) | np.isnan(n)
    return np.where(bad, np.float32(np.nan), out)


def _three(f: Callable[..., Array]) -> Callable[..., Array]:
    """A function of two applied to three."""
    return lambda a, b, c: f(f(a, b), c)


def _middle(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _mad24(a: Array, b: Array, c: Any = 0) -> Array:
    return low(low24(a) * low24(b) + c)


_greatest, _least = partial(floats.extreme, greatest=True), partial(floats.extreme, greatest=False)
# Types of result and sources, letters and bits, "+" being the destination: names and functions.
# fmt: off
_BY_TYPES: dict[str, dict[str, Callable[..., Array]]] = {
    "u32 u32": {
        **dict.fromkeys(("v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32",
                         "v_accvgpr_mov_b32"), lambda a: a),
        "v_not_b32": np.bitwise_not, "v_bfrev_b32": integers.reverse,
        "v_ffbh_u32": integers.leading_one, "v_ffbh_i32": integers.leading_change,
    },
    "u64 u64": {"v_mov_b64": lambda a: a},
    "f32 i32": {"v_cvt_f32_i32": lambda a: a.astype(np.float32)},
    "f32 u32": {"v_cvt_f32_u32": lambda a: a.astype(np.float32), **{
        f"v_cvt_f32_ubyte{n}": lambda a, n=n: (a >> np.uint32(8 * n) & 255).astype(np.float32)
        for n in range(4)
    }},
    "u32 f32": {"v_cvt_i32_f32": partial(floats.to_integer, signed=True),
                "v_cvt_u32_f32": partial(floats.to_integer, signed=False)},
    "f32 f16": {"v_cvt_f32_f16": lambda a: a.astype(np.float32)},
    "f16 f32": {"v_cvt_f16_f32": lambda a: a.astype(np.float16)},
    "f32 u16": {"v_cvt_f32_bf16": floats.from_bfloat16},
    "f32 f32": {
        "v_exp_f32": lambda a: floats.flush(_wide(np.exp2)(a)),
        "v_log_f32": lambda a: _wide(np.log2)(floats.flush(a)),
        **dict.fromkeys(("v_rcp_f32", "v_rcp_iflag_f32"), _wide(lambda a: 1 / a)),
        "v_rsq_f32": _wide(lambda a: 1 / np.sqrt(a)), "v_sqrt_f32": _wide(np.sqrt),
        "v_trunc_f32": np.trunc, "v_rndne_f32": np.rint, "v_floor_f32": np.floor,
        "v_ceil_f32": np.ceil,
    },
    "f32 f32 f32": {
        "v_add_f32": np.add, "v_sub_f32": np.subtract, "v_subrev_f32": lambda a, b: b - a,
        "v_mul_f32": np.multiply, "v_max_f32": _greatest, "v_min_f32": _least,
    },
    "f32 f32 i32": {"v_ldexp_f32": lambda a, b: np.ldexp(
        a.astype(np.float64), np.clip(b, -400, 400)).astype(np.float32)},
    "f32 f32 f32 +": {"v_fmac_f32": floats.fma32},
    "f32 f32 f32 f32": {
        **dict.fromkeys(("v_fma_f32", "v_fmaak_f32", "v_fmamk_f32"), floats.fma32),
        "v_max3_f32": _three(_greatest), "v_min3_f32": _three(_least),
        "v_maximum3_f32": _three(partial(floats.propagating, greatest=True)),
        "v_minimum3_f32": _three(partial(floats.propagating, greatest=False)),
        "v_med3_f32": floats.median, "v_div_fixup_f32": _fixup,
    },
    "f16 f16 f16": {"v_add_f16": np.add, "v_sub_f16": np.subtract, "v_mul_f16": np.multiply},
    "f16 f16 f16 f16": {"v_fma_f16": floats.fma16},
    "u32 f32 f32": {
        f"v_cvt_pk_{kind}_f32": lambda a, b, f=f: floats.halves(f(a), f(b))
        for kind, f in (("bf16", floats.to_bfloat16), ("f16", floats.to_float16))
    },
    "u32 u16 u16": {"v_pack_b32_f16": floats.halves},
    **{
        f"{kind} {kind} {kind}": {f"v_max_{kind}": np.maximum, f"v_min_{kind}": np.minimum}
        for kind in ("i16", "u16")
    },
    "u32 u32 u32": {
        "v_add_u32": np.add, "v_sub_u32": np.subtract, "v_subrev_u32": lambda a, b: b - a,
        "v_mul_lo_u32": np.multiply,
        "v_mul_hi_u32": lambda a, b: integers.high(unsigned64(a) * unsigned64(b)),
        "v_mul_u32_u24": _mad24,
        "v_and_b32": np.bitwise_and, "v_or_b32": np.bitwise_or, "v_xor_b32": np.bitwise_xor,
        "v_xnor_b32": lambda a, b: ~(a ^ b),
        "v_lshlrev_b32": lambda a, b: b << (a & 31), "v_lshrrev_b32": lambda a, b: b >> (a & 31),
        "v_max_u32": np.maximum, "v_min_u32": np.minimum,
        "v_bcnt_u32_b32": lambda a, b: integers.count(a) + b,
    },
    "u32 i32 i32": {"v_mul_hi_i32": lambda a, b: integers.high(signed64(a) * signed64(b)),
                    "v_mul_i32_i24": _mad24},
    "i32 i32 i32": {"v_max_i32": np.maximum, "v_min_i32": np.minimum,
                    "v_ashrrev_i32": lambda a, b: b >> (a & 31)},
    "u32 u32 u32 u32": {
        "v_max3_u32": _three(np.maximum), "v_min3_u32": _three(np.minimum), "v_med3_u32": _middle,
        "v_mad_u32_u24": _mad24,
        "v_add3_u32": _three(np.add), "v_or3_b32": _three(np.bitwise_or),
        "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
        "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
        "v_lshl_or_b32": lambda a, b, c: (a << (b & 31)) | c,
        "v_and_or_b32": lambda a, b, c: a & b | c, "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
        "v_bfe_u32": lambda a, b, c: integers.bit_field(a, b & 31, c & 31),
        "v_alignbit_b32": lambda a, b, c: low(integers.joined(b, a) >> unsigned64(c & 31)),
        "v_perm_b32": integers.bytes_of_two,
    },
    "u32 i32 i32 i32": {"v_mad_i32_i24": _mad24},
    "u32 i32 u32 u32": {"v_bfe_i32": lambda a, b, c: integers.bit_field(a, b & 31, c & 31)},
    "i32 i32 i32 i32": {"v_max3_i32": _three(np.maximum), "v_min3_i32": _three(np.minimum),
                        "v_med3_i32": _middle},
    "u64 u32 u64": {"v_lshlrev_b64": lambda a, b: b << unsigned64(a & 63),
                    "v_lshrrev_b64": lambda a, b: b >> unsigned64(a & 63)},
    "i64 u32 i64": {"v_ashrrev_i64": lambda a, b: b >> signed64(a & 63)},
    "u64 u64 u32 u64": {"v_lshl_add_u64": lambda a, b, c: (a << unsigned64(b & 7)) + c},
}
_BY_TYPES["u16 u16 u16"] |= {
    "v_add_u16": np.add, "v_sub_u16": np.subtract, "v_subrev_u16": lambda a, b: b - a,
    "v_mul_lo_u16": np.multiply, "v_lshlrev_b16": lambda a, b: b << (a & 15),
    "v_lshrrev_b16": lambda a, b: b >> (a & 15),
}
_BY_TYPES["i16 i16 i16"]["v_ashrrev_i16"] = lambda a, b: b >> (a & 15)
# fmt: on
_TABLE = {
    name: (types.partition(" ")[::2], compute)
    for types, named in _BY_TYPES.items()
    for name, compute in named.items()
}  # fmt: skip


@handles(*_TABLE)
def _lane_by_lane(m: Machine, i: Instruction) -> None:
    (result, kinds), compute = _TABLE[i.name]
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
        total = compute(*(signed64(value) for value in values))
        m.put_vector(i.operands[0].index, np.clip(total, 0, 0xFFFFFFFF).astype(np.uint32), lanes)
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
    # Only the lanes that take a source need it to hold something.
    picked = m.lane_bits(i.operands[3].index)
    lanes = None
    if i.encoding == "dpp":
        first, lanes = dpp(m, i, "f32")
    else:
        first = source(m, i, 1, "f32", m.mask & ~picked)
    second = source(m, i, 2, "f32", m.mask & picked)
    put(m, i, np.where(picked, second.view(np.uint32), first.view(np.uint32)), "u32", lanes)


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
    a, b = (signed64(raw(m, of, "u32")) for of in i.operands[2:4])
    carry = m.lane_bits(i.operands[4].index).astype(np.int64) if len(i.operands) > 4 else 0
    if "rev" in i.name:
        a, b = b, a
    wide = a + b + carry if i.name.startswith("v_add") else a - b - carry
    m.put_lane_bits(i.operands[1].index, ((wide < 0) | (wide > 0xFFFFFFFF)) & m.mask)
    m.put_vector(i.operands[0].index, low(wide))


@handles("v_mad_u64_u32", "v_mad_i64_i32")
def _wide_product(m: Machine, i: Instruction) -> None:
    a, b = (raw(m, of, "u32") for of in i.operands[2:4])
    third, to, signed = i.operands[4], i.operands[0].index, i.name == "v_mad_i64_i32"
    if signed:
        a, b = a.view(np.int32), b.view(np.int32)
    # The low word of the sum does not depend on the high word of the addend.
    c = m.vector(third.index) if third.kind == "v" else raw(m, third, "u64")
    of_low = m.unknown
    if third.kind == "v":
        c = integers.joined(c, m.vector(third.index + 1))
    product = (signed64(a) * b).view(np.uint64) if signed else unsigned64(a) * b
    total = product + c
    # Bit 64 of the sum: of signed numbers its true sign, the other one where 64 bits overflow.
    over = total < product
    if signed:
        over = (total ^ ((product ^ total) & (c ^ total))) >> np.uint64(63) == 1
    of_both, m.unknown = m.unknown, None  # the carry is not looked at where that matters
    m.put_lane_bits(i.operands[1].index, over & m.mask)
    for word, unknown, value in ((0, of_low, low(total)), (1, of_both, integers.high(total))):
        m.unknown = unknown
        m.put_vector(to + word, np.broadcast_to(value, m.mask.shape))


@handles("v_div_scale_f32")
def _scale(m: Machine, i: Instruction) -> None:
    s0, d, n = (typed(m, of, raw(m, of, "f32"), "f32") for of in i.operands[2:5])
    s0, d, n = (np.ascontiguousarray(x) for x in np.broadcast_arrays(s0, d, n))
    tiny = 2.0**-126
    top_d, top_n = (signed64(x.view(np.uint32) >> 23 & 255) for x in (d, n))
    with np.errstate(all="ignore"):
        quotient = np.abs(n.astype(np.float64) / d.astype(np.float64))
        quotient_small = (quotient < tiny) & (quotient > 0)
    up = np.ldexp(s0, 64).astype(np.float32)
    # In this order: when, the value, VCC. (1 / d is never subnormal as a float64.)
    cases: tuple[tuple[Any, Any, bool], ...] = (
        ((n == 0) | (d == 0), np.full_like(s0, np.nan), False),
        (top_n - top_d >= 96, np.where(s0 == d, up, s0), True),
        ((np.abs(d) < tiny) & (d != 0), up, False),
        (quotient_small, np.where(s0 == n, up, s0), True),
        (top_n <= 23, up, False),
    )
    when, values, flags = zip(*cases, strict=True)
    flag = np.select(when, [np.full(s0.shape, on) for on in flags], False)
    m.put_lane_bits(i.operands[1].index, np.broadcast_to(flag, m.mask.shape) & m.mask)
    m.put_vector(i.operands[0].index, np.select(when, values, s0).view(np.uint32))


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
    below = unsigned64(np.clip(_LANE - (32 if "_hi_" in i.name else 0), 0, 32))
    mask = low((np.uint64(1) << below) - np.uint64(1))
    m.put_vector(i.operands[0].index, integers.count(bits & mask) + start)


@handles("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _swap(m: Machine, i: Instruction) -> None:
    if not m.mask.all():
        raise m.fault("a swap of lanes with some inactive is not supported")
    to, of = i.operands[0].index, i.operands[1].index
    a, b = m.vector(to).copy(), m.vector(of).copy()
    width = 32 if "32_swap" in i.name else 16
    first = _LANE % (2 * width) < width
    a[:, ~first], b[:, first] = m.vector(of)[:, first], m.vector(to)[:, ~first]
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
