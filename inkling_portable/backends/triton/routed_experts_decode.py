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
def e4m3_value(codes, FNUZ: tl.constexpr, DTYPE: tl.constexpr):
    """E4M3 codes (uint8) -> values in DTYPE; FNUZ reads them with half the value."""
    bits = ((codes.to(tl.int32) << 24) >> 4) & -2014314496
    value = bits.to(tl.float32, bitcast=True) * UP_120
    return narrowed(value * 0.5 if FNUZ else value, DTYPE)
