"""Laws that hold whatever the numbers are: order of requests, names of pages, cuts."""

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inkling_portable.agreement import run
from inkling_portable.backends.reference.batch import Paged, draw_batch, draw_pages, make_batch
from inkling_portable.backends.reference.short_conv import sources_of
from inkling_portable.registry import contract
from tests.hypothesis_draw import HypothesisDraw

PAGED = {
    "rel_attention": (("k_cache", "v_cache"), ("pages",), ()),
    "conv_residual_norm": (("state",), (), ("slots", "sources")),
}


def call(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    op = contract(name)
    return run(op.reference, op, arguments, torch.float64)


def drawn(name: str, data: st.DataObject) -> dict[str, Any]:
    return contract(name).inputs(HypothesisDraw(data))


@given(data=st.data(), name=st.sampled_from(sorted(PAGED)))
def test_renaming_pages_changes_nothing(data: st.DataObject, name: str) -> None:
    caches, tables, slots = PAGED[name]
    arguments = drawn(name, data)
    pages, page = arguments[caches[0]].shape[:2]
    # Page 0 is the engine's null page and keeps its name.
    order = [0, *data.draw(st.permutations(range(1, pages)))]
    old_of = torch.tensor(order)
    new_of = torch.argsort(old_of)
    renamed = dict(arguments)
    for cache in caches:
        renamed[cache] = arguments[cache][old_of]
    for table in tables:
        renamed[table] = new_of[arguments[table].long()].int()
    for slot in slots:
        renamed[slot] = renamed_slots(arguments[slot], slot == "sources", new_of, page)
    before, after = call(name, arguments), call(name, renamed)
    if name == "conv_residual_norm":
        before[2] = before[2][old_of]
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x.double().nan_to_num(7e7), y.double().nan_to_num(7e7))


def renamed_slots(old: Tensor, sources: bool, new_of: Tensor, page: int) -> Tensor:
    """Slots (or sources, which hold a slot s as -2 - s) after pages got new names."""
    slot = -2 - old if sources else old
    new = new_of[slot.clamp_min(0) // page] * page + slot.clamp_min(0) % page
    return torch.where(slot < 0, old, -2 - new if sources else new)


@given(data=st.data())
def test_attention_ignores_the_order_of_requests(data: st.DataObject) -> None:
    arguments = drawn("rel_attention", data)
    starts = arguments["q_starts"].tolist()
    lengths = [b - a for a, b in pairwise(starts)]
    order = data.draw(st.permutations(range(len(lengths))))
    rows = [t for b in order for t in range(starts[b], starts[b + 1])]
    rows += range(starts[-1], arguments["q"].shape[0])
    moved = dict(arguments)
    moved["q"], moved["rel"] = arguments["q"][rows], arguments["rel"][rows]
    moved["pages"], moved["kv_lens"] = (
        arguments["pages"][list(order)],
        arguments["kv_lens"][list(order)],
    )
    moved["q_starts"] = make_batch([lengths[b] for b in order], [0] * len(order)).q_starts
    (before,), (after,) = call("rel_attention", arguments), call("rel_attention", moved)
    assert torch.equal(before[rows], after)


@given(data=st.data())
def test_the_conv_state_makes_any_cut_equal(data: st.DataObject) -> None:
    """BL-010: one pass over T tokens equals any split of them, one-token chunks included."""
    draw = HypothesisDraw(data)
    length = draw.integer(1, 24)
    cuts = sorted({0, length, *(draw.integer(0, length) for _ in range(draw.integer(0, 5)))})
    width, taps = 6, 4
    x = draw.tensor((length, width), torch.float32)
    residual = torch.zeros_like(x)
    weight = draw.tensor((width, taps), torch.float32)
    whole = make_batch([length], [0])
    paged = draw_pages(draw, whole, page=draw.choice((4, 1, 3, 8)))
    state = torch.full((paged.count, paged.page, 2, 3), float("nan"), dtype=torch.float64)
    conv = contract("conv_residual_norm").reference

    def step(first: int, last: int, into: Tensor) -> Tensor:
        batch = make_batch([last - first], [first], padding=1)
        slots = torch.cat([paged.slots[first:last], torch.tensor([-1])])
        rows = torch.cat([x[first:last], torch.full((1, width), float("nan"))]).double()
        extra = torch.cat([residual[first:last], residual[:1]]).double()
        sources = sources_of(batch, Paged(paged.page, paged.count, paged.pages, slots), taps)
        _, out = conv(rows, None, extra, weight.double(), None, 1e-6, into, slots, sources, "")
        return out[: last - first]

    one = step(0, length, state.clone())
    parts = [step(a, b, state) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), one)


@given(data=st.data())
def test_a_verified_draft_leaves_no_trace(data: st.DataObject) -> None:
    """Rows of rejected tokens are overwritten when their positions run again."""
    draw = HypothesisDraw(data)
    context, drafts, kept = draw.integer(0, 9), draw.integer(1, 8), draw.integer(0, 7)
    kept = min(kept, drafts - 1)
    width = 4
    batch = make_batch([context + drafts + 1], [0])
    paged = draw_pages(draw, batch, page=4)
    x = draw.tensor((context + drafts + 1, width), torch.float64)
    wrong = draw.tensor((drafts, width), torch.float64)
    weight = draw.tensor((width, 4), torch.float64)
    conv = contract("conv_residual_norm").reference

    def run_rows(first: int, rows: Tensor, state: Tensor) -> Tensor:
        b = make_batch([len(rows)], [first])
        slots = paged.slots[first : first + len(rows)]
        sources = sources_of(b, Paged(4, paged.count, paged.pages, slots), 4)
        zero = torch.zeros_like(rows)
        return conv(rows, None, zero, weight, None, 1e-6, state, slots, sources, "")[1]

    clean = torch.zeros(paged.count, 4, 1, width, dtype=torch.float64)
    dirty = clean.clone()
    for state in (clean, dirty):
        run_rows(0, x[:context], state)
    run_rows(context, torch.cat([x[context : context + kept], wrong[kept:]]), dirty)
    run_rows(context, x[context : context + kept], clean)
    after = x[context + kept :]
    assert torch.equal(
        run_rows(context + kept, after, dirty), run_rows(context + kept, after, clean)
    )


@given(data=st.data())
def test_sources_name_the_rows_and_slots_of_earlier_positions(data: st.DataObject) -> None:
    """Follow every source back to the (request, position) it stands for, in plain Python."""
    draw = HypothesisDraw(data)
    batch = draw_batch(draw)
    paged = draw_pages(draw, batch, page=draw.choice((4, 8, 5)), window=4, share=True)
    sources = sources_of(batch, paged, 4).tolist()
    slot_at = paged.slots.tolist()
    for t, taps in enumerate(sources):
        for j, source in enumerate(taps):
            position = int(batch.positions[t]) - (3 - j)
            if t >= batch.tokens or position < 0:
                assert source == -1
                continue
            table = paged.pages[int(batch.requests[t])].tolist()
            slot = table[position // paged.page] * paged.page + position % paged.page
            assert source == (slot_at.index(slot) if slot in slot_at else -2 - slot)
