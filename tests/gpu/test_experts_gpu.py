"""Routed experts of ours on this machine's GPU: contract, guards, graph replay."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.experts import FORMATS, MODELS, realistic, tokens_of, weights_of
from inkling_portable.agreement import convert, disagreements, run
from inkling_portable.backends import cuda, triton
from inkling_portable.formats import arranged
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import Facts, contract
from inkling_portable.target import Target
from tests.guards import broken_guards, guarded

Provider = Callable[..., torch.Tensor]
OP = contract("routed_experts")
SERVED = ["nvfp4-arranged", "mxfp4-arranged"]
TARGET, FACTS = Target.detect(), Facts(weights="nvfp4")
ROWS = [row for row in (*triton.OFFERS, *cuda.OFFERS)
        if row.op == "routed_experts" and row.refusal(TARGET, FACTS) is None]  # fmt: skip


@pytest.fixture(params=ROWS, ids=[row.provider for row in ROWS])
def routed_experts(request: pytest.FixtureRequest) -> Provider:
    found: Provider = request.param.load()
    return found


def test_contract_on_drawn_inputs(routed_experts: Provider) -> None:
    """Small odd shapes, all formats, float32 and bfloat16."""
    for seed in range(80):
        drawn = OP.inputs(SeededDraw(seed))
        assert not disagreements(OP, routed_experts, drawn, device="cuda"), seed


@pytest.mark.parametrize("form", [*FORMATS, *SERVED])
@pytest.mark.parametrize("model", ["large-tp8", "small-tp2"])
def test_contract_on_served_shapes(routed_experts: Provider, form: str, model: str) -> None:
    torch.manual_seed(0)
    weights = weights_of(model, form)
    for tokens in (1, 3, 16, 40, 300):
        one = realistic(tokens_of(MODELS[model][0], tokens, 1))[0]
        assert not disagreements(OP, routed_experts, {**weights, **one}), tokens


def test_extreme_routing_on_served_shapes(routed_experts: Provider) -> None:
    """All tokens on the same experts, and experts held by other ranks."""
    torch.manual_seed(1)
    weights = weights_of("large-tp8", "nvfp4")
    for tokens in (1, 16, 200):
        one = tokens_of(6144, tokens, 1)[0]
        one["ids"] = torch.arange(6, device="cuda", dtype=torch.int32).repeat(tokens, 1) * 40
        assert not disagreements(OP, routed_experts, {**weights, **one}), tokens
        one["ids"][:, 1] = -1
        one["ids"][:, 2] = 256
        assert not disagreements(OP, routed_experts, {**weights, **one}), tokens


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "nvfp4-arranged"])
def test_extreme_routing_of_long_steps(routed_experts: Provider, form: str) -> None:
    """Every row of a few experts' or of one token's only; another's are zeros; nothing at all."""
    torch.manual_seed(4)
    weights = weights_of("large-tp8", form)
    for tokens in (1600, 3000, 8192):
        one = tokens_of(6144, tokens, 1)[0]
        spread = one["ids"].clone()
        one["ids"] = torch.arange(6, device="cuda", dtype=torch.int32).repeat(tokens, 1) * 40
        one["ids"][:, 1], one["ids"][:, 2] = -1, 256
        assert not disagreements(OP, routed_experts, {**weights, **one}), tokens
        one["ids"] = torch.full_like(spread, -1)
        assert not routed_experts(**weights, **one).any(), tokens
        one["ids"][tokens // 2] = spread[tokens // 2]
        got = routed_experts(**weights, **one)
        alone = routed_experts(**weights, **{k: v[tokens // 2 :][:1] for k, v in one.items()})
        assert (got.any(dim=1).nonzero() == tokens // 2).all(), tokens
        apart = (got[tokens // 2] - alone[0]).float().norm() / alone.float().norm()
        assert apart < 2**-6, tokens


def test_nothing_outside_the_arguments_is_touched(routed_experts: Provider) -> None:
    for seed in range(20):
        drawn = {k: convert(v, device="cuda") for k, v in OP.inputs(SeededDraw(900 + seed)).items()}
        plain = run(routed_experts, OP, drawn)[0]
        fenced = {k: guarded(v) for k, v in drawn.items()
                  if isinstance(v, torch.Tensor) and v.dtype != torch.uint8}  # fmt: skip
        got = routed_experts(**{**drawn, **fenced})
        torch.cuda.synchronize()
        assert not broken_guards(fenced), seed
        assert torch.equal(got.cpu(), plain), seed


@pytest.mark.parametrize("form", [*FORMATS, *SERVED])
def test_graph_replay_equals_eager_and_runs_repeat(routed_experts: Provider, form: str) -> None:
    """Bit for bit, with other tokens between capture and replay, and run after run."""
    torch.manual_seed(2)
    weights = weights_of("large-tp8", form)
    for tokens in (1, 9, 40, 700, 8192):
        first, second = (realistic(tokens_of(6144, tokens, 1))[0] for _ in range(2))
        eager = routed_experts(**weights, **second)
        assert torch.equal(eager, routed_experts(**weights, **second))
        routed_experts(**weights, **first)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = routed_experts(**weights, **first)
        for key, value in second.items():
            first[key].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager), tokens


def test_long_steps_give_what_short_ones_do(routed_experts: Provider) -> None:
    """Other kernels and settings for each length; sums differ by roundings of a bfloat16."""
    torch.manual_seed(3)
    for model, form in (("large-tp8", "nvfp4"), ("small-tp1", "mxfp4")):
        weights = weights_of(model, form)
        for tokens in (200, 600, 1500, 3000, 8191):
            one = realistic(tokens_of(MODELS[model][0], tokens, 1))[0]
            some = {key: value[30:130] for key, value in one.items()}
            long = routed_experts(**weights, **one)[30:130].float()
            short = routed_experts(**weights, **some).float()
            apart = (long - short).norm(dim=1) / short.norm(dim=1)
            assert apart.max() < 2**-6, (model, tokens)


@pytest.mark.parametrize("form", SERVED)
def test_arranged_codes_change_no_bit(routed_experts: Provider, form: str) -> None:
    for model in ("large-tp8", "small-tp1"):
        torch.manual_seed(6)
        stored = weights_of(model, form.partition("-")[0])
        there = stored | {w: arranged(stored[w]) for w in ("w13", "w2")} | {"format": form}
        for tokens in (1, 16, 64, 128, 300, 700, 8192):
            one = realistic(tokens_of(MODELS[model][0], tokens, 1))[0]
            got = routed_experts(**there, **one)
            assert torch.equal(got, routed_experts(**stored, **one)), (model, tokens)
