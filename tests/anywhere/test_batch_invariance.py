"""Batch invariance: a token's result is the same bits in any company and however it is computed."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inkling_portable.__main__ import main
from inkling_portable.agreement import disagreements, run
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton import rel_attention as host
from inkling_portable.backends.triton import rel_attention_fixed as fixed
from inkling_portable.backends.triton._common import target as launch_target
from inkling_portable.backends.triton.rel_attention_tuning import Shape
from inkling_portable.inputs import SeededDraw, fill
from inkling_portable.registry import Facts, Offer, SelectionError, choose, contract
from inkling_portable.target import Target
from tests.anywhere.test_triton_attention import OP_FLOAT32
from tests.quick_interpreter import install

install()
OP = contract("rel_attention")


@dataclass
class Requests:
    """Whole requests, of which steps compute stretches: every query, bias row, key and value."""

    lengths: list[int]
    heads: int = 8
    kv_heads: int = 1
    width: int = 16
    extent: int = 40
    window: int = 0
    page: int = 16
    stored: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    last: dict[str, Any] = field(default_factory=dict)  # the latest call

    def __post_init__(self) -> None:
        needed = [-(-n // self.page) for n in self.lengths]
        count = sum(needed) + 1
        self.table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
        free = list(range(1, count))
        for b, n in enumerate(needed):
            self.table[b, :n] = torch.tensor([free.pop() for _ in range(n)])
        cells = fill((2, count, self.page, self.kv_heads, self.width), self.dtype, "normal", 5)
        both = torch.cat([*cells], dim=-1).to(self.device, self.stored)
        self.keys, self.values = both.split(self.width, dim=-1)
        self.q, self.rel = (
            [fill((n, self.heads, w), self.dtype, "normal", 9 * b + w) for b, n in
             enumerate(self.lengths)] for w in (self.width, self.extent)
        )  # fmt: skip

    def step(self, stretches: list[tuple[int, int, int]], slack: int = 0) -> list[Tensor]:
        """One call for (request, first token, end) each; `slack` widens the host's bounds."""
        starts = [0]
        for _, first, end in stretches:
            starts.append(starts[-1] + end - first)
        q, rel = (
            torch.cat([x[b][first:end] for b, first, end in stretches]).to(self.device)
            for x in (self.q, self.rel)
        )
        call: dict[str, Any] = {
            "q": q, "k_cache": self.keys, "v_cache": self.values, "rel": rel,
            "pages": self.table[[b for b, _, _ in stretches]].to(self.device),
            "q_starts": torch.tensor(starts, dtype=torch.int32, device=self.device),
            "kv_lens": torch.tensor([end for _, _, end in stretches], dtype=torch.int32,
                                    device=self.device),
            "max_q": max(end - first for _, first, end in stretches) + slack,
            "max_kv": max(end for _, _, end in stretches) + 700 * slack,
            "window": self.window, "scale": 1 / self.width, "out": torch.full_like(q, float("nan")),
            "k_scale": 0.5 if self.stored.itemsize == 1 else 1.0, "v_scale": 1.0,
        }  # fmt: skip
        self.last = call
        fixed.rel_attention(**call)
        return [call["out"][a:b].cpu() for a, b in pairwise(starts)]

    def alone(self) -> list[Tensor]:
        """Every request as one prompt in a batch of its own."""
        return [self.step([(b, 0, n)])[0] for b, n in enumerate(self.lengths)]

    def differing(self, stretches: list[tuple[int, int, int]], want: list[Tensor], slack: int
                  ) -> list[tuple[int, int, int]]:  # fmt: skip
        """Those stretches of one step that do not get the bits of `want`."""
        got = self.step(stretches, slack)
        return [
            s for s, x in zip(stretches, got, strict=True) if not x.equal(want[s[0]][s[1] : s[2]])
        ]


PER_ROW = ("x", "residual", "ids", "hidden", "embeds", "partial", "extra", "slots", "sources",
           "qkvr", "conv_slots", "conv_sources", "kv_slots", "positions", "logits", "gate_up",
           "gammas", "bins", "weights")  # fmt: skip


def changed_by_company(row: Offer, arguments: dict[str, Any], keep: int, device: str | None = None
                       ) -> list[int]:  # fmt: skip
    """Outputs whose first `keep` rows differ when the rows behind them are left out."""
    op, function = contract(row.op), row.under(Facts(batch_invariant=True)).load()
    named = (*PER_ROW, "weight") if row.op == "swiglu" else PER_ROW
    rows = max(v.shape[0] for k, v in arguments.items() if k in named and v is not None)
    few = {
        k: v[:keep] if k in named and v is not None and v.shape[0] == rows else v
        for k, v in arguments.items()
    }
    results = [run(function, op, a, device=device) for a in (arguments, few)]
    if "kv_slots" in arguments:
        slots, page = arguments["kv_slots"][:keep].cpu(), arguments["k_cache"].shape[1]
        at = slots[slots >= 0]
        for outputs in results:
            outputs[2:] = [x[at // page, at % page] for x in outputs[-2:]]
    else:
        results = [x[: len(x) - len(op.mutates)] for x in results]
    return [
        i for i, (a, b) in enumerate(zip(*results, strict=True))
        if not a[: len(b)].double().nan_to_num(7e7).equal(b.double().nan_to_num(7e7))
    ]  # fmt: skip


DESCRIBED = ("q", "k_cache", "v_cache", "rel", "kv_lens", "max_q", "max_kv", "window")


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of a few tiles, so that short requests have several of them."""
    monkeypatch.setattr(fixed, "SPAN", 64)
    monkeypatch.setattr(fixed, "FINE", 2)
    monkeypatch.setattr(fixed, "COARSE", 2)
    fixed.plan.cache_clear()


KINDS = {
    "global": {},
    "groups": {"heads": 4, "kv_heads": 4, "page": 64, "extent": 300},
    "sixteen": {"heads": 16, "kv_heads": 1, "page": 128},
    "window": {"window": 40, "heads": 4, "kv_heads": 2},
    "fp8": {"stored": torch.float8_e4m3fn},
    "float32": {"dtype": torch.float32, "stored": torch.float32, "heads": 2},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@settings(max_examples=2)
@given(data=st.data())
def test_same_bits_in_any_company(kind: dict[str, Any], data: st.DataObject) -> None:
    """Whole prompts, chunks, verified drafts and single tokens, beside any others."""
    requests = Requests([140, 45, 70], **kind)
    want = requests.alone()
    for decoding in (True, False):
        stretches = []
        for b in data.draw(st.permutations(range(3))):
            end = data.draw(st.integers(1, requests.lengths[b]))
            fresh = 1 if decoding else data.draw(st.sampled_from([1, 9, 40, end]))
            stretches.append((b, max(0, end - fresh), end))
        few = stretches[: data.draw(st.integers(1, 3))]
        slack = 0 if decoding else data.draw(st.sampled_from([0, 3]))
        assert not requests.differing(few, want, slack)


@pytest.mark.parametrize("batch", [1, 5])
def test_split_and_whole_programs_agree(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice between them looks at the batch, so they must not differ."""
    requests = Requests([460 - 30 * b for b in range(batch)], heads=2, kv_heads=1)
    last = [(b, n - 1, n) for b, n in enumerate(requests.lengths)]
    found, ways = [], []
    for units, scratch in ((10**6, 1 << 30), (0, 1 << 30), (0, 0)):
        monkeypatch.setattr(fixed.tuning, "_units", lambda target, units=units: units)
        monkeypatch.setattr(fixed, "SCRATCH", scratch)
        fixed.plan.cache_clear()
        found.append(requests.step(last))
        shape = host.describe(*(requests.last[k] for k in DESCRIBED))
        ways.append(fixed.plan(launch_target(), shape)[3:])
    fixed.plan.cache_clear()
    # 460 keys: two spans of 64, then three of 128 and less. A program each; one for all; whole.
    assert ways == [(5, 5), (5, 1), (1, 1)]
    for others in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0], others, strict=True))


def test_one_long_request_among_short_ones_has_many_programs() -> None:
    """Nor do those of a context of 1M, for which graphs are captured, take much memory."""
    for chip, kv_heads in (("h200", 1), ("h200", 2), ("mi300x", 1)):
        shape = Shape(64, 64, 8 * kv_heads, kv_heads, 128, 1024, 0, 128, 1, 1 << 20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixed, "SPAN", 512)
            patch.setattr(fixed, "FINE", 128)
            patch.setattr(fixed, "COARSE", 8)
            _, _, sequences, spans, programs = fixed.plan(Target.parse(chip), shape)
        assert spans == 368 and programs >= 64 and sequences == 64 * kv_heads
    fixed.plan.cache_clear()


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_contract(seed: int) -> None:
    arguments = OP.inputs(SeededDraw(300 + seed))
    op = OP_FLOAT32 if arguments["q"].dtype == torch.float32 else OP
    assert not disagreements(op, fixed.rel_attention, arguments)


@pytest.mark.parametrize("chip", ["h200", "b200", "mi300x", "mi355x"])
def test_tiles_do_not_look_at_the_step(chip: str) -> None:
    shapes = [
        Shape(rows, batch, 8, 1, 128, 1024, 0, 128, max_q, max_kv, descriptors=True)
        for rows, batch, max_q, max_kv in (
            (1, 1, 1, 100), (64, 64, 1, 8192), (9, 1, 9, 65536), (8192, 1, 8192, 8192),
            (2111, 64, 2048, 500_000),
        )
    ]  # fmt: skip
    assert len({fixed.tiles(Target.parse(chip), shape) for shape in shapes}) == 1


ROWS = [r for r in OFFERS if r.op not in ("rel_attention", "conv_sources") and r.invariant]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.op)
def test_rows_do_not_depend_on_those_behind_them(row: Offer) -> None:
    """Every op whose tiles or sums could follow the number of rows, in its invariant form."""
    for seed in range(4):
        arguments = contract(row.op).inputs(SeededDraw(seed))
        if arguments.get("act", "bf16") != "bf16":
            continue
        for keep in (1, 17):
            assert not changed_by_company(row, arguments, keep), (seed, keep)


@pytest.mark.parametrize("name", ["gate_logits", "sink_experts", "skinny_linear", "routed_experts"])
def test_plain_forms_do_depend_on_the_batch(name: str) -> None:
    """Else the test above could not fail: here tiles are chosen by the number of rows."""
    row = next(r for r in OFFERS if r.op == name)
    plain = replace(row, invariant=True)
    drawn = (contract(name).inputs(SeededDraw(seed)) for seed in range(40))
    served = (a for a in drawn if a.get("act", "bf16") == "bf16")
    assert any(changed_by_company(plain, arguments, 1) for arguments in served)


SERVER = Target.parse("h200+triton=3.6+vllm=0.33")


def test_every_op_has_an_invariant_row_or_the_server_stops() -> None:
    facts = Facts(batch_invariant=True, weights="nvfp4", tp=2)
    chosen = [d for d in choose(SERVER, facts) if d.verdict == "chosen"]
    assert {d.provider for d in chosen if d.op != "skinny_linear"} == {"triton"}
    codes = {d.op: d.offer.code for d in chosen}
    assert codes["rel_attention"].endswith("rel_attention_fixed:rel_attention")
    assert codes["gate_logits"].endswith("invariant:gate_logits")
    assert codes["skinny_linear"] == "engine"  # few rows are summed as many are
    for target, changes, sentence in (
        (SERVER, {"tp": 8}, "sums over 8 ranks in no fixed order; batch invariance needs tp 1"),
        (
            Target("cpu", "cpu"),
            {},
            r"depends on the batch; batch invariance needs a fixed one\); leave",
        ),
    ):
        with pytest.raises(SelectionError, match=sentence):
            choose(target, replace(facts, **changes))
    with pytest.raises(SelectionError, match="routed_experts=engine cannot be obeyed"):
        choose(SERVER, facts, (("routed_experts", "engine"),))


def test_explain_says_that_it_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", str(SERVER), "--batch-invariant"]) == 0
    assert "batch-invariant: tiles and sums do not depend on the batch" in capsys.readouterr().out
    cpu = ["explain", "--target", "cpu", "--batch-invariant"]
    assert main(cpu) == 2
    assert "sums in an order that depends on the batch" in capsys.readouterr().err
    eight = ["explain", "--target", str(SERVER), "--kv-cache-dtype", "fp8_e5m2"]
    assert main(eight) == 2
    said = capsys.readouterr().err
    assert "--kv-cache-dtype needs to be auto, bfloat16" in said and said.count("auto") == 1
