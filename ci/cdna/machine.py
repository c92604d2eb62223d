"""The waves of some workgroups: registers, scheduling, wait counters and what is undefined.

All waves are held in arrays (waves last but for the 64 lanes), and those at the same instruction
execute it together; of several such sets the one that is furthest behind goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ci.cdna.integers import high, joined, low
from ci.cdna.lds import Lds
from ci.cdna.memory import Memory
from ci.cdna.parse import EXEC, CodeError, Instruction, Operand, Program

LANES = 64
Array = np.ndarray[Any, Any]
Handler = Callable[["Machine", Instruction], None]
HANDLERS: dict[str, Handler] = {}
_CARRIES = {"s_mov_b32", "s_mov_b64"}
_USES = ("v_cmp", "v_readfirstlane", "v_mfma")
BUDGET = 300_000  # steps: an instruction of some waves together is one
RUNNING, WAITING, ENDED = 0, 1, 2
_BITS = np.arange(32, dtype=np.uint32)


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the function that executes the named instructions."""

    def register(function: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = function
        return function

    return register


class Counters:
    """One wait counter: how many operations each wave issued and how many are known complete."""

    def __init__(self, waves: int, in_order: bool = True) -> None:
        self.issued = np.zeros(waves, np.int64)
        self.done = np.zeros(waves, np.int64)
        self.in_order = in_order

    def wait(self, waves: Any, outstanding: int) -> None:
        """At most `outstanding` operations are left; which ones is known only when in order."""
        if self.in_order or outstanding == 0:
            self.done[waves] = np.maximum(self.done[waves], self.issued[waves] - outstanding)


class Machine:
    """Workgroups of one kernel in execution. Arrays: S [128, W], V [512, W, 64], scc [W]."""

    def __init__(
        self, program: Program, memory: Memory, groups: int, waves_of_group: int,
        lds_bytes: int, chip: str, budget: int = BUDGET, first_group: int = 0,
    ) -> None:  # fmt: skip
        waves = groups * waves_of_group
        self.program, self.memory, self.chip, self.budget = program, memory, chip, budget
        self.s = np.zeros((128, waves), np.uint32)
        self.v = np.zeros((512, waves, LANES), np.uint32)
        self.s_known = np.zeros((128, waves), bool)
        self.v_known = np.zeros((512, waves, LANES), bool)
        self.s_all_known, self.v_all_known = set[int](), set[int]()
        self.scc = np.zeros(waves, bool)
        self.pc = np.zeros(waves, np.int64)
        self.status = np.zeros(waves, np.int8)
        # Number within this machine; that of the launch is `first_group` more.
        self.group = np.repeat(np.arange(groups), waves_of_group)
        self.first_group = first_group
        names = {one.name for one in program.instructions}
        narrow = next((n for n in (1, 2) if any(f"ds_write_b{8 * n}" in x for x in names)), 4)
        self.lds = Lds(groups, lds_bytes, waves, narrow)
        # LDS operations and scalar loads share lgkmcnt, and scalar loads return in any order.
        self.vm, self.ds = Counters(waves), Counters(waves)
        self.sm = Counters(waves, in_order=False)
        # Each wave's last store or write-back for other workgroups, counted as `vm` counts.
        self.published = np.zeros(waves, np.int64)
        self.loading: dict[tuple[str, int], tuple[Counters, Array]] = {}
        self.seen: Counter[str] = Counter()
        self.jumped = self.lenient = self.all_lanes = False
        self.saturates = np.zeros(waves, bool)  # MODE.FP16_OVFL
        self.s[EXEC : EXEC + 2] = 0xFFFFFFFF
        self.s_known[EXEC : EXEC + 2] = True
        self._selected: bytes = b""
        self.waves: Any = slice(None)
        self.count = waves
        self._mask: Array | None = None
        self.now: Instruction | None = None
        self.at = 0
        self.unknown: Array | None = None

    # Scheduling

    def run(self) -> None:
        """Run every wave to its end. Raises CodeError for any fault, naming the line."""
        labels = set(self.program.labels.values())
        code, steps = self.program.instructions, 0
        while True:
            running = self.status == RUNNING
            if not running.any():
                if not self._release():
                    return
                continue
            first = int(self.pc[running].min())
            self._select(running & (self.pc == first))
            alone = self.count == running.sum()
            at = first
            while True:
                if at >= len(code):
                    raise CodeError("execution runs past the last instruction")
                self.at, self.now = at, (now := code[at])
                handler = HANDLERS.get(now.name)
                if handler is None:
                    raise self.fault(f"instruction {now.name} is not supported")
                if (steps := steps + 1) > self.budget:
                    raise self.fault(f"the budget of {self.budget} steps is used up")
                self.seen[now.name] += 1
                self.jumped = False
                # Arithmetic on what was never written is itself unwritten; using it is a fault.
                self.lenient = now.name in _CARRIES or (
                    now.name.startswith("v_") and not now.name.startswith(_USES)
                )
                self.unknown = None
                handler(self, now)
                if self.jumped:
                    break
                at += 1
                if not alone and at in labels:
                    self.pc[self.waves] = at
                    break

    def jump(self, label: str, taken: Array | bool = True) -> None:
        """Move the selected waves where `taken` holds to a label, the others to the next line."""
        if label not in self.program.labels:
            raise self.fault(f"label {label} is not defined")
        self.pc[self.waves] = np.where(taken, self.program.labels[label], self.at + 1)
        self.jumped = True

    def stop(self, status: int) -> None:
        """End the selected waves, or leave them at a barrier."""
        if status == WAITING:
            self.pc[self.waves] = self.at + 1
        self.status[self.waves] = status
        self.jumped = True

    def _release(self) -> bool:
        """Open the barriers of all groups; false when every wave has ended."""
        waiting = self.status == WAITING
        if not waiting.any():
            return False
        for group in np.unique(self.group[waiting]):
            members = self.group == group
            if not waiting[members].all() or len(np.unique(self.pc[members])) > 1:
                raise CodeError(f"workgroup {group}: its waves do not meet at one barrier: "
                                f"{int((members & waiting).sum())} of {int(members.sum())} wait, "
                                "at lines " + ", ".join(sorted({
                                    str(self.program.instructions[int(pc) - 1].line)
                                    for pc in self.pc[members & waiting]})))  # fmt: skip
        self.lds.epoch[np.unique(self.group[waiting])] += 1
        self.status[waiting] = RUNNING
        return True

    def _select(self, chosen: Array) -> None:
        key = chosen.tobytes()
        if key != self._selected:
            self._selected = key
            self.count = int(chosen.sum())
            self.waves = slice(None) if chosen.all() else np.flatnonzero(chosen)
            self._mask = None

    def fault(self, what: str) -> CodeError:
        """A fault of the current instruction, with its line and text."""
        if self.now is None:
            return CodeError(what)
        return CodeError(f"line {self.now.line}: {self.now.text!r}: {what}")

    def checked(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """What a call returns; its CodeError as a fault of the current instruction."""
        try:
            return act(*arguments)
        except CodeError as error:
            raise self.fault(str(error)) from None

    # EXEC and masks

    @property
    def mask(self) -> Array:
        """EXEC of the selected waves as bool [n, 64]."""
        if self._mask is None:
            self._mask = self.lane_bits(EXEC)
            self.all_lanes = bool(self._mask.all())
        return self._mask

    def lane_bits(self, register: int) -> Array:
        """A pair of scalar registers as bool [n, 64]."""
        pair = self.scalar(register), self.scalar(register + 1)
        return np.concatenate([(x[:, None] >> _BITS) & 1 for x in pair], axis=1).astype(bool)

    def put_lane_bits(self, register: int, bits: Array) -> None:
        """Write bool [n, 64] to a pair of scalar registers."""
        packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        self.put_scalar(register, packed[:, 0])
        self.put_scalar(register + 1, packed[:, 1])

    # Registers

    def _check_loaded(self, kind: str, register: int, what: str, by: Any = None) -> None:
        entry = self.loading.get((kind, register))
        # Loads that are counted together, by `by`, return in the order in which they were issued.
        if entry is None or entry[0] is by:
            return
        counters, ticket = entry
        if (ticket[self.waves] > counters.done[self.waves]).any():
            raise self.fault(f"{kind}{register} is {what} before the s_waitcnt of its load")
        if (ticket <= counters.done).all():
            del self.loading[(kind, register)]

    def _read_unknown(self, name: str, where: Array) -> None:
        if not self.lenient:
            raise self.fault(f"{name} is read before it is written")
        self.unknown = where if self.unknown is None else self.unknown | where

    def scalar(self, register: int) -> Array:
        """A scalar register of the selected waves, uint32 [n]."""
        if self.loading:
            self._check_loaded("s", register, "read")
        if register not in self.s_all_known:
            known = self.s_known[register]
            if known.all():
                self.s_all_known.add(register)
            elif not known[self.waves].all():
                self._read_unknown(f"s{register}", ~known[self.waves][:, None])
        return self.s[register, self.waves]

    def put_scalar(self, register: int, value: Any) -> None:
        """Write uint32 [n] or one number to a scalar register."""
        if self.loading:
            self._check_loaded("s", register, "written")
        self.s[register, self.waves] = value
        self.s_known[register, self.waves] = True
        if self.unknown is not None:
            self.s_known[register, self.waves] = ~self.unknown.any(axis=1)
            self.s_all_known.discard(register)
        if register in (EXEC, EXEC + 1):
            self._mask = None

    def vector(self, register: int, lanes: Array | None = None) -> Array:
        """A vector register of the selected waves, uint32 [n, 64]; `lanes` are those used."""
        if self.loading:
            self._check_loaded("v", register, "read")
        if register not in self.v_all_known:
            known = self.v_known[register]
            used = self.mask if lanes is None else lanes
            if known.all():
                self.v_all_known.add(register)
            elif not (known[self.waves] | ~used).all():
                self._read_unknown(_vector_name(register), ~known[self.waves] & used)
        return self.v[register, self.waves]

    def put_vector(self, register: int, value: Any, lanes: Array | None = None, by: Any = None
                   ) -> None:  # fmt: skip
        """Write uint32, broadcast to [n, 64], in the active lanes (or those of `lanes`)."""
        if self.loading:
            self._check_loaded("v", register, "written", by)
        mask = self.mask if lanes is None else lanes
        if (lanes is None and self.all_lanes) or bool(mask.all()):
            self.v[register, self.waves] = value
            self.v_known[register, self.waves] = True
        elif isinstance(self.waves, slice):
            np.copyto(self.v[register], value, where=mask)
            self.v_known[register] |= mask
        else:
            self.v[register, self.waves] = np.where(mask, value, self.v[register, self.waves])
            self.v_known[register, self.waves] |= mask
        if self.unknown is not None:
            self.v_known[register, self.waves] &= ~(self.unknown & mask)
            self.v_all_known.discard(register)

    def put_half(self, register: int, bits: Array, high: bool) -> None:
        """Write 16 bits, uint32 [n, 64], to half of a vector register; the other half stays."""
        # Before its first write the other half holds nothing.
        known = self.v_known[register, self.waves]
        before = np.where(known, self.v[register, self.waves], np.uint32(0))
        keep, shift = (0xFFFF, 16) if high else (0xFFFF0000, 0)
        self.put_vector(register, before & np.uint32(keep) | bits << np.uint32(shift))

    def mark_loading(self, kind: str, register: int, counters: Counters) -> None:
        """The register is to be used only once the operation issued last has been waited for."""
        entry = self.loading.get((kind, register))
        ticket = np.zeros_like(counters.issued) if entry is None else entry[1]
        if entry is not None and entry[0] is not counters:
            ticket = np.zeros_like(counters.issued)
        ticket[self.waves] = counters.issued[self.waves]
        self.loading[(kind, register)] = (counters, ticket)

    def scalar32(self, of: Operand) -> Array:
        """A scalar source, uint32 [n]."""
        if of.kind == "s":
            return self.scalar(of.index)
        if of.kind in ("int", "float"):
            return np.full(self.count, constant(of, "u32"), np.uint32)
        if of.kind == "name" and of.name in ("src_scc", "scc"):
            return self.scc[self.waves].astype(np.uint32)
        raise self.fault(f"operand {of.name or of.kind} is not supported here")

    def scalar64(self, of: Operand) -> Array:
        """A scalar source of two registers, uint64 [n]; integers are sign-extended."""
        if of.kind == "s":
            return joined(self.scalar(of.index), self.scalar(of.index + 1))
        if of.kind == "int" and -(1 << 31) <= of.value < 1 << 31:
            return np.full(self.count, int(of.value) & (1 << 64) - 1, np.uint64)
        if of.kind == "float":
            return np.full(self.count, constant(of, "u64"), np.uint64)
        raise self.fault("a 64-bit literal of unclear extension is not supported")

    def put64(self, register: int, value: Array) -> None:
        """Write uint64 [n] to two scalar registers."""
        for word, part in enumerate((low(value), high(value))):
            self.put_scalar(register + word, part)


def _vector_name(register: int) -> str:
    return f"v{register}" if register < 256 else f"a{register - 256}"


def constant(of: Operand, kind: str) -> Any:
    """A constant operand as the bits of an unsigned number of its width."""
    if of.kind == "int":
        return int(of.value) & ((1 << 64) - 1 if kind.endswith("64") else 0xFFFFFFFF)
    width = {"f16": np.float16, "f64": np.float64, "u64": np.float64}.get(kind, np.float32)
    unsigned = {np.float16: np.uint16, np.float64: np.uint64, np.float32: np.uint32}[width]
    return int(np.array(of.value, width).view(unsigned))
