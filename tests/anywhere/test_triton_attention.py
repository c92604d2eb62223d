"""Triton's rel_attention under the interpreter, against its contract.

Drawn inputs go through the plan of this machine and through the plans that GPUs would get, cut
down in size; explicit cases are the public faults that this op has had elsewhere.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.agreement import disagreements
from inkling_portable.backends.reference.batch import make_batch
from inkling_portable.backends.triton import rel_attention as kernel
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton.rel_attention_tuning import Plan, Shape, Split, Whole
from inkling_portable.inputs import SeededDraw, fill
from inkling_portable.numerics import Tolerance
from inkling_portable.registry import contract
from inkling_portable.target import Target
from tests.guards import broken_guards, guarded
from tests.hypothesis_draw import HypothesisDraw
from tests.quick_interpreter import install

install()
OP = contract("rel_attention")
# In float32 the baseline's error is a few roundings, which one other order of summation doubles.
OP_FLOAT32 = replace(OP, tolerances=(Tolerance("twice", 5, "float32: another summation order"),))
SPLIT, WHOLE = Split(16, 16, 4, 1, 3), Whole(32, 32, 4, 1)
PLANS = {
    "own": None,
    "split": Plan(Split(32, 32, 4, 1, 5, least=2, pieces=2), None, 10**6),
    "whole": Plan(None, WHOLE),
    "mixed": Plan(SPLIT, WHOLE, 3),
}


def check(arguments: dict[str, Any], plan: Plan | None = None) -> None:
    op = OP_FLOAT32 if arguments["q"].dtype == torch.float32 else OP
    function = kernel.rel_attention if plan is None else partial(kernel.attend, plan)
    assert not disagreements(op, function, arguments)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@settings(max_examples=5)
@given(data=st.data())
def test_agrees_on_drawn_batches(plan: Plan | None, data: st.DataObject) -> None:
    """Ragged, empty, decoding and prefilling requests; NaN in all that must not be read."""
    check(OP.inputs(HypothesisDraw(data)), plan)


def case(
    lengths: list[int], contexts: list[int], heads: int = 8, kv_heads: int = 1, extent: int = 64,
    window: int = 0, width: int = 16, page: int = 16, dtype: torch.dtype = torch.bfloat16,
    padding: int = 1, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """One call; pages are taken in reverse, and rows that no request owns are NaN."""
    batch = make_batch(lengths, contexts, padding)
    needed = [-(-int(n) // page) for n in batch.kv_lens]
    count = sum(needed) + 1
    table = torch.zeros((len(needed), max([1, *needed])), dtype=torch.int32)
    free = list(range(1, count))
    caches = torch.full((2, count, page, kv_heads, width), float("nan"), dtype=dtype)
    for b, n in enumerate(needed):
        gone = max(0, contexts[b] - (window - 1)) // page if window else 0
        for i in range(n):
            table[b, i] = free.pop() if i >= gone else 0
            if i >= gone:
                rows = min(page, int(batch.kv_lens[b]) - i * page)
                values = fill((2, rows, kv_heads, width), dtype, "normal", 1000 * seed + 31 * b + i)
                caches[:, table[b, i], :rows] = values
    shape = (batch.rows, heads, width)
    q = fill(shape, dtype, "normal", seed)
    rel = fill((batch.rows, heads, extent), dtype, "normal", seed + 1)
    q[batch.tokens :] = rel[batch.tokens :] = float("nan")
    return {
        "q": q, "k_cache": caches[0], "v_cache": caches[1], "rel": rel, "pages": table,
        "q_starts": batch.q_starts, "kv_lens": batch.kv_lens, "max_q": max([0, *lengths]),
        "max_kv": int(max([0, *batch.kv_lens.tolist()])), "window": window, "scale": 1 / width,
        "out": torch.full(shape, float("nan"), dtype=dtype),
    }  # fmt: skip


WIDE = Plan(Split(128, 128, 8, 1, 3), None, 10**6), Plan(None, Whole(128, 128, 8, 1))


@pytest.mark.parametrize(("new", "context", "plan"), [
    (25, 1000, WIDE[0]), (9, 1100, WIDE[0]), (25, 1000, WIDE[1]), (128, 129, WIDE[1]),
    (200, 1000, WIDE[1]),
], ids=lambda x: x if isinstance(x, int) else "split" if x.few else "whole")  # fmt: skip
def test_packing_heads_keeps_each_rows_bias(plan: Plan, new: int, context: int) -> None:
    """Contexts that are no multiple of a tile, with eight heads per KV head, row by row."""
    check(case([new], [context], extent=512, page=128), plan)


def fenced(**call: Any) -> None:
    """The op on copies of its arguments that lie between NaN or impossible indices."""
    copies = {name: guarded(value) for name, value in call.items()}
    kernel.rel_attention(**copies)
    assert not broken_guards(copies)
    call["out"].copy_(copies["out"])


@pytest.mark.parametrize("seed", range(20, 24))
def test_nothing_outside_the_arguments_is_touched(seed: int) -> None:
    assert not disagreements(OP_FLOAT32, fenced, OP.inputs(SeededDraw(seed)))


def test_one_long_request_among_short_ones() -> None:
    check(case([1, 1, 1, 1], [5, 1500, 0, 40]), Plan(Split(16, 32, 4, 1, 7), None, 1))


def test_tokens_that_fill_no_tile() -> None:
    """130 tokens in all, decoding beside prefilling, with windows whose pages have been freed."""
    plan = Plan(SPLIT, Whole(64, 32, 4, 1), 9)
    check(case([1, 9, 120], [300, 77, 3], window=40, extent=40, kv_heads=2), plan)


@pytest.mark.parametrize("length", [91, 136, 253])
def test_result_does_not_depend_on_how_a_prompt_is_cut(length: int) -> None:
    """Chunks of 64 and 128 and one whole: the lengths are those of a public fault, scaled."""
    whole = case([length], [0], padding=0, heads=4, extent=40)
    results = []
    for chunk in (length, 128, 64):
        rows = []
        for start in range(0, length, chunk):
            stop = min(length, start + chunk)
            part = dict(whole)
            for name in ("q", "rel", "out"):
                part[name] = whole[name][start:stop].clone()
            part["q_starts"] = torch.tensor([0, stop - start], dtype=torch.int32)
            part["kv_lens"] = torch.tensor([stop], dtype=torch.int32)
            part["max_q"], part["max_kv"] = stop - start, stop
            kernel.attend(Plan(None, Whole(64, 64, 4, 1)), **part)
            rows.append(part["out"])
        results.append(torch.cat(rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    "plan",
    [Plan(Split(16, 16, 4, 1, 3, tma=True), None, 99), Plan(None, Whole(32, 16, 4, 1, tma=True))],
    ids=["split", "whole"],
)
def test_tensor_descriptors_read_the_engines_layouts(plan: Plan, heads_first: bool) -> None:
    """Keys and values share rows of one buffer, token-major or head-major, behind a spare page."""
    call = case([3, 20], [50, 13], heads=4, kv_heads=2, page=32, extent=24)
    both = torch.cat([call["k_cache"], call["v_cache"]], dim=-1)
    if heads_first:
        both = both.transpose(1, 2).contiguous().transpose(1, 2)
    call["k_cache"], call["v_cache"] = both[..., :16], both[..., 16:]
    check(call, plan)


def test_wider_bounds_and_shorter_lengths_change_nothing() -> None:
    """A captured graph keeps the host's bounds: any lengths within them must come out the same."""
    call = case([2, 1], [60, 35])
    narrow, wide = call["out"].clone(), call["out"].clone()
    plan = Plan(SPLIT, None, 9)
    kernel.attend(plan, **{**call, "out": narrow})
    kernel.attend(plan, **{**call, "out": wide, "max_q": 9, "max_kv": 10**6})
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"k_cache": torch.zeros(3, 8, 1, 16, dtype=torch.bfloat16)}, "k_cache"),
        ({"v_cache": torch.zeros(3, 16, 1, 16)}, "v_cache"),
        ({"rel": torch.zeros(4, 4, 64, dtype=torch.bfloat16)}, "rel"),
        ({"kv_lens": torch.zeros(1, dtype=torch.int64)}, "kv_lens"),
        ({"q_starts": torch.zeros(1, dtype=torch.int32)}, "q_starts"),
        ({"pages": torch.zeros(1, 4)}, "pages"),
        ({"kv_lens": torch.tensor([17], dtype=torch.int32)}, "pages"),
        ({"out": torch.zeros(4, 8, 16)}, "out"),
        ({"window": -1}, "window"),
        ({"q": torch.zeros(4, 8, 24, dtype=torch.bfloat16)}, "q"),
    ],
)
def test_refuses_what_it_would_read_wrongly(change: dict[str, Any], name: str) -> None:
    call = case([3], [10])
    with pytest.raises(ValueError, match=rf"^{name} needs"):
        kernel.rel_attention(**{**call, **change})


def test_plans_follow_the_shape() -> None:
    """The tuning function on an H200 and on AMD chips: which kernels, and what they may use."""
    h200, mi355x = Target.parse("h200"), Target.parse("mi355x")
    shape = Shape(1, 1, 8, 1, 128, 1024, 0, 128, 1, 65536, descriptors=True)
    decode = tuning.plan(h200, shape)
    assert decode.many is None
    assert decode.few is not None
    assert decode.few.programs % 132 == 0
    assert tuning.plan(h200, replace(shape, rows=9, max_q=9)).many is None
    prompt = tuning.plan(h200, replace(shape, rows=16384, max_q=16384, max_kv=16384))
    assert prompt.few is None
    assert prompt.many is not None
    assert prompt.many.tma
    chunk = tuning.plan(h200, replace(shape, rows=64, max_q=64, max_kv=500_000))
    assert chunk.few is not None
    assert chunk.few_tokens >= 64
    mixed = tuning.plan(h200, replace(shape, rows=2111, batch=64, max_q=2048))
    assert mixed.few is not None
    assert mixed.many is not None
    local = replace(shape, kv_heads=2, window=512, extent=512, page=48)
    for plan in (tuning.plan(mi355x, shape), tuning.plan(mi355x, local)):
        for tiles in (plan.few, plan.many):
            assert tiles is None or (tiles.stages == 1 and not tiles.tma and not tiles.pdl)
    odd = tuning.plan(h200, replace(shape, rows=4096, max_q=4096, page=48))
    assert odd.many is not None
    assert not odd.many.tma


def test_seeded_inputs_agree_in_this_machines_plan() -> None:
    for seed in range(4):
        check(OP.inputs(SeededDraw(seed)))
