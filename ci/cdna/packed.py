"""Packed arithmetic on two values of a lane, and matrix products."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ci.cdna import floats
from ci.cdna.machine import HANDLERS, Machine, constant, handles
from ci.cdna.parse import Instruction, Operand

Array = np.ndarray[Any, Any]
# name: (number of sources, their type, function); of f32 each half is a register of its own.
_PACKED: dict[str, tuple[int, Any, Callable[..., Array]]] = {
    "v_pk_add_f32": (2, np.float32, np.add),
    "v_pk_mul_f32": (2, np.float32, np.multiply),
    "v_pk_fma_f32": (3, np.float32, floats.fma32),
    "v_pk_add_f16": (2, np.float16, np.add),
    "v_pk_mul_f16": (2, np.float16, np.multiply),
    "v_pk_fma_f16": (3, np.float16, floats.fma16),
    "v_pk_add_u16": (2, np.uint16, np.add),
    "v_pk_sub_i16": (2, np.uint16, np.subtract),
    "v_pk_mul_lo_u16": (2, np.uint16, np.multiply),
    "v_pk_lshlrev_b16": (2, np.uint16, lambda a, b: b << (a & 15)),
    "v_pk_lshrrev_b16": (2, np.uint16, lambda a, b: b >> (a & 15)),
}


def _word(m: Machine, of: Operand, high: int) -> Array:
    """One of the two registers of a source, uint32."""
    if of.kind == "v":
        return m.vector(of.index + high)
    if of.kind == "s":
        return m.scalar(of.index + high)[:, None]
    if of.kind in ("int", "float") and not high:
        return np.full((1, 1), constant(of, "f32"), np.uint32)
    raise m.fault("the high word of a constant is not supported")


def _half(m: Machine, of: Operand, high: int, kind: str) -> Array:
    """16 bits of a source; an inline constant has them below zeros, or below its sign."""
    if of.kind in ("int", "float"):
        if not -16 <= of.value <= 64:
            raise m.fault("a literal here is not supported")
        above = 0xFFFF if of.kind == "int" and of.value < 0 else 0
        return np.full((1, 1), (above if high else constant(of, kind)) & 0xFFFF, np.uint16)
    return (_word(m, of, 0) >> np.uint32(16 * high)).astype(np.uint16)


@handles(*_PACKED)
def _both(m: Machine, i: Instruction) -> None:
    count, kind, compute = _PACKED[i.name]
    if "clamp" in i.modifiers:
        raise m.fault("clamping packed values is not supported")
    results = []
    for half, key, sign in ((0, "op_sel", "neg_lo"), (1, "op_sel_hi", "neg_hi")):
        values = []
        for of, pick, minus in zip(i.operands[1:], i.bits(key, half, count),
                                   i.bits(sign, 0, count), strict=True):  # fmt: skip
            one = _word(m, of, pick) if kind is np.float32 else _half(
                m, of, pick, "f16" if kind is np.float16 else "u16")  # fmt: skip
            value = np.ascontiguousarray(one).view(kind)
            values.append(-value if minus else value)
        with np.errstate(all="ignore"):
            results.append(np.ascontiguousarray(compute(*values), kind))
    low, high = (x.view(f"u{x.itemsize}") for x in results)
    if kind is np.float32:
        _put_pair(m, i, low, high)
    else:
        m.put_vector(i.operands[0].index, floats.halves(low, high))


def _put_pair(m: Machine, i: Instruction, low: Array, high: Array) -> None:
    m.put_vector(i.operands[0].index, low)
    m.put_vector(i.operands[0].index + 1, high)


@handles("v_pk_mov_b32")
def _move(m: Machine, i: Instruction) -> None:
    """The low word comes from source 0 and the high one from source 1."""
    picks = i.bits("op_sel", 0, 2)
    _put_pair(m, i, *(_word(m, of, p).copy() for of, p in zip(i.operands[1:], picks, strict=True)))


@handles("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def _mixed(m: Machine, i: Instruction) -> None:
    """A fused multiply-add whose sources are float32, or where op_sel_hi says so float16."""
    values = []
    for of, is_half, high in zip(i.operands[1:], i.bits("op_sel_hi", 0, 3), i.bits("op_sel", 0, 3),
                                 strict=True):  # fmt: skip
        if is_half:
            bits = np.ascontiguousarray(_half(m, of, high, "f16"))
            value = bits.view(np.float16).astype(np.float32)
        else:
            value = np.ascontiguousarray(_word(m, of, 0)).view(np.float32)
        value = np.abs(value) if of.absolute else value
        values.append(-value if of.negate else value)
    if "clamp" in i.modifiers:
        raise m.fault("clamping this is not supported")
    with np.errstate(all="ignore"):
        to = i.operands[0].index
        if i.name == "v_fma_mix_f32":
            m.put_vector(to, floats.fma32(*values).view(np.uint32))
            return
        bits = floats.fma16(*values).view(np.uint16).astype(np.uint32)
        m.put_half(to, bits, i.name == "v_fma_mixhi_f16")


_MATRIX = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_(bf16|f16|f32|xf32)$")
_EVERY = np.ones((1, 64), bool)


def _operand(m: Machine, of: Operand, size: int, depth: int, kind: str) -> Array:
    """A or B as float32 [n, size, depth]: a lane holds consecutive k of one row."""
    words = [m.vector(of.index + w, _EVERY) for w in range(of.count)]
    bits = np.stack(words, axis=-1)  # [n, 64, words]
    if kind == "xf32" and (bits & np.uint32(0x1FFF)).any():
        raise m.fault("how inputs of more than 11 significant bits are rounded is not documented")
    if kind in ("f32", "xf32"):
        values = bits.view(np.float32)
    elif kind == "f16":
        values = bits.view(np.float16).astype(np.float32)
    else:
        values = floats.from_bfloat16(bits.view(np.uint16))
    each = values.shape[-1]
    if each * 64 != size * depth:
        raise m.fault(f"needs {size * depth // 64} values a lane; found {each}")
    # Lane l holds row l % size and k from (l // size) * each.
    ordered = values.reshape(-1, 64 // size, size, each)
    return ordered.transpose(0, 2, 1, 3).reshape(-1, size, depth)


@np.errstate(all="ignore")
def _matrix(m: Machine, i: Instruction) -> None:
    found = _MATRIX.match(i.name)
    assert found is not None
    if i.modifiers:
        raise m.fault("modifiers of a matrix product are not supported")
    rows, columns, depth = int(found[1]), int(found[2]), int(found[3])
    to, first, second, start = i.operands
    a = _operand(m, first, rows, depth, found[4]).astype(np.float64)
    b = _operand(m, second, columns, depth, found[4]).astype(np.float64)
    product = a @ b.transpose(0, 2, 1)
    # A lane holds one column; its registers are rows in runs of four, lanes apart by the width.
    word = np.arange(to.count)[:, None]
    lane = np.arange(64)
    row = word // 4 * (4 * (64 // columns)) + lane // columns * 4 + word % 4
    spread = product[:, row, lane % columns]  # [n, words, 64]
    # The result may overlap the addend: everything is read before anything is written.
    if start.kind == "v":
        addend = np.stack([m.vector(start.index + w, _EVERY) for w in range(to.count)], axis=1)
    else:
        addend = np.full((1, to.count, 1), constant(start, "f32"), np.uint32)
    total = (spread + addend.view(np.float32)).astype(np.float32).view(np.uint32)
    for w in range(to.count):
        m.put_vector(to.index + w, total[:, w], np.ones((m.count, 64), bool))


for _shapes, _kinds in (("16x16x16 32x32x8 16x16x32 32x32x16", "bf16 f16"),
                        ("16x16x8 32x32x4", "xf32"), ("16x16x4 32x32x2", "f32")):  # fmt: skip
    HANDLERS |= {f"v_mfma_f32_{shape}_{kind}": _matrix
                 for shape in _shapes.split() for kind in _kinds.split()}  # fmt: skip
