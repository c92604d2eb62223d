"""The numbers of one block of a conversion: one expert of a stack, or one linear layer.

An expert is read and written by slabs of rows, so memory does not depend on its size. NVFP4 needs
the largest number of an expert first; its rows are then read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from inkling_portable import formats
from inkling_portable.conversion.plan import Job
from inkling_portable.conversion.source import ConvertError, Reader, Weight
from inkling_portable.model.quant_layouts import (
    CODES,
    GLOBAL,
    INPUT,
    NVFP4_RANGE,
    ORIGINAL,
    SCALE,
    TILE,
    decode,
)

SLAB = 1 << 20
"""Most weights in memory at once; quantising takes about 60 bytes for each."""
SMALLEST = torch.finfo(torch.float32).tiny

Write = Callable[[str, int, Tensor], None]
"""Stores rows of the tensor in a role, from a row on."""


class Energy(NamedTuple):
    """Sums of squares of a block's weights and of what the conversion changed in them."""

    signal: float
    noise: float


def convert_block(job: Job, block: int, reader: Reader, write: Write) -> Energy:
    """Convert block `block` of a job; raises ConvertError with file and tensor for bad values."""
    weight = job.source
    assert isinstance(weight, Weight)
    try:
        if ORIGINAL in job.target and block == 0:
            write(ORIGINAL, 0, torch.tensor(weight.shape, dtype=torch.int64))
        if INPUT in job.target:
            _write_input(job, weight, block, reader, write)
        if job.form is not None and job.form.format == "nvfp4":
            if weight.format == "nvfp4":
                return _relabel(job, weight, block, reader, write)
            if weight.format == "mxfp4":
                return _widen(job, weight, block, reader, write)
        return _requantise(job, weight, block, reader, write)
    except ValueError as error:
        if isinstance(error, ConvertError):
            raise
        where = f"tensor {weight.name} in {weight.codes.file}"
        said = str(error)
        place = where if weight.layer is None else f"{where}, expert {block}"
        raise ConvertError(f"{place}: {said.removeprefix(f'{where}: ')}") from None


def _slabs(weight: Weight) -> Iterator[tuple[int, int]]:
    """Row ranges of one expert, in whole pairs of gate and up, or in whole tiles of FP8 layers."""
    rows, columns = weight.shape[-2:]
    unit = 2 if weight.layer is not None else TILE[0]
    step = max(1, SLAB // (columns * unit)) * unit
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def _stored(weight: Weight, block: int, first: int, last: int, reader: Reader) -> dict[str, Tensor]:
    """Rows first to last - 1 of one expert as stored, by role, with a dimension of one expert."""
    rows = weight.shape[-2]
    found = {}
    for role in (CODES, SCALE):
        if role in weight.tensors:
            tensor, at, low, high = weight.tensors[role], block * rows, first, last
            if weight.layer is None and tensor.shape[0] != rows:
                low, high = first // TILE[0], -(-last // TILE[0])
            found[role] = reader.rows(tensor, at + low, at + high)[None]
    if GLOBAL in weight.tensors:
        tensor = weight.tensors[GLOBAL]
        halves = tensor.shape[1] if len(tensor.shape) == 2 else 1
        found[GLOBAL] = reader.whole(tensor).view(-1, halves)[block : block + 1]
    return found


def _decoded(weight: Weight, found: dict[str, Tensor]) -> Tensor:
    """What `_stored` found as fp32 numbers [rows, columns]."""
    name = f"tensor {weight.name} in {weight.codes.file}"
    if weight.layout is None:
        return found[CODES][0].float()
    if weight.layer is None and weight.tensors[SCALE].shape[0] != weight.shape[0]:
        return formats.dequantize_fp8(found[CODES][0], found[SCALE][0], block=TILE, name=name)
    return decode(weight.layout, found, name=name)[0]


def _energy(values: Tensor, seen: Tensor) -> Energy:
    error = (values - seen).double()
    return Energy(values.double().square().sum().item(), error.square().sum().item())


def _sum(energies: list[Energy]) -> Energy:
    return Energy(sum(e.signal for e in energies), sum(e.noise for e in energies))


def _requantise(job: Job, weight: Weight, block: int, reader: Reader, write: Write) -> Energy:
    """Decode to fp32, round to the target."""
    rows = weight.shape[-2]
    number_format = job.form.format if job.form else "plain"
    nvfp4 = None
    if number_format == "nvfp4":
        largest = 0.0
        for first, last in _slabs(weight):
            values = _decoded(weight, _stored(weight, block, first, last, reader))
            largest = max(largest, values.nan_to_num().abs().max().item())
        gain = max(largest / NVFP4_RANGE, SMALLEST) if largest else 1.0
        nvfp4 = _Nvfp4(job, block, torch.tensor(gain), write)
    energies = []
    for first, last in _slabs(weight):
        values = _decoded(weight, _stored(weight, block, first, last, reader))
        at = block * rows + first
        if job.form is None:
            narrow = job.target[CODES].dtype == "BF16"
            stored = values.to(torch.bfloat16 if narrow else torch.float32)
            if not torch.isfinite(stored).all():
                raise ValueError(
                    "a weight is NaN, infinite or beyond the range of the target; repair the "
                    "checkpoint"
                )
            write(CODES, at, stored)
            energies.append(_energy(values, stored.float()))
            continue
        if nvfp4 is not None:
            codes, scale, _ = formats.quantize_nvfp4(values, nvfp4.factor)
            seen = nvfp4.decode(codes, scale)
        elif number_format == "mxfp4":
            codes, scale = formats.quantize_mxfp4(values)
            seen = formats.dequantize_mxfp4(codes, scale, check=False)
        else:
            codes, scale = formats.quantize_fp8_channel(values)
            seen = formats.dequantize_fp8(codes, scale, check=False)
        write(CODES, at, codes)
        write(SCALE, at, scale)
        energies.append(_energy(values, seen))
    return _sum(energies)


class _Nvfp4:
    """The global scale of one expert, stored as the layout has it; `factor` is what it means."""

    def __init__(self, job: Job, block: int, gain: Tensor, write: Write) -> None:
        assert job.form is not None
        self._reciprocal = job.form.reciprocal
        self._stored = (1 / gain if self._reciprocal else gain).reshape(())
        self.factor = 1 / self._stored if self._reciprocal else self._stored
        write(GLOBAL, block, self._stored.reshape(1))

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The numbers that a reader of the output will see."""
        return formats.dequantize_nvfp4(
            codes, scale, self._stored, reciprocal=self._reciprocal, check=False
        )


def _relabel(job: Job, weight: Weight, block: int, reader: Reader, write: Write) -> Energy:
    """NVFP4 in another layout: the same codes; gate and up that differ get one global scale."""
    assert weight.layout is not None
    reciprocal = weight.layout.reciprocal
    rows = weight.shape[-2]
    energies = []
    for first, last in _slabs(weight):
        found = _stored(weight, block, first, last, reader)
        values = _decoded(weight, found)
        codes, scale, gain = found[CODES][0], found[SCALE], found[GLOBAL]
        if gain.shape[1] == 2:
            scale, gain, _ = formats.unify_global_scales(
                scale, gain, interleaved=True, reciprocal=reciprocal
            )
        gain = gain.reshape(())
        nvfp4 = _Nvfp4(job, block, 1 / gain if reciprocal else gain, write)
        write(CODES, block * rows + first, codes)
        write(SCALE, block * rows + first, scale[0])
        energies.append(_energy(values, nvfp4.decode(codes, scale[0])))
    return _sum(energies)


def _widen(job: Job, weight: Weight, block: int, reader: Reader, write: Write) -> Energy:
    """MXFP4 to NVFP4 with the same codes, wherever E4M3 has the power of two that it takes.

    The global scale is the power of two that makes an expert's largest block scale 2^8.
    """
    rows, columns = weight.shape[-2:]
    top = -127
    for first, last in _slabs(weight):
        found = _stored(weight, block, first, last, reader)
        power = found[SCALE][0].int() - 127
        top = max(top, int(torch.where(_all_zero(found[CODES][0], columns), -127, power).max()))
    shift = max(top - 8, -126)
    nvfp4 = _Nvfp4(job, block, torch.tensor(2.0**shift), write)
    energies = []
    for first, last in _slabs(weight):
        found = _stored(weight, block, first, last, reader)
        values = _decoded(weight, found)
        codes, power = found[CODES][0], found[SCALE][0].int() - 127 - shift
        fits = _all_zero(codes, columns) | (power >= -9)
        scale = torch.exp2(power.clamp(-9, 8).float()).to(torch.float8_e4m3fn)
        scale = scale.view(torch.uint8).repeat_interleave(2, -1)
        if not fits.all():
            rounded, own_scale, _ = formats.quantize_nvfp4(values, nvfp4.factor)
            keep = fits.repeat_interleave(2, -1)
            scale = torch.where(keep, scale, own_scale.view(torch.uint8))
            codes = torch.where(keep.repeat_interleave(8, -1), codes, rounded)
        write(CODES, block * rows + first, codes)
        write(SCALE, block * rows + first, scale)
        energies.append(_energy(values, nvfp4.decode(codes, scale.view(torch.float8_e4m3fn))))
    return _sum(energies)


def _all_zero(codes: Tensor, columns: int) -> Tensor:
    """Which blocks of 32 hold nothing but zeros; codes [rows, columns / 2]."""
    return ((codes & 0x77) == 0).unflatten(-1, (columns // 32, 16)).all(-1)


def _write_input(job: Job, weight: Weight, block: int, reader: Reader, write: Write) -> None:
    """The scale of activations: one amax per stack, or the reciprocal of a scale per expert."""
    assert weight.layout is not None and job.form is not None
    tensor = weight.tensors[INPUT]
    held = reader.whole(tensor).float().reshape(-1)
    if not (torch.isfinite(held) & (held > 0)).all():
        raise ValueError(
            f"{tensor.name} needs positive and finite numbers; found {held.min().item():g} to "
            f"{held.max().item():g}; quantise the weight again"
        )
    amax = NVFP4_RANGE / held if weight.layout.reciprocal else held
    if job.form.reciprocal:
        per_expert = held.numel() in (weight.shape[0], 2 * weight.shape[0])
        own = amax.view(weight.shape[0], -1)[block] if per_expert else amax
        write(INPUT, block, (NVFP4_RANGE / own.max()).reshape(1))
    elif block == 0:
        write(INPUT, 0, amax.max().reshape(1).to(torch.bfloat16))
