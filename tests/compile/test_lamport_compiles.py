"""The exchange without barriers compiles for the chips that it is offered on, and for AMD's."""

import pytest
import torch

from ci.cross_compile import Launch, compile_all, recorded
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.lamport import Workspace, plan
from inkling_portable.target import Target


def launches_of(chip: str, rows: int, ranks: int) -> list[Launch]:
    """Launches of one call on the last of `ranks`, hidden size 6144, two partial sums."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    share = 6144 // ranks
    with launching_for(Target.parse(chip)), recorded() as launches:
        work = Workspace(
            meta(ranks, dtype=torch.int64), meta(8, dtype=torch.int32), ranks - 1, ranks, 6144,
            send=2 if chip != "mi300x" else 0, trap=chip != "mi300x",
        )  # fmt: skip
        wide = meta(rows, 6144)
        work.run(wide, wide, wide, meta(share, 4), meta(6144), 1e-6, meta(9, 16, 1, share),
                 meta(rows, dtype=torch.int64), meta(rows, 3, dtype=torch.int64),
                 *plan(rows, share))  # fmt: skip
    return launches


@pytest.mark.parametrize(("chip", "arch"), [("h200", "sm90"), ("b200", "sm100"),
                                            ("mi300x", "gfx942")])  # fmt: skip
def test_one_launch(chip: str, arch: str) -> None:
    (report,) = compile_all(launches_of(chip, 1, 2), [arch], 1)
    assert report.spills <= 4  # ptxas trades a few words for more blocks on a unit
    if arch.startswith("sm"):
        # Words go whole and past the caches in both directions, and a lost rank ends the kernel.
        assert report.count(r"st\.relaxed\.sys\.global\.v4\.b32") and report.count("trap;")
        assert report.count(r"ld\.volatile\.global\.v4") and not report.count(r"st\.volatile")
        # Threads wait by themselves: barriers are for the order of phases and the norm's sum.
        assert report.count("AGAIN:") == 5 and report.count(r"bar\.sync") <= 7
        assert report.count(r"atom\.global\.gpu\.relaxed") == 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_two_programs_of_a_long_step_fit_a_unit(ranks: int) -> None:
    (launch,) = launches_of("h200", 512, ranks)
    (report,) = compile_all([launch], ["sm90"], 1)
    assert report.spills <= 4 and launch.grid == (264, 1)
    assert report.occupancy >= 2 * report.warps and report.shared < 16 << 10
