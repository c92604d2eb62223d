"""CUDA sources through NVRTC, as a user's machine compiles them: each launch of a released layer.

The CPU tests of these kernels use a C++ compiler, which takes more than NVRTC does.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_portable.backends.cuda import (
    compiled,
    few_rows,
    routed_experts_mma,
    routed_experts_wgmma,
    short_conv_rows,
)
from inkling_portable.backends.triton.routed_experts import Matrix

SMALL = (1, 4, 9, 16, 64, 128, 512, 1024, 8192)
EXPERTS, TOP_K = 256, 6


class Skipped:
    """A launch of Triton's, which other tests compile."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


def launches(monkeypatch: pytest.MonkeyPatch, module: Any, run: Any, tokens: int, form: str,
             hidden: int, width: int) -> list[Any]:  # fmt: skip
    """(path, name, macros) of what one step would launch; no tensor has memory.

    Codes of 1 and of 9 tokens are as stored, others arranged as a server has them.
    """
    found: list[Any] = []

    def noted(path: Any, name: str, macros: Any, device: Any) -> Any:
        found.append((path, name, macros))
        return SimpleNamespace(launch=lambda *_: None)

    monkeypatch.setattr(module, "kernel", noted)
    monkeypatch.setattr(module, "make_plan", lambda *_: (torch.empty(0, device="meta"), 64))
    monkeypatch.setattr(module, "compute_units", lambda: 132)
    for name in ("combine_kernel", "arrange_kernel"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, Skipped())

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(rows: int, inner: int) -> Matrix:
        block = 16 if form == "nvfp4" else 32
        gain = empty(EXPERTS, 1, dtype=torch.float32) if form == "nvfp4" else None
        return Matrix(empty(EXPERTS, rows, inner // 2), empty(EXPERTS, rows, inner // block), gain,
                      form, rows, inner, tokens % 2 == 0)  # fmt: skip

    x = empty(tokens, hidden, dtype=torch.bfloat16)
    run(x, empty(tokens, TOP_K, dtype=torch.int32), empty(tokens, TOP_K, dtype=torch.float32),
        matrix(2 * width, hidden), matrix(hidden, width), True, torch.empty_like(x))  # fmt: skip
    return found


def compiles(cases: set[Any], arch: str) -> None:
    """NVRTC leaves Python's lock alone while it works, so two threads use two cores."""
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda case: compiled.compile_source(
            compiled.source_of(case[0]), case[2], arch), sorted(cases, key=str)))  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100", "sm_120"])
def test_few_and_many_tokens(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    module = routed_experts_mma
    hopper = arch == "sm_90a"
    cases = {
        one
        for tokens in (SMALL if hopper else (4, 1024))
        for form in (("nvfp4", "mxfp4") if hopper and tokens in (9, 64) else ("nvfp4",))
        for one in launches(monkeypatch, module, module._run, tokens, form, 6144, 384)
    }
    assert len(cases) > (10 if hopper else 2)
    compiles(cases, arch)


def test_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    module = routed_experts_wgmma
    cases = {
        one
        for tokens, form in ((256, "nvfp4"), (1024, "nvfp4"), (8192, "nvfp4"), (2048, "mxfp4"),
                             (8192, "mxfp4"))
        for one in launches(monkeypatch, module, module.run, tokens, form, 6144, 384)
    }
    assert {name for _, name, _ in cases} == {"experts", "combine"}
    compiles(cases, "sm_90a")


def test_ends_of_branches() -> None:
    """Both hidden sizes, with and without a second partial sum."""
    source = compiled.source_of(short_conv_rows.SOURCE)
    for width, extra in ((6144, 1), (6144, 0), (4096, 1)):
        macros = (("H", width), ("W", width // 2), ("EXTRA", extra), ("MOST_ROWS", 64),
                  ("STAGES", 4))  # fmt: skip
        assert compiled.compile_source(source, macros, "sm_90a")


def test_products_of_few_rows() -> None:
    """What a rank of eight launches for the gate, the sinks and both linear layers."""
    cases = {
        (few_rows.SOURCE, "", (("ROWS", how.rows), ("TOKENS", tokens), ("PARTS", how.parts),
                               ("STAGES", how.stages), ("X_STAGES", how.x_stages)))
        for columns, inner in ((258, 6144), (1536, 6144), (1408, 6144), (6144, 768), (6144, 1024))
        for tokens in (16, 32, 64, 128) for how in (few_rows.tiles(tokens, columns, inner),)
    }  # fmt: skip
    assert len(cases) >= 8
    compiles(cases, "sm_90a")


def test_what_nvrtc_refuses_is_told() -> None:
    source = "__global__ void f(int* x) { auto g = [&](auto n) { *x = n; }; g(1); }"
    with pytest.raises(compiled.CompileError, match=r"for sm_90a: .* host functions are not allow"):
        compiled.compile_source(source, (), "sm_90a")
