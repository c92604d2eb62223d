"""Scalar instructions: arithmetic on SGPRs, SCC, branches, scalar loads, waits and barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ci.cdna.machine import ENDED, HANDLERS, WAITING, Machine, handles
from ci.cdna.parse import EXEC, VCC, Instruction, Operand

Array = np.ndarray[Any, Any]
U64, I64 = np.uint64, np.int64


def _i(x: Array) -> Array:
    """uint32 as signed, in 64 bits."""
    return x.view(np.int32).astype(I64)


def _u(x: Array) -> Array:
    return x.astype(U64)


def _low(x: Array) -> Array:
    return (x.astype(U64, casting="unsafe") & U64(0xFFFFFFFF)).astype(np.uint32)


def _fits(x: Array) -> Array:
    """Whether int64 values are within 32 signed bits."""
    return (x < -(1 << 31)) | (x >= 1 << 31)


def _bfe(x: Array, control: Array, signed: bool) -> Array:
    offset, width = (control & 31).astype(I64), (control >> 16 & 127).astype(I64)
    wide = _i(x) if signed else x.astype(I64)
    field = wide >> offset & (np.left_shift(I64(1), width) - 1)
    if signed:
        sign = np.where(width > 0, np.left_shift(I64(1), np.maximum(width - 1, 0)), 0)
        field = (field ^ sign) - sign
    return _low(field)


def _reverse(x: Array) -> Array:
    octets = np.ascontiguousarray(x)[:, None].view(np.uint8)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)[:, 0]


def _first_one(x: Array) -> Array:
    """Index of the lowest set bit, -1 if there is none; x uint32 or uint64."""
    bits = np.unpackbits(np.ascontiguousarray(x[:, None]).view(np.uint8), axis=1, bitorder="little")
    return np.where(bits.any(axis=1), bits.argmax(axis=1), 0xFFFFFFFF).astype(np.uint32)


def _leading_one(x: Array) -> Array:
    """Zeros above the highest set bit of uint32, -1 for none."""
    return _first_one(_reverse(x))


def _popcount(x: Array) -> Array:
    return np.bitwise_count(x).astype(np.uint32)


# result and SCC of 32-bit operations; None leaves SCC as it is, "nonzero" is what it says.
_TWO: dict[str, tuple[Callable[[Array, Array], Array], Any]] = {
    "s_add_u32": (lambda a, b: a + b, lambda a, b: _u(a) + _u(b) > U64(0xFFFFFFFF)),
    "s_add_i32": (lambda a, b: a + b, lambda a, b: _fits(_i(a) + _i(b))),
    "s_sub_u32": (lambda a, b: a - b, lambda a, b: b > a),
    "s_sub_i32": (lambda a, b: a - b, lambda a, b: _fits(_i(a) - _i(b))),
    "s_mul_i32": (lambda a, b: a * b, None),
    "s_mul_hi_u32": (lambda a, b: (_u(a) * _u(b) >> U64(32)).astype(np.uint32), None),
    "s_mul_hi_i32": (lambda a, b: _low(_i(a) * _i(b) >> 32), None),
    "s_min_i32": (lambda a, b: np.where(_i(a) < _i(b), a, b), lambda a, b: _i(a) < _i(b)),
    "s_max_i32": (lambda a, b: np.where(_i(a) > _i(b), a, b), lambda a, b: _i(a) > _i(b)),
    "s_min_u32": (np.minimum, lambda a, b: a < b),
    "s_max_u32": (np.maximum, lambda a, b: a > b),
    "s_and_b32": (np.bitwise_and, "nonzero"),
    "s_or_b32": (np.bitwise_or, "nonzero"),
    "s_xor_b32": (np.bitwise_xor, "nonzero"),
    "s_andn2_b32": (lambda a, b: a & ~b, "nonzero"),
    "s_orn2_b32": (lambda a, b: a | ~b, "nonzero"),
    "s_lshl_b32": (lambda a, b: a << (b & 31), "nonzero"),
    "s_lshr_b32": (lambda a, b: a >> (b & 31), "nonzero"),
    "s_ashr_i32": (lambda a, b: _low(_i(a) >> (b & 31).astype(I64)), "nonzero"),
    "s_bfe_u32": (lambda a, b: _bfe(a, b, False), "nonzero"),
    "s_bfe_i32": (lambda a, b: _bfe(a, b, True), "nonzero"),
}


def _shifted_sum(shift: int) -> tuple[Callable[[Array, Array], Array], Any]:
    def over(a: Array, b: Array) -> Array:
        return (_u(a) << U64(shift)) + _u(b) > U64(0xFFFFFFFF)

    return lambda a, b: (a << np.uint32(shift)) + b, over


_TWO |= {f"s_lshl{shift}_add_u32": _shifted_sum(shift) for shift in (1, 2, 3, 4)}
_TWO_WIDE: dict[str, Callable[[Array, Array], Array]] = {
    "s_and_b64": np.bitwise_and,
    "s_or_b64": np.bitwise_or,
    "s_xor_b64": np.bitwise_xor,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_orn2_b64": lambda a, b: a | ~b,
    "s_nand_b64": lambda a, b: ~(a & b),
    "s_nor_b64": lambda a, b: ~(a | b),
    "s_xnor_b64": lambda a, b: ~(a ^ b),
}
_SHIFT_WIDE: dict[str, Callable[[Array, Array], Array]] = {
    "s_lshl_b64": lambda a, b: a << (b & 63).astype(U64),
    "s_lshr_b64": lambda a, b: a >> (b & 63).astype(U64),
    "s_ashr_i64": lambda a, b: (a.view(I64) >> (b & 63).astype(I64)).view(U64),
}
_ONE: dict[str, tuple[Callable[[Array], Array], Any]] = {
    "s_mov_b32": (lambda a: a, None),
    "s_not_b32": (lambda a: ~a, "nonzero"),
    "s_brev_b32": (_reverse, None),
    "s_abs_i32": (lambda a: _low(np.abs(_i(a))), "nonzero"),
    "s_bcnt1_i32_b32": (_popcount, "nonzero"),
    "s_ff1_i32_b32": (_first_one, None),
    "s_flbit_i32_b32": (_leading_one, None),
    "s_sext_i32_i8": (lambda a: _low(a.astype(np.int8).astype(I64)), None),
    "s_sext_i32_i16": (lambda a: _low(a.astype(np.int16).astype(I64)), None),
}
_RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "lt": np.less, "le": np.less_equal,
}  # fmt: skip


def _result(m: Machine, to: Operand, value: Array, scc: Any, *sources: Array) -> None:
    m.put_scalar(to.index, value)
    if scc == "nonzero":
        m.scc[m.waves] = value != 0
    elif scc is not None:
        m.scc[m.waves] = scc(*sources)


@handles(*_TWO)
def _two(m: Machine, i: Instruction) -> None:
    compute, scc = _TWO[i.name]
    a, b = m.scalar32(i.operands[1]), m.scalar32(i.operands[2])
    _result(m, i.operands[0], compute(a, b), scc, a, b)


@handles(*_ONE)
def _one(m: Machine, i: Instruction) -> None:
    compute, scc = _ONE[i.name]
    a = m.scalar32(i.operands[1])
    _result(m, i.operands[0], compute(a), scc, a)


@handles("s_addc_u32", "s_subb_u32")
def _carry(m: Machine, i: Instruction) -> None:
    a, b = _u(m.scalar32(i.operands[1])), _u(m.scalar32(i.operands[2]))
    carry = m.scc[m.waves].astype(U64)
    if i.name == "s_addc_u32":
        total = a + b + carry
        m.scc[m.waves] = total > U64(0xFFFFFFFF)
    else:
        total = a - b - carry
        m.scc[m.waves] = b + carry > a
    m.put_scalar(i.operands[0].index, _low(total))


@handles("s_movk_i32", "s_addk_i32", "s_mulk_i32")
def _short(m: Machine, i: Instruction) -> None:
    value = np.int16(np.uint16(int(i.operands[1].value) & 0xFFFF)).astype(I64)
    to = i.operands[0].index
    if i.name == "s_movk_i32":
        m.put_scalar(to, int(value) & 0xFFFFFFFF)
        return
    before = _i(m.scalar(to))
    wide = before + value if i.name == "s_addk_i32" else before * value
    if i.name == "s_addk_i32":
        m.scc[m.waves] = _fits(wide)
    m.put_scalar(to, _low(wide))


def _compare_short(m: Machine, i: Instruction) -> None:
    _, _, relation, kind = i.name.split("_")
    value = int(i.operands[1].value)
    a = m.scalar32(i.operands[0])
    left = a.astype(I64) if kind == "u32" else _i(a)
    if kind == "i32":
        value = ((value & 0xFFFF) ^ 0x8000) - 0x8000
    m.scc[m.waves] = _RELATIONS[relation](left, np.asarray(value))


def _compare(m: Machine, i: Instruction) -> None:
    _, _, relation, kind = i.name.split("_")
    if kind == "u64":
        a, b = m.scalar64(i.operands[0]), m.scalar64(i.operands[1])
    else:
        a, b = m.scalar32(i.operands[0]), m.scalar32(i.operands[1])
        if kind == "i32":
            a, b = _i(a), _i(b)
    m.scc[m.waves] = _RELATIONS[relation](a, b)


for _name in _RELATIONS:
    for _kind in ("u32", "i32"):
        HANDLERS[f"s_cmp_{_name}_{_kind}"] = _compare
        HANDLERS[f"s_cmpk_{_name}_{_kind}"] = _compare_short
    if _name in ("eq", "lg"):
        HANDLERS[f"s_cmp_{_name}_u64"] = _compare


@handles("s_bitcmp0_b32", "s_bitcmp1_b32")
def _bit(m: Machine, i: Instruction) -> None:
    a, b = m.scalar32(i.operands[0]), m.scalar32(i.operands[1])
    m.scc[m.waves] = (a >> (b & 31) & 1) == (i.name == "s_bitcmp1_b32")


@handles("s_cselect_b32", "s_cselect_b64")
def _choose(m: Machine, i: Instruction) -> None:
    wide = i.name.endswith("64")
    # Only the chosen source has to hold something.
    read = m.scalar64 if wide else m.scalar32
    scc = m.scc[m.waves]
    if scc.all() or not scc.any():
        value = read(i.operands[1 if scc.all() else 2])
    else:
        value = np.where(scc, read(i.operands[1]), read(i.operands[2]))
    (m.put64 if wide else m.put_scalar)(i.operands[0].index, value)


@handles("s_mov_b64", "s_not_b64")
def _wide_one(m: Machine, i: Instruction) -> None:
    value = m.scalar64(i.operands[1])
    if i.name == "s_not_b64":
        value = ~value
        m.scc[m.waves] = value != 0
    m.put64(i.operands[0].index, value)


@handles("s_bcnt1_i32_b64", "s_ff1_i32_b64")
def _count(m: Machine, i: Instruction) -> None:
    a = m.scalar64(i.operands[1])
    value = _popcount(a) if "bcnt1" in i.name else _first_one(a)
    _result(m, i.operands[0], value, "nonzero" if "bcnt1" in i.name else None)


@handles(*_TWO_WIDE)
def _wide_two(m: Machine, i: Instruction) -> None:
    value = _TWO_WIDE[i.name](m.scalar64(i.operands[1]), m.scalar64(i.operands[2]))
    m.put64(i.operands[0].index, value)
    m.scc[m.waves] = value != 0


@handles(*_SHIFT_WIDE)
def _wide_shift(m: Machine, i: Instruction) -> None:
    value = _SHIFT_WIDE[i.name](m.scalar64(i.operands[1]), m.scalar32(i.operands[2]))
    m.put64(i.operands[0].index, value)
    m.scc[m.waves] = value != 0


@handles("s_and_saveexec_b64", "s_or_saveexec_b64", "s_andn2_saveexec_b64", "s_xor_saveexec_b64")
def _save_exec(m: Machine, i: Instruction) -> None:
    source = m.scalar64(i.operands[1])
    before = m.scalar64(Operand("s", EXEC, 2))
    after = _TWO_WIDE[i.name.replace("_saveexec", "")](source, before)
    m.put64(i.operands[0].index, before)
    m.put64(EXEC, after)
    m.scc[m.waves] = after != 0


@handles("s_branch")
def _branch(m: Machine, i: Instruction) -> None:
    m.jump(i.operands[0].name)


@handles("s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz", "s_cbranch_vccnz",
         "s_cbranch_execz", "s_cbranch_execnz")  # fmt: skip
def _branch_if(m: Machine, i: Instruction) -> None:
    what = i.name.removeprefix("s_cbranch_")
    if what.startswith("scc"):
        taken = m.scc[m.waves] == (what == "scc1")
    else:
        register = VCC if what.startswith("vcc") else EXEC
        some = (m.scalar(register) | m.scalar(register + 1)) != 0
        taken = some == what.endswith("nz")
    m.jump(i.operands[0].name, taken)


@handles("s_endpgm")
def _end(m: Machine, i: Instruction) -> None:
    m.stop(ENDED)


@handles("s_barrier")
def _barrier(m: Machine, i: Instruction) -> None:
    m.stop(WAITING)


@handles("s_nop", "s_setprio", "s_sleep", "s_icache_inv", "s_sethalt", "buffer_wbl2", "buffer_inv",
         "s_inst_prefetch")  # fmt: skip
def _nothing(m: Machine, i: Instruction) -> None:
    """Time, priorities and caches are not modelled."""


@handles("s_setreg_imm32_b32")
def _mode(m: Machine, i: Instruction) -> None:
    """Only bit 23 of MODE: whether conversions to 8 bits saturate."""
    if i.operands[0].name.replace(" ", "") != "hwreg(HW_REG_MODE,23,1)":
        raise m.fault("this mode is not supported")
    m.saturates[m.waves] = bool(int(i.operands[1].value) & 1)


@handles("s_waitcnt")
def _wait(m: Machine, i: Instruction) -> None:
    for counter, text in i.modifiers.items():
        left = int(text)
        if counter == "vmcnt":
            m.vm.wait(m.waves, left)
        elif counter == "lgkmcnt":
            m.sm.wait(m.waves, left)
            scalars_left = (m.sm.issued[m.waves] > m.sm.done[m.waves]).any()
            if not scalars_left:
                m.ds.wait(m.waves, left)
        elif counter != "expcnt":
            raise m.fault(f"counter {counter} is not supported")


@handles("s_load_dword", "s_load_dwordx2", "s_load_dwordx4", "s_load_dwordx8", "s_load_dwordx16")
def _load(m: Machine, i: Instruction) -> None:
    words = int(i.name.partition("dword")[2].removeprefix("x") or 1)
    to, base, offset = i.operands
    place = m.scalar64(base) + U64(int(i.modifiers.get("offset", "0"), 0))
    more = m.scalar32(offset) if offset.kind == "s" else int(offset.value) & (1 << 64) - 1
    place = place + np.asarray(more, U64)
    data = m.memory.read(place & ~U64(3), 4 * words).view(np.uint32)
    m.sm.issued[m.waves] += 1
    for word in range(words):
        m.put_scalar(to.index + word, data[:, word])
        m.mark_loading("s", to.index + word, m.sm)
