"""Triton's rel_attention on the accelerator that is present, against its contract."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.attention_cases import CASES, Case, arguments, faults, smaller
from inkling_portable.agreement import convert, disagreements
from inkling_portable.backends.triton import rel_attention as kernel
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton.rel_attention_tuning import Plan, Split, Whole
from inkling_portable.inputs import SeededDraw
from inkling_portable.numerics import Tolerance
from inkling_portable.registry import contract
from inkling_portable.target import Target
from tests.anywhere.test_triton_attention import case, fenced

DEVICE = "cuda"
OP = contract("rel_attention")
# One running sum over all keys beside a baseline that adds in blocks: up to 6.7 times its error was
# seen, depending on the CPU that computes it.
OP_FLOAT32 = replace(OP, tolerances=(Tolerance("twice", 8, "float32: one running sum"),))
PDL = tuning._has_pdl(Target.detect())
SPLIT, WHOLE = Split(16, 64, 4, 2, 50, pdl=PDL), Whole(64, 32, 4, 2, pdl=PDL)


def check(call: dict[str, Any], plan: Plan | None = None) -> None:
    op = OP_FLOAT32 if call["q"].dtype == torch.float32 else OP
    function = kernel.rel_attention if plan is None else partial(kernel.attend, plan)
    assert not disagreements(op, function, call, device=DEVICE)


@pytest.mark.parametrize("seed", range(60))
def test_agrees_on_drawn_batches(seed: int) -> None:
    check(OP.inputs(SeededDraw(seed)))


OTHERS = {"split": Plan(SPLIT, None, 10**6), "whole": Plan(None, WHOLE),
          "mixed": Plan(SPLIT, WHOLE, 3)}  # fmt: skip


@pytest.mark.parametrize("plan", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("seed", range(100, 110))
def test_agrees_in_other_plans(plan: Plan, seed: int) -> None:
    call = OP.inputs(SeededDraw(seed))
    if call["q"].dtype == torch.float32:
        for name in ("q", "k_cache", "v_cache", "rel", "out"):
            call[name] = convert(call[name], torch.bfloat16)
    check(call, plan)


@pytest.mark.parametrize("seed", range(200, 215))
def test_nothing_outside_the_arguments_is_touched(seed: int) -> None:
    assert not disagreements(OP_FLOAT32, fenced, OP.inputs(SeededDraw(seed)), device=DEVICE)


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize(("new", "context"), [(25, 1000), (128, 129), (200, 1000), (9, 1100)])
def test_packing_heads_keeps_each_rows_bias(new: int, context: int, page: int) -> None:
    check(case([new], [context], extent=512, width=128, page=page))


def test_decoding_beside_prefilling() -> None:
    check(case([1, 600, 9, 0, 1], [3000, 77, 500, 9, 0], extent=1024, width=128, page=128))
    check(case([1, 600, 9, 0, 1], [3000, 77, 500, 9, 0], extent=512, window=512, kv_heads=2,
               width=128, page=128))  # fmt: skip


@pytest.mark.parametrize("shape", [c for c in CASES if "TP1" not in c.name], ids=lambda c: c.name)
def test_serving_shapes_cut_short(shape: Case) -> None:
    few = smaller(shape)
    call = arguments(few, DEVICE)
    call["out"].fill_(float("nan"))
    kernel.rel_attention(**call)
    assert not faults(few, call)


@pytest.mark.parametrize("shape", ["global 512K + 63 x 2K", "verify 9, 8K", "local 64 x 8K",
                                   "global prefill 4K"])  # fmt: skip
def test_a_captured_graph_equals_eager_for_shorter_lengths(shape: str) -> None:
    """Bit for bit, after every length has shrunk under the bounds that the capture saw."""
    few = smaller(next(c for c in CASES if c.name == shape))
    call = arguments(few, DEVICE)
    kernel.rel_attention(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.rel_attention(**call)
    for cut in (0, 5, 130):
        call["kv_lens"].copy_(torch.tensor([max(few.fresh, n - cut) for n in few.lengths]))
        call["out"].fill_(float("nan"))
        graph.replay()
        replayed = call["out"].clone()
        call["out"].fill_(float("nan"))
        kernel.rel_attention(**call)
        assert torch.equal(replayed, call["out"])
        assert replayed.isfinite().all()


@pytest.mark.parametrize("shape", ["global 1 x 64K", "verify 9, 8K", "local 64 x 8K"])
def test_a_chain_of_early_launches_reads_what_was_just_written(shape: str) -> None:
    """Each step's queries, bias and last key come from the kernels right before: bit for bit as if
    one had waited for them."""
    few = smaller(next(c for c in CASES if c.name == shape))
    first = arguments(few, DEVICE)
    steps = [first["kv_lens"] - 40 + i for i in range(40)]
    last = [first["pages"][:, (n - 1) // few.page].diagonal().long() for n in steps]
    torch.cuda.synchronize()

    def chain(wait: bool) -> list[torch.Tensor]:
        call, outs = {k: convert(v) for k, v in first.items()}, []
        for lengths, page in zip(steps, last, strict=True):
            found = call["q"].view(len(few.lengths), few.fresh, few.heads, few.width)[:, -1]
            call["k_cache"][page, (lengths - 1).long() % few.page] = found[:, : few.kv_heads]
            call["rel"] = call["rel"] * 0.5 + call["q"][..., :1]
            call |= {"kv_lens": lengths, "out": torch.empty_like(call["q"])}
            kernel.rel_attention(**call)
            outs.append(call["out"])
            call["q"] = call["out"] * 9 + first["q"]
            if wait:
                torch.cuda.synchronize()
        return outs

    for early, waited in zip(chain(False), chain(True), strict=True):
        assert torch.equal(early, waited)


def test_cache_beyond_two_to_the_31_elements() -> None:
    """Pages far apart in one large buffer: offsets need 64 bits."""
    call = case([1, 3], [200, 90], width=128, page=128, extent=256, padding=0)
    want = {k: convert(v, device=DEVICE) for k, v in call.items()}
    kernel.rel_attention(**want)
    count = call["k_cache"].shape[0]
    stride = (1 << 32) // count // 16 * 16
    buffer = torch.empty(2 * count * stride, dtype=torch.uint8, device=DEVICE).view(torch.bfloat16)
    wide = buffer.as_strided(call["k_cache"].shape, (stride, 128, 128, 1))
    wide.copy_(call["k_cache"])
    got = {**want, "k_cache": wide, "out": torch.empty_like(want["out"])}
    kernel.rel_attention(**got)
    assert torch.equal(got["out"], want["out"])
