"""Linear layers through the op for few rows: who gets it, the same answers, refused beside LoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_portable.backends.reference import experts, linear
from inkling_portable.model.engine import UnquantizedLinearMethod
from inkling_portable.model.logits import InklingLogits
from inkling_portable.model.settings import Settings
from inkling_portable.model.skinny import SkinnyLinearMethod, check_skinny_request
from inkling_portable.registry import MODELS, SelectionError, resolve
from inkling_portable.target import Target
from tests.vllm_cpu.conftest import Engine, Oracle

PARTS = ("skinny_linear", "gated_sinks", "gate_logits", "route", "sink_experts")
ASKED = {"inkling_portable": dict.fromkeys(PARTS, "reference")}


def test_layers_are_taken_over_when_asked(
    engines: Callable[..., Engine], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plain matrix; a prompt of many rows goes the engine's way, a token's row by the op, and
    through gate, routing and sinks at once."""
    rows: list[int] = []
    gated: list[int] = []
    real, whole = linear.check_skinny, experts.gated_sinks

    def counted(x: torch.Tensor, weight: torch.Tensor) -> None:
        rows.append(x.shape[0])
        real(x, weight)

    @wraps(whole)
    def together(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        gated.append(x.shape[0])
        return whole(x, *others)

    monkeypatch.setattr(linear, "check_skinny", counted)
    monkeypatch.setattr(experts, "gated_sinks", together)
    engine = engines(additional_config=ASKED)

    def methods(model: Any) -> tuple[list[str], list[str], int]:
        kinds = {n: getattr(m, "quant_method", None) for n, m in model.named_modules()}
        taken = [n for n, kind in kinds.items() if isinstance(kind, SkinnyLinearMethod)]
        plain = [n for n, kind in kinds.items() if type(kind) is UnquantizedLinearMethod]
        return taken, plain, len(model.model.layers)

    taken, plain, layers = engine.on_model(methods)
    assert sum(name.endswith("qkvr") for name in taken) == layers
    assert sum(name.endswith("wo_ud") for name in taken) == layers
    assert any(name.endswith("gate_up_proj") for name in taken) and not plain
    prompt = [5, 9, 33, 250, 17, 8] * 6
    [found] = engine.prompt_logprobs([prompt])
    oracle.answer(prompt).check(found, slice(0, len(prompt) - 1), "a prompt of many rows")
    rows.clear()
    [tokens] = engine.greedy([prompt], 4)
    assert set(rows) == {1}
    assert gated and set(gated) == {1}
    oracle.assert_greedy(prompt, tokens)


@pytest.mark.parametrize(("rows", "most"), [(0, 16), (1, 16), (16, 16), (17, 16), (17, 64),
                                            (64, 64), (65, 64)])  # fmt: skip
def test_the_method_picks_by_rows(rows: int, most: int) -> None:
    seen: list[int] = []

    def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return linear.skinny_linear(x, weight)

    layer = torch.nn.Linear(64, 32, bias=False)
    x = torch.randn(rows, 64)
    method = SkinnyLinearMethod.__new__(SkinnyLinearMethod)
    method.op, method.most_rows = op, most
    torch.testing.assert_close(method.apply(layer, x), layer(x))
    assert seen == ([rows] if rows <= most else [])


def test_the_heads_factor_rides_in_the_product() -> None:
    """One rounding: the logits of bfloat16 rows are those of float64, scaled, stored once."""
    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(torch.randn(96, 64, dtype=torch.bfloat16), False)
    head.tp_size = 1
    logits = InklingLogits.__new__(InklingLogits)
    torch.nn.Module.__init__(logits)
    logits.scale, logits.org_vocab_size = 0.3, 90
    logits.factor_in_product, logits.few_rows, logits.few = True, linear.skinny_linear, 16
    hidden = torch.randn(3, 64, dtype=torch.bfloat16)
    found = logits.forward(head, hidden)
    exact = (hidden.double() @ head.weight.double().T * 0.3)[:, :90]
    assert found is not None and torch.equal(found, exact.to(torch.bfloat16))


def test_beside_adapters_it_is_refused() -> None:
    with pytest.raises(SelectionError, match="without adapters; found --enable-lora"):
        check_skinny_request({"skinny_linear": "triton"}, lora=True)
    with pytest.raises(SelectionError, match="found VLLM_BATCH_INVARIANT=1"):
        check_skinny_request({"skinny_linear": "triton"}, lora=False, batch_invariant=True)
    check_skinny_request({"skinny_linear": "triton"}, lora=False)
    check_skinny_request({}, lora=True, batch_invariant=True)
    check_skinny_request({"skinny_linear": "engine"}, lora=True)


@pytest.mark.parametrize(
    ("chip", "facts", "asked", "ours"),
    [
        ("cuda:sm90/132", {}, {}, True),
        ("cuda:sm90/132", {}, {"skinny_linear": "engine"}, False),
        ("cuda:sm90/132", {"lora": True}, {}, False),
        ("cuda:sm90/132", {"batch_invariant": True}, {}, False),
        ("cuda:sm100/148", {}, {}, False),
        ("cuda:sm100/148", {}, {"skinny_linear": "triton"}, True),
        ("rocm:gfx942/304", {}, {}, False),
        ("cpu", {}, {}, False),
    ],
)
def test_who_gets_it(chip: str, facts: dict[str, Any], asked: dict[str, str], ours: bool) -> None:
    """By default only the chip on which it was timed beside the engine's library."""
    target = Target.parse(f"{chip}+triton=3.6.0+vllm=0.33.0")
    op = resolve(target, replace(MODELS["large"], **facts), asked).skinny_linear
    assert (op is not None) == ours


@pytest.mark.parametrize(("whole", "gate", "route", "sinks", "asked", "together"), [
    ("triton", "triton", "triton", "triton", "gate_logits", True),
    ("triton", "wgmma", "triton", "triton", "", False),
    ("wgmma", "wgmma", "triton", "wgmma", "gate_logits", True),
    ("wgmma", "triton", "triton", "wgmma", "", True),
    ("wgmma", "triton", "triton", "wgmma", "gate_logits", False),
    ("wgmma", "wgmma", "triton", "triton", "sink_experts", False),
    ("wgmma", "wgmma", "reference", "wgmma", "", False),
    ("reference", "triton", "triton", "reference", "", False),
])  # fmt: skip
def test_gate_and_sinks_are_one_op_of_whoever_has_all(
    whole: str, gate: str, route: str, sinks: str, asked: str, together: bool
) -> None:
    """What was asked for by name is not passed over; what wgmma is composed of is Triton's."""
    chosen = {"gated_sinks": (whole,), "gate_logits": (gate,), "route": (route,),
              "sink_experts": (sinks,)}  # fmt: skip
    ops = SimpleNamespace(gated_sinks=len)
    requests = ((asked, chosen[asked][0]),) if asked else ()
    settings = SimpleNamespace(chosen=lambda: chosen, ops=lambda: ops, requests=requests)
    parts = ("gate_logits", "route", "sink_experts")
    assert Settings.together(settings, "gated_sinks", *parts) == together  # type: ignore[arg-type]
