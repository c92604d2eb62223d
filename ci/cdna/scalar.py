"""Scalar instructions: arithmetic on SGPRs, SCC, branches, scalar loads, waits and barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ci.cdna import integers
from ci.cdna.integers import low, signed64, unsigned64
from ci.cdna.machine import ENDED, HANDLERS, WAITING, Machine, handles
from ci.cdna.parse import EXEC, VCC, Instruction, Operand

Array = np.ndarray[Any, Any]
U64 = np.uint64
_EXEC = Operand("s", EXEC, 2)
_NUMBERS: dict[str, Any] = {"i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64}


def _over(total: Callable[..., Array]) -> Callable[..., Array]:
    """Whether a sum or difference in int64 is beyond 32 bits of the sources' type."""

    def check(a: Array, b: Array) -> Array:
        wide, kind = total(signed64(a), signed64(b)), np.iinfo(a.dtype)
        return (wide < kind.min) | (wide > kind.max)

    return check


def _shifted_sum(shift: int) -> tuple[str, Callable[..., Array], Any]:
    return ("u32 u32 u32", lambda a, b: (a << np.uint32(shift)) + b,
            _over(lambda a, b: (a << shift) + b))  # fmt: skip


def _half(x: Array, which: str) -> Array:
    return x >> np.uint32(16) if which == "h" else x & np.uint32(0xFFFF)


# name: (types of result and sources, function, SCC). SCC stays where None, and is whether the
# result is not zero where True.
_TABLE: dict[str, tuple[str, Callable[..., Array], Any]] = {
    **dict.fromkeys(("s_mov_b32", "s_movk_i32"), ("u32 u32", lambda a: a, None)),
    "s_mov_b64": ("u64 u64", lambda a: a, None),
    "s_not_b32": ("u32 u32", lambda a: ~a, True),
    "s_not_b64": ("u64 u64", lambda a: ~a, True),
    "s_brev_b32": ("u32 u32", integers.reverse, None),
    "s_abs_i32": ("u32 i32", lambda a: low(np.abs(signed64(a))), True),
    "s_bcnt1_i32_b32": ("u32 u32", integers.count, True),
    "s_bcnt1_i32_b64": ("u32 u64", integers.count, True),
    "s_ff1_i32_b32": ("u32 u32", integers.first_one, None),
    "s_ff1_i32_b64": ("u32 u64", integers.first_one, None),
    "s_flbit_i32_b32": ("u32 u32", integers.leading_one, None),
    "s_sext_i32_i8": ("u32 u32", lambda a: low(a.astype(np.int8)), None),
    "s_sext_i32_i16": ("u32 u32", lambda a: low(a.astype(np.int16)), None),
    "s_add_u32": ("u32 u32 u32", np.add, _over(np.add)),
    "s_add_i32": ("u32 i32 i32", np.add, _over(np.add)),
    "s_addk_i32": ("u32 i32 i32", np.add, _over(np.add)),
    "s_sub_u32": ("u32 u32 u32", np.subtract, _over(np.subtract)),
    "s_sub_i32": ("u32 i32 i32", np.subtract, _over(np.subtract)),
    **dict.fromkeys(("s_mul_i32", "s_mulk_i32"), ("u32 u32 u32", np.multiply, None)),
    "s_mul_hi_u32": ("u32 u32 u32", lambda a, b: integers.high(unsigned64(a) * b), None),
    "s_mul_hi_i32": ("u32 i32 i32", lambda a, b: integers.high(signed64(a) * b), None),
    "s_min_i32": ("u32 i32 i32", np.minimum, np.less),
    "s_max_i32": ("u32 i32 i32", np.maximum, np.greater),
    "s_min_u32": ("u32 u32 u32", np.minimum, np.less),
    "s_max_u32": ("u32 u32 u32", np.maximum, np.greater),
    **{
        f"s_{name}_b{bits}": (f"u{bits} u{bits} u{bits}", compute, True)
        for bits in (32, 64)
        for name, compute in (
            ("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor),
            ("andn2", lambda a, b: a & ~b), ("orn2", lambda a, b: a | ~b),
            ("nand", lambda a, b: ~(a & b)), ("nor", lambda a, b: ~(a | b)),
            ("xnor", lambda a, b: ~(a ^ b)),
        )
    },
    "s_lshl_b32": ("u32 u32 u32", lambda a, b: a << (b & 31), True),
    "s_lshr_b32": ("u32 u32 u32", lambda a, b: a >> (b & 31), True),
    "s_ashr_i32": ("u32 i32 i32", lambda a, b: a >> (b & 31), True),
    "s_lshl_b64": ("u64 u64 u32", lambda a, b: a << unsigned64(b & 63), True),
    "s_lshr_b64": ("u64 u64 u32", lambda a, b: a >> unsigned64(b & 63), True),
    "s_ashr_i64": ("u64 i64 u32", lambda a, b: a >> signed64(b & 63), True),
    "s_bfe_u32": ("u32 u32 u32", lambda a, b: integers.bit_field(a, b & 31, b >> 16 & 127), True),
    "s_bfe_i32": ("u32 i32 u32", lambda a, b: integers.bit_field(a, b & 31, b >> 16 & 127), True),
    **{
        f"s_pack_{x}{y}_b32_b16": (
            "u32 u32 u32", lambda a, b, x=x, y=y: _half(a, x) | _half(b, y) << np.uint32(16), None
        )
        for x, y in ("ll", "lh", "hh")
    },
    **{f"s_lshl{shift}_add_u32": _shifted_sum(shift) for shift in (1, 2, 3, 4)},
}  # fmt: skip
_RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "lt": np.less, "le": np.less_equal,
}  # fmt: skip


def _source(m: Machine, of: Operand, kind: str) -> Array:
    read = m.scalar64 if kind.endswith("64") else m.scalar32
    return read(of).view(_NUMBERS[kind])


def _immediate(i: Instruction, position: int, signed: bool = True) -> Operand:
    """The 16-bit constant of an instruction, which may be printed with or without its sign."""
    value = int(i.operands[position].value) & 0xFFFF
    return Operand("int", value=(value ^ 0x8000) - 0x8000 if signed else value)


@handles(*_TABLE)
def _compute(m: Machine, i: Instruction) -> None:
    types, compute, scc = _TABLE[i.name]
    result, *kinds = types.split()
    sources = i.operands[1:]
    if i.name.endswith("k_i32"):  # of these the destination is the first source
        sources = (*(i.operands[:1] if len(kinds) == 2 else ()), _immediate(i, 1))
    # Compilers build masks lane by lane under EXEC: what one holds of other lanes, never written,
    # becomes a pattern on which nothing right depends.
    masks = i.name in ("s_or_b64", "s_andn2_b64") and sources[1] == _EXEC
    m.lenient |= masks
    values = [_source(m, of, kind) for of, kind in zip(sources, kinds, strict=True)]
    if masks and m.unknown is not None:
        values[0] = np.where(m.unknown[:, 0], U64(0x5A5A5A5A5A5A5A5A), values[0])
        m.unknown = None
    value = compute(*values).view(_NUMBERS[result])
    (m.put64 if result == "u64" else m.put_scalar)(i.operands[0].index, value)
    if scc is not None:
        m.scc[m.waves] = value != 0 if scc is True else scc(*values)


@handles("s_addc_u32", "s_subb_u32")
def _carry(m: Machine, i: Instruction) -> None:
    a, b = (signed64(m.scalar32(of)) for of in i.operands[1:])
    carry = signed64(m.scc[m.waves])
    total = a + b + carry if i.name == "s_addc_u32" else a - b - carry
    m.scc[m.waves] = (total < 0) | (total > 0xFFFFFFFF)
    m.put_scalar(i.operands[0].index, low(total))


def _compare(m: Machine, i: Instruction) -> None:
    _, form, relation, kind = i.name.split("_")
    right = _immediate(i, 1, kind == "i32") if form == "cmpk" else i.operands[1]
    a, b = _source(m, i.operands[0], kind), _source(m, right, kind)
    m.scc[m.waves] = _RELATIONS[relation](a, b)


for _name in _RELATIONS:
    for _kind in ("u32", "i32"):
        HANDLERS[f"s_cmp_{_name}_{_kind}"] = _compare
        HANDLERS[f"s_cmpk_{_name}_{_kind}"] = _compare
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


@handles("s_and_saveexec_b64", "s_or_saveexec_b64", "s_andn2_saveexec_b64", "s_xor_saveexec_b64")
def _save_exec(m: Machine, i: Instruction) -> None:
    source, before = m.scalar64(i.operands[1]), m.scalar64(_EXEC)
    after = _TABLE[i.name.replace("_saveexec", "")][1](source, before)
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


@handles("s_nop", "s_setprio", "s_sleep", "s_icache_inv", "s_sethalt", "s_inst_prefetch", "v_nop")
def _nothing(m: Machine, i: Instruction) -> None:
    """Time and priorities are not modelled."""


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
            if not (m.sm.issued[m.waves] > m.sm.done[m.waves]).any():
                m.ds.wait(m.waves, left)
        elif counter != "expcnt":
            raise m.fault(f"counter {counter} is not supported")


@handles("s_load_dword", "s_load_dwordx2", "s_load_dwordx4", "s_load_dwordx8", "s_load_dwordx16")
def _load(m: Machine, i: Instruction) -> None:
    words = int(i.name.partition("dword")[2].removeprefix("x") or 1)
    to, base, offset = i.operands
    more = m.scalar32(offset) if offset.kind == "s" else int(offset.value) & (1 << 64) - 1
    place = m.scalar64(base) + U64(i.number("offset")) + np.asarray(more, U64)
    groups = m.first_group + m.group[m.waves]
    data = m.checked(m.memory.read, place & ~U64(3), 4 * words, groups)
    m.sm.issued[m.waves] += 1
    for word, value in enumerate(data.view(np.uint32).T):
        m.put_scalar(to.index + word, value)
        m.mark_loading("s", to.index + word, m.sm)
