"""Codes of E2M1, E4M3 and E8M0: value tables, encoding, decoding, packing, blocks.

Every conversion is driven by the value tables below, so a format is defined once: decoding is a
lookup, encoding is a search among the midpoints of the same table. Encoding rounds to nearest, ties
to the even code, keeps the sign of zero and saturates at the largest value.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import embedding

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3FNUZ_MAX = 240.0

_NAN = float("nan")


def _small_float(mantissa_bits: int, bias: int, codes: int) -> tuple[float, ...]:
    """Values of the non-negative codes of a float with subnormals and no infinities."""
    steps = 1 << mantissa_bits
    return tuple(
        (code % steps) / steps * 2.0 ** (1 - bias)
        if code < steps
        else (1 + (code % steps) / steps) * 2.0 ** (code // steps - bias)
        for code in range(codes)
    )


E2M1_POSITIVE = _small_float(mantissa_bits=1, bias=1, codes=8)
E4M3_POSITIVE = _small_float(mantissa_bits=3, bias=7, codes=127)
E4M3FNUZ_POSITIVE = _small_float(mantissa_bits=3, bias=8, codes=128)

E2M1_VALUES: tuple[float, ...] = E2M1_POSITIVE + tuple(-v for v in E2M1_POSITIVE)
E4M3_VALUES: tuple[float, ...] = (
    *E4M3_POSITIVE,
    _NAN,
    *(-v for v in E4M3_POSITIVE),
    _NAN,
)
# fnuz has one zero and one NaN: the code that would be minus zero.
E4M3FNUZ_VALUES: tuple[float, ...] = (
    *E4M3FNUZ_POSITIVE,
    _NAN,
    *(-v for v in E4M3FNUZ_POSITIVE[1:]),
)
E8M0_VALUES: tuple[float, ...] = (*(2.0 ** (code - 127) for code in range(255)), _NAN)


def table_tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device=device, dtype=dtype)


def upper_bounds(positive: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The largest number that still rounds to each code; the last code has no bound.

    The midpoint after an even code belongs to that code; the one after an odd code to the next.
    """
    table = torch.tensor(positive, dtype=torch.float64)
    middle = ((table[:-1] + table[1:]) / 2).to(dtype)
    below = torch.nextafter(middle, torch.zeros_like(middle))
    odd = torch.arange(len(middle)) % 2 == 1
    return torch.where(odd, below, middle).to(device)


def working(x: Tensor) -> Tensor:
    """x in the dtype of the arithmetic: fp64 stays, every other float becomes fp32."""
    if not x.is_floating_point():
        raise ValueError(f"quantising needs a float tensor; found {x.dtype}; convert it first")
    return x if x.dtype == torch.float64 else x.float()


def lookup(codes: Tensor, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    # fp64 tables of E8M0 hold numbers that fp16 cannot: the caller asks for fp32 or wider there.
    return table_tensor(values, dtype, codes.device)[codes.int()]


def nearest(x: Tensor, positive: tuple[float, ...]) -> Tensor:
    """Magnitude codes int32 of the values nearest to |x|; x in fp32 or fp64."""
    bounds = upper_bounds(positive, x.dtype, x.device)
    return torch.bucketize(x.abs(), bounds, out_int32=True)


def snap(x: Tensor, positive: tuple[float, ...]) -> Tensor:
    """The representable value nearest to x, in x's dtype; NaN stays NaN, zero keeps its sign."""
    values = table_tensor(positive, x.dtype, x.device)[nearest(x, positive)]
    return torch.where(x.isnan(), x, torch.copysign(values, x))


def as_codes(x: Tensor) -> Tensor:
    """Bytes of a uint8 or 8-bit float tensor."""
    if x.element_size() != 1:
        raise ValueError(f"8-bit codes need uint8 or a float8 dtype; found {x.dtype}")
    return x if x.dtype == torch.uint8 else x.view(torch.uint8)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of unpacked E2M1 codes 0..15 (any integer dtype, any shape)."""
    return lookup(codes, E2M1_VALUES, dtype)


def encode_e2m1(x: Tensor) -> Tensor:
    """Unpacked E2M1 codes uint8 of x; |x| above 6 saturates; NaN, which has no code, is refused."""
    work = working(x)
    if work.isnan().any():
        raise ValueError("E2M1 has no NaN; found NaN in the tensor to encode; remove it first")
    return e2m1_codes(work)


def e2m1_codes(work: Tensor) -> Tensor:
    return (nearest(work, E2M1_POSITIVE) + 8 * torch.signbit(work)).to(torch.uint8)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32, *, fnuz: bool = False) -> Tensor:
    """Values of E4M3 codes (uint8 or float8); `fnuz` reads them as float8_e4m3fnuz."""
    return lookup(as_codes(codes), E4M3FNUZ_VALUES if fnuz else E4M3_VALUES, dtype)


def encode_e4m3(x: Tensor, *, fnuz: bool = False) -> Tensor:
    """x as float8_e4m3fn (or fnuz), rounded once; saturates at 448 (240); NaN stays NaN."""
    positive = E4M3FNUZ_POSITIVE if fnuz else E4M3_POSITIVE
    snapped = snap(working(x), positive)
    # torch's cast gives fnuz, which has no minus zero, a plain zero.
    return snapped.to(torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(code - 127) for E8M0 codes (uint8 or float8_e8m0fnu); code 255 is NaN."""
    return lookup(as_codes(codes), E8M0_VALUES, dtype)


def pack_e2m1(codes: Tensor) -> Tensor:
    """codes [..., C] in 0..15 -> bytes uint8 [..., C/2]; the even column takes the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"packing needs an even number of columns; found {codes.shape[-1]}")
    low, high = codes[..., 0::2].to(torch.uint8), codes[..., 1::2].to(torch.uint8)
    return low | (high << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """bytes uint8 [..., C/2] -> codes uint8 [..., C]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """bytes [..., C/2] -> E2M1 values [..., C]; one lookup gives both halves of a byte."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = decode_e2m1(unpack_e2m1(every_byte[:, None]), dtype)
    return embedding(packed.int(), pairs).flatten(-2)


def split_blocks(x: Tensor, block: int) -> Tensor:
    if x.shape[-1] == 0 or x.shape[-1] % block:
        raise ValueError(
            f"blocks of {block} must divide the columns; found {x.shape[-1]} columns; "
            f"pad them to a multiple of {block}"
        )
    return x.unflatten(-1, (-1, block))


def finite(x: Tensor) -> Tensor:
    work = working(x)
    if not torch.isfinite(work).all():
        raise ValueError(
            "quantising needs finite weights; found NaN or infinity; repair the tensor first"
        )
    return work


def _packed_columns(packed: Tensor, name: str) -> int:
    if packed.dtype != torch.uint8:
        raise ValueError(f"{name}: packed E2M1 needs uint8; found {packed.dtype}")
    return 2 * packed.shape[-1]


def shaped_scale(packed: Tensor, scale: Tensor, block: int, name: str) -> Tensor:
    """scale as [..., R, C/block]; also accepts the flattened [rows of all experts, C/block]."""
    columns = _packed_columns(packed, name)
    if columns == 0 or columns % block:
        raise ValueError(
            f"{name}: blocks of {block} must divide the columns; found {columns} columns; "
            f"the weight is not in this format"
        )
    wanted = (*packed.shape[:-1], columns // block)
    flattened = (packed.shape[:-1].numel(), columns // block)
    if tuple(scale.shape) not in (wanted, flattened):
        raise ValueError(
            f"{name}: block scales need shape {list(wanted)}; found {list(scale.shape)}; "
            f"check that weight and scale belong together"
        )
    return scale.reshape(wanted)


ARRANGED = "-arranged"
"""What the name of a 4-bit format ends in where its codes are `arranged`."""

# Bits of a 32-bit word of eight codes where they arrive, and how far to the left they move.
_MOVES = ((0x00070007, 0), (0x02000200, 6), (0x01C001C0, 2), (0x80008000, 8), (0x70007000, 4),
          (1 << 21, 10), (1 << 5, -22), (0x04000400, -2), (0x00180018, -10),
          (0x08000800, -4))  # fmt: skip


def arranged(packed: Tensor) -> Tensor:
    """Packed E2M1 codes uint8 [..., n], n a multiple of 4, with other places for each eight's bits.

    Kernels want two codes in the halves of a word, each with its value at bits 6 to 8 and its sign
    at bit 15. Here codes j and j + 4 come there by one shift for j = 0 (6 to the left), 1 (none)
    and 2 (a rotation by 6 to the right); for j = 3 by 4 to the left, but the last bit by 4 to the
    right. As stored they take half as many operations more. `as_stored` undoes it. Raises
    ValueError for other dtypes and shapes.
    """
    return _moved(packed, _MOVES)


def as_stored(packed: Tensor, format: str) -> tuple[Tensor, str]:
    """Packed codes and their format, both without what `arranged` did if the format says so."""
    if not format.endswith(ARRANGED):
        return packed, format
    back = [(bits >> left if left >= 0 else bits << -left, -left) for bits, left in _MOVES]
    return _moved(packed, back), format.removesuffix(ARRANGED)


def _moved(packed: Tensor, moves: Iterable[tuple[int, int]]) -> Tensor:
    if packed.dtype != torch.uint8 or packed.shape[-1] % 4:
        raise ValueError("arranging 4-bit codes needs rows of uint8 in whole fours of bytes; found "
                         f"{packed.dtype} {list(packed.shape)}")  # fmt: skip
    words = packed.contiguous().view(torch.int32)
    out = torch.zeros_like(words)
    for bits, left in moves:
        moved = words << left if left >= 0 else words >> -left
        out |= moved & (bits - (bits >> 31 << 32))  # as a signed number
    return out.view(torch.uint8)
