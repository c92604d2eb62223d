"""Global memory: the buffers a launch was given, in one address space with gaps between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ci.cdna.parse import CodeError

Bytes = np.ndarray[Any, Any]
BASE = 0x7F0000000000
_GAP = 4096


class Memory:
    """Buffers copied into one arena; accesses outside any buffer are faults.

    A wave's atomics and plain accesses happen at once, so what this finds are wrong addresses.
    """

    def __init__(self, buffers: Sequence[Bytes]) -> None:
        """buffers: uint8 arrays, each placed at a multiple of 256 bytes."""
        self.places: list[int] = []
        size = _GAP
        for buffer in buffers:
            self.places.append(size)
            size += -(-(len(buffer) + _GAP) // 256) * 256
        self.sizes = [len(buffer) for buffer in buffers]
        self.bytes = np.zeros(size, np.uint8)
        self.inside = np.zeros(size, bool)
        for place, buffer in zip(self.places, buffers, strict=True):
            self.bytes[place : place + len(buffer)] = buffer
            self.inside[place : place + len(buffer)] = True

    def address(self, buffer: int) -> int:
        """Where a buffer starts."""
        return BASE + self.places[buffer]

    def contents(self, buffer: int) -> Bytes:
        """What a buffer holds now, uint8."""
        place = self.places[buffer]
        return self.bytes[place : place + self.sizes[buffer]]

    def _offsets(self, addresses: Bytes, width: int, what: str) -> Bytes:
        offsets = addresses.astype(np.int64) - BASE
        wrong = (offsets < 0) | (offsets + width > len(self.bytes))
        index = np.where(wrong, 0, offsets)[..., None] + np.arange(width)
        wrong |= ~self.inside[index].all(axis=-1)
        if wrong.any():
            raise CodeError(
                f"{what} {width} bytes outside every buffer, {self._near(int(offsets[wrong][0]))}"
            )
        if (offsets % min(width, 4)).any():
            raise CodeError(f"{what} {width} bytes at an address that is not aligned")
        return index

    def _near(self, offset: int) -> str:
        for i, (place, size) in enumerate(zip(self.places, self.sizes, strict=True)):
            if place - _GAP // 2 <= offset < place + size + _GAP // 2:
                return f"at byte {offset - place} of buffer {i}, which has {size}"
        return f"at address {offset + BASE:#x}"

    def read(self, addresses: Bytes, width: int) -> Bytes:
        """uint8 [k, width] at uint64 addresses [k]."""
        return self.bytes[self._offsets(addresses, width, "reads")]

    def write(self, addresses: Bytes, data: Bytes) -> None:
        """uint8 [k, width] to uint64 addresses [k]; of equal addresses the last lane wins."""
        self.bytes[self._offsets(addresses, data.shape[1], "writes")] = data
