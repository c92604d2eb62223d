"""Long prefills in two parts, with FA4 played by plain torch: what FA4 is asked for, and the join.

The stand-in does what FA4 does, its habits included: rows without keys get arbitrary numbers with
a finite log-sum-exp, and the page table is read before its first column.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import rel_attention_fa4 as fa4
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton.rel_attention_tuning import Plan, Shape, Split, Whole
from inkling_portable.registry import MODELS, SelectionError, choose, contract
from inkling_portable.target import Target
from tests.anywhere.test_triton_attention import case
from tests.quick_interpreter import install

install()
OP = contract("rel_attention")


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int,
    page_table: Tensor, softmax_scale: float, causal: bool, return_lse: bool, out: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert causal and return_lse and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    group, page = q.shape[1] // k.shape[2], k.shape[1]
    lse = torch.full((q.shape[1], q.shape[0]), 3.0)
    out.fill_(99.0)
    for b, used in enumerate(seqused_k.tolist()):
        rows = range(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        before = page_table.as_strided((16,), (1,), int(page_table[b].storage_offset()) - 16)
        assert not before.any(), "pages before the first must be real ones"
        pages = page_table[b, : -(-used // page)].long()
        keys, values = (
            x[pages].flatten(0, 1)[:used].float().repeat_interleave(group, 1) for x in (k, v)
        )
        for i, row in enumerate(rows):
            seen = used - len(rows) + i + 1
            if seen > 0:
                s = torch.einsum("hd,khd->hk", q[row].float(), keys[:seen]) * softmax_scale
                lse[:, row] = s.logsumexp(1)
                mixed = torch.einsum("hk,khd->hd", s.softmax(1), values[:seen])
                out[row] = mixed.to(out.dtype)
    return out, lse


@pytest.mark.parametrize(("new", "context", "plan"), [
    ([90], [0], Plan(None, Whole(32, 32, 4, 1))),
    ([40, 70], [100, 3], Plan(None, Whole(32, 32, 4, 1))),
    ([1, 60, 5, 0, 1], [150, 30, 20, 0, 9], Plan(Split(16, 16, 4, 1, 5), Whole(32, 32, 4, 1), 8)),
])  # fmt: skip
def test_far_and_near_keys_make_the_whole(
    new: list[int], context: list[int], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests shorter than the extent, beyond it, and decoding ones, which FA4 is kept from."""
    asked: list[list[int]] = []

    def play(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        asked.append(kwargs["seqused_k"].tolist())
        return causal_attention(*args, **kwargs)

    monkeypatch.setattr(fa4, "flash_attention", lambda: play)
    monkeypatch.setattr(tuning, "near_plan", lambda target, shape: plan)
    call = case(new, context, extent=48, width=16, page=16)
    assert not disagreements(OP, fa4.composed, call)
    few = plan.few_tokens if plan.few else 0
    lengths = [n + c for n, c in zip(new, context, strict=True)]
    far = [max(0, n - 48) if f > few else 0 for n, f in zip(lengths, new, strict=True)]
    assert far in asked


@pytest.mark.parametrize(("change", "taken"), [
    ({}, True), ({"window": 512}, False), ({"max_q": 64}, False), ({"max_kv": 1500}, False),
    ({"page": 64}, False),
])  # fmt: skip
def test_only_long_prefills_are_composed(change: dict[str, int], taken: bool) -> None:
    facts = {"window": 0, "max_q": 4096, "max_kv": 8192, "page": 128} | change
    page = facts.pop("page")
    meta = {"device": "meta", "dtype": torch.bfloat16}
    cache = torch.empty((9, page, 1, 128), **meta)
    q = torch.empty((4096, 8, 128), **meta)
    rel = torch.empty((4096, 8, 1024), **meta)
    none = torch.empty(0)
    assert taken is fa4.long_prefill(
        q, cache, cache, rel, none, none, none, facts["max_q"], facts["max_kv"], facts["window"],
        1 / 128, q,
    )  # fmt: skip


def test_splits_fill_the_chip_once() -> None:
    """One request gets as many parts as it has key tiles; 64 requests share the chip's units."""
    base = {"heads": 8, "kv_heads": 1, "width": 128, "extent": 1024, "page": 128}
    one = Shape(rows=1, batch=1, window=0, max_q=1, max_kv=8192, **base)
    many = Shape(rows=64, batch=64, window=0, max_q=1, max_kv=8192, **base)
    local = Shape(rows=1, batch=1, window=512, max_q=1, max_kv=8192, **base)
    assert [fa4.splits(s, 132) for s in (one, many, local)] == [64, 2, 5]


def test_fa4_is_two_rows_and_refuses_in_sentences() -> None:
    served = Target.parse("h200+triton=3.6.0+vllm=0.33.0")
    rows = [d for d in choose(served, MODELS["large"], (("rel_attention", "fa4"),))
            if d.op == "rel_attention" and d.verdict == "chosen"]  # fmt: skip
    assert [d.offer.when is None for d in rows] == [False, True]
    with pytest.raises(SelectionError, match="needs sm90; this is sm100"):
        choose(Target.parse("b200+vllm=0.33.0"), MODELS["large"], (("rel_attention", "fa4"),))
    with pytest.raises(SelectionError, match=r"needs vllm .* which is not installed"):
        choose(Target.parse("h200"), MODELS["large"], (("rel_attention", "vllm"),))
