"""Arithmetic and conversions of the chips' number formats on numpy arrays, correctly rounded."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _fma_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64, rounded to odd: rounding that to a narrower format is the only one.

    The product of two values of at most 26 significant bits is exact in float64.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    wide = c.astype(np.float64)
    total = product + wide
    rest = total - product
    error = (product - (total - rest)) + (wide - rest)
    bits = np.ascontiguousarray(total).view(np.int64)
    adjust = (error != 0) & np.isfinite(total) & np.isfinite(error) & (bits & 1 == 0)
    outward = (error > 0) == (total > 0)
    return np.where(adjust, bits + np.where(outward, 1, -1), bits).view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c with one rounding."""
    return _fma_odd(a, b, c).astype(np.float32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """float16 a * b + c with one rounding."""
    return _fma_odd(a, b, c).astype(np.float16)


def flush(x: Array) -> Array:
    """Denormal float32 as zero of its sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def extreme(a: Array, b: Array, greatest: bool) -> Array:
    """IEEE maximum or minimum of float32: a number beats NaN, +0 is above -0."""
    with np.errstate(invalid="ignore"):
        found = np.fmax(a, b) if greatest else np.fmin(a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        x, y = np.broadcast_arrays(a.view(np.uint32), b.view(np.uint32))
        found = np.where(zeros, (x & y if greatest else x | y).view(np.float32), found)
    return found.astype(np.float32)


def propagating(a: Array, b: Array, greatest: bool) -> Array:
    """IEEE 754-2019 maximum or minimum of float32: NaN wins, +0 is above -0."""
    nan = np.isnan(a) | np.isnan(b)
    return np.where(nan, np.float32(np.nan), extreme(a, b, greatest))


def median(a: Array, b: Array, c: Array) -> Array:
    """The middle of three float32; with a NaN among them, the least of the others."""
    with np.errstate(invalid="ignore"):
        least = extreme(extreme(a, b, False), c, False)
        middle = extreme(extreme(a, b, False), extreme(extreme(a, b, True), c, False), True)
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, middle)


def to_integer(x: Array, signed: bool) -> Array:
    """float32 to 32-bit integers as the chips convert: towards zero, saturating, NaN is 0."""
    low, high = (-(1 << 31), (1 << 31) - 1) if signed else (0, (1 << 32) - 1)
    wide = np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(np.float64)), low, high))
    return wide.astype(np.int64).astype(np.uint64).astype(np.uint32)


def to_bfloat16(x: Array) -> Array:
    """float32 to the bits of bfloat16, uint16, nearest even; NaN stays quiet NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def to_float16(x: Array) -> Array:
    """float32 to the bits of float16, uint16, nearest even."""
    return x.astype(np.float16).view(np.uint16)


def halves(low: Array, high: Array) -> Array:
    """Two numbers of 16 bits in one word, uint32."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def from_bfloat16(bits: Array) -> Array:
    """uint16 to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _table(exponent: int, mantissa: int, bias: int, special: str) -> Array:
    codes = np.arange(1 << (1 + exponent + mantissa))
    field = codes >> mantissa & (1 << exponent) - 1
    fraction = codes & (1 << mantissa) - 1
    sign = np.where(codes >> (exponent + mantissa), -1.0, 1.0)
    value = np.where(field == 0, fraction * 2.0 ** (1 - bias - mantissa),
                     (1 + fraction / (1 << mantissa)) * 2.0 ** (field - float(bias)))  # fmt: skip
    value = (sign * value).astype(np.float32)
    if special == "fnuz":
        value[1 << (exponent + mantissa)] = np.nan
    elif special == "ocp":  # only the all-ones codes are NaN
        value[(codes & 0x7F) == 0x7F] = np.nan
    elif special == "ieee":
        top = field == (1 << exponent) - 1
        value[top] = np.where(fraction[top] == 0, sign[top] * np.inf, np.nan)
    return value


FP4 = _table(2, 1, 1, "none")
FP8 = {"gfx942": _table(4, 3, 8, "fnuz"), "gfx950": _table(4, 3, 7, "ocp")}
BF8 = {"gfx942": _table(5, 2, 16, "fnuz"), "gfx950": _table(5, 2, 15, "ieee")}


def encode8(x: Array, table: Array, saturate: Any) -> Array:
    """float32 to the codes of an 8-bit format (its table of 256 values), nearest even.

    Beyond the largest finite value: that value where `saturate`, else NaN (infinity if it has one).
    """
    half = table[:128].astype(np.float64)
    finite = np.isfinite(half)
    values = half[finite]  # codes 0, 1, ... in rising order
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    limit = values[-1] + (values[-1] - values[-2]) / 2
    top = len(values) - 1
    # At the middle between the largest value and the next one, the even code is taken.
    over = size > limit if top % 2 == 0 else size >= limit
    infinite = np.isinf(half).any()
    nan = 0x80 if np.isnan(table[128]) else 0x7F
    beyond = np.flatnonzero(np.isinf(half))[0] if infinite else nan
    code = np.where(over, np.where(saturate, top, beyond), code)
    negative = np.signbit(x) & ((code != 0) | ~np.isnan(table[128])) & (code != 0x80)
    code = np.where(negative, code | 0x80, code)
    return np.where(np.isnan(x), nan, code).astype(np.uint32)
