"""Global memory: the buffers a launch was given, in one address space with gaps between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from ci.cdna.parse import CodeError

Array = np.ndarray[Any, Any]
BASE = 0x7F0000000000
_GAP = 4096
_NOBODY = -1


class Memory:
    """Buffers copied into one arena; accesses outside any buffer are faults.

    A wave's atomics and plain accesses happen at once. Workgroups run on chips whose caches are
    not coherent with each other, so what one stored and another reads in the same launch must have
    been released (written back) by the one and acquired (caches emptied) by the other since.
    """

    def __init__(self, buffers: Sequence[Array]) -> None:
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
        # Of each two bytes: the workgroup that stored them, and at which access of this memory.
        self.writer = np.full(size // 2, _NOBODY, np.int32)
        self.when = np.zeros(size // 2, np.int32)
        self.clock = 0
        self.released: dict[int, list[int]] = {}
        self.acquired: dict[int, int] = {}

    def address(self, buffer: int) -> int:
        """Where a buffer starts."""
        return BASE + self.places[buffer]

    def contents(self, buffer: int) -> Array:
        """What a buffer holds now, uint8."""
        place = self.places[buffer]
        return self.bytes[place : place + self.sizes[buffer]]

    def _index(self, addresses: Array, width: int, what: str) -> tuple[Array, Array, Array]:
        """(memory as units of an access, indices of its units, indices of its pairs of bytes)."""
        offsets = addresses.astype(np.int64) - BASE
        wrong = (offsets < 0) | (offsets + width > len(self.bytes))
        start, unit = np.where(wrong, 0, offsets)[..., None], min(width, 4)
        units = start // unit + np.arange(width // unit)
        wrong |= ~self.inside[units * unit + unit - 1].all(axis=-1)
        if wrong.any():
            raise CodeError(
                f"{what} {width} bytes outside every buffer, {self._near(int(offsets[wrong][0]))}"
            )
        if (offsets % unit).any():
            raise CodeError(f"{what} {width} bytes at an address that is not aligned")
        content = self.bytes.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[unit])
        return content, units, start // 2 + np.arange(max(1, width // 2))

    def _near(self, offset: int) -> str:
        for i, (place, size) in enumerate(zip(self.places, self.sizes, strict=True)):
            if place - _GAP // 2 <= offset < place + size + _GAP // 2:
                return f"at byte {offset - place} of buffer {i}, which has {size}"
        return f"at address {offset + BASE:#x}"

    def _check_passed(self, what: str, pairs: Array, groups: Array, fresh: bool,
                      where: Any = True) -> None:  # fmt: skip
        """Workgroups [k] touch pairs of bytes [k, n]: those of others must have been passed on."""
        writer = self.writer[pairs]
        foreign = (writer != _NOBODY) & (writer != groups[:, None]) & where
        if not foreign.any():
            return
        mine = np.broadcast_to(groups[:, None], pairs.shape)[foreign]
        met = np.stack([mine, writer[foreign], self.when[pairs][foreign]], axis=1)
        for group, other, when in np.unique(met, axis=0).tolist():
            times = self.released.get(other, [])
            place = bisect_left(times, when)
            if place == len(times):
                raise CodeError(f"workgroup {group} {what} what workgroup {other} stored in the "
                                "same launch and did not release at agent scope")  # fmt: skip
            if not fresh and self.acquired.get(group, -1) < times[place]:
                raise CodeError(f"workgroup {group} {what} what workgroup {other} stored in the "
                                "same launch without an acquire at agent scope since")  # fmt: skip

    def read(self, addresses: Array, width: int, groups: Array | None, fresh: bool = False
             ) -> Array:  # fmt: skip
        """uint8 [k, width] at uint64 addresses [k] for workgroups [k]; None: an atomic's.

        fresh: the load passes by the caches that other workgroups do not share.
        """
        content, units, pairs = self._index(addresses, width, "reads")
        self.clock += 1
        if groups is not None:
            self._check_passed("reads", pairs, groups, fresh)
        return np.ascontiguousarray(content[units]).view(np.uint8)

    def write(self, addresses: Array, data: Array, groups: Array | None) -> None:
        """uint8 [k, width] to uint64 addresses [k]; of equal addresses the last lane wins.

        groups: the workgroups [k]; None where the store itself goes to what all share.
        """
        content, units, pairs = self._index(addresses, data.shape[1], "writes")
        new = np.ascontiguousarray(data).view(content.dtype)
        self.clock += 1
        if groups is None:
            self.writer[pairs] = _NOBODY
            content[units] = new
            return
        # Workgroups that store the same value decide nothing.
        changes = (content[units] != new).repeat(max(1, new.itemsize // 2), 1)
        self._check_passed("overwrites", pairs, groups, False, changes)
        self.writer[pairs], self.when[pairs] = groups[:, None], self.clock
        content[units] = new
        lost = (content[units] != new).repeat(max(1, new.itemsize // 2), 1)
        if (lost & (self.writer[pairs] != groups[:, None])).any():
            raise CodeError("two workgroups store different values at one place")

    def release(self, groups: Array) -> None:
        """These workgroups' stores so far are written back to what all workgroups share."""
        self.clock += 1
        for group in np.unique(groups).tolist():
            self.released.setdefault(group, []).append(self.clock)

    def acquire(self, groups: Array) -> None:
        """These workgroups' caches hold nothing old from here on."""
        self.acquired |= dict.fromkeys(groups.tolist(), self.clock)
