"""Routed experts of the Triton tier under Triton's interpreter: contract, decoding, laws, refusals.

Decoding is held to torch's own 8-bit dtypes over every code, and to the worked example of NVFP4.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inkling_portable import formats
from inkling_portable.agreement import disagreements, run
from inkling_portable.backends.triton import OFFERS, routed_experts_sort
from inkling_portable.backends.triton import routed_experts as module
from inkling_portable.backends.triton.routed_experts_decode import (
    e2m1_pair,
    e4m3_scale,
    e4m3_value,
    e8m0_scale,
    e8m0_scale_bf16,
)
from inkling_portable.inputs import SeededDraw, fill
from inkling_portable.registry import Facts, check_schema, contract
from inkling_portable.target import Target
from tests.guards import broken_guards, guarded
from tests.hypothesis_draw import HypothesisDraw
from tests.quick_interpreter import install

install()

OP = contract("routed_experts")
OFFER = next(row for row in OFFERS if row.op == "routed_experts" and row.provider == "triton")
FORMATS = ("bf16", "nvfp4", "mxfp4", "fp8")
BF16, BYTE = torch.bfloat16, torch.uint8


def provider() -> Callable[..., Tensor]:
    function = OFFER.load()
    check_schema(OP, function, OFFER.code)
    return function


def case(form: str, rows: int = 5, experts: int = 8, top_k: int = 3, hidden: int = 64,
         inner: int = 96, dtype: torch.dtype = BF16, seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Arguments with weights quantised by `formats` from normal numbers, spread routing."""
    generator = torch.Generator().manual_seed(seed)
    wide = {"w13": fill((experts, 2 * inner, hidden), torch.float32, "small", seed + 1),
            "w2": fill((experts, hidden, inner), torch.float32, "small", seed + 2)}  # fmt: skip
    arguments: dict[str, Any] = {
        "x": fill((rows, hidden), dtype, "normal", seed + 3),
        "ids": torch.stack([torch.randperm(experts, generator=generator)[:top_k]
                            for _ in range(rows)]).int(),
        "weights": fill((rows, top_k), torch.float32, "normal", seed + 4).abs(),
        "format": form, "act": "bf16", "interleaved": True,
    }  # fmt: skip
    for name, w in wide.items():
        # Blocks of very different size: a scale taken from a neighbour would show.
        w *= 2.0 ** (torch.arange(w.shape[-1]) // 16 % 5 - 2)
        parts: tuple[Any, ...] = (w.to(dtype),)
        if form == "nvfp4":
            parts = formats.quantize_nvfp4(w)
            parts = (parts[0], parts[1].view(BYTE), parts[2])
        elif form == "mxfp4":
            parts = formats.quantize_mxfp4(w)
        elif form == "fp8":
            parts = formats.quantize_fp8_channel(w)
            parts = (parts[0].view(BYTE), parts[1])
        for suffix, part in zip(("", "_scale", "_global"), (*parts, None, None), strict=False):
            arguments[name + suffix] = part
    return arguments


@given(data=st.data())
@settings(max_examples=20)
def test_contract(data: st.DataObject) -> None:
    arguments = OP.inputs(HypothesisDraw(data))
    assert not disagreements(OP, provider(), arguments)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("inner", [384, 128, 640])
def test_widths_that_are_no_multiple_of_256(form: str, inner: int) -> None:
    """Known fault BL-004: block scales walked with a wrong pitch at 128, 384 and 640."""
    for rows in (1, 4):
        arguments = case(form, rows, experts=4, top_k=2, hidden=96, inner=inner)
        assert not disagreements(OP, provider(), arguments)


def test_nothing_outside_the_arguments_is_touched() -> None:
    """Between NaN and impossible indices results are the same bits, and guards stay whole."""
    for seed in range(5):
        drawn = OP.inputs(SeededDraw(500 + seed))
        plain = run(provider(), OP, drawn)[0]
        # A byte has no value that codes may not have.
        fenced = {k: guarded(v) for k, v in drawn.items()
                  if isinstance(v, Tensor) and v.dtype != BYTE}  # fmt: skip
        got = provider()(**{**drawn, **fenced})
        assert not broken_guards(fenced)
        assert torch.equal(got, plain)


# --- decoding ------------------------------------------------------------------------------------


@triton.jit
def _decode(codes, even, odd, nv, mx, narrow, wide, fnuz, N: tl.constexpr):
    i = tl.arange(0, N)
    code = tl.load(codes + i)
    one = tl.full((N,), 2.0**63, dtype=tl.float32)
    low, high = e2m1_pair(code, one, tl.bfloat16)
    tl.store(even + i, low.to(tl.float32) * 2.0**63)
    tl.store(odd + i, high.to(tl.float32) * 2.0**63)
    tl.store(nv + i, e4m3_scale(code) * 2.0**-63)
    tl.store(mx + i, e8m0_scale(code) * 2.0**-63)
    tl.store(narrow + i, e8m0_scale_bf16(code).to(tl.float32))
    tl.store(wide + i, e4m3_value(code, False, tl.bfloat16))
    tl.store(fnuz + i, e4m3_value(code, True, tl.float32))


def test_every_code_decodes_as_torch_decodes_it() -> None:
    codes = torch.arange(256).to(BYTE)
    even, odd, nv, mx, narrow, wide, fnuz = (torch.empty(256) for _ in range(7))
    _decode[(1,)](codes, even, odd, nv, mx, narrow, wide, fnuz, N=256)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.equal(even, e2m1[codes.int() & 15])
    assert torch.equal(odd, e2m1[codes.int() >> 4])
    assert torch.equal(torch.signbit(even), (codes & 8) > 0)
    e4m3 = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(nv.nan_to_num(-7.0), e4m3.nan_to_num(-7.0))
    number = ~e4m3.isnan()
    assert torch.equal(wide[number], e4m3[number])
    number = codes != 128
    assert torch.equal(fnuz[number], codes.view(torch.float8_e4m3fnuz).float()[number])
    e8m0 = codes.view(torch.float8_e8m0fnu).float()
    assert torch.equal(mx[1:191], e8m0[1:191])
    assert mx[191:].isnan().all()
    assert torch.equal(narrow.nan_to_num(-7.0), e8m0.nan_to_num(-7.0))


def test_worked_example_of_nvfp4() -> None:
    """Bytes 5A 10 F7 3C with block scale 6C and global scale 1/1024, worked by hand."""
    expected = torch.tensor([-0.09375, 0.28125, 0, 0.046875, 0.5625, -0.5625, -0.1875, 0.140625])
    arguments = case("nvfp4", rows=1, experts=1, top_k=1, hidden=32, inner=32, dtype=torch.float32)
    arguments["x"] = torch.zeros(1, 32)
    arguments["x"][0, 0] = 1.0
    arguments["ids"], arguments["weights"] = torch.zeros(1, 1).int(), torch.ones(1, 1)
    for name in ("w13", "w2"):
        arguments[name].zero_()
        arguments[f"{name}_scale"].fill_(0x38)
        arguments[f"{name}_global"].fill_(1.0)
    shared = torch.tensor([0x5A, 0x10, 0xF7, 0x3C], dtype=BYTE)
    for column in range(8):
        a = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        a["w13"][0, 0:2, 0] = torch.tensor([7, 2], dtype=BYTE)  # gate 6, up 1 from column 0
        a["w13_global"].fill_(16.0)  # silu(96) is 96
        inner = 96.0 * 16.0  # of column 0, and 0 of all others
        a["w2"][0, 1, 0] = shared[column // 2] >> (4 * (column % 2)) & 15
        a["w2_scale"][0, 1] = 0x6C
        a["w2_global"].fill_(1.0 / 1024)
        got = provider()(**a)
        assert got[0, 1].item() == expected[column].item() * inner


# --- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "rows"), [("nvfp4", 1), ("mxfp4", 6), ("nvfp4", 20), ("fp8", 6), ("bf16", 20)]
)
def test_order_of_tokens_and_names_of_experts_do_not_matter(form: str, rows: int) -> None:
    """Bit for bit: tokens permuted, experts renamed, gate and up rows as two halves."""
    a = case(form, rows)
    plain = provider()(**a)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    moved = {**a, "x": a["x"][order], "ids": a["ids"][order], "weights": a["weights"][order]}
    assert torch.equal(provider()(**moved), plain[order])
    names = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    stacks = [k for k in a if k.startswith(("w1", "w2"))]
    renamed = {**a, "ids": names[a["ids"].long()].int()}
    for key in stacks:
        if a[key] is not None:
            renamed[key] = torch.empty_like(a[key])
            renamed[key][names] = a[key]
    assert torch.equal(provider()(**renamed), plain)
    halves = dict(a, interleaved=False)
    for key in ("w13", "w13_scale"):
        if a[key] is not None and a[key].shape[1] > 1:
            halves[key] = torch.cat([a[key][:, 0::2], a[key][:, 1::2]], dim=1)
    assert torch.equal(provider()(**halves), plain)


@pytest.mark.parametrize(
    ("form", "rows"), [("mxfp4", 1), ("nvfp4", 5), ("mxfp4", 19), ("fp8", 5), ("bf16", 5)]
)
def test_ranks_sum_to_the_whole(form: str, rows: int) -> None:
    """Expert parallel: foreign ids add nothing. Tensor parallel: shares of the width add up."""
    a = case(form, rows, dtype=torch.float32, inner=64)
    whole = provider()(**a).double()
    stacks = [k for k in a if k.startswith(("w1", "w2"))]
    parts = []
    for begin in (0, 4):
        mine = {k: a[k][begin : begin + 4] if a[k] is not None else None for k in stacks}
        parts.append(provider()(**{**a, **mine, "ids": a["ids"] - begin}).double())
    bound = 1e-5 * whole.abs().max()
    assert (parts[0] + parts[1] - whole).abs().max() < bound
    parts = []
    for rank in (0, 1):
        mine = dict(a)
        for key in ("w13", "w13_scale"):
            if a[key] is not None:
                mine[key] = a[key][:, rank * 64 : rank * 64 + 64]
        mine["w2"] = a["w2"].chunk(2, dim=2)[rank]
        if form in ("nvfp4", "mxfp4"):
            mine["w2_scale"] = a["w2_scale"].chunk(2, dim=2)[rank]
        parts.append(provider()(**mine).double())
    assert (parts[0] + parts[1] - whole).abs().max() < bound


@given(data=st.data())
@settings(max_examples=10)
def test_a_plan_lists_every_pair_once(data: st.DataObject) -> None:
    """Each pair stands in one tile of its expert, ids that are no expert nowhere."""
    rows, experts = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    tall = data.draw(st.sampled_from((16, 32)))
    ids = torch.tensor(data.draw(st.lists(
        st.integers(-1, experts), min_size=2 * rows, max_size=2 * rows)),
        dtype=torch.int32).view(rows, 2)  # fmt: skip
    plan, tiles = routed_experts_sort.make_plan(ids, experts, tall)
    counts, starts = plan[:experts], plan[experts : 2 * experts]
    owners = plan[3 * experts : 3 * experts + tiles]
    listed = plan[3 * experts + tiles :].view(tiles, tall)
    seen = []
    for tile, owner in enumerate(owners.tolist()):
        if owner >= 0:
            live = min(tall, int(counts[owner]) - (tile - int(starts[owner])) * tall)
            assert live > 0
            pairs = listed[tile, :live].tolist()
            assert all(int(ids.flatten()[p]) == owner for p in pairs)
            seen += pairs
    known = [i for i, e in enumerate(ids.flatten().tolist()) if 0 <= e < experts]
    assert sorted(seen) == known


@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_parts_and_plans_change_no_bit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps run in parts; a part or a plan is no other arithmetic."""
    a = case(form, rows=14, hidden=160)
    plain = provider()(**a)
    monkeypatch.setattr(module, "UNPLANNED_TO", 0)
    assert torch.equal(provider()(**a), plain)
    monkeypatch.setattr(module, "INNER_BYTES", 4000)
    monkeypatch.setattr(module, "PARTS_BYTES", 10000)
    assert torch.equal(provider()(**a), plain)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_arranged_codes_give_what_stored_ones_do(form: str) -> None:
    """Steps that no kernel with arranged codes takes come here."""
    arguments = case(form)
    there = arguments | {name: formats.arranged(arguments[name]) for name in ("w13", "w2")}
    got = provider()(**there | {"format": form + formats.ARRANGED})
    assert torch.equal(got, provider()(**arguments))
    assert not torch.equal(provider()(**there), got)


@pytest.mark.parametrize(("form", "changed", "words"), [
    ("nvfp4", {"act": "fp8"}, "act 'bf16'; found 'fp8'"),
    ("nvfp4", {"format": "int4"}, "unknown weight format 'int4'"),
    ("nvfp4", {"w13_scale": None}, "pass w13_scale"),
    ("nvfp4", {"w2_global": None}, "needs w2_global"),
    ("nvfp4", {"w2_global": torch.ones(3)}, "needs w2_global"),
    ("mxfp4", {"w2_scale": torch.zeros(8, 64, 6, dtype=BYTE)}, "needs w2_scale"),
    ("mxfp4", {"w2": torch.zeros(8, 64, 40, dtype=BYTE)}, "multiple of 32 columns"),
    ("fp8", {"w13_scale": torch.ones(8, 3, 2)}, "w13_scale"),
    ("bf16", {"w2": torch.zeros(8, 64, 96)}, "w2 needs the dtype of x"),
    ("bf16", {"w2": torch.zeros(8, 96, 64, dtype=BF16).transpose(1, 2)}, "contiguous last axis"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(form: str, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        provider()(**{**case(form), **changed})


def test_the_row_refuses_shares_that_cut_a_block() -> None:
    target = Target.parse("h200+triton=3.6.0")
    assert OFFER.refusal(target, Facts(weights="nvfp4", tp=8)) is None
    reason = OFFER.refusal(target, Facts(weights="mxfp4", tp=128))
    assert reason is not None
    assert "multiples of 32" in reason
