"""Every small op of the Triton tier on this machine's GPU: contract, guards, graph replay.

Inputs are seeded draws: what fails here is repeated anywhere by its seed.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from benchmarks.small_ops_shapes import OPS, RANKS, arguments
from inkling_portable.agreement import convert, disagreements, run
from inkling_portable.backends.triton import OFFERS
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import Facts, check_schema, contract, table
from inkling_portable.target import Target
from tests.guards import broken_guards, guarded

SEEDS = 40
ROWS = ((1, True), (16, True), (64, True), (700, False))
RANK_NAMES = ("large-tp8-global", "large-tp8-local", "small-tp1-global")


def provider(op: str) -> Callable[..., Any]:
    offer = next(row for row in OFFERS if row.op == op and row.provider == "triton")
    function = offer.load()
    check_schema(contract(op), function, offer.code)
    return function


@pytest.mark.parametrize("op", OPS)
def test_contract_on_drawn_inputs(op: str) -> None:
    """Small odd shapes, float32 and bfloat16, strided caches, NaN in padding rows."""
    function = provider(op)
    for seed in range(SEEDS):
        drawn = contract(op).inputs(SeededDraw(seed))
        assert not disagreements(contract(op), function, drawn, device="cuda"), (op, seed)


@pytest.mark.parametrize("op", OPS)
def test_contract_on_served_shapes(op: str) -> None:
    """The shapes that one rank of a served model has, decode and prefill."""
    for name in RANK_NAMES:
        for rows, decode in ROWS:
            if op == "skinny_linear" and rows > 16:
                continue
            torch.manual_seed(rows)
            served = arguments(op, rows, RANKS[name], "cuda", decode)
            assert not disagreements(contract(op), provider(op), served), (op, name, rows)


@pytest.mark.parametrize("op", ["gate_logits", "sink_experts", "gated_sinks", "skinny_linear"])
def test_few_rows_by_wgmma(op: str) -> None:
    """Where that kernel is offered: drawn and served shapes, and the same bits each time."""
    here = Target.detect()
    for offer in (row for row in table("cuda") if (row.op, row.provider) == (op, "wgmma")):
        if offer.refusal(here, Facts()):
            continue
        function = offer.load()
        for seed in range(SEEDS):
            drawn = contract(op).inputs(SeededDraw(seed))
            assert not disagreements(contract(op), function, drawn, device="cuda"), seed
        for name in RANK_NAMES:
            for rows in (2, 9, 16, 17, 33, 64, 128, 129):
                if op == "skinny_linear" and rows > 128:
                    continue
                torch.manual_seed(rows)
                for layer in ("qkvr", "o_proj") if op == "skinny_linear" else ("qkvr",):
                    served = arguments(op, rows, RANKS[name], "cuda", True, layer)
                    assert not disagreements(contract(op), function, served), (name, rows, layer)
                first, *others = (run(function, contract(op), served) for _ in range(20))
                for other in others:
                    assert all(map(torch.equal, first, other)), (name, rows)


@pytest.mark.parametrize("rows", [300, 700, 2100])
def test_long_steps_in_one_pass(rows: int) -> None:
    """Where that kernel is offered: the contract, and the portable kernels' sums bit for bit."""
    op, here = "conv_residual_norm", Target.detect()
    offers = [row for row in table("cuda") if (row.op, row.provider) == (op, "rows")]
    for offer in offers if not offers[0].refusal(here, Facts()) else ():
        for name in RANK_NAMES:
            served = arguments(op, rows, RANKS[name], "cuda", False)
            for extra in (served["extra"], None):
                call = {**served, "extra": extra}
                assert not disagreements(contract(op), offer.load(), call), name
                assert torch.equal(offer.load()(**call)[1], provider(op)(**call)[1]), name


def test_gate_with_and_without_rows_behind_its_matrix() -> None:
    """The vendor's library may read NaN there; copies, as other tests make, have nothing there."""
    op, memory = contract("gate_logits"), torch.randn(264, 6144, device="cuda").bfloat16()
    memory[258:] = float("nan")
    x = torch.randn(700, 6144, device="cuda").bfloat16()
    for weight in (memory[:258], memory[:258].clone()):
        truth = op.reference(x.double(), weight.double())
        got = provider("gate_logits")(x, weight)
        assert op.tolerances[0].check(got, op.reference(x, weight), truth) is None


@pytest.mark.parametrize("op", OPS)
def test_nothing_outside_the_arguments_is_touched(op: str) -> None:
    """Arguments lie between NaN or impossible indices; results stay right, guards stay."""
    for seed in range(10):
        drawn = {k: convert(v, device="cuda") for k, v in
                 contract(op).inputs(SeededDraw(1000 + seed)).items()}  # fmt: skip
        plain = run(provider(op), contract(op), drawn)
        fenced = {k: guarded(v) for k, v in drawn.items()}
        returned = provider(op)(**fenced)
        torch.cuda.synchronize()
        got = list(returned) if isinstance(returned, tuple) else [returned]
        got = [x.cpu() for x in got if x is not None] + [fenced[k].cpu() for k in
                                                        contract(op).mutates]  # fmt: skip
        assert not broken_guards(fenced), (op, seed)
        for mine, other in zip(got, plain, strict=True):
            assert torch.equal(mine.double().nan_to_num(7e7), other.double().nan_to_num(7e7)), (
                op,
                seed,
            )


@pytest.mark.parametrize("op", OPS)
def test_graph_replay_equals_eager(op: str) -> None:
    """Bit for bit, with inputs replaced between capture and replay."""
    for rows, decode in ((1, True), (16, True), (700, False)):
        # Of long steps the gate's library asks what lies behind its matrix, which copies lose.
        if rows > 16 and op in ("skinny_linear", "gate_logits", "gated_sinks"):
            continue
        torch.manual_seed(rows)
        rank = RANKS["large-tp8-global"]
        first = arguments(op, rows, rank, "cuda", decode)
        second = arguments(op, rows, rank, "cuda", decode)
        # Copies with what lies behind them in memory: it decides what computes a gate. The first
        # compile before the capture.
        copied, again = ({k: deepcopy(v) for k, v in each.items()} for each in (first, second))
        provider(op)(**copied)
        made = provider(op)(**again)
        eager = [x.cpu() for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
        eager += [again[k].cpu() for k in contract(op).mutates]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = provider(op)(**first)
        for key, value in second.items():
            if isinstance(value, torch.Tensor):
                first[key].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        got = list(returned) if isinstance(returned, tuple) else [returned]
        got = [x.cpu() for x in got if x is not None]
        got += [first[k].cpu() for k in contract(op).mutates]
        for mine, other in zip(got, eager, strict=True):
            assert torch.equal(mine.double().nan_to_num(7e7), other.double().nan_to_num(7e7)), (
                op,
                rows,
            )


def test_which_program_routes_does_not_matter() -> None:
    """The last with gate rows does: the same bits in thousands of launches beside others."""
    torch.manual_seed(0)
    given = [arguments("gated_sinks", 1, RANKS["large-tp8-global"], "cuda") for _ in range(8)]
    wanted = [provider("gated_sinks")(**one) for one in given]
    graph, noise = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        found = [provider("gated_sinks")(**one) for one in given]
    matrix = torch.randn(1024, 1024, device="cuda")
    for i in range(600):
        if i % 3 == 0:
            with torch.cuda.stream(noise):
                matrix @ matrix
        if i % 60 == 0:
            for value in (value for one in found for value in one):
                value.fill_(-1)
        graph.replay()
        if i % 60 == 59:
            for mine, other in zip(found, wanted, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_dependent_launch_changes_nothing() -> None:
    """A chain of ops gives the same bits with programmatic dependent launch, where there is one."""
    from inkling_portable.backends.triton._common import dependent_launch
    from inkling_portable.backends.triton.experts import gate_logits, route, swiglu
    from inkling_portable.backends.triton.norm import rms_norm
    from inkling_portable.backends.triton.skinny_linear import skinny_linear

    torch.manual_seed(0)
    a = arguments("conv_residual_norm", 1, RANKS["large-tp8-global"], "cuda")
    gate = arguments("gate_logits", 1, RANKS["large-tp8-global"], "cuda")["weight"]
    wide = arguments("skinny_linear", 1, RANKS["large-tp8-global"], "cuda", layer="sinks")["weight"]
    bias, one = torch.zeros(256, device="cuda"), torch.ones(1, device="cuda")

    def chain() -> list[torch.Tensor]:
        x, outputs = a["partial"], []
        for _ in range(30):
            x, _ = rms_norm(x, a["norm_weight"], 1e-6, a["residual"])
            weights, ids, _ = route(gate_logits(x, gate), bias, one, 6, 8.0)
            inner = swiglu(skinny_linear(x, wide), True, None)
            x = torch.cat([inner * weights[0, 0], x], dim=1)[:, : x.shape[1]].contiguous()
            outputs += [x, ids]
        return outputs

    with dependent_launch(False):
        plain = chain()
    for _ in range(20):
        with dependent_launch():
            overlapped = chain()
        torch.cuda.synchronize()
        for mine, other in zip(overlapped, plain, strict=True):
            assert torch.equal(mine, other)
