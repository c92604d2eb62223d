"""Decoding weights inside kernels: nibbles and bytes to floats by moving bits, exact throughout.

An E2M1 or E4M3 number placed at the right bits of a float32 is that number times 2^-126 or 2^-120,
subnormals included, so decoding is shifts, one mask and one multiplication. The multiplication
carries the block scale. Scaled weights are kept times 2^-63 (`OFFSET`), in the middle of the
exponents that bfloat16 has; whoever sums them multiplies the sum by 2^63. A code times its block
scale has at most six significant bits, so bfloat16 holds it exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

UP_63 = tl.constexpr(2.0**63)
UP_120 = tl.constexpr(2.0**120)


@triton.jit
def e4m3_scale(codes):
    """E4M3 codes (uint8) -> float32 values times 2^63; code 127 is NaN."""
    wide = codes.to(tl.int32)
    # Sign to bit 31 and its copies above bit 26, which the mask removes.
    bits = ((wide << 24) >> 4) & -2014314496  # 0x87F00000 as int32
    value = bits.to(tl.float32, bitcast=True) * UP_120 * UP_63
    return tl.where((wide & 127) == 127, float("nan"), value)


@triton.jit
def e8m0_scale(codes):
    """E8M0 codes (uint8) -> float32 values times 2^63.

    Codes above 190, scales from 2^64, would not fit: they give NaN, as code 255 does by definition.
    """
    wide = codes.to(tl.int32)
    # Code 0 is 2^-127: times 2^63 it is a normal number like all others.
    value = ((wide + 63) << 23).to(tl.float32, bitcast=True)
    return tl.where(wide > 190, float("nan"), value)


@triton.jit
def e2m1_top(words):
    """The highest nibble of int32 words -> float32 values times 2^-126."""
    # The shift copies the sign over bits 31..25; the mask keeps one copy and the three value bits.
    return ((words >> 6) & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000 as int32


@triton.jit
def narrowed(value, DTYPE: tl.constexpr):
    """float32 values that DTYPE holds exactly, in DTYPE: bfloat16 by cutting zero bits off."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = value.to(tl.int32, bitcast=True) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def e2m1_pair(packed, scale, DTYPE: tl.constexpr):
    """Bytes and their scale times 2^63 -> (even columns, odd columns) times 2^-63, in DTYPE."""
    wide = packed.to(tl.int32)
    even = e2m1_top(wide << 28) * scale
    odd = e2m1_top(wide << 24) * scale
    return narrowed(even, DTYPE), narrowed(odd, DTYPE)


@triton.jit
def e4m3_scale_bf16(codes):
    """E4M3 codes (uint8) -> bfloat16, on chips that convert float8_e4m3fn themselves."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)


@triton.jit
def e8m0_scale_bf16(codes):
    """E8M0 codes (uint8) -> bfloat16, code 255 as NaN."""
    wide = codes.to(tl.int32)
    # Code 0 is the subnormal 2^-127.
    bits = tl.maximum(wide << 7, 64) + (wide == 255).to(tl.int32)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


# Four bytes, two per round. The three value bits of a nibble select the high and the low byte of
# its bfloat16 from two 8-byte tables; signs are spread and added; a multiplication by the scale
# (with -0 added, so that zeros keep their sign) ends it. Half the instructions of e2m1_pair.
_PAIR_PTX = tl.constexpr(
    """{
    .reg .b32 r, s, h, l, p, q, e, o, ha, hb, la, lb, z, s0, s1;
    mov.b32 r, $4;
    mov.b32 s0, $5;
    mov.b32 s1, $6;
    mov.b32 ha, 0x3F3F3F00;
    mov.b32 hb, 0x40404040;
    mov.b32 la, 0xC0800000;
    mov.b32 lb, 0xC0804000;
    mov.b32 z, 0x80008000;
    and.b32 s, r, 0x77777777;
    prmt.b32 h, ha, hb, s;
    prmt.b32 l, la, lb, s;
    prmt.b32 p, r, 0, 0x1404;
    shl.b32 q, p, 4;
    prmt.b32 e, l, h, 0x6240;
    prmt.b32 o, l, h, 0x7351;
    lop3.b32 e, q, 0x80008000, e, 0xEA;
    lop3.b32 o, p, 0x80008000, o, 0xEA;
    fma.rn.bf16x2 $0, e, s0, z;
    fma.rn.bf16x2 $2, o, s0, z;
    shr.u32 s, s, 16;
    prmt.b32 h, ha, hb, s;
    prmt.b32 l, la, lb, s;
    prmt.b32 p, r, 0, 0x3424;
    shl.b32 q, p, 4;
    prmt.b32 e, l, h, 0x6240;
    prmt.b32 o, l, h, 0x7351;
    lop3.b32 e, q, 0x80008000, e, 0xEA;
    lop3.b32 o, p, 0x80008000, o, 0xEA;
    fma.rn.bf16x2 $1, e, s1, z;
    fma.rn.bf16x2 $3, o, s1, z;
    }"""
)


@triton.jit
def e2m1_pair_ptx(packed, scale):
    """Bytes and their bfloat16 scales -> (even columns, odd columns) in bfloat16, on sm80 on."""
    return tl.inline_asm_elementwise(
        _PAIR_PTX,
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_value(codes, FNUZ: tl.constexpr, DTYPE: tl.constexpr):
    """E4M3 codes (uint8) -> values in DTYPE; FNUZ reads them with half the value."""
    bits = ((codes.to(tl.int32) << 24) >> 4) & -2014314496
    value = bits.to(tl.float32, bitcast=True) * UP_120
    return narrowed(value * 0.5 if FNUZ else value, DTYPE)
