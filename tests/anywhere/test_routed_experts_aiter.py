"""AITER's row without AITER: its table of pairs, its calls, and what refuses it.

The library's signatures are facts of its sources (`python -m ci.surface.providers`). Its GEMM is
replaced by a plain one that reads the table as AITER's kernel does: block by block, row by row.
"""

import ast
import inspect
import json
import sys
import types
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ci.surface.compare import binds, parsed
from ci.surface.providers import FACTS
from inkling_portable import formats
from inkling_portable.agreement import disagreements
from inkling_portable.backends.rocm import OFFERS, routed_experts_aiter
from inkling_portable.inputs import fill
from inkling_portable.registry import (
    Facts,
    SelectionError,
    check_schema,
    choose,
    contract,
    switches,
)
from inkling_portable.target import Target

OP = contract("routed_experts")
OFFER = next(row for row in OFFERS if row.provider == "aiter")
SIGNATURES: dict[str, dict[str, Any]] = json.loads(FACTS.read_text())["amd-aiter"]
SERVED = ("0.1.16", "0.1.18", "0.1.19.post2", "0.1.20.post1")
GEMM = "aiter.ops.triton.moe.moe_op_gemm_a16w4:moe_gemm_a16w4"
ROUTING = "aiter.ops.triton.moe.moe_routing.routing"


@given(data=st.data())
def test_the_table_lists_every_pair_once_by_expert(data: st.DataObject) -> None:
    rows, experts = data.draw(st.integers(1, 40)), data.draw(st.sampled_from((1, 3, 9)))
    listed = st.lists(st.integers(-1, experts), min_size=2 * rows, max_size=2 * rows)
    ids = torch.tensor(data.draw(listed)).int().view(rows, 2)
    weights = torch.rand(rows, 2)
    table = routed_experts_aiter.routing_table(ids, weights, experts)
    known = [e if 0 <= e < experts else 0 for e in ids.flatten().tolist()]
    order = sorted(range(2 * rows), key=lambda pair: known[pair])
    assert table.gather.tolist() == order
    assert [order[place] for place in table.scatter.tolist()] == list(range(2 * rows))
    assert table.counts.tolist() == [known.count(e) for e in range(experts)]
    flat = weights.flatten().tolist()
    mine = [0 <= e < experts for e in ids.flatten().tolist()]
    assert table.weights.tolist() == [flat[p] if mine[p] else 0.0 for p in order]
    blocks = [(e, b) for e in range(experts)
              for b in range(-(-known.count(e) // table.block_m))]  # fmt: skip
    packed = [e + (b << 16) for e, b in blocks]
    assert table.first_blocks[-1].item() == len(packed)
    assert table.blocks.tolist() == packed + [-1] * (len(table.blocks) - len(packed))
    assert table.block_m <= 32


def gemm(x: Tensor, w: Tensor, x_scales: None, w_scales: Tensor, routing_data: Any,
         gather_indx: Tensor | None = None, scatter_indx: Tensor | None = None,
         gammas: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
         apply_swiglu: bool = False, alpha: float = 1.0, limit: float | None = 1.0,
         swiglu_add_residual: bool = True) -> Tensor:  # fmt: skip
    """What AITER documents: w [E, K/2, N] with k contiguous, scales [E, K/32, N]."""
    assert w.stride(-2) == 1
    assert not apply_swiglu or (alpha == 1.0 and limit is None and not swiglu_add_residual)
    data, k = routing_data.expt_data, routing_data.n_expts_act
    pairs = x.shape[0] if gather_indx is None else gather_indx.shape[0]
    columns = w.shape[-1] // (2 if apply_swiglu else 1)
    y = torch.full((pairs, columns), float("nan"), dtype=out_dtype)
    for packed in data.block_pid_map[: int(data.token_offs_pad[-1])].tolist():
        expert, block = packed & 0xFFFF, packed >> 16
        start, end = int(data.token_offs_raw[expert]), int(data.token_offs_raw[expert + 1])
        assert end - start == int(data.hist[expert])
        low = start + block * routing_data.block_m
        rows = torch.arange(low, min(low + routing_data.block_m, end))
        source = rows if gather_indx is None else gather_indx[rows].long() // k
        dense = formats.dequantize_mxfp4(
            w[expert].T.contiguous(), w_scales[expert].T.contiguous(), dtype=torch.float32
        )
        out = x[source].float() @ dense.T
        if apply_swiglu:
            out = torch.nn.functional.silu(out[:, 0::2]) * out[:, 1::2]
        y[rows] = (out if gammas is None else out * gammas[rows][:, None]).to(out_dtype)
    return y if scatter_indx is None else y[scatter_indx.long()].view(-1, k, columns).sum(1)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A module `aiter` with the signatures that `version` has."""
    facts = SIGNATURES[version]

    def called(*args: Any, **kwargs: Any) -> Tensor:
        assert binds(facts[GEMM], len(args), kwargs) is None
        return gemm(*args, **kwargs)

    called.__signature__ = parsed(facts[GEMM])  # type: ignore[attr-defined]
    routing = types.ModuleType(ROUTING)
    for name in ("ExptData", "RoutingData"):
        fields = parsed(facts[f"{ROUTING}:{name}"]).parameters
        setattr(routing, name, make_dataclass(name, list(fields)))
    module = types.ModuleType("moe_op_gemm_a16w4")
    module.moe_gemm_a16w4 = called  # type: ignore[attr-defined]
    moe, table = types.ModuleType("moe"), types.ModuleType("moe_routing")
    moe.moe_op_gemm_a16w4 = module  # type: ignore[attr-defined]
    table.routing = routing  # type: ignore[attr-defined]
    for name, value in {"aiter": types.ModuleType("aiter"), "aiter.ops.triton.moe": moe,
                        "aiter.ops": types.ModuleType("ops"),
                        "aiter.ops.triton": types.ModuleType("triton"),
                        "aiter.ops.triton.moe.moe_routing": table}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, value)


def case(rows: int, experts: int = 5, hidden: int = 64, inner: int = 96) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "x": fill((rows, hidden), torch.bfloat16, "normal", 1),
        "ids": torch.stack([torch.randperm(experts)[:2] for _ in range(rows)]).int(),
        "weights": fill((rows, 2), torch.float32, "normal", 2).abs(), "w13_global": None,
        "w2_global": None, "format": "mxfp4", "act": "bf16", "interleaved": True,
    }  # fmt: skip
    for name, shape in (("w13", (2 * inner, hidden)), ("w2", (hidden, inner))):
        parts = formats.quantize_mxfp4(fill((experts, *shape), torch.float32, "small", 3))
        arguments |= {name: parts[0], f"{name}_scale": parts[1]}
    return arguments


@pytest.mark.parametrize("version", SERVED)
@pytest.mark.parametrize("rows", [1, 7, 90])
def test_contract(monkeypatch: pytest.MonkeyPatch, version: str, rows: int) -> None:
    install(monkeypatch, version)
    function = OFFER.load()
    check_schema(OP, function, OFFER.code)
    arguments = case(rows)
    arguments["ids"][0] = torch.tensor([5, -1])
    assert not disagreements(OP, function, arguments)


def test_an_aiter_without_plain_silu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.1.14")
    with pytest.raises(RuntimeError, match="needs moe_gemm_a16w4 with swiglu_add_residual"):
        OFFER.load()(**case(1))


@pytest.mark.parametrize(("changed", "words"), [
    ({"format": "nvfp4"}, "needs format mxfp4; found nvfp4"),
    ({"act": "mxfp4"}, "needs act bf16; found mxfp4"),
    ({"interleaved": False}, "needs interleaved True; found False"),
    ({"w2_scale": None}, "pass w13_scale, w2_scale"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OFFER.load()(**{**case(1), **changed})


def test_calls_name_parameters_that_every_served_version_has() -> None:
    tree = ast.parse(inspect.getsource(routed_experts_aiter))
    names = {"gemm": GEMM, "routing.ExptData": f"{ROUTING}:ExptData",
             "routing.RoutingData": f"{ROUTING}:RoutingData"}  # fmt: skip
    calls = [n for n in ast.walk(tree)
             if isinstance(n, ast.Call) and ast.unparse(n.func) in names]  # fmt: skip
    assert len(calls) == 4
    for version in SERVED:
        for call in calls:
            text = SIGNATURES[version][names[ast.unparse(call.func)]]
            assert binds(text, len(call.args), {k.arg or "": 0 for k in call.keywords}) is None


def decided(target: str, **facts: Any) -> dict[str, str]:
    found = choose(Target.parse(target), Facts(weights="mxfp4", moe_backend="aiter", **facts))
    return {d.provider: d.verdict for d in found if d.op == "routed_experts"}


def test_moe_backend_aiter_gets_aiter_or_a_sentence() -> None:
    """The user's own command line, on both chips: obeyed or refused, never swapped."""
    served = "+triton=3.6.0+vllm=0.33.0+amd-aiter=0.1.16"
    assert decided(f"mi300x{served}")["aiter"] == "chosen"
    assert decided(f"mi355x{served}")["engine"] == "chosen"
    assert decided("mi355x+triton=3.6.0+amd-aiter=0.1.16")["aiter"] == "chosen"
    for libraries, words in (
        ("+triton=3.6.0+vllm=0.33.0", "needs amd-aiter"),
        ("+triton=3.6.0+vllm=0.33.0+amd-aiter=0.1.14", "found 0.1.14"),
    ):
        with pytest.raises(SelectionError, match=words):
            decided(f"mi300x{libraries}")
    # A version says nothing of a build without tags; what its source offers does.
    assert decided("mi300x+amd-aiter=0.1+aiter-a16w4")["aiter"] == "chosen"
    # vLLM's kernels of AITER's are off unless that is set: its own layer would fail while loading.
    for value, on in (("1", True), ("True", True), ("", None), ("0", False), ("yes", False)):
        assert switches({"VLLM_ROCM_USE_AITER": value})["rocm_aiter"] is on
    for chip in ("mi300x", "mi355x"):
        assert decided(f"{chip}{served}", **switches({}))["aiter"] == "chosen"
    for experts, on in (("1", True), ("", True), ("0", False), ("False", False)):
        both = {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": experts}
        assert switches(both)["rocm_aiter"] is on
    assert switches({"VLLM_ROCM_USE_AITER_MOE": "1"})["rocm_aiter"] is None
    for name in ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"):
        for words in (r"aiter: VLLM_ROCM_USE_AITER or VLLM_ROCM_USE_AITER_MOE is set to off; unset",
                      "engine: vLLM wants VLLM_ROCM_USE_AITER=1"):  # fmt: skip
            with pytest.raises(SelectionError, match=words):
                decided(f"mi355x{served}", **switches({name: "0"}))
