"""Local memory of the workgroups, with a record of who touched it since the last barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from ci.cdna.parse import CodeError

Array = np.ndarray[Any, Any]
_NOBODY, _SEVERAL = -1, -2


class Lds:
    """bytes [G, size]. Two accesses by different waves, one a write, need a barrier between.

    Who touched what is kept for each two bytes.
    """

    def __init__(self, groups: int, size: int) -> None:
        self.size = size
        stored = max(4, -(-size // 4) * 4)
        self.epoch = np.zeros(groups, np.int32)
        self.bytes = np.zeros((groups, stored), np.uint8)
        self.known = np.zeros((groups, stored), bool)
        self.writer, self.written, self.reader, self.read_in = (
            np.full((groups, stored // 2), _NOBODY, np.int32) for _ in range(4)
        )
        # Direct loads from global memory: the writer's ticket until it has waited for it.
        self.ticket = np.zeros((groups, stored // 2), np.int32)

    def _index(
        self, groups: Array, offsets: Array, width: int, what: str
    ) -> tuple[Any, tuple[Array, Array], tuple[Array, Array]]:
        """(unit type of an access, indices of its units, indices of its pairs of bytes)."""
        if ((offsets < 0) | (offsets + width > self.size)).any():
            raise CodeError(f"{what} LDS outside its {self.size} bytes, at {int(offsets.max())}")
        unit = min(width, 4)
        if (offsets % unit).any():
            raise CodeError(f"{what} {width} bytes of LDS at an address that is not aligned")
        group, start = groups[:, None], offsets[:, None]
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[unit]
        units = start // unit + np.arange(width // unit)
        return kind, (group, units), (group, start // 2 + np.arange(max(1, width // 2)))

    def _conflict(self, pairs: tuple[Array, Array], waves: Array, read_too: bool) -> Array:
        """Where another wave wrote (or read) since the last barrier."""
        now = self.epoch[pairs[0]]
        found = (self.writer[pairs] != waves[:, None]) & (self.written[pairs] == now)
        if read_too:
            found |= (self.reader[pairs] != waves[:, None]) & (self.read_in[pairs] == now)
        return found

    def _mark_read(self, pairs: tuple[Array, Array], waves: Array) -> None:
        now = self.epoch[pairs[0]]
        same = (self.read_in[pairs] != now) | (self.reader[pairs] == waves[:, None])
        self.reader[pairs] = np.where(same, waves[:, None], _SEVERAL)
        self.read_in[pairs] = now

    def read(self, groups: Array, waves: Array, offsets: Array, width: int, done: Array) -> Array:
        """uint8 [k, width]; `done` [W] is how many vector memory operations waves waited for."""
        kind, units, pairs = self._index(groups, offsets, width, "reads")
        known = {1: bool, 2: np.uint16, 4: np.uint32}[min(width, 4)]
        if (self.known.view(known)[units] != int.from_bytes(b"\1" * min(width, 4), "little")).any():
            raise CodeError("reads LDS that was never written")
        other = self._conflict(pairs, waves, False)
        if other.any():
            raise CodeError(f"reads LDS byte {2 * int(pairs[1][other][0])} that another wave wrote "
                            "since the last barrier")  # fmt: skip
        ticket = self.ticket[pairs]
        if ticket.any() and (ticket > done[np.maximum(self.writer[pairs], 0)]).any():
            raise CodeError("reads LDS that is still being loaded from global memory")
        self._mark_read(pairs, waves)
        return np.ascontiguousarray(self.bytes.view(kind)[units]).view(np.uint8)

    def write(self, groups: Array, waves: Array, offsets: Array, data: Array,
              ticket: Array | None = None) -> None:  # fmt: skip
        """uint8 [k, width] of lanes [k]; `ticket` [k] is that of a direct load."""
        kind, units, pairs = self._index(groups, offsets, data.shape[1], "writes")
        now, content = self.bytes.view(kind), np.ascontiguousarray(data).view(kind)
        each = max(1, content.itemsize // 2)
        other = self._conflict(pairs, waves, True)
        if other.any():
            # Triton lets waves that hold copies of a value all store it: that decides nothing.
            changes = (now[units] != content).repeat(each, 1)
            if (other & (changes | ~self.known[pairs[0], 2 * pairs[1]])).any():
                raise CodeError("writes LDS that another wave touched since the last barrier")
        self.writer[pairs], self.written[pairs] = waves[:, None], self.epoch[pairs[0]]
        # Waves of one instruction write together: what is not there afterwards was overwritten.
        now[units] = content
        lost = (now[units] != content).repeat(each, 1)
        if (lost & (self.writer[pairs] != waves[:, None])).any():
            raise CodeError("two waves write different values to one LDS byte without a barrier")
        self.ticket[pairs] = 0 if ticket is None else ticket[:, None]
        self.known[units[0], offsets[:, None] + np.arange(data.shape[1])] = True

    def add(self, groups: Array, waves: Array, offsets: Array, values: Array) -> None:
        """Atomic 32-bit additions of uint32 [k]."""
        kind, units, pairs = self._index(groups, offsets, 4, "adds to")
        if not self.known[groups, offsets].all():
            raise CodeError("adds to LDS that was never written")
        if self._conflict(pairs, waves, False).any():
            raise CodeError("adds to LDS that another wave wrote since the last barrier")
        np.add.at(self.bytes.view(kind), (groups, units[1][:, 0]), values)
        self._mark_read(pairs, waves)
