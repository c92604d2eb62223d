"""Execute every Triton kernel as gfx942 and gfx950 code in all its configurations, on two cores.

    python -m ci.amd_sweep [--chips gfx942,gfx950] [--seeds 3] [--only TEXT] [--list] [--record]

Prints what broke its contract and every reported fault, the configurations that tuning picks for
served shapes and no case reached, and the instructions that ran. The suite runs three seeds
(tests/cdna/test_configurations.py); more are asked for here, with `--drawn N` those of Hypothesis.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ci.amd_inputs import ATTENTION, FORMATS, Case, SizedDraw, cases
from ci.cdna.launch import CHIPS, executing
from ci.cross_compile import Job, Launch, recorded
from inkling_portable.agreement import disagreements
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.rel_attention import attend
from inkling_portable.registry import Facts, contract
from inkling_portable.target import Target

Configuration = tuple[str, tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]
SEEDS = (1, 2, 3)
RECORD = Path(__file__).parents[1] / "docs" / "numerics" / "executed-tritons.json"
# Constants that are widths of the model or counts of the step; of some only whether they are 0.
_WIDTHS = {"H", "CHUNK", "W", "HQ", "HKV", "D", "DP", "D_REL", "RP", "EXT", "K", "GROUP", "E", "S",
           "TOP_K", "EP", "AP", "KP", "MEL", "LEVELS", "HEADS", "KV_HEADS", "WIDTH", "EXTENT",
           "BATCH", "PARTS", "TAPS", "INTERLEAVED"}  # fmt: skip
_SWITCHES = {"WINDOW", "SEGMENT", "MOST"}


@dataclass
class Result:
    """One case on one chip with one seed."""

    name: str
    chip: str
    seed: int
    faults: list[str]
    seconds: float
    configurations: set[Configuration] = field(default_factory=set)
    instructions: Counter[str] = field(default_factory=Counter)


def configuration(work: Job) -> Configuration:
    """What tuning decided of a compilation: constants and options, without the model's widths."""
    kernel: Any = import_module(work.module)
    for part in work.kernel.split("."):
        kernel = getattr(kernel, part)
    names = [p.name for p in kernel.params]
    constants = {names[place[0]]: value for place, value in work.constants}
    return _decided(kernel, constants, dict(work.options))


def _decided(kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> Configuration:
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    kept = {n: v for n, v in constants.items() if n in fixed and n not in _WIDTHS}
    kept |= {n: v != 0 for n, v in kept.items() if n in _SWITCHES}
    if "PAGE" in kept:
        kept["PAGE"] = kept["PAGE"] % 64 == 0
    return (kernel.fn.__qualname__, tuple(sorted(kept.items())),
            tuple(sorted({"debug": False, **options}.items())))  # fmt: skip


def _of_launch(launch: Launch) -> Configuration:
    """The same of a launch that was only recorded."""
    names = [p.name for p in launch.kernel.params]
    return _decided(launch.kernel, dict(zip(names, launch.args, strict=True)), launch.options)


def execute(case: Case, chip: str, seed: int) -> Result:
    """Draw, execute, compare; whatever is raised is a fault of the result."""
    started = time.process_time()
    draw = SizedDraw(seed, case.sizes)
    arguments = contract(case.op).inputs(draw)
    faults = [f"the contract no longer offers {offer}" for offer in draw.unused()]
    run = None
    try:
        with executing(chip) as run, case.settings():
            faults += disagreements(contract(case.op), case.run(), arguments)
        if not run.jobs:
            faults.append("no kernel was launched")
    except Exception as error:
        faults.append(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    found = Result(case.name, chip, seed, faults, time.process_time() - started)
    if run is not None:
        found.configurations = {configuration(work) for work in run.jobs}
        found.instructions = run.instructions
    return found


def execute_named(name: str, chip: str, seed: int) -> Result:
    """`execute` of a case by its name: what another process can be asked for."""
    torch.set_num_threads(1)
    return execute(_named(chip)[name], chip, seed)


@cache
def _named(chip: str) -> dict[str, Case]:
    found = {case.name: case for case in cases(chip)}
    assert len(found) == len(cases(chip)), "two cases have one name"
    return found


def served(chip: str) -> set[Configuration]:
    """Configurations of every kernel that a rank of Inkling or Inkling-Small can get on a chip."""
    from benchmarks.experts import MODELS, tokens_of, weights_of
    from benchmarks.small_ops_shapes import LAYERS, OPS, RANKS, arguments
    from ci.kernel_table import large_launches_for, launches_for

    machine = CHIPS[chip]
    launches = launches_for(machine) + large_launches_for(machine)
    rows_of = {row.op: row for row in OFFERS}
    with launching_for(Target.parse(machine)), recorded() as more:
        for op in OPS:
            for rank in RANKS.values():
                for rows in (1, 2, 16, 17, 33, 65, 700, 8192):
                    for layer in LAYERS if op == "skinny_linear" else ("qkvr",):
                        if op != "skinny_linear" or rows <= 16:
                            given = arguments(op, rows, rank, "meta", rows <= 65, layer)
                            for fixed in (False, True):
                                row = rows_of[op].under(Facts(batch_invariant=fixed))
                                row.load()(**given)
        for model, (hidden, _) in MODELS.items():
            for form in FORMATS:
                for tokens in (1, 4, 9, 10, 16, 17, 64, 1000, 4096):
                    for fixed in (False, True):
                        row = rows_of["routed_experts"].under(Facts(batch_invariant=fixed))
                        row.load()(**weights_of(model, form, "meta"),
                                   **tokens_of(hidden, tokens, 1, "meta")[0])  # fmt: skip
        for eight in (False, True):
            _attention(machine, eight)
    return {_of_launch(launch) for launch in [*launches, *more]}


def _attention(machine: str, eight: bool) -> None:
    """Attention's launches on tensors without memory, in both orders of sums."""
    target = Target.parse(machine)
    fp8 = torch.float8_e4m3fnuz if target.arch == "gfx942" else torch.float8_e4m3fn
    fixed = next(r for r in OFFERS if r.op == "rel_attention").under(Facts(batch_invariant=True))

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for fresh, batch, longest, window in ATTENTION:
        for page in (128, 16):
            rows, kv_heads = fresh * batch, 2 if window else 1
            cache = tensor(64, kv_heads, page, 256, dtype=fp8 if eight else torch.bfloat16)
            cache = cache.transpose(1, 2)
            given = (
                tensor(rows, 8, 128), cache[..., :128], cache[..., 128:],
                tensor(rows, 8, window or 1024), tensor(batch, 64, dtype=torch.int32),
                tensor(batch + 1, dtype=torch.int32), tensor(batch, dtype=torch.int32),
                fresh, longest, window, 1 / 128, tensor(rows, 8, 128),
            )  # fmt: skip
            attend(target, *given)
            fixed.load()(*given)


def jobs(chips: list[str], seeds: tuple[int, ...], only: str = "") -> list[tuple[str, str, int]]:
    """(case, chip, seed) of a sweep, the longest first; of extra cases one of three seeds."""
    found = [
        (case, chip, seed)
        for chip in chips
        for number, case in enumerate(cases(chip))
        if only in case.name
        for seed in (seeds[number % 3 :: 3] or seeds[:1] if case.extra else seeds)
    ]
    found.sort(key=lambda one: -one[0].weight)
    return [(case.name, chip, seed) for case, chip, seed in found]


def start(pool: ProcessPoolExecutor, wanted: list[tuple[str, str, int]]
          ) -> dict[tuple[str, str, int], Future[Result]]:  # fmt: skip
    """Ask a pool for everything that is wanted."""
    return {one: pool.submit(execute_named, *one) for one in wanted}


def processes(count: int = 2) -> ProcessPoolExecutor:
    """Fresh processes: forked ones would inherit a parent's threads."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def results(wanted: list[tuple[str, str, int]], count: int) -> Iterator[Result]:
    """Results of `count` processes as they come."""
    with processes(count) as pool:
        for done in as_completed(start(pool, wanted).values()):
            yield done.result()


def coverage(executed: Counter[str]) -> str:
    """A table of every instruction: the test that is its own, and how often kernels ran it."""
    from ci.cdna.machine import HANDLERS
    from tests.cdna import test_instructions, test_pseudo_code
    from tests.cdna.hand_written import TESTED

    assert test_instructions.TESTED is TESTED
    own = dict.fromkeys(test_pseudo_code.TESTED, "AMD's pseudo-code") | TESTED
    lines = [f"{name:32} {own.get(name, 'NO TEST'):52} {executed[name]:9}"
             for name in sorted(HANDLERS)]  # fmt: skip
    ran = sum(executed[name] > 0 for name in HANDLERS)
    return "\n".join([*lines, f"{len(HANDLERS)} instructions, {ran} of them run by kernels"])


def record(version: str, chip: str, done: list[Result], into: Path = RECORD) -> None:
    """Write what one run did on a chip, also of a run that was ended or did not ask for all."""
    content = json.loads(into.read_text()) if into.exists() else {}
    content.setdefault(version, {})[chip] = {
        "cases": len(cases(chip)),
        "executed": len({one.name for one in done}),
        "configurations": len(set().union(*(one.configurations for one in done))),
        "executions": len(done),
        "faults": sorted(f"{one.name}: {fault}" for one in done for fault in one.faults),
    }
    into.write_text(json.dumps(dict(sorted(content.items())), indent=1) + "\n")


def draw(chips: list[str], examples: int, only: str = "") -> int:
    """Inputs that Hypothesis draws, for ops whose name holds a text; returns 1 for a fault."""
    from ci.amd_drawn import drawn  # nothing else here needs Hypothesis

    ops = [row.op for row in OFFERS if only in row.op]
    failed = 0
    for chip in chips:
        for op in ops:
            faults = drawn(op, chip, examples)
            failed += bool(faults)
            for fault in faults:
                print(f"{chip}, {op}, drawn: {fault}", flush=True)
    print(f"{len(ops)} ops on {len(chips)} chips, each on {examples} drawn inputs, {failed} with "
          "faults")  # fmt: skip
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    """Returns 1 where anything broke a contract, was reported, or was not reached."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--chips", default=",".join(CHIPS))
    p.add_argument("--seeds", type=int, default=len(SEEDS), help="inputs of each configuration")
    p.add_argument("--only", default="", help="cases whose name holds this text")
    p.add_argument("--coverage", action="store_true", help="print what tests every instruction")
    p.add_argument("--drawn", type=int, help="inputs of each op by Hypothesis, in place of cases")
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--record", action="store_true", help=f"write {RECORD.name} of docs/numerics")
    p.add_argument("--list", action="store_true", help="print the cases and end")
    options = p.parse_args(argv)
    chips = options.chips.split(",")
    if options.drawn:
        return draw(chips, options.drawn, options.only)
    wanted = jobs(chips, tuple(range(1, options.seeds + 1)), options.only)
    if options.list:
        print("\n".join(f"{chip} {name} {seed}" for name, chip, seed in wanted))
        return 0
    import triton

    seconds, failed = 0.0, 0
    all_done: dict[str, list[Result]] = {chip: [] for chip in chips}
    version = triton.__version__.partition("+")[0]
    reached: dict[str, set[Configuration]] = {chip: set() for chip in chips}
    instructions: Counter[str] = Counter()
    for done in results(wanted, options.processes):
        all_done[done.chip].append(done)
        if options.record:
            record(version, done.chip, all_done[done.chip])
        seconds += done.seconds
        failed += bool(done.faults)
        reached[done.chip] |= done.configurations
        instructions += done.instructions
        for fault in done.faults:
            print(f"{done.chip}, {done.name}, seed {done.seed}: {fault}", flush=True)
    missed: list[str] = []
    for chip in () if options.only else chips:
        rest = sorted(served(chip) - reached[chip], key=str)
        missed += [f"{chip} has not been given {one}" for one in rest]
    print("".join(f"{line}\n" for line in missed), end="")
    count = sum(len(found) for found in reached.values())
    if options.coverage:
        print(coverage(instructions))
    print(f"Triton {triton.__version__}: {len(wanted)} executions, {failed} with faults; {count} "
          f"configurations, {len(missed)} not reached; {len(instructions)} distinct instructions; "
          f"{seconds:.0f} s of processor time")  # fmt: skip
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
