"""Products of few rows in CUDA C++, on a CPU: source and launcher as they are, and contracts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inkling_portable import self_test
from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import OFFERS
from inkling_portable.backends.cuda import few_rows as module
from inkling_portable.backends.cuda.few_rows import Tiles
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import Facts, check_schema, contract
from tests.anywhere.test_routed_experts_mma import HostKernel, build

__all__ = ["build"]
BF16 = torch.bfloat16
HOMES = ((module.experts, "gate_logits"), (module.experts, "sink_experts"),
         (module.one_row, "gated_sinks"), (module.linear, "skinny_linear"))  # fmt: skip
OFFER = {row.op: row for row in OFFERS if row.provider == "wgmma"}


@pytest.fixture
def alone(build: Callable[..., HostKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """No case may be handed on."""
    monkeypatch.setattr(module, "kernel", build)
    for home, op in HOMES:
        monkeypatch.setattr(home, op, None)


def arguments(op: str, rows: int, hidden: int, inner: int, beside: bool) -> dict[str, Any]:
    """Arguments of an op with two sinks of `inner` columns; NaN behind the last row of x."""
    draw, experts = SeededDraw(rows), 70 - 2
    x = torch.full((rows + 3, hidden), float("nan"), dtype=BF16)[:rows]
    x.copy_(draw.tensor((rows, hidden), BF16))
    gate = draw.tensor((experts + 2, hidden), BF16, "small")
    if op == "gate_logits":
        return {"x": x, "weight": gate}
    if op == "skinny_linear":
        return {"x": x, "weight": draw.tensor((132, hidden), BF16, "small"), "scale": 1.0}
    w2 = draw.tensor((2, hidden, inner), BF16, "small")
    if beside:
        w2 = w2.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    sinks = {"x": x, "w13": draw.tensor((2, 2 * inner, hidden), BF16, "small"), "w2": w2}
    if op == "sink_experts":
        return {**sinks, "gammas": draw.tensor((rows, 2), torch.float32, "gain")}
    return {**sinks, "gate": gate, "bias": draw.tensor((experts,), torch.float32, "small"),
            "global_scale": draw.tensor((1,), torch.float32, "gain"), "top_k": 3,
            "route_scale": 8.0}  # fmt: skip


@pytest.mark.parametrize(("op", "rows", "hidden", "how"), [
    ("gate_logits", 9, 384, Tiles(64, 2, 4, 2)),  # rows of the matrix end inside a block
    ("gate_logits", 2, 64, Tiles(64, 2, 4, 2)),  # and a part has no columns
    ("skinny_linear", 33, 320, Tiles(128, 3, 2, 3)),  # parts are not equal, the ring is short
    ("sink_experts", 17, 256, Tiles(64, 1, 3, 4)),
    ("sink_experts", 16, 256, Tiles(64, 2, 4, 2)),
    ("gated_sinks", 9, 256, Tiles(64, 2, 4, 2)),
])  # fmt: skip
@pytest.mark.usefixtures("alone")
def test_contract(op: str, rows: int, hidden: int, how: Tiles, monkeypatch: pytest.MonkeyPatch
                  ) -> None:  # fmt: skip
    monkeypatch.setattr(module, "tiles", lambda *_: how)
    function = OFFER[op].load()
    check_schema(contract(op), function, OFFER[op].code)
    given = arguments(op, rows, hidden, 64, rows % 2 == 0)
    assert not disagreements(contract(op), function, given)


@pytest.mark.usefixtures("alone")
def test_narrow_gammas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads float32: others become that."""
    monkeypatch.setattr(module, "tiles", lambda *_: Tiles(64, 2, 4, 2))
    given = arguments("sink_experts", 16, 256, 64, True)
    narrow = given["gammas"].to(BF16)
    wide = module.sink_experts(**{**given, "gammas": narrow.float()})
    assert torch.equal(module.sink_experts(**{**given, "gammas": narrow}), wide)


def test_every_setting_fits() -> None:
    """The rings into an SM, parts into what a cluster may be."""
    for inner in (64, 384, 768, 1024, 2048, 4096, 6144):
        for columns in (258, 1408, 1536, 6144, 16384):
            for rows in (2, 17, 64, 128):
                how = module.tiles(rows, columns, inner)
                assert how.shared(module.padded(rows)) <= 227 << 10
                assert 1 <= how.parts <= 8 and how.rows in (64, 128, 192)


def test_what_does_not_fit_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel", None)
    for home, op in HOMES:
        monkeypatch.setattr(home, op, lambda *_: "handed on")
        function = getattr(module, op)
        fits = arguments(op, 9, 128, 64, False)
        assert function(**{**fits, "x": fits["x"][:1]}) == "handed on"
        floats = {k: v.float() if k in ("x", "w13", "w2", "weight", "gate") else v
                  for k, v in fits.items()}  # fmt: skip
        assert function(**floats) == "handed on"
        shifted = torch.empty(9 * 128 + 1, dtype=BF16)[1:].view(9, 128)
        assert function(**{**fits, "x": shifted}) == "handed on"
    wide = arguments("skinny_linear", 17, 64, 64, False)
    wide["weight"] = torch.randn(module.WIDEST + 4, 64).to(BF16)
    want = wide["x"].float() @ wide["weight"].float().T
    torch.testing.assert_close(module.skinny_linear(**wide).float(), want, atol=0.1, rtol=0.02)
    with pytest.raises(ValueError, match="gate_logits: weight needs axes EH with E = 4, H = 128"):
        module.gate_logits(torch.zeros(2, 128, dtype=BF16), torch.zeros(4, 192, dtype=BF16))


@pytest.mark.parametrize("op", sorted(OFFER))
def test_the_self_test_reaches_the_kernel_itself(
    op: str, build: Callable[..., HostKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws that another kernel computes would say that this one agrees where it cannot run."""
    built: list[str] = []

    def noting(*given: Any) -> HostKernel:
        built.append(given[1])
        return build(*given)

    monkeypatch.setattr(module, "kernel", noting)
    facts = Facts(dtype="bfloat16", head_dim=128)
    for itself, drawn in self_test._attempts(contract(op), facts):
        try:
            with self_test.alone(itself):
                assert not disagreements(contract(op), OFFER[op].load(), drawn, "cpu")
        except ValueError:
            continue
        break
    assert itself and built
