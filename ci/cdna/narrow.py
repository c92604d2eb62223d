"""Conversions between float32 and the 8-bit and 4-bit formats, scaled ones of gfx950 included."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ci.cdna import floats
from ci.cdna.machine import Machine, handles
from ci.cdna.parse import Instruction
from ci.cdna.vector import raw, typed

Array = np.ndarray[Any, Any]


def _table(m: Machine, name: str) -> Array:
    return (floats.BF8 if "bf8" in name else floats.FP8)[m.chip]


@handles("v_cvt_f32_fp8", "v_cvt_f32_bf8")
def _widen(m: Machine, i: Instruction) -> None:
    selection = i.modifiers.get("src0_sel", "BYTE_0")
    if not selection.startswith("BYTE"):
        raise m.fault(f"selection {selection} is not supported")
    bits = raw(m, i.operands[1], "u32") >> np.uint32(8 * int(selection[-1])) & np.uint32(255)
    value = _table(m, i.name)[np.broadcast_to(bits, m.mask.shape)]
    m.put_vector(i.operands[0].index, value.view(np.uint32))


@handles("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def _widen_two(m: Machine, i: Instruction) -> None:
    word = i.modifiers.get("src0_sel", "WORD_0")
    if word not in ("WORD_0", "WORD_1", "DWORD"):
        raise m.fault(f"selection {word} is not supported")
    high = word == "WORD_1" or i.bits("op_sel", 0, 1)[0]
    bits = np.broadcast_to(raw(m, i.operands[1], "u32"), m.mask.shape) >> np.uint32(16 * high)
    for half in range(2):
        value = _table(m, i.name)[bits >> np.uint32(8 * half) & np.uint32(255)]
        m.put_vector(i.operands[0].index + half, value.view(np.uint32))


@handles("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32", "v_cvt_scalef32_pk_fp8_f32",
         "v_cvt_scalef32_pk_bf8_f32")  # fmt: skip
def _narrow_two(m: Machine, i: Instruction) -> None:
    to = i.operands[0].index
    scaled = "scalef32" in i.name
    if scaled and not (m.chip == "gfx950" and i.operands[3].kind == "float"
                       and i.operands[3].value == 1):  # fmt: skip
        raise m.fault("scales other than 1 are not supported")
    # The last bit of op_sel is the destination's half.
    four = scaled or i.modifiers.get("op_sel", "").count(",") == 3
    high = i.bits("op_sel", 0, 4)[3 if four else 2]
    saturate = m.saturates[m.waves][:, None]
    pair = np.zeros(m.mask.shape, np.uint32)
    for half, of in enumerate(i.operands[1:3]):
        x = np.broadcast_to(typed(m, of, raw(m, of, "f32"), "f32"), m.mask.shape)
        table = _table(m, i.name)
        # What these become is not documented: NaN, which breaks the contract of whoever uses it.
        # (The compiler fills unused halves with what a register happens to hold.)
        beyond = np.isinf(x)
        if scaled:
            beyond |= np.abs(x) > table[np.isfinite(table)].max()
        code = floats.encode8(np.where(beyond, np.float32(np.nan), x), table, saturate)
        pair |= code << np.uint32(8 * half)
    m.put_half(to, pair, bool(high))


_SCALED = re.compile(r"v_cvt_scalef32_pk_(f32|bf16|f16)_(fp4|fp8|bf8)$")


@handles(
    *(f"v_cvt_scalef32_pk_{a}_{b}" for a in ("f32", "bf16", "f16") for b in ("fp4", "fp8", "bf8"))
)
def _scaled(m: Machine, i: Instruction) -> None:
    """Two codes times the power of two that is the exponent of the scale."""
    if m.chip != "gfx950":
        raise m.fault("needs gfx950")
    found = _SCALED.match(i.name)
    assert found is not None
    first, second = i.bits("op_sel", 0, 2)[:2]
    bits = np.broadcast_to(raw(m, i.operands[1], "u32"), m.mask.shape)
    exponent = raw(m, i.operands[2], "u32") >> np.uint32(23) & np.uint32(255)
    if (np.broadcast_to(exponent, m.mask.shape)[m.mask] == 255).any():
        raise m.fault("a scale of infinity or NaN is not supported")
    scale = np.ldexp(1.0, exponent.astype(np.int64) - 127)
    if found[2] == "fp4":
        table, width, shift = floats.FP4, 4, 8 * (first + 2 * second)
    else:
        table, width, shift = _table(m, i.name), 8, 16 * first
    codes = (bits >> np.uint32(shift + width * k) & np.uint32((1 << width) - 1) for k in range(2))
    values = [(table[code] * scale).astype(np.float32) for code in codes]
    to = i.operands[0].index
    if found[1] == "f32":
        for k, value in enumerate(values):
            m.put_vector(to + k, value.view(np.uint32))
    else:
        narrow = floats.to_bfloat16 if found[1] == "bf16" else floats.to_float16
        m.put_vector(to, floats.halves(narrow(values[0]), narrow(values[1])))
