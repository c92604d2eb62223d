"""The routed experts' WGMMA kernel on a CPU: source and launcher as they are, and the contract."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import compiled, routed_experts_mma
from inkling_portable.backends.cuda import routed_experts_wgmma as module
from inkling_portable.backends.cuda.routed_experts_wgmma import Tiles
from inkling_portable.compile_ahead import compiled_ahead
from inkling_portable.registry import contract
from tests.anywhere.test_routed_experts_mma import (
    OFFER,
    HostKernel,
    assert_arranged_codes_change_no_bit,
    build,
)
from tests.anywhere.test_triton_experts import case

OP = contract("routed_experts")
__all__ = ["build"]


@pytest.fixture
def provider(build: Callable[..., HostKernel], monkeypatch: pytest.MonkeyPatch
             ) -> Callable[..., Tensor]:  # fmt: skip
    monkeypatch.setattr(module, "kernel", build)
    monkeypatch.setattr(module, "FROM", 0)
    monkeypatch.setattr(routed_experts_mma, "few_most", lambda _: 0)
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return OFFER.load()


@pytest.mark.parametrize(("form", "rows", "hidden", "inner", "up", "down"), [
    ("nvfp4", 41, 768, 128, Tiles(2, 16, 16, 16, 4), Tiles(2, 16, 16, 16, 3)),
    ("mxfp4", 10, 256, 256, Tiles(4, 16, 16, 16, 3), Tiles(2, 16, 16, 16, 4)),
    ("nvfp4", 5, 256, 128, Tiles(2, 32, 16, 16, 5), Tiles(4, 32, 16, 16, 4)),
    ("nvfp4", 75, 768, 384, Tiles(3, 64, 16, 16, 3, 1, 2), Tiles(3, 64, 16, 16, 3, 1, 2, 2)),
    ("mxfp4", 30, 768, 384, Tiles(2, 64, 16, 32, 4, 1, 2), Tiles(2, 64, 16, 16, 4, 1, 2, 3)),
])  # fmt: skip
def test_contract(provider: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, form: str,
                  rows: int, hidden: int, inner: int, up: Tiles, down: Tiles) -> None:  # fmt: skip
    """Foreign ids, an expert with all tokens, several tiles, slabs and rounds, large tiles first
    but in one case, both orders of rows."""
    monkeypatch.setattr(module, "compute_units", lambda: 3)
    monkeypatch.setattr(module, "SORTED_FROM", 16 if rows > 5 else 80)
    monkeypatch.setattr(module, "tiles", lambda _load, is_up, _wide=False: up if is_up else down)
    arguments = case(form, rows, 5, 3, hidden, inner, seed=rows)
    arguments["ids"][:, 0] = 3
    arguments["ids"][0] = torch.tensor([-1, 5, 2])
    arguments["interleaved"] = rows % 2 == 1
    assert not disagreements(OP, provider, arguments)
    assert_arranged_codes_change_no_bit(provider, arguments)


def test_nothing_is_launched_while_kernels_are_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that Triton's kernels did not write would lead anywhere. No CUDA driver is here."""
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    with compiled_ahead(1):
        compiled.Kernel(bytes, "experts", 0).launch((1, 1), 1, (), 0, False)
    assert compiled.ahead is None


def test_sources_are_compiled_side_by_side_and_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two at a time while kernels are made ready, none again after a restart."""
    together, asked = threading.Barrier(2, timeout=20), list[Any]()

    def compile_source(source: str, macros: Any, arch: str) -> bytes:
        together.wait()
        asked.append((macros, arch))
        return f"{len(source)} {macros}".encode()

    version = SimpleNamespace(nvrtcVersion=lambda *_: 0)
    monkeypatch.setattr(compiled, "compile_source", compile_source)
    monkeypatch.setattr(compiled, "nvrtc", lambda: version)
    monkeypatch.setattr(compiled.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    source = tmp_path / "kernel.cu"
    source.write_text("one")
    for _ in range(2):
        with compiled_ahead(2):
            found = [compiled.kernel(source, "experts", (("K", k),), 0) for k in (1, 2)]
        assert [kernel._cubin() for kernel in found] == [b"3 (('K', 1),)", b"3 (('K', 2),)"]
        assert sorted(asked) == [((("K", 1),), "sm_90a"), ((("K", 2),), "sm_90a")]
        compiled.kernel.cache_clear()
    source.write_text("other")
    with compiled_ahead(2):
        found = [compiled.kernel(source, "experts", (("K", k),), 0) for k in (1, 2)]
    assert found[0]._cubin() == b"5 (('K', 1),)" and len(asked) == 4
