"""The other providers of attention that the present GPU is offered, against the contract."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.attention_cases import CASES, arguments, faults, smaller
from inkling_portable.agreement import disagreements
from inkling_portable.registry import MODELS, contract, table
from inkling_portable.target import Target
from tests.anywhere.test_triton_attention import case

HERE, OP = Target.detect(), contract("rel_attention")
ROWS = [
    row for row in (table(HERE.vendor) if HERE.vendor != "cpu" else ())
    if row.op == "rel_attention" and row.refusal(HERE, MODELS["large"]) is None
]  # fmt: skip
# Two kinds of layer, as one rank of eight has them, and as Inkling-Small's.
GLOBAL = {"extent": 1024, "width": 128, "page": 128}
LOCAL = {"extent": 512, "window": 512, "kv_heads": 2, "width": 128, "page": 128}
SMALL = {**GLOBAL, "kv_heads": 2}
BATCHES = [([128], [0]), ([200], [7]), ([300], [1500]), ([1, 600, 9, 0, 1], [3000, 77, 500, 9, 0]),
           ([17, 1200, 300], [5, 0, 2000]), ([40, 1030], [1027, 4099])]  # fmt: skip


def names(rows: list[Any]) -> list[str]:
    return [f"{row.provider}-{row.code.split(':')[1]}" for row in rows]


PARTIAL = [row for row in ROWS if row.when is not None]
WHOLE = [row for row in ROWS if row.when is None]


@pytest.mark.parametrize("kind", [GLOBAL, LOCAL, SMALL], ids=["global", "local", "small"])
@pytest.mark.parametrize(("new", "context"), BATCHES)
@pytest.mark.parametrize("row", PARTIAL, ids=names(PARTIAL))
def test_rows_for_some_calls(
    row: Any, new: list[int], context: list[int], kind: dict[str, int]
) -> None:
    """On ragged batches with NaN in all that must not be read; sizes below what pays run too."""
    if row.provider == "fa4" and kind is LOCAL:
        kind = GLOBAL  # it composes global layers only
    call = case(new, context, **kind)
    assert not disagreements(OP, row.load(), call, device="cuda")


@pytest.mark.parametrize("name", ["global 1 x 8K", "verify 9, 8K", "local 64 x 8K",
                                  "global prefill 4K", "local prefill 4K"])  # fmt: skip
@pytest.mark.parametrize("row", WHOLE, ids=names(WHOLE))
def test_rows_for_every_call(row: Any, name: str) -> None:
    """On serving shapes cut short: FA4 multiplies what follows the last key, so it is finite."""
    few = smaller(next(c for c in CASES if c.name == name))
    call = arguments(few, "cuda")
    call["out"].fill_(float("nan"))
    function: Callable[..., None] = row.load()
    function(**call)
    assert not faults(few, call)


@pytest.mark.parametrize("row", PARTIAL, ids=names(PARTIAL))
def test_a_captured_graph_equals_eager_for_shorter_lengths(row: Any) -> None:
    """Bit for bit, after the length has shrunk under the bound that the capture saw."""
    shape = next(c for c in CASES if c.name == "global prefill 4K")
    call = arguments(shape, "cuda")
    function: Callable[..., None] = row.load()
    function(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(**call)
    for cut in (0, 130):
        call["kv_lens"].fill_(4096 - cut)
        call["q_starts"][1] = 4096 - cut
        call["out"].fill_(float("nan"))
        graph.replay()
        replayed = call["out"].clone()
        call["out"].fill_(float("nan"))
        function(**call)
        assert torch.equal(replayed, call["out"])
        assert replayed.isfinite().all()
