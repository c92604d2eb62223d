"""What our kernels would cost an MI300X or MI355X at most in throughput, from executed code.

    python -m ci.cdna_cost [PART]    writes docs/performance/cost-amd.json, minutes on one core
    python ci/generate_performance.py

Not measured: no AMD GPU has run this. A served shape is too long to execute, so each kernel runs at
two short lengths with the tiles that the served shape gets; the difference is the inner loop, and
the rest follows by multiplying it. Counted are, over all waves, cycles of the matrix units, issue
cycles of all other instructions, bytes to and from LDS, bytes asked of the caches, and the 128-byte
lines of memory that were touched. The estimate is the longest of what these take at the published
rates below, as if they overlapped entirely and all compute units were equally busy.

Beside them stands how long the waves themselves take: of each, the issue cycles and the waits for
loads, at the assumed latencies below; all of that over as many waves as registers, LDS and the
served launch let run at once. Waves that share a SIMD do not hinder each other there.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import attention_cases
from benchmarks.experts import stack, tokens_of
from ci.cdna import machine, memory
from ci.cdna.launch import CHIPS, executing
from ci.cross_compile import compile_launch, recorded
from inkling_portable.backends.triton import OFFERS, routed_experts
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.rel_attention import attend, describe
from inkling_portable.target import Target

FILE = Path(__file__).resolve().parents[1] / "docs" / "performance" / "cost-amd.json"
LINE = 128


@dataclass(frozen=True)
class Rates:
    """Published numbers of a chip; a SIMD is a quarter of a compute unit."""

    units: int
    ghz: float
    gbs: float
    flops: int  # of bfloat16 products for one SIMD in one cycle: the published peak
    lds: int = 128  # bytes for one unit in one cycle
    cache: int = 64  # bytes from the vector cache for one unit in one cycle


RATES = {
    "gfx942": Rates(304, 2.1, 5300, 512),
    "gfx950": Rates(256, 2.4, 8000, 1024),
}
# From a load to its use: assumed, not published. Memory twice, since under load nobody knows it.
MEMORY_NS = (400, 800)
LATENCY_CYCLES = {"ds": 64, "sm": 200}
# Issue cycles of a wave of 64 lanes on a SIMD that is 16 wide; a quarter of the rate beside them.
_ISSUE, _SLOW = 4, 16
_SLOW_NAMES = ("v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_sin", "v_cos", "v_mul_lo_u32",
               "v_mul_hi")  # fmt: skip
_WIDTH = re.compile(r"(?:b|u|i|f)(8|16|32|64|96|128)(?:_|$)|dword(?:x(\d))?|short|byte")


@dataclass(frozen=True)
class Counts:
    """Of all waves together: cycles of one SIMD, and bytes."""

    matrix: float = 0
    issue: float = 0
    lds: float = 0
    cache: float = 0
    lines: float = 0  # bytes
    soon: float = 0  # cycles from start to end, of every wave by itself, and with the
    late: float = 0  # longer of the two latencies

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> Counts:
        return Counts(*(getattr(self, f.name) * factor for f in fields(self)))

    def at(self, one: int, two: Counts, second: int, wanted: int) -> Counts:
        """Counts at length `wanted`, from these at `one` and others at `second`."""
        return self + (two + self.times(-1)).times((wanted - one) / (second - one))

    def microseconds(self, chip: str, slots: float = 0) -> dict[str, float]:
        """What each resource needs at its rate, and the waves where `slots` run at once."""
        r = RATES[chip]
        clock = r.ghz * 1e3  # cycles in a microsecond
        return {
            "matrix": self.matrix / (4 * r.units * clock),
            "issue": self.issue / (4 * r.units * clock),
            "lds": self.lds / (r.lds * r.units * clock),
            "cache": self.cache / (r.cache * r.units * clock),
            "memory": self.lines / (r.gbs * 1e3),
            "soon": self.soon / (slots * clock) if slots else 0.0,
            "late": self.late / (slots * clock) if slots else 0.0,
        }


def matrix_cycles(name: str, chip: str) -> float:
    """Cycles of one matrix instruction on its SIMD. Raises ValueError for one of unknown rate."""
    found = re.fullmatch(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_(\w+)", name)
    if found is None or not found[4].endswith(("bf16", "f16", "f32")):
        raise ValueError(f"the rate of {name} is not stated here")
    products = 2 * int(found[1]) * int(found[2]) * int(found[3])
    rate = RATES[chip].flops
    return products / (256 if found[4] == "f32" else rate)


def width(name: str) -> int:
    """Bytes that one lane moves by a memory instruction."""
    found = _WIDTH.search(name)
    if found is None:
        return 4
    if found[1]:
        each = int(found[1]) // 8
    else:
        each = {"short": 2, "byte": 1}.get(found[0], 4 * int(found[2] or 1))
    return each * (2 if "read2" in name or "write2" in name else 1)


class Clock:
    """The time of each wave of a machine, which waits where its code does, at both latencies."""

    def __init__(self, m: machine.Machine, chip: str) -> None:
        self.now = np.zeros((2, len(m.pc)))
        memory_cycles = np.array([[ns * RATES[chip].ghz] for ns in MEMORY_NS])
        self.latency: dict[str, Any] = {"vm": memory_cycles, **LATENCY_CYCLES}
        # When each of the last operations of a counter was issued; none counts further than 63.
        self.issued = {name: np.zeros((2, 64, len(m.pc))) for name in self.latency}

    def step(self, m: machine.Machine, now: Any, handler: machine.Handler, cycles: float) -> None:
        """Execute one instruction of the selected waves."""
        of, waves = {name: getattr(m, name) for name in self.latency}, m.waves
        kept = np.arange(len(m.pc))[waves]
        waits = now.name == "s_waitcnt"
        before = {name: (c.done if waits else c.issued)[kept] for name, c in of.items()}
        handler(m, now)
        self.now[:, kept] += cycles
        for name, counter in of.items():
            after = (counter.done if waits else counter.issued)[kept]
            moved = after > before[name]
            if not moved.any():
                continue
            place, those = after[moved] % 64, kept[moved]
            if waits:
                ready = self.issued[name][:, place, those] + self.latency[name]
                self.now[:, those] = np.maximum(self.now[:, those], ready)
            else:
                self.issued[name][:, place, those] = self.now[:, those]


@contextmanager
def counted(chip: str) -> Iterator[list[Counts]]:
    """Execute the block's launches as the chip's code; at its end the list holds their counts."""
    sums: list[dict[str, float]] = []
    handlers = dict(machine.HANDLERS)
    touched: list[set[int]] = []
    locate: Any = memory.Memory._index
    arenas: dict[int, Any] = {}
    clocks: dict[int, tuple[machine.Machine, Clock]] = {}

    def number(of: Any) -> int:
        """Which launch a memory is of: each has one of its own, and finds the caches empty."""
        if id(of) not in arenas:
            arenas[id(of)] = (len(sums), of)  # kept, so that no other gets its id
            sums.append(dict.fromkeys((f.name for f in fields(Counts)), 0.0))
            touched.append(set())
        return int(arenas[id(of)][0])

    def wrapped(handler: machine.Handler) -> machine.Handler:
        def count(m: machine.Machine, now: Any) -> None:
            name, waves, of = now.name, m.count, sums[number(m.memory)]
            cycles: float = _SLOW if name.startswith(_SLOW_NAMES) else _ISSUE
            of["issue"] += waves * cycles
            if name.startswith("v_mfma"):
                cycles = matrix_cycles(name, chip)
                of["matrix"] += waves * cycles
            if name.startswith(("ds_read", "ds_write", "global_", "buffer_")):
                moved = width(name) * int(m.mask.sum())
                if name.startswith("ds_") or "lds" in now.modifiers:
                    of["lds"] += moved
                if not name.startswith("ds_"):
                    of["cache"] += moved
            if id(m) not in clocks:
                clocks[id(m)] = (m, Clock(m, chip))
            clock = clocks[id(m)][1]
            clock.step(m, now, handler, cycles)
            if name == "s_endpgm":
                soon, late = clock.now[:, m.waves].sum(axis=1)
                of["soon"], of["late"] = of["soon"] + float(soon), of["late"] + float(late)

        return count

    def index(self: Any, addresses: Any, width: int, what: str) -> Any:
        first = addresses.astype(np.int64) - memory.BASE
        lines = np.concatenate([first, first + width - 1]) // LINE
        touched[number(self)].update(np.unique(lines).tolist())
        return locate(self, addresses, width, what)

    result: list[Counts] = []
    machine.HANDLERS.update({name: wrapped(handler) for name, handler in handlers.items()})
    memory.Memory._index = index  # type: ignore[method-assign]
    try:
        with executing(chip):
            yield result
    finally:
        memory.Memory._index = locate  # type: ignore[method-assign]
        machine.HANDLERS.update(handlers)
    for of, seen in zip(sums, touched, strict=True):
        result.append(Counts(**of | {"lines": float(LINE * len(seen))}))


Run = Callable[[str, int, int, str, int], Any]


@dataclass(frozen=True)
class Case:
    """One served shape: run(chip, length, times, device, pieces) calls it with the served tiles.

    times: how many of the served shape's `pieces` are called at once; on the device "meta" the call
    is only recorded.
    """

    name: str
    run: Run
    lengths: tuple[int, int]
    served: int
    repeat: int = 1  # how many such pieces the served shape has


def attention(lengths: int, fresh: int, bound: int, window: int = 0, former: bool = False
              ) -> Run:  # fmt: skip
    """Requests of `fresh` new tokens on contexts of `bound`.

    former: with the tiles of 64 keys, in stages, that this estimate spoke against.
    """

    def arguments(length: int, times: int, device: str) -> dict[str, Any]:
        shape = attention_cases.LOCAL if window else attention_cases.GLOBAL
        case = attention_cases.Case("estimate", "decode", lengths=(length,) * lengths * times,
                                    fresh=fresh, **shape)  # fmt: skip
        torch.manual_seed(0)
        return attention_cases.arguments(case, device) | {"max_kv": bound}

    def run(chip: str, length: int, times: int, device: str, pieces: int = 1) -> None:
        served = arguments(bound, pieces, "meta")
        names = ("q", "k_cache", "v_cache", "rel", "kv_lens", "max_q", "max_kv", "window")
        plan = tuning.plan(Target.parse(CHIPS[chip]), describe(*(served[n] for n in names)))
        if plan.few is not None:
            few, stages = plan.few, 1 if chip == "gfx950" else 2
            few = replace(few, n=64, stages=stages) if former else few
            # One request is cut into shorter ones' pieces, each as long as in the served shape;
            # of several each is cut into as many.
            share = length / bound if lengths * pieces == 1 else times / pieces
            programs = round(few.programs * share)
            plan = replace(plan, few=replace(few, programs=max(1, programs)))
        attend(plan, **arguments(length, times, device))

    return run


def experts(form: str, tokens: int, width: int = 384, vector: bool | None = None
            ) -> Run:  # fmt: skip
    """Routed experts of one rank of eight at a shorter hidden size; no two tokens share one.

    vector: whether without matrix units; None: as tuning has it.
    """
    function = next(row for row in OFFERS if row.op == "routed_experts").load()

    def run(chip: str, hidden: int, times: int, device: str, pieces: int = 1) -> None:
        torch.manual_seed(0)
        call: dict[str, Any] = {"format": form, "act": "bf16", "interleaved": True}
        for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
            parts = stack(form, rows, columns, device)
            call |= {name: parts[0], f"{name}_scale": parts[1], f"{name}_global": parts[2]}
        kept = routed_experts.gemv_to
        if vector is not None:
            routed_experts.gemv_to = lambda: tokens if vector else 0
        try:
            function(**call, **tokens_of(hidden, tokens, 1, device)[0])
        finally:
            routed_experts.gemv_to = kept

    return run


def _attention(name: str, lengths: int, fresh: int, bound: int, short: tuple[int, int],
               repeat: int = 1) -> tuple[Case, Case]:  # fmt: skip
    """A shape with the tiles that it gets, and with those that it had."""
    return tuple(
        Case(name + ", former tiles" * former, attention(lengths, fresh, bound, 0, former), short,
             bound, repeat) for former in (False, True)
    )  # type: ignore[return-value]  # fmt: skip


CASES = (
    *_attention("attention, 1 x 64K, global", 1, 1, 65536, (2048, 4096)),
    *_attention("attention, 64 x 8K, global", 8, 1, 8192, (512, 1024), 8),
    *_attention("attention, verify 4 on 64K, global", 1, 4, 65536, (2048, 4096)),
    *_attention("attention, verify 9 on 64K, global", 1, 9, 65536, (2048, 4096)),
    Case("experts, MXFP4, 1 token", experts("mxfp4", 1), (512, 1024), 6144),
    Case("experts, NVFP4, 1 token", experts("nvfp4", 1), (512, 1024), 6144),
    *(Case(f"experts, {form.upper()}, 16 tokens, {how}", experts(form, 16, vector=vector),
           (512, 1024), 6144)
      for form in ("mxfp4", "nvfp4")
      for how, vector in (("tiles", False), ("without matrix units", True))),
    Case("experts, BF16, 16 tokens", experts("bf16", 16), (512, 1024), 6144),
)  # fmt: skip


def estimate(case: Case, chip: str) -> dict[str, Any]:
    """One row: microseconds of each resource, summed over launches, and the longest."""
    found = []
    for length in case.lengths:
        with counted(chip) as counts:
            case.run(chip, length, 1, "cpu", case.repeat)
        found.append(counts)
    first, second = case.lengths
    with launching_for(Target.parse(CHIPS[chip])), recorded() as launches:
        case.run(chip, case.served, case.repeat, "meta", case.repeat)
    spent: Counter[str] = Counter()
    for one, two, launch in zip(*found, launches, strict=True):
        total = one.at(first, two, second, case.served).times(case.repeat)
        report = compile_launch(launch, chip)
        launched = prod(launch.grid) * report.warps
        slots = min(launched, 4 * RATES[chip].units * report.occupancy)
        spent.update(total.microseconds(chip, slots))
    us = {name: round(value, 2) for name, value in spent.items()}
    bound = max(us, key=lambda name: us[name])
    return {"case": case.name, "chip": chip, "us": us, "bound": bound}


def main(argv: list[str]) -> int:
    """Write the file; of cases that do not hold the text given, what was written before stays."""
    import triton

    part = argv[0] if argv else ""
    kept = json.loads(FILE.read_text())["rows"] if part else []
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for chip in CHIPS:
            old = [r for r in kept if (r["case"], r["chip"]) == (case.name, chip)]
            rows += old if part not in case.name else [estimate(case, chip)]
            print(rows[-1:], file=sys.stderr, flush=True)
    rates = {chip: asdict(rate) for chip, rate in RATES.items()}
    content = {"command": "python -m ci.cdna_cost", "triton": triton.__version__, "rates": rates,
               "rows": rows}  # fmt: skip
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
