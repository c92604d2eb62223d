"""Attention compiles for chips that are not here, in the configurations that tuning picks there."""

from functools import cache, partial

import pytest
import torch

from ci.cross_compile import Launch, Report, compile_all, recorded
from inkling_portable.backends.cuda import rel_attention_hopper as hopper
from inkling_portable.backends.triton import rel_attention as kernel
from inkling_portable.backends.triton import rel_attention_fixed as invariant
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.target import Target

CHIPS = {"sm90": "h200", "sm100": "b200", "gfx942": "mi300x", "gfx950": "mi355x"}
# One rank of eight: global layers, then local ones; (new tokens, batch, longest).
GLOBAL = [(1, 1, 65536), (1, 64, 8192), (4, 1, 65536), (9, 1, 65536), (64, 1, 129088),
          (16384, 1, 16384), (2048, 64, 131072)]  # fmt: skip
LOCAL = [(1, 1, 8192), (1, 64, 8192), (9, 1, 65536), (9, 64, 65536), (16384, 1, 16384)]
# Widest load or asynchronous copy of the loop over keys: 16 bytes.
WIDE_LOAD = {"sm": r"cp\.async\.cg\.shared\.global|ld\.global\S*\.v4|cp\.async\.bulk\.tensor",
             "gf": r"global_load_dwordx4|buffer_load_dwordx4|global_load_lds_dwordx4"}  # fmt: skip
MATRIX = {"sm": r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", "gf": r"v_mfma"}


# A few of these calls stand for all where caches are in 8 bits, or the order of sums is fixed, and
# on sm100, which takes the tiles of sm90.
FEW_GLOBAL, FEW_LOCAL = [GLOBAL[i] for i in (0, 3, 5)], LOCAL[:1]
# (tokens of a page, bits of a cached number, fixed order)
CONFIGURATIONS = [(128, 8, False), (128, 16, True), (128, 16, False), (16, 16, False)]


def launches(chip: str, page: int, bits: int = 16, fixed: bool = False) -> list[Launch]:
    """What the op launches on `chip` for the serving shapes, on tensors without memory."""
    target, found = Target.parse(chip), []
    eight = torch.float8_e4m3fnuz if target.arch == "gfx942" else torch.float8_e4m3fn
    stored = eight if bits == 8 else torch.bfloat16
    attend = invariant.rel_attention if fixed else partial(kernel.attend, target)
    few, some = fixed or bits == 8, FEW_GLOBAL
    if target.arch == "sm100":
        few, some = True, FEW_GLOBAL[::2]

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for kv_heads, window, calls in (
        (1, 0, some if few else GLOBAL), (2, 512, FEW_LOCAL if few else LOCAL),
    ):  # fmt: skip
        for fresh, batch, longest in calls:
            rows, extent = fresh + batch - 1, window or 1024
            cache_ = tensor(4096, kv_heads, page, 256, dtype=stored).transpose(1, 2)
            with launching_for(target), recorded() as new:
                attend(
                    tensor(rows, 8, 128), cache_[..., :128], cache_[..., 128:],
                    tensor(rows, 8, extent), tensor(batch, 8192, dtype=torch.int32),
                    tensor(batch + 1, dtype=torch.int32), tensor(batch, dtype=torch.int32),
                    fresh, longest, window, 1 / 128, tensor(rows, 8, 128),
                )  # fmt: skip
            found += new
    return found


def hopper_launch() -> list[Launch]:
    """A prefill of a local layer."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache_ = tensor(4096, 2, 128, 256).transpose(1, 2)
    with launching_for(Target.parse("h200")), recorded() as found:
        hopper.rel_attention(
            tensor(16384, 8, 128), cache_[..., :128], cache_[..., 128:], tensor(16384, 8, 512),
            tensor(1, 128, dtype=torch.int32), tensor(2, dtype=torch.int32),
            tensor(1, dtype=torch.int32), 16384, 16384, 512, 1 / 128, tensor(16384, 8, 128),
        )  # fmt: skip
    return found


@cache
def reports(arch: str) -> list[Report]:
    """All configurations; of launches with equal tiles that of the smallest page and most requests.

    A tile that needs no two pages has less to do than the same in small ones.
    """
    # What compiles longest comes first, so that no process ends alone with it.
    found = hopper_launch() if arch == "sm90" else []
    for how in CONFIGURATIONS:
        found += launches(CHIPS[arch], *how)
    return compile_all(found, [arch], but=("BATCH", "CLEAR", "KV_HEADS", "PAGE"))


@pytest.mark.parametrize("arch", CHIPS)
def test_fits_the_chip(arch: str) -> None:
    """No spill and no scratch on AMD, few on NVIDIA; shared memory within the chip's."""
    for report in reports(arch):
        faults = report.faults()
        if arch.startswith("sm"):
            # ptxas keeps addresses in memory that it moved out of the loop over requests, to read
            # them back once per request: seen in the machine code, not in the loops over keys.
            assert report.spills <= (160 if report.kernel == "attend_hopper" else 80), report
            faults = [f for f in faults if "shared" in f]
        assert not faults, faults


@pytest.mark.parametrize("arch", CHIPS)
def test_uses_matrix_units_and_wide_loads(arch: str) -> None:
    attention = [r for r in reports(arch) if r.kernel.startswith("attend")]
    assert {r.kernel for r in attention} >= {"attend_split", "attend_whole", "attend_fixed"}
    for report in attention:
        assert report.count(MATRIX[arch[:2]]) >= 8, report
        assert report.count(WIDE_LOAD[arch[:2]]) >= 4, report


def test_the_hopper_kernel_keeps_its_loops_in_registers() -> None:
    """Two warpgroups in 227 KiB, few registers in memory."""
    (report,) = (r for r in reports("sm90") if r.kernel == "attend_hopper")
    assert report.registers == 168, "three warpgroups share the register file"
    assert report.count(r"wgmma\.mma_async") >= 64
    assert report.count(r"cp\.async\.bulk\.tensor") >= 4


def test_gfx950_pipelines_nothing() -> None:
    """Pipelined attention loops were miscompiled for gfx950 by public releases."""
    for launch in launches("mi355x", 128):
        if launch.name.startswith("attend"):
            assert launch.options["num_stages"] == 1
