"""Local memory of the workgroups, with a record of who touched each byte since the last barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from ci.cdna.parse import CodeError

Array = np.ndarray[Any, Any]
_NOBODY, _SEVERAL = -1, -2


class Lds:
    """bytes [G, size]. Two accesses of a byte by different waves, one a write, need a barrier."""

    def __init__(self, groups: int, size: int, waves: int) -> None:
        self.size = size
        self.epoch = np.zeros(groups, np.int64)
        self.bytes = np.zeros((groups, size), np.uint8)
        self.known = np.zeros((groups, size), bool)
        self.writer = np.full((groups, size), _NOBODY, np.int64)
        self.reader = np.full((groups, size), _NOBODY, np.int64)
        self.written = np.full((groups, size), -1, np.int64)
        self.read_in = np.full((groups, size), -1, np.int64)
        # Direct loads from global memory: the writer's ticket until it has waited for it.
        self.ticket = np.zeros((groups, size), np.int64)

    def _index(self, groups: Array, offsets: Array, width: int, what: str) -> tuple[Array, Array]:
        if ((offsets < 0) | (offsets + width > self.size)).any():
            raise CodeError(f"{what} LDS outside its {self.size} bytes, at {int(offsets.max())}")
        natural = width if width in (1, 2, 4, 8, 16) else 4
        if (offsets % min(natural, 4)).any():
            raise CodeError(f"{what} {width} bytes of LDS at an address that is not aligned")
        return groups[:, None], offsets[:, None] + np.arange(width)

    def read(self, groups: Array, waves: Array, offsets: Array, width: int, done: Array) -> Array:
        """uint8 [k, width]; `done` [W] is how many vector memory operations waves waited for."""
        at = self._index(groups, offsets, width, "reads")
        if not self.known[at].all():
            raise CodeError("reads LDS that was never written")
        other = (self.writer[at] != waves[:, None]) & (self.written[at] == self.epoch[at[0]])
        if other.any():
            raise CodeError(f"reads LDS byte {int(at[1][other][0])} that another wave wrote "
                            "since the last barrier")  # fmt: skip
        ticket = self.ticket[at]
        if ticket.any() and (ticket > done[np.maximum(self.writer[at], 0)]).any():
            raise CodeError("reads LDS that is still being loaded from global memory")
        same = (self.read_in[at] != self.epoch[at[0]]) | (self.reader[at] == waves[:, None])
        self.reader[at] = np.where(same, waves[:, None], _SEVERAL)
        self.read_in[at] = self.epoch[at[0]]
        return self.bytes[at]

    def write(self, groups: Array, waves: Array, offsets: Array, data: Array,
              ticket: Array | None = None) -> None:  # fmt: skip
        """uint8 [k, width] of lanes [k]; `ticket` [k] is that of a direct load."""
        at = self._index(groups, offsets, data.shape[1], "writes")
        now = self.epoch[at[0]]
        mine = waves[:, None]
        # Triton lets waves that hold copies of a value all store it: that decides nothing.
        changes = ~self.known[at] | (self.bytes[at] != data)
        for who, when in ((self.writer, self.written), (self.reader, self.read_in)):
            if (changes & (who[at] != mine) & (when[at] == now)).any():
                raise CodeError("writes LDS that another wave touched since the last barrier")
        self.writer[at], self.written[at] = mine, now
        # Waves of one instruction write together: what is not there afterwards was overwritten.
        self.bytes[at] = data
        if ((self.bytes[at] != data) & (self.writer[at] != mine)).any():
            raise CodeError("two waves write different values to one LDS byte without a barrier")
        self.ticket[at] = 0 if ticket is None else ticket[:, None]
        self.known[at] = True

    def add(self, groups: Array, waves: Array, offsets: Array, values: Array) -> None:
        """Atomic 32-bit additions of uint32 [k]."""
        at = self._index(groups, offsets, 4, "adds to")
        if not self.known[at].all():
            raise CodeError("adds to LDS that was never written")
        other = (self.writer[at] != waves[:, None]) & (self.written[at] == self.epoch[at[0]])
        if other.any():
            raise CodeError("adds to LDS that another wave wrote since the last barrier")
        words = self.bytes.reshape(len(self.bytes), -1, 4).view(np.uint32)[..., 0]
        np.add.at(words, (groups, offsets // 4), values)
        same = (self.read_in[at] != self.epoch[at[0]]) | (self.reader[at] == waves[:, None])
        self.reader[at] = np.where(same, waves[:, None], _SEVERAL)
        self.read_in[at] = self.epoch[at[0]]
