"""What our kernels would cost an MI300X or MI355X at most in throughput, from executed code.

    python -m ci.cdna_cost [PART]    writes docs/performance/cost-amd.json, minutes on one core
    python ci/generate_performance.py

Not measured: no AMD GPU has run this. A served shape is too long to execute, so each kernel runs at
two short lengths with the tiles that the served shape gets; the difference is the inner loop, and
the rest follows by multiplying it. Counted are, over all waves, cycles of the matrix units, issue
cycles of all other instructions, bytes to and from LDS, bytes asked of the caches, and the 128-byte
lines of memory that were touched. The estimate is the longest of what these take at the published
rates below, as if they overlapped entirely and all compute units were equally busy.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import attention_cases
from benchmarks.experts import stack, tokens_of
from ci.cdna import machine, memory
from ci.cdna.launch import CHIPS, executing
from inkling_portable.backends.triton import OFFERS, routed_experts
from inkling_portable.backends.triton.rel_attention import attend
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

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> Counts:
        return Counts(*(getattr(self, f.name) * factor for f in fields(self)))

    def at(self, one: int, two: Counts, second: int, wanted: int) -> Counts:
        """Counts at length `wanted`, from these at `one` and others at `second`."""
        return self + (two + self.times(-1)).times((wanted - one) / (second - one))

    def microseconds(self, chip: str) -> dict[str, float]:
        """What each resource needs at its rate."""
        r = RATES[chip]
        clock = r.ghz * 1e3  # cycles in a microsecond
        return {
            "matrix": self.matrix / (4 * r.units * clock),
            "issue": self.issue / (4 * r.units * clock),
            "lds": self.lds / (r.lds * r.units * clock),
            "cache": self.cache / (r.cache * r.units * clock),
            "memory": self.lines / (r.gbs * 1e3),
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


@contextmanager
def counted(chip: str) -> Iterator[list[Counts]]:
    """Execute the block's launches as the chip's code; at its end the list holds their counts."""
    sums = dict.fromkeys((f.name for f in fields(Counts)), 0.0)
    handlers = dict(machine.HANDLERS)
    touched: set[int] = set()
    locate: Any = memory.Memory._index
    arenas: list[int] = []

    def wrapped(handler: machine.Handler) -> machine.Handler:
        def count(m: machine.Machine, now: Any) -> None:
            name, waves = now.name, m.count
            if name.startswith("v_mfma"):
                sums["matrix"] += waves * matrix_cycles(name, chip)
            slow = name.startswith(_SLOW_NAMES)
            sums["issue"] += waves * (_SLOW if slow else _ISSUE)
            if name.startswith(("ds_read", "ds_write", "global_", "buffer_")):
                moved = width(name) * int(m.mask.sum())
                if name.startswith("ds_") or "lds" in now.modifiers:
                    sums["lds"] += moved
                if not name.startswith("ds_"):
                    sums["cache"] += moved
            handler(m, now)

        return count

    def index(self: Any, addresses: Any, width: int, what: str) -> Any:
        # Each launch has a memory of its own, and finds the caches empty.
        if not hasattr(self, "number"):
            self.number = len(arenas)
            arenas.append(self.number)
        first = addresses.astype(np.int64) - memory.BASE
        lines = np.concatenate([first, first + width - 1]) // LINE
        touched.update((np.unique(lines) + (self.number << 40)).tolist())
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
    sums["lines"] = float(LINE * len(touched))
    result.append(Counts(**sums))


@dataclass(frozen=True)
class Case:
    """One served shape: run(chip, length) executes it at a length, with the served tiles."""

    name: str
    run: Callable[[str, int], Any]
    lengths: tuple[int, int]
    served: int
    repeat: float = 1  # how many such pieces the served shape has


def attention(lengths: int, fresh: int, bound: int, window: int = 0) -> Callable[[str, int], Any]:
    """Requests of `fresh` new tokens; tiles are those for contexts up to `bound`."""

    def run(chip: str, length: int) -> None:
        shape = attention_cases.LOCAL if window else attention_cases.GLOBAL
        case = attention_cases.Case("estimate", "decode", lengths=(length,) * lengths, fresh=fresh,
                                    **shape)  # fmt: skip
        torch.manual_seed(0)
        call = attention_cases.arguments(case, "cpu") | {"max_kv": bound}
        attend(Target.parse(CHIPS[chip]), **call)

    return run


def experts(form: str, tokens: int, width: int = 384, vector: bool = False
            ) -> Callable[[str, int], Any]:  # fmt: skip
    """Routed experts of one rank of eight at a shorter hidden size; no two tokens share one.

    vector: without matrix units at any number of tokens.
    """
    function = next(row for row in OFFERS if row.op == "routed_experts").load()

    def run(chip: str, hidden: int) -> None:
        torch.manual_seed(0)
        call: dict[str, Any] = {"format": form, "act": "bf16", "interleaved": True}
        for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
            parts = stack(form, rows, columns, "cpu")
            call |= {name: parts[0], f"{name}_scale": parts[1], f"{name}_global": parts[2]}
        kept = routed_experts.GEMV_TO
        routed_experts.GEMV_TO = tokens if vector else kept
        try:
            function(**call, **tokens_of(hidden, tokens, 1, "cpu")[0])
        finally:
            routed_experts.GEMV_TO = kept

    return run


CASES = (
    Case("attention, 1 x 64K, global", attention(1, 1, 65536), (2048, 4096), 65536),
    Case("attention, 64 x 8K, global", attention(8, 1, 8192), (512, 1024), 8192, 8),
    Case("attention, verify 9 on 64K, global", attention(1, 9, 65536), (2048, 4096), 65536),
    Case("experts, MXFP4, 1 token", experts("mxfp4", 1), (512, 1024), 6144),
    Case("experts, MXFP4, 16 tokens", experts("mxfp4", 16), (512, 1024), 6144),
    Case(
        "experts, MXFP4, 16 tokens, without matrix units",
        experts("mxfp4", 16, vector=True),
        (512, 1024),
        6144,
    ),
    Case("experts, NVFP4, 1 token", experts("nvfp4", 1), (512, 1024), 6144),
    Case("experts, NVFP4, 16 tokens", experts("nvfp4", 16), (512, 1024), 6144),
    Case("experts, BF16, 16 tokens", experts("bf16", 16), (512, 1024), 6144),
)


def estimate(case: Case, chip: str) -> dict[str, Any]:
    """One row: microseconds of each resource, and the longest."""
    found = []
    for length in case.lengths:
        with counted(chip) as counts:
            case.run(chip, length)
        found += counts
    first, second = case.lengths
    total = found[0].at(first, found[1], second, case.served).times(case.repeat)
    us = {name: round(value, 2) for name, value in total.microseconds(chip).items()}
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
