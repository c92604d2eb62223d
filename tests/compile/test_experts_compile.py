"""Routed experts compiled for four chips without a GPU: limits, launches, temporaries."""

import os

import pytest
import torch

from benchmarks.experts import MODELS, tokens_of, weights_of
from ci.cross_compile import Launch, compile_all, compile_launch, recorded
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.routed_experts import routed_experts
from inkling_portable.target import Target

CHIPS = {"sm90": "h200", "sm100": "b200", "gfx942": "mi300x", "gfx950": "mi355x"}
FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")


def launches(chip: str, model: str, form: str, tokens: int) -> list[Launch]:
    """What one step on a chip would launch, recorded on tensors without memory."""
    with launching_for(Target.parse(chip)), recorded() as found:
        routed_experts(**weights_of(model, form, "meta"),
                       **tokens_of(MODELS[model][0], tokens, 1, "meta")[0])  # fmt: skip
    return found


@pytest.mark.parametrize("arch", CHIPS)
def test_no_spills_and_shared_memory_within_limits(arch: str) -> None:
    """One token, few, many: the kernels that a rank of Inkling at TP8 runs."""
    # A tile finds its expert in the same way in all formats: few tokens, without a plan, once. And
    # sm100 takes the tiles of sm90.
    few = () if arch == "sm100" else (64,)
    found = [launch for form in FORMATS
             for tokens in (1, *((16, 64) if form == "nvfp4" else few), 4096)
             for launch in launches(CHIPS[arch], "large-tp8", form, tokens)[:5]]  # fmt: skip
    reports = compile_all(found, (arch,), processes=min(2, os.cpu_count() or 1))
    assert {r.kernel for r in reports} >= {"tile_kernel", "combine_kernel"}
    assert [fault for report in reports for fault in report.faults()] == []


@pytest.mark.parametrize("chip", CHIPS.values())
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_decode_takes_at_most_three_launches(chip: str, form: str, model: str) -> None:
    for tokens in (1, 2, 9, 16):
        assert len(launches(chip, model, form, tokens)) <= 3
    if form in ("nvfp4", "mxfp4"):
        assert len(launches(chip, model, form, 9)) == 2


@pytest.mark.parametrize("chip", ["h200", "mi300x"])
@pytest.mark.parametrize("model", MODELS)
def test_temporaries_stay_below_64_mb(
    chip: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything allocated in one step but its output, all together per part of the step."""
    sizes: list[int] = []
    empty = torch.empty

    def counted(*shape: int, **how: object) -> torch.Tensor:
        made = empty(*shape, **how)  # type: ignore[call-overload]
        sizes.append(made.numel() * made.element_size())
        return made

    from inkling_portable.backends.triton import routed_experts as module

    for tokens in (1, 64, 1000, 8192, 65536):
        arguments = {**weights_of(model, "nvfp4", "meta"),
                     **tokens_of(MODELS[model][0], tokens, 1, "meta")[0]}  # fmt: skip
        with launching_for(Target.parse(chip)), recorded(), monkeypatch.context() as patch:
            patch.setattr(torch, "empty", counted)
            # Parts of a step run one after the other: what counts is one part.
            share = min(module.INNER_BYTES // (6 * MODELS[model][1] * 2),
                        module.PARTS_BYTES // (6 * 128 * 4))  # fmt: skip
            cut = {k: v[:share] if k in ("x", "ids", "weights") else v
                   for k, v in arguments.items()}  # fmt: skip
            sizes.clear()
            out = module.routed_experts(**cut)
        # On "meta" the output is allocated by the same function, first.
        assert sizes.pop(0) == out.numel() * out.element_size()
        assert 0 < sum(sizes) < 64 << 20


def test_amd_uses_matrix_cores_and_nvidia_leaves_weights_in_registers() -> None:
    """MFMA on gfx942; on sm90 the decoded weights feed WGMMA without a detour through memory."""
    amd = next(x for x in launches("mi300x", "large-tp8", "mxfp4", 16) if x.name == "tile_kernel")
    assert compile_launch(amd, "gfx942").count(r"v_mfma_f32_\d+x\d+x\d+_?bf16") > 0
    nvidia = next(x for x in launches("h200", "large-tp8", "nvfp4", 12) if x.name == "tile_kernel")
    report = compile_launch(nvidia, "sm90")
    assert report.count(r"wgmma\.mma_async.*\}, *\{%r\d+, ?%r\d+, ?%r\d+, ?%r\d+\}") > 0
    assert report.count(r"fma\.rn\.bf16x2") > 0
