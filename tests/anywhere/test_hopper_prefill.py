"""What the Hopper kernel's host side promises its device side, checked with plain arithmetic.

The device side runs on one kind of GPU only (tests/gpu). Its idea can be followed anywhere: boxes
cut from the bias as TMA cuts them, times the matrices that turn them round, are each row's bias.
"""

import re

import pytest
import torch

from inkling_portable.backends.cuda import rel_attention_hopper as hopper
from inkling_portable.backends.triton.rel_attention_tuning import Shape
from inkling_portable.registry import MODELS, SelectionError, choose
from inkling_portable.target import Target


def cut(boxes: object, at: tuple[int, int, int], columns: int) -> torch.Tensor:
    """A box [rows, columns] as TMA delivers it: zeros where a coordinate leaves the shape."""
    rel, (tokens, heads, flat) = boxes.base.flatten(), boxes.shape  # type: ignore[attr-defined]
    found = torch.zeros(boxes.block_shape, dtype=rel.dtype)  # type: ignore[attr-defined]
    assert found.shape[2] == columns
    start = at[2] * rel.element_size()
    assert at[2] < 0 or (start % 16 == 0), "TMA reads from multiples of 16 bytes"
    for i in range(found.shape[0]):
        for h in range(found.shape[1]):
            for c in range(columns):
                place = at[2] + c
                if i < tokens and at[1] + h < heads and 0 <= place < flat:
                    step = i * boxes.strides[0] + (at[1] + h) * boxes.strides[1]  # type: ignore[attr-defined]
                    found[i, h, c] = rel[place + step] if place + step < rel.numel() else 0
    return found.flatten(0, 1)


@pytest.mark.parametrize(("group", "kv_head", "context", "key", "token"), [
    (8, 0, 1000, 896, 3), (8, 0, 0, 0, 1), (4, 1, 1003, 512, 5), (4, 0, 513, 0, 6),
    (4, 1, 777, 640, 7),
])  # fmt: skip
def test_boxes_turned_round_are_the_bias(
    group: int, kv_head: int, context: int, key: int, token: int
) -> None:
    """Every eighth token from `token`, at position context + token, against keys key .. key+127."""
    heads, extent, tokens = 8, 512, 150
    rel = torch.randn(tokens, heads, extent, generator=torch.Generator().manual_seed(token))
    rel = rel.to(torch.bfloat16)
    wide, spare = hopper._boxes(rel, group)
    position = context + token
    skipped = (position + 1) % 8
    start = position - (key + 127) - skipped + token * heads * extent
    head = kv_head * group
    first, second = cut(wide, (0, head, start), 64), cut(wide, (0, head, start + 64), 64)
    rest = cut(spare, (0, head, start + 128), 16)
    y, above, column = torch.arange(64)[:, None], torch.arange(16)[:, None], torch.arange(64)
    turned = (y + column == 63 + skipped).double()
    beyond = (above + column == skipped - 1).double()
    low = second.double() @ turned + rest.double() @ beyond
    high = first.double() @ turned + second[:, :16].double() @ beyond
    bias = torch.cat([low, high], 1)
    checked = 0
    for row in range(64):
        mine = token + row // group * 8
        for c in range(128):
            distance = context + mine - key - c
            if mine < tokens - 1 and 0 <= distance < extent:
                assert bias[row, c] == rel[mine, head + row % group, distance].double()
                checked += 1
    assert checked > 1000


@pytest.mark.parametrize("group", [4, 8])
def test_the_grid_has_a_program_for_every_tile(group: int) -> None:
    """Of ragged requests with host bounds only; a request's tiles come in fours."""
    span = 512 // group
    for lengths in ([1], [span], [span + 1], [1, 700, 9, 0, 333], [3] * 40 + [2000]):
        rows = sum(lengths)
        shape = Shape(rows, len(lengths), 8, 8 // group, 128, 1024, 0, 128, max(lengths), 4096)
        assert hopper._tiles(shape) >= sum(4 * -(-n // span) for n in lengths)
        assert hopper._tiles(shape) <= 4 * (rows // span + len(lengths))


@pytest.mark.parametrize(("change", "taken"), [
    ({}, True), ({"window": 512, "tokens": 8192}, True), ({"window": 512}, False),
    ({"window": 2048, "tokens": 8192}, False), ({"tokens": 128}, False), ({"max_kv": 4096}, False),
    ({"page": 64}, False), ({"scale": 0.09}, False), ({"kv_heads": 8}, False),
    ({"k_scale": 0.5}, False),
])  # fmt: skip
def test_what_it_serves(change: dict[str, int], taken: bool) -> None:
    facts = {"window": 0, "tokens": 4096, "max_kv": 16384, "page": 128, "scale": 1 / 128,
             "kv_heads": 1, "k_scale": 1.0} | change  # fmt: skip
    meta = {"device": "meta", "dtype": torch.bfloat16}
    cache = torch.empty((9, facts["page"], facts["kv_heads"], 128), **meta)
    q = torch.empty((facts["tokens"], 8, 128), **meta)
    rel = torch.empty((facts["tokens"], 8, 1024), **meta)
    lens = torch.empty(1, dtype=torch.int32)
    assert taken is hopper.serves(
        q, cache, cache, rel, lens, lens, lens, facts["tokens"], facts["max_kv"], facts["window"],
        facts["scale"], q, facts["k_scale"],
    )  # fmt: skip


def test_it_is_offered_for_hopper_and_triton_3_6_only() -> None:
    asked = (("rel_attention", "gluon"),)
    rows = [d for d in choose(Target.parse("h200+triton=3.6.0"), MODELS["large"], asked)
            if d.op == "rel_attention" and d.verdict == "chosen"]  # fmt: skip
    assert [d.offer.when is None for d in rows] == [False, True]
    refusals = {"b200+triton=3.6.0": "needs sm90; this is sm100",
                "h200+triton=3.9.0": "needs triton >=3.6,<3.7; found 3.9.0"}  # fmt: skip
    for machine, reason in refusals.items():
        with pytest.raises(SelectionError, match=re.escape(reason)):
            choose(Target.parse(machine), MODELS["large"], asked)
