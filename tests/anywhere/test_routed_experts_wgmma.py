"""The routed experts' WGMMA kernel on a CPU: source and launcher as they are, and the contract."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import compiled
from inkling_portable.backends.cuda import routed_experts_wgmma as module
from inkling_portable.backends.cuda.routed_experts_wgmma import Tiles
from inkling_portable.compile_ahead import compiled_ahead
from inkling_portable.registry import contract
from tests.anywhere.test_routed_experts_mma import OFFER, HostKernel, build
from tests.anywhere.test_triton_experts import case

OP = contract("routed_experts")
__all__ = ["build"]


@pytest.fixture
def provider(build: Callable[..., HostKernel], monkeypatch: pytest.MonkeyPatch
             ) -> Callable[..., Tensor]:  # fmt: skip
    monkeypatch.setattr(module, "kernel", build)
    monkeypatch.setattr(module, "FROM", 0)
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return OFFER.load()


@pytest.mark.parametrize(("form", "rows", "hidden", "inner", "up", "down"), [
    ("nvfp4", 21, 768, 128, Tiles(2, 16, 16, 16, 4), Tiles(2, 16, 16, 16, 3)),
    ("mxfp4", 10, 256, 256, Tiles(4, 16, 16, 16, 3), Tiles(2, 16, 16, 16, 4)),
    ("nvfp4", 5, 256, 128, Tiles(2, 32, 16, 16, 5), Tiles(4, 32, 16, 16, 4)),
])  # fmt: skip
def test_contract(provider: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, form: str,
                  rows: int, hidden: int, inner: int, up: Tiles, down: Tiles) -> None:  # fmt: skip
    """Foreign ids, an expert with all tokens, several tiles and slabs, both orders of rows."""
    monkeypatch.setattr(module, "tiles", lambda _, is_up: up if is_up else down)
    columns = 512 if hidden == 768 else 256
    monkeypatch.setattr(module, "TEMPORARY_BYTES", rows * 3 * 2 * (inner + columns))
    arguments = case(form, rows, 5, 3, hidden, inner, seed=rows)
    arguments["ids"][:, 0] = 3
    arguments["ids"][0] = torch.tensor([-1, 5, 2])
    arguments["interleaved"] = rows % 2 == 1
    assert not disagreements(OP, provider, arguments)


def test_nothing_is_launched_while_kernels_are_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that Triton's kernels did not write would lead anywhere. No CUDA driver is here."""
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    with compiled_ahead(1):
        compiled.Kernel(ctypes.c_void_p()).launch((1, 1), 1, (), 0, False)
    assert compiled.launching
