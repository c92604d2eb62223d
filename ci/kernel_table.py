"""What the compiler makes of the small-op kernels on each chip, as a Markdown table.

    python -m ci.kernel_table            needs no GPU; some minutes on two cores

The launches are those that each chip's tuning picks on the served shapes, recorded from the ops.
"""

import torch

from benchmarks.small_ops_shapes import LAYERS, OPS, RANKS, arguments
from ci.cross_compile import Launch, Report, compile_all, recorded
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.registry import Facts
from inkling_portable.target import Target

CHIPS = {"sm90": "h200", "sm100": "b200", "gfx942": "mi300x", "gfx950": "mi355x"}
# One, a few and many rows: both sides of every switch in the tuning functions.
ROWS = ((1, True), (16, True), (64, True), (8192, False))
# Kernels whose shapes differ between ranks are compiled for more than the first.
RANK_NAMES = {"qkvr_prep": ("large-tp8-global", "large-tp8-local", "small-tp1-global")}


def launches_for(chip: str) -> list[Launch]:
    """All launches of all small ops on one chip."""
    rows_of_table = {row.op: row for row in OFFERS}
    with launching_for(Target.parse(chip)), recorded() as launches:
        for op in OPS:
            function = rows_of_table[op].load()
            for name in RANK_NAMES.get(op, ("large-tp8-global",)):
                for rows, decode in ROWS:
                    for layer in LAYERS if op == "skinny_linear" else ("qkvr",):
                        if op != "skinny_linear" or rows <= 16:
                            function(**arguments(op, rows, RANKS[name], "meta", decode, layer))
            fixed = rows_of_table[op].under(Facts(batch_invariant=True)).load()
            if fixed is not function:
                fixed(**arguments(op, 16, RANKS["large-tp8-global"], "meta"))
        for rows, decode in ROWS:
            prep = arguments("qkvr_prep", rows, RANKS["large-tp8-global"], "meta", decode)
            stored = torch.float8_e4m3fnuz if chip == CHIPS["gfx942"] else torch.float8_e4m3fn
            caches = {name: prep[name].to(stored) for name in ("k_cache", "v_cache")}
            rows_of_table["qkvr_prep"].load()(**{**prep, **caches})
    return launches


def lines(reports: list[Report]) -> list[str]:
    """One table row for each kernel and chip: the variant with the most registers."""
    worst: dict[tuple[str, str], Report] = {}
    for report in reports:
        key = (report.kernel, report.arch)
        if key not in worst or report.registers > worst[key].registers:
            worst[key] = report
    table = ["| kernel | chip | warps | registers | AGPRs | spills | shared, bytes | occupancy |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (kernel, arch), r in sorted(worst.items()):
        table.append(f"| {kernel.strip('_')} | {arch} | {r.warps} | {r.registers} | "
                     f"{r.accumulators} | {r.spills} | {r.shared} | {r.occupancy} |")  # fmt: skip
    return table


def main() -> None:
    reports = [r for arch, chip in CHIPS.items() for r in compile_all(launches_for(chip), [arch])]
    print("\n".join(lines(reports)))


if __name__ == "__main__":
    main()
