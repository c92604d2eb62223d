"""Every small-op kernel, in every configuration that a chip's tuning picks, compiles within limits.

The launches are recorded from the ops themselves on the served shapes, with tensors that have no
memory: a host that would read a tensor's value fails here too.
"""

from contextlib import nullcontext

import pytest
import torch

from benchmarks.small_ops_shapes import RANKS, arguments
from ci.cross_compile import SHARED_KIB, Launch, Report, compile_all, job, recorded, unlike
from ci.kernel_table import CHIPS, launches_for
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import dependent_launch, launching_for
from inkling_portable.target import Target


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    """What the compiler says, by chip; of `_prep_kernel` by layers with most heads and extent."""
    return {arch: compile_all(launches_for(chip), [arch], but=("HQ", "HKV", "EXT", "LOG"))
            for arch, chip in CHIPS.items()}  # fmt: skip


@pytest.mark.parametrize("arch", CHIPS)
def test_nothing_spills_and_shared_memory_fits(arch: str, reports: dict[str, list[Report]]) -> None:
    found = reports[arch]
    kernels = {report.kernel for report in found}
    assert kernels == {"_norm_kernel", "_embed_norm_kernel", "_halves_kernel", "_sources_kernel",
                       "_conv_kernel", "_prep_kernel", "_row_kernel", "_tile_kernel", "_sum_kernel",
                       "_route_kernel", "_gated_kernel", "_swiglu_kernel", "_norm_gelu_kernel",
                       "_dmel_kernel"}  # fmt: skip
    assert not [fault for report in found for fault in report.faults()]


@pytest.mark.parametrize("arch", CHIPS)
def test_products_use_matrix_units_and_wide_loads(
    arch: str, reports: dict[str, list[Report]]
) -> None:
    """The reports are of optimised code: matrix instructions, 16-byte loads of the weights."""
    matrix = {"sm90": r"mma|wgmma", "sm100": r"mma", "gfx942": "v_mfma", "gfx950": "v_mfma"}[arch]
    wide = r"cp\.async\.cg|ld\.global[.\w]*v4|v4\.b32" if arch.startswith("sm") else r"load_\w*x4"
    tiles = [r for r in reports[arch] if r.kernel in ("_tile_kernel", "_prep_kernel")]
    assert all(r.count(matrix) for r in tiles)
    assert all(r.count(wide) for r in reports[arch] if r.kernel in ("_tile_kernel", "_row_kernel"))


def test_launch_attributes_are_the_launchers() -> None:
    """Without them other code comes out, so the helper must not lose them."""
    with launching_for(Target.parse("mi300x")), recorded() as launches:
        x = torch.empty(4, 6144, dtype=torch.bfloat16, device="meta")
        next(r for r in OFFERS if r.op == "rms_norm").load()(x, x[0], 1e-6, x[:, :].clone())
    work = job(launches[0], "gfx942")
    marks = {index[0]: dict(values) for index, values in work.attributes if values}
    assert marks[0] == {"tt.divisibility": 16, "tt.pointer_range": 32}
    assert dict(work.signature)["x"] == "*bf16"
    assert launches[0].grid == (4,)


def test_limits_are_checked() -> None:
    """A kernel with too few registers is reported to spill, one with too much memory not to fit."""
    with launching_for(Target.parse("h200")), recorded() as launches:
        a = arguments("conv_residual_norm", 1, RANKS["large-tp8-global"], "meta")
        next(r for r in OFFERS if r.op == "conv_residual_norm").load()(**a)
    choked = Launch(launches[0].kernel, launches[0].args, {"num_warps": 8, "maxnreg": 40}, (1,))
    report = compile_all([choked], ["sm90"])[0]
    assert any("spilled" in fault for fault in report.faults())
    fat = Report("k", "gfx942", 4, 32, 0, 0, 0, (SHARED_KIB["gfx942"] << 10) + 1, 0.0, "")
    assert any("64 KiB" in fault for fault in fat.faults())


@pytest.mark.parametrize("switch", [None, True, False])
def test_dependent_launch_compiles_in(switch: bool | None) -> None:
    """Switched on, NVIDIA's kernels wait for their neighbours; AMD never sees the flag.

    Left alone, it is on for the chips on which it was measured to pay.
    """
    for chip, arch, expected in (("h200", "sm90", switch is not False),
                               ("b200", "sm100", switch is True),
                               ("mi300x", "gfx942", False)):  # fmt: skip
        how = nullcontext() if switch is None else dependent_launch(switch)
        with launching_for(Target.parse(chip)), how, recorded() as launches:
            a = arguments("route", 1, RANKS["large-tp8-global"], "meta")
            next(r for r in OFFERS if r.op == "route").load()(**a)
        assert ("launch_pdl" in launches[0].options) is expected
        report = compile_all(launches, [arch])[0]
        assert bool(report.count(r"griddepcontrol\.wait")) is expected


def test_only_twins_are_left_out() -> None:
    """Ranks that differ in heads are one kind for `but`; another dtype, tile or chip is none."""
    with launching_for(Target.parse("h200")), recorded() as launches:
        prep = next(r for r in OFFERS if r.op == "qkvr_prep").load()
        for rank, rows in (
            ("large-tp8-global", 1),
            ("small-tp1-global", 1),
            ("large-tp8-global", 8192),
        ):
            prep(**arguments("qkvr_prep", rows, RANKS[rank], "meta", rows == 1))
        stored = arguments("qkvr_prep", 1, RANKS["large-tp8-global"], "meta")
        prep(**stored | {k: stored[k].to(torch.float8_e4m3fn) for k in ("k_cache", "v_cache")})
    work = [job(launch, arch) for launch in launches for arch in ("sm90", "sm100")]
    assert len(set(work)) == len(unlike(work)) == 8
    assert unlike(work, ("HQ", "HKV")) == work[2:]
