"""Local memory of the workgroups, with a record of who touched it since the last barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from ci.cdna.parse import CodeError

Array = np.ndarray[Any, Any]
_NEVER = -1


class Lds:
    """bytes [G * size]. Two accesses by different waves, one a write, need a barrier between.

    For each `granule` bytes, the fewest that the program writes at once, the last write and the
    last read are kept as the number of barriers before it times `waves`, plus the wave; of several
    waves that read since a barrier only that there are several (the number `waves` - 1).
    """

    def __init__(self, groups: int, size: int, waves: int, granule: int) -> None:
        self.size, self.stride, self.granule = size, max(4, -(-size // 4) * 4), granule
        self.waves = waves + 1
        self.epoch = np.zeros(groups, np.int32)
        self.bytes = np.zeros(groups * self.stride, np.uint8)
        self.written, self.read_by = (
            np.full(len(self.bytes) // granule, _NEVER, np.int32) for _ in range(2)
        )
        # Direct loads from global memory: the writer's ticket until it has waited for it.
        self.ticket = np.zeros(len(self.written), np.int32)
        self.direct = False

    def _index(self, groups: Array, offsets: Array, width: int, what: str
               ) -> tuple[Any, Array, Array]:  # fmt: skip
        """(unit type of an access, indices of its units, indices of its granules)."""
        if ((offsets < 0) | (offsets + width > self.size)).any():
            raise CodeError(f"{what} LDS outside its {self.size} bytes, at {int(offsets.max())}")
        unit = min(width, 4)
        if (offsets % unit).any():
            raise CodeError(f"{what} {width} bytes of LDS at an address that is not aligned")
        start = (groups * self.stride + offsets)[:, None]
        units = start // unit + np.arange(width // unit)
        granules = units
        if self.granule != unit:
            granules = start // self.granule + np.arange(max(1, width // self.granule))
        return {1: np.uint8, 2: np.uint16, 4: np.uint32}[unit], units, granules

    def _now(self, groups: Array, waves: Array) -> tuple[Array, Array]:
        """The least mark since the last barrier, and this wave's, each [k, 1]."""
        since = self.epoch[groups] * self.waves
        return since[:, None], (since + waves)[:, None].astype(np.int32)

    def _other_wrote(self, granules: Array, since: Array, mine: Array, what: str) -> None:
        wrote = self.written[granules]
        if (wrote == _NEVER).any():
            raise CodeError(f"{what} LDS that was never written")
        other = (wrote >= since) & (wrote != mine)
        if other.any():
            place = int(granules[other][0]) * self.granule % self.stride
            raise CodeError(f"{what} LDS byte {place} that another wave wrote since the last "
                            "barrier")  # fmt: skip

    def _mark_read(self, granules: Array, since: Array, mine: Array) -> None:
        before = self.read_by[granules]
        alone = (before < since) | (before == mine)
        self.read_by[granules] = np.where(alone, mine, since + self.waves - 1)

    def read(self, groups: Array, waves: Array, offsets: Array, width: int, done: Array) -> Array:
        """uint8 [k, width]; `done` [W] is how many vector memory operations waves waited for."""
        kind, units, granules = self._index(groups, offsets, width, "reads")
        since, mine = self._now(groups, waves)
        self._other_wrote(granules, since, mine, "reads")
        if self.direct:
            ticket = self.ticket[granules]
            if (ticket > done[self.written[granules] % self.waves]).any():
                raise CodeError("reads LDS that is still being loaded from global memory")
        self._mark_read(granules, since, mine)
        return self.bytes.view(kind)[units].view(np.uint8)

    def write(self, groups: Array, waves: Array, offsets: Array, data: Array,
              ticket: Array | None = None) -> None:  # fmt: skip
        """uint8 [k, width] of lanes [k]; `ticket` [k] is that of a direct load."""
        kind, units, granules = self._index(groups, offsets, data.shape[1], "writes")
        since, mine = self._now(groups, waves)
        now, content = self.bytes.view(kind), np.ascontiguousarray(data).view(kind)
        each = max(1, content.itemsize // self.granule)
        wrote, read = self.written[granules], self.read_by[granules]
        other = ((wrote >= since) & (wrote != mine)) | ((read >= since) & (read != mine))
        # Triton lets waves that hold copies of a value all store it: that decides nothing.
        if (
            other.any()
            and (other & ((now[units] != content).repeat(each, 1) | (wrote == _NEVER))).any()
        ):
            raise CodeError("writes LDS that another wave touched since the last barrier")
        self.written[granules] = mine
        # Waves of one instruction write together: what is not there afterwards was overwritten.
        now[units] = content
        lost = now[units] != content
        if lost.any() and (lost.repeat(each, 1) & (self.written[granules] != mine)).any():
            raise CodeError("two waves write different values to one LDS byte without a barrier")
        if ticket is not None:
            self.direct = True
            self.ticket[granules] = ticket[:, None]
        elif self.direct:
            self.ticket[granules] = 0

    def add(self, groups: Array, waves: Array, offsets: Array, values: Array) -> None:
        """Atomic 32-bit additions of uint32 [k]."""
        kind, units, granules = self._index(groups, offsets, 4, "adds to")
        since, mine = self._now(groups, waves)
        self._other_wrote(granules, since, mine, "adds to")
        np.add.at(self.bytes.view(kind), units[:, 0], values)
        self._mark_read(granules, since, mine)
