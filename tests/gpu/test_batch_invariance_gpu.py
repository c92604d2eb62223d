"""The same bits in any company, on the accelerator that is present; and 8-bit rounding there."""

import random
from typing import Any

import pytest
import torch

from benchmarks.small_ops_shapes import OPS, RANKS, arguments
from inkling_portable.agreement import disagreements
from inkling_portable.backends.triton import rel_attention_fixed as fixed
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import contract
from inkling_portable.target import Target
from tests.anywhere.test_batch_invariance import ROWS, Requests, changed_by_company
from tests.anywhere.test_fp8_cache import FN, FNUZ, wrongly_rounded
from tests.gpu.test_attention_gpu import OP_FLOAT32

OP = contract("rel_attention")
STORED = FNUZ if Target.detect().arch == "gfx942" else FN
SERVED = {"width": 128, "page": 128, "extent": 1024, "device": "cuda"}
KINDS: dict[str, dict[str, Any]] = {
    "tp8": {},
    "tp8-local": {"kv_heads": 2, "window": 512, "extent": 512},
    "fp8": {"stored": STORED},
    "fp8-local": {"stored": STORED, "kv_heads": 2, "window": 512, "extent": 512, "page": 64},
    "group-1": {"heads": 2, "kv_heads": 2, "page": 16},
    "group-16": {"heads": 16, "kv_heads": 1, "page": 64},
    "float32": {"dtype": torch.float32, "stored": torch.float32, "heads": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_in_any_company(kind: str) -> None:
    """Prompts, chunks, verified drafts and single tokens, among 1 to 64 requests."""
    lengths = [3000, 5000, 700, 64, 1, *(40 * b + 3 for b in range(59))]
    requests = Requests(lengths, **{**SERVED, **KINDS[kind]})
    want, draws = requests.alone(), random.Random(7)
    # Every second position of the longest requests as a single token, 64 at a time.
    for first in range(1, 2900, 256):
        step = [(0, p, p + 1) for p in range(first, first + 128, 2)]
        assert not requests.differing(step, want, 0)
    for _ in range(40):
        stretches = []
        for b in draws.sample(range(64), draws.choice([1, 2, 3, 16, 64])):
            end = draws.randint(1, lengths[b])
            fresh = draws.choice([1, 1, 1, 9, 64, 300, end])
            stretches.append((b, max(0, end - fresh), end))
        assert not requests.differing(stretches, want, draws.choice([0, 5]))


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_the_contract(seed: int) -> None:
    call = OP.inputs(SeededDraw(400 + seed))
    op = OP_FLOAT32 if call["q"].dtype == torch.float32 else OP
    assert not disagreements(op, fixed.rel_attention, call, device="cuda")


@pytest.mark.parametrize("row", [r for r in ROWS if r.op in OPS], ids=lambda r: r.op)
def test_rows_do_not_depend_on_those_behind_them(row: Any) -> None:
    for rank in ("large-tp8-global", "large-tp8-local", "small-tp1-global"):
        for rows, decode in ((16, True), (64, True), (700, False)):
            if row.op == "skinny_linear" and rows > 16:
                continue
            torch.manual_seed(rows)
            served = arguments(row.op, rows, RANKS[rank], "cuda", decode)
            for keep in (1, 2, 5, 15, 63, 300):
                if keep < rows:
                    assert not changed_by_company(row, served, keep, "cuda"), (rank, rows, keep)


@pytest.mark.parametrize("seed", range(20))
def test_expert_rows_do_not_depend_on_those_behind_them(seed: int) -> None:
    row = next(r for r in ROWS if r.op == "routed_experts")
    drawn = contract("routed_experts").inputs(SeededDraw(seed))
    if drawn["act"] == "bf16":
        for keep in (1, 2, 9):
            assert not changed_by_company(row, drawn, keep, "cuda"), keep


def test_stored_numbers_are_the_nearest() -> None:
    """A cast that rounds twice differs in a few values of a thousand."""
    assert wrongly_rounded(STORED, 1 << 20, "cuda") == 0


def test_a_captured_graph_equals_eager() -> None:
    """Bit for bit, after lengths have shrunk under the bounds that the capture saw."""
    requests = Requests([4000, 2500], **SERVED)
    requests.step([(0, 3999, 4000), (1, 2499, 2500)], slack=2)
    call = requests.last
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fixed.rel_attention(**call)
    for cut in (0, 900, 2499):
        call["kv_lens"].copy_(torch.tensor([4000 - cut, 2500 - cut]))
        call["out"].fill_(float("nan"))
        graph.replay()
        replayed = call["out"].clone()
        fixed.rel_attention(**call)
        assert torch.equal(replayed, call["out"])
        assert replayed.isfinite().all()
