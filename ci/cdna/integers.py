"""Integer arithmetic on numpy arrays that scalar and vector instructions share."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def signed64(x: Array) -> Array:
    """Values as int64."""
    return x.astype(np.int64)


def unsigned64(x: Array) -> Array:
    """Values as uint64."""
    return x.astype(np.uint64)


def low(x: Array) -> Array:
    """The low 32 bits of 64-bit integers, uint32."""
    return x.astype(np.uint64, casting="unsafe").astype(np.uint32)


def high(x: Array) -> Array:
    """The high 32 bits of 64-bit integers, uint32."""
    return (x.astype(np.uint64, casting="unsafe") >> np.uint64(32)).astype(np.uint32)


def joined(lower: Array, upper: Array) -> Array:
    """Two words uint32 as uint64."""
    return unsigned64(lower) | unsigned64(upper) << np.uint64(32)


def extended(field: Array, width: int) -> Array:
    """Fields of `width` bits, sign-extended to their type."""
    sign = field.dtype.type(1 << (width - 1))
    return (field ^ sign) - sign


def bit_field(x: Array, offset: Array, width: Array) -> Array:
    """`width` bits from bit `offset`, uint32; sign-extended where x is int32."""
    o, w = signed64(offset), signed64(width)
    field = signed64(x) >> o & (np.left_shift(np.int64(1), w) - 1)
    if x.dtype == np.int32:
        sign = np.where(w > 0, np.left_shift(np.int64(1), np.maximum(w - 1, 0)), 0)
        field = (field ^ sign) - sign
    return low(field)


def low24(x: Array) -> Array:
    """The low 24 bits as int64, signed where x is int32."""
    field = signed64(x) & 0xFFFFFF
    return extended(field, 24) if x.dtype == np.int32 else field


def _bits(x: Array) -> Array:
    """Bits of uint32 or uint64, the lowest first, along a new last axis."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.itemsize)
    return np.unpackbits(octets, axis=-1, bitorder="little")


def reverse(x: Array) -> Array:
    """uint32 with its bits in the other order."""
    return np.packbits(_bits(x)[..., ::-1], axis=-1, bitorder="little").view(np.uint32)[..., 0]


def first_one(x: Array) -> Array:
    """Index of the lowest set bit of uint32 or uint64, all ones for none."""
    return np.where(x == 0, 0xFFFFFFFF, _bits(x).argmax(axis=-1)).astype(np.uint32)


def leading_one(x: Array) -> Array:
    """Zeros above the highest set bit of uint32, all ones for none."""
    return first_one(reverse(x))


def leading_change(x: Array) -> Array:
    """From the top, the first bit of uint32 that differs from the sign bit, all ones for none."""
    return leading_one(np.where(x >> 31 == 1, ~x, x))


def count(x: Array) -> Array:
    """How many bits are set, uint32."""
    return np.bitwise_count(x).astype(np.uint32)


def bytes_of_two(a: Array, b: Array, selector: Array) -> Array:
    """v_perm_b32: each byte of the selector names one of the eight of (a, b), or a constant."""
    data = joined(b, a)
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint32)
    for byte in range(4):
        pick = selector >> np.uint32(8 * byte) & np.uint32(0xFF)
        value = data >> unsigned64(8 * (pick & 7)) & np.uint64(0xFF)
        half = np.clip(signed64(pick) - 8, 0, 3)
        signs = (data >> (16 * half + 15).astype(np.uint64) & np.uint64(1)) * np.uint64(0xFF)
        constant = np.where(pick == 12, np.uint64(0), np.uint64(0xFF))
        value = np.where(pick < 8, value, np.where(pick < 12, signs, constant))
        out = out | value.astype(np.uint32) << np.uint32(8 * byte)
    return out
