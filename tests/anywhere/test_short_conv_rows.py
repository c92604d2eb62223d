"""Branch ends of many rows, in CUDA C++, on a CPU: source and launcher, and the contract."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import OFFERS
from inkling_portable.backends.cuda import short_conv_rows as module
from inkling_portable.backends.reference.batch import draw_batch, draw_pages, make_batch, poison
from inkling_portable.backends.reference.short_conv import sources_of
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import check_schema, contract
from tests.anywhere.test_routed_experts_mma import HostKernel, build

__all__ = ["build"]
OP = contract("conv_residual_norm")
OFFER = next(row for row in OFFERS if row.op == OP.name and row.provider == "rows")
Provider = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def provider(build: Callable[..., HostKernel], monkeypatch: pytest.MonkeyPatch) -> Provider:
    monkeypatch.setattr(module, "kernel", build)
    monkeypatch.setattr(module, "FROM", 0)
    monkeypatch.setattr(module, "compute_units", lambda: 3)
    # No case here may be handed on.
    monkeypatch.setattr(module.triton, "conv_residual_norm", None)
    function = OFFER.load()
    check_schema(OP, function, OFFER.code)
    return function


def case(seed: int, lengths: tuple[int, ...] = (), extra: bool = True) -> dict[str, Any]:
    """512 channels of two groups; a drawn batch unless `lengths` say otherwise."""
    draw, bf16 = SeededDraw(seed), torch.bfloat16
    contexts = [seed * (i + 1) % 11 for i in range(len(lengths))]
    batch = make_batch(list(lengths), contexts, padding=2) if lengths else draw_batch(draw)
    paged = draw_pages(draw, batch, page=draw.choice((4, 8, 5)), window=4, share=True)
    shape = (batch.rows, 512)
    return {
        "partial": poison(draw.tensor(shape, bf16), batch),
        "extra": poison(draw.tensor(shape, bf16), batch) if extra else None,
        "residual": poison(draw.tensor(shape, bf16), batch),
        "conv_weight": draw.tensor((512, 4), bf16),
        "norm_weight": draw.tensor((512,), bf16, "gain"),
        "eps": 1e-6,
        "state": paged.cache(draw, 2, 256, bf16),
        "slots": paged.slots,
        "sources": sources_of(batch, paged, 4),
        "group": "",
    }


@pytest.mark.parametrize("extra", [True, False])
def test_contract(provider: Provider, extra: bool) -> None:
    """Requests that end inside a block and across two, prefixes of the same step, padding; decoding
    requests before others, more than a block's threads and fewer."""
    for seed in range(12):
        arguments = case(seed, extra=extra)
        if arguments["partial"].shape[0]:
            assert not disagreements(OP, provider, arguments), seed
    # The second has more blocks than units.
    for lengths in ((1, 37, 2, 3), (190, 5), (*[1] * 10, 30), (*[1] * 70, 20, 9)):
        assert not disagreements(OP, provider, case(3, lengths, extra))


def test_what_does_not_fit_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FROM", 0)
    monkeypatch.setattr(module, "kernel", None)
    monkeypatch.setattr(module.triton, "conv_residual_norm", lambda *_: "handed on")
    fits = case(1, (9,))
    narrow = {k: v[:, :480] if k in ("partial", "extra", "residual") else v
              for k, v in fits.items()}  # fmt: skip
    shifted = torch.empty(11 * 512 + 1, dtype=torch.bfloat16)[1:].view(11, 512)
    for change in (
        narrow, {"norm_weight": None}, {"residual": fits["residual"].float()},
        {"partial": shifted}, {"conv_weight": fits["conv_weight"][:, :2]},
    ):  # fmt: skip
        assert module.conv_residual_norm(**{**fits, **change}) == "handed on"
    with pytest.raises(ValueError, match="conv_residual_norm: slots needs axes T with T = 11"):
        module.conv_residual_norm(**{**fits, "slots": fits["slots"][1:]})
