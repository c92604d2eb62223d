"""Every small op of the Triton tier under Triton's interpreter: contracts, and laws of its own.

What the interpreter cannot show (registers, spills, rounding of fused arithmetic) is the business
of tests/compile and tests/gpu.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.agreement import convert, disagreements, run
from inkling_portable.backends.reference.batch import draw_pages, make_batch
from inkling_portable.backends.reference.short_conv import sources_of
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import dependent_launch, launching_for
from inkling_portable.inputs import SeededDraw, fill
from inkling_portable.registry import Facts, check_schema, choose, contract
from inkling_portable.target import Target
from tests.guards import broken_guards, guarded
from tests.hypothesis_draw import HypothesisDraw
from tests.quick_interpreter import install

install()

OPS = ("rms_norm", "embed_norm", "embed_norm_chain", "concat_norms", "conv_sources",
       "conv_residual_norm", "qkvr_prep", "gate_logits", "route", "swiglu", "sink_experts",
       "gated_sinks", "skinny_linear", "norm_gelu", "dmel_embed_norm")  # fmt: skip


def provider(op: str) -> Callable[..., Any]:
    offer = next(row for row in OFFERS if row.op == op and row.provider == "triton")
    function = offer.load()
    check_schema(contract(op), function, offer.code)
    return function


@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_contract(op: str, data: st.DataObject) -> None:
    arguments = contract(op).inputs(HypothesisDraw(data))
    assert not disagreements(contract(op), provider(op), arguments)


@pytest.mark.parametrize("op", OPS)
def test_nothing_outside_the_arguments_is_touched(op: str) -> None:
    """Between NaN and impossible indices results are the same bits, and guards stay whole."""
    for seed in (11, 12, 13):
        drawn = contract(op).inputs(SeededDraw(seed))
        plain = run(provider(op), contract(op), drawn)
        fenced = {k: guarded(v) for k, v in drawn.items()}
        returned = provider(op)(**fenced)
        got = list(returned) if isinstance(returned, tuple) else [returned]
        got = [x for x in got if x is not None] + [fenced[k] for k in contract(op).mutates]
        assert not broken_guards(fenced)
        for mine, other in zip(got, plain, strict=True):
            assert torch.equal(mine.double().nan_to_num(7e7), other.double().nan_to_num(7e7))


# --- routing -------------------------------------------------------------------------------------


def routed(logits: torch.Tensor, bias: torch.Tensor, top_k: int = 6) -> tuple[torch.Tensor, ...]:
    return provider("route")(logits, bias, torch.tensor([1.25]), top_k, 8.0)


@given(seed=st.integers(0, 2**31 - 1), levels=st.integers(1, 4))
@settings(max_examples=15)
def test_exact_ties_go_to_the_lowest_index(seed: int, levels: int) -> None:
    """Few distinct logits and equal biases: the order is by value, then by index."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (3, 258), generator=generator).float()
    bias = torch.full((256,), 0.5)
    _, ids, _ = routed(logits, bias)
    for row, chosen in zip(logits[:, :256].tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(256), key=lambda e: (-row[e], e))[:6]


def test_extreme_logits_and_biases_keep_their_weights() -> None:
    """Known fault BL-006: a weight recovered from a biased score cancels to 0 in float32."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.rand(40, 258, generator=generator) * 80 - 40
    bias = torch.rand(256, generator=generator) * 40 - 20
    logits[0, :] = -18.0
    logits[1, :] = -40.0
    bias[7] = 12.0
    weights, ids, gammas = routed(logits, bias)
    z = logits.double()
    active = torch.cat([z.gather(1, ids.long()), z[:, 256:]], dim=1)
    shares = torch.softmax(torch.nn.functional.logsigmoid(active), dim=1) * (8.0 * 1.25)
    got = torch.cat([weights, gammas], dim=1).double()
    assert ((got - shares).abs() <= 2e-5 * shares + 1e-30).all()
    assert (got.sum(dim=1) - 10.0).abs().max() < 1e-5
    assert (weights[0] > 0).all()


def test_ids_are_valid_and_distinct_even_for_rows_of_nan() -> None:
    """Padding rows hold anything; an id that no expert has would read outside the weights."""
    logits = torch.full((4, 42), float("nan"))
    logits[1, :20] = float("-inf")
    logits[2, :] = float("inf")
    for row in routed(logits, torch.linspace(-1, 1, 40))[1].tolist():
        assert len(set(row)) == 6
        assert all(0 <= e < 40 for e in row)


def test_gate_routing_and_sinks_of_one_row_at_once() -> None:
    """As the three ops give them, tile sizes apart; ids are valid for rows of NaN; again and again,
    since the count of arrivals begins at zero."""
    given = {"x": fill((1, 96), torch.bfloat16, "normal", 1),
             "gate": fill((42, 96), torch.bfloat16, "normal", 2), "bias": torch.linspace(-1, 1, 40),
             "global_scale": torch.tensor([1.25]), "top_k": 6, "route_scale": 8.0,
             "w13": fill((2, 64, 96), torch.bfloat16, "normal", 3),
             "w2": fill((2, 96, 32), torch.bfloat16, "normal", 4)}  # fmt: skip
    once = provider("gated_sinks")(**given)
    logits = provider("gate_logits")(given["x"], given["gate"])
    weights, ids, gammas = provider("route")(logits, given["bias"], given["global_scale"], 6, 8.0)
    apart = logits, weights, ids, provider("sink_experts")(given["x"], given["w13"], given["w2"],
                                                           gammas)  # fmt: skip
    for mine, other in zip(once, apart, strict=True):
        assert torch.equal(mine, other)
    poisoned = provider("gated_sinks")(**{**given, "x": torch.full_like(given["x"], float("nan"))})
    assert len(set(poisoned[2][0].tolist())) == 6 and poisoned[2].min() >= 0
    for mine, other in zip(provider("gated_sinks")(**given), once, strict=True):
        assert torch.equal(mine, other)


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_sinks_differ_and_their_segments_are_in_order(rows: int, dtype: torch.dtype) -> None:
    """Two sinks of unlike weight; one row has kernels of its own."""
    arguments = {
        "x": fill((rows, 96), dtype, "normal", 1),
        "w13": fill((2, 64, 96), dtype, "normal", 2),
        "w2": fill((2, 96, 32), dtype, "normal", 3),
        "gammas": torch.tensor([[0.5, 7.0]] * rows),
    }
    # As the model keeps them, columns of all sinks lie side by side in memory.
    beside = {**arguments, "w2": arguments["w2"].transpose(0, 1).contiguous().transpose(0, 1)}
    for laid in (arguments, beside):
        assert not disagreements(contract("sink_experts"), provider("sink_experts"), laid)


@pytest.mark.parametrize("op", ["gate_logits", "skinny_linear"])
def test_one_row_products(op: str) -> None:
    for seed, (n, k) in enumerate(((258, 6144), (33, 40), (10, 1000), (1, 8))):
        for dtype in (torch.float32, torch.bfloat16):
            arguments = {"x": fill((1, k), dtype, "normal", seed),
                         "weight": fill((n, k), dtype, "small", seed + 9)}  # fmt: skip
            assert not disagreements(contract(op), provider(op), arguments), (n, k)


def test_long_sums_of_hopper_are_put_together_outside() -> None:
    """Sums of many rows are kept for two steps; here the seventh is left over."""
    arguments = {"x": fill((70, 440), torch.bfloat16, "normal", 1),
                 "weight": fill((20, 440), torch.bfloat16, "normal", 2)}  # fmt: skip
    with launching_for(Target.parse("h200")), dependent_launch(False):
        assert not disagreements(contract("gate_logits"), provider("gate_logits"), arguments)


def test_one_row_as_hopper_reads_it() -> None:
    """More rows than units have programs, an end within a block, and gates with all of theirs;
    rows of fewer columns than are added up at once."""
    x, wide = (fill((n, 2600), torch.bfloat16, "normal", n) for n in (1, 41))
    w13, w2 = wide[:40].view(2, 20, 2600), fill((2, 2600, 10), torch.bfloat16, "small", 2)
    products = {"x": x, "weight": wide}
    together = {"x": x, "gate": fill((12, 2600), torch.bfloat16, "small", 3), "w13": w13, "w2": w2,
                "bias": torch.zeros(10), "global_scale": torch.ones(1), "top_k": 3,
                "route_scale": 8.0}  # fmt: skip
    narrow = {"x": x[:, :3], "weight": wide[:9, :3]}
    small = replace(Target.parse("h200"), compute_units=4)
    with launching_for(small), dependent_launch(False):
        for op, given in (("skinny_linear", products), ("gated_sinks", together),
                          ("gate_logits", narrow)):  # fmt: skip
            assert not disagreements(contract(op), provider(op), given), op


# --- short convolution ---------------------------------------------------------------------------


WIDTH, TAPS = 24, 4


def conv_arguments(length: int) -> dict[str, Any]:
    """Float32 inputs of `length` tokens, without what the batch decides."""
    shape = (length, WIDTH)
    return {
        "partial": fill(shape, torch.float32, "normal", 1),
        "extra": fill(shape, torch.float32, "normal", 2),
        "residual": fill(shape, torch.float32, "normal", 3),
        "conv_weight": fill((WIDTH, TAPS), torch.float32, "normal", 4),
        "norm_weight": fill((WIDTH,), torch.float32, "gain", 5),
        "eps": 1e-6,
        "group": "",
    }


def one_request(length: int, page: int) -> dict[str, Any]:
    """One request of `length` tokens from position 0, its cache a view with gaps."""
    batch = make_batch([length], [0])
    paged = draw_pages(SeededDraw(length * 31 + page), batch, page)
    state = paged.cache(SeededDraw(9), 3, 8, torch.float32)
    return {**conv_arguments(length), "state": state, "slots": paged.slots,
            "sources": sources_of(batch, paged, TAPS)}  # fmt: skip


@given(data=st.data())
@settings(max_examples=15)
def test_one_pass_equals_any_split_into_chunks(data: st.DataObject) -> None:
    """Known faults BL-010 and BL-062: the window is carried over every cut, bit for bit."""
    length, page = data.draw(st.integers(2, 12)), data.draw(st.sampled_from((4, 5, 32)))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, length - 1)))), length]
    whole = one_request(length, page)
    op = provider("conv_residual_norm")
    split = {k: convert(v) for k, v in whole.items()}
    paged = draw_pages(SeededDraw(length * 31 + page), make_batch([length], [0]), page)
    normed, summed = op(**whole)
    parts = []
    for begin, end in itertools.pairwise(cuts):
        batch = make_batch([end - begin], [begin])
        out = torch.empty(end - begin, TAPS - 1, dtype=torch.int64)
        stale = torch.full((paged.count * page,), 1, dtype=torch.int32)
        provider("conv_sources")(
            batch.q_starts, batch.kv_lens, paged.pages, paged.slots[begin:end], page, stale, out
        )
        rows = {k: split[k][begin:end] for k in ("partial", "extra", "residual", "slots")}
        parts.append(op(**{**split, **rows, "sources": out}))
    assert torch.equal(torch.cat([p[0] for p in parts]), normed)
    assert torch.equal(torch.cat([p[1] for p in parts]), summed)
    assert torch.equal(split["state"], whole["state"])


def test_a_prefix_of_the_same_step_is_read_from_its_rows() -> None:
    """Two requests share whole blocks that one of them computes now: no race with the state."""
    batch = make_batch([8, 3, 1], [0, 8, 4], padding=2)
    paged = draw_pages(SeededDraw(2), batch, 4)
    paged.pages[1, :2] = paged.pages[0, :2]
    paged.pages[2, :1] = paged.pages[0, :1]
    out = torch.full((batch.rows, TAPS - 1), 77, dtype=torch.int64)
    stale = torch.arange(paged.count * paged.page, dtype=torch.int32) % 9 - 3
    provider("conv_sources")(
        batch.q_starts, batch.kv_lens, paged.pages, paged.slots, paged.page, stale, out
    )
    assert out[8].tolist() == [5, 6, 7]  # the second request's first row: rows of the first
    assert out[9].tolist() == [6, 7, 8]
    assert out[11].tolist() == [1, 2, 3]
    assert out[0].tolist() == [-1, -1, -1]
    assert (out[12:] == -1).all()


CACHES = {"conv_residual_norm": ("slots", "sources", ("state",)),
          "qkvr_prep": ("conv_slots", "conv_sources", ("k_state", "v_state"))}  # fmt: skip


@pytest.mark.parametrize("op", CACHES)
def test_names_of_blocks_do_not_matter(op: str) -> None:
    """The same state under other block numbers gives the same bits."""
    slots, sources, caches = CACHES[op]
    for seed in range(3):
        plain = contract(op).inputs(SeededDraw(300 + seed))
        renamed = {k: convert(v) for k, v in plain.items()}
        count, size = plain[caches[0]].shape[:2]
        names = torch.randperm(count, generator=torch.Generator().manual_seed(seed))

        def rename(slot: torch.Tensor, names: torch.Tensor = names, size: int = size
                   ) -> torch.Tensor:  # fmt: skip
            return names[slot.clamp_min(0) // size] * size + slot % size

        renamed[slots] = torch.where(plain[slots] >= 0, rename(plain[slots]), plain[slots])
        old = plain[sources]
        renamed[sources] = torch.where(old < -1, -2 - rename(-2 - old), old)
        for cache in caches:
            renamed[cache][names] = plain[cache]
        first = run(provider(op), contract(op), plain)
        second = run(provider(op), contract(op), renamed)
        returned = len(first) - len(contract(op).mutates)
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            is_state = i >= returned and contract(op).mutates[i - returned] in caches
            assert torch.equal(
                a.double().nan_to_num(7e7), (b[names] if is_state else b).double().nan_to_num(7e7)
            ), i


# --- refusals ------------------------------------------------------------------------------------


def test_a_cpu_needs_the_interpreter() -> None:
    facts = Facts()
    for text, verdict in (("cpu+triton=3.9.0", "refused"), ("cpu+triton=3.9.0+interpret", "chosen"),
                          ("h200+triton=3.6.0", "chosen"), ("h200+triton=3.5.1", "refused"),
                          ("mi300x+triton=3.6.0", "chosen")):  # fmt: skip
        decisions = choose(Target.parse(text + "+vllm=0.32.0"), facts)
        row = next(d for d in decisions if d.op == "route" and d.provider == "triton")
        assert row.verdict == verdict, text
        if text.startswith("cpu") and verdict == "refused":
            assert row.reason == "needs an accelerator or TRITON_INTERPRET=1"


def test_bad_arguments_are_named() -> None:
    x, wide = torch.zeros(2, 32), torch.zeros(2, 20000)
    with pytest.raises(ValueError, match=r"x has 129 rows"):
        provider("skinny_linear")(torch.zeros(129, 32), x)
    with pytest.raises(ValueError, match=r"skinny_linear: weight .*bfloat16"):
        provider("skinny_linear")(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"x needs a contiguous last axis"):
        provider("rms_norm")(torch.zeros(32, 2).t(), x[0], 1e-6, None)
    with pytest.raises(ValueError, match=r"rows of 20000 values are beyond 16384"):
        provider("rms_norm")(wide, wide[0], 1e-6, None)
    with pytest.raises(ValueError, match=r"logits needs float32"):
        provider("route")(torch.zeros(1, 10).bfloat16(), torch.zeros(8), torch.ones(1), 2, 8.0)
    with pytest.raises(ValueError, match=r"top_k needs 1 to 8"):
        provider("route")(torch.zeros(1, 10), torch.zeros(8), torch.ones(1), 9, 8.0)
    sources = contract("conv_sources").inputs(SeededDraw(3))
    sources["kv_lens"] = sources["kv_lens"] + 1000
    with pytest.raises(ValueError, match=r"pages needs columns for 10\d\d tokens; found \d+ of"):
        provider("conv_sources")(**sources)
    arguments = one_request(2, 4)
    arguments["state"] = arguments["state"][..., :4]
    with pytest.raises(ValueError, match=r"state holds 12 channels, partial 24"):
        provider("conv_residual_norm")(**arguments)


FREE = {"table": 1, "pages": 2, "rows_of": 1, "state": 2, "k_state": 2, "v_state": 2, "k_cache": 2,
        "v_cache": 2}  # fmt: skip
"""First axes that may have any length: no other argument tells how long they are."""


@pytest.mark.parametrize("op", OPS)
def test_arguments_that_do_not_go_together_are_refused(op: str) -> None:
    """Each axis of each argument is cut by one, and would be read as if it were whole.

    What the contract takes is served: a matrix may have a row less.
    """
    refused = 0
    for seed in range(6):
        drawn = contract(op).inputs(SeededDraw(seed))
        for name, value in drawn.items():
            axes = range(FREE.get(name, 0), value.dim()) if isinstance(value, torch.Tensor) else ()
            for axis in axes:
                if value.shape[axis] > 1 and value.numel():
                    cut = value.narrow(axis, 0, value.shape[axis] - 1).contiguous()
                    try:
                        provider(op)(
                            **{**{k: convert(v) for k, v in drawn.items()}, name: cut.clone()}
                        )
                    except ValueError as error:
                        assert re.match(rf"{op}: \w+ (needs|has|holds) ", str(error))
                        refused += 1
                    else:
                        assert not disagreements(contract(op), provider(op), {**drawn, name: cut})
    assert refused > 2 or op == "route"  # there a column less is a sink less


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    x, gain = torch.ones(2, 32), torch.ones(32)
    with pytest.raises(ValueError, match=r"^rms_norm: x needs one of the served dtypes.*float64"):
        provider("rms_norm")(x.double(), gain, 1e-6, None)
    with pytest.raises(ValueError, match=r"^rms_norm: residual needs .* found torch\.bfloat16"):
        provider("rms_norm")(x, gain, 1e-6, x.bfloat16())
    with pytest.raises(ValueError, match=r"^concat_norms: embed_weight needs a contiguous last"):
        provider("concat_norms")(x, x, gain, torch.ones(64)[::2], 1e-6)
    with pytest.raises(ValueError, match=r"^rms_norm: weight needs axes H with H = 32; found \[31"):
        provider("rms_norm")(x, gain[1:], 1e-6, None)


def test_ids_outside_the_table_read_nothing() -> None:
    """Padding rows of a captured step may hold any id."""
    table, gain = torch.full((4, 8), 3.0), torch.ones(8)
    out = provider("embed_norm")(torch.tensor([2, -1, 4, 1 << 40]), table, gain, 1e-6)
    torch.testing.assert_close(out[0], torch.ones(8))
    assert (out[1:] == 0).all()


def test_launches_are_counted() -> None:
    """A decode step's fusions: one launch each, whatever is fused; the sinks take two."""
    from triton.runtime import interpreter

    counts: dict[str, int] = {}
    original = interpreter.InterpretedFunction.run

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["launches"] = counts.get("launches", 0) + 1
        return original(self, *args, **kwargs)

    once = ("conv_sources", "conv_residual_norm", "qkvr_prep", "route", "gate_logits",
            "embed_norm_chain", "rms_norm", "skinny_linear")  # fmt: skip
    expected = {**dict.fromkeys(once, 1), "sink_experts": 2}
    from benchmarks.small_ops_shapes import Rank, arguments

    rank = Rank("tiny", 64, 4, 1, 32, 4, 64, 16, 100)
    interpreter.InterpretedFunction.run = count
    try:
        for op, launches in expected.items():
            counts.clear()
            provider(op)(**arguments(op, 1, rank, "cpu"))
            assert counts["launches"] == launches, op
    finally:
        interpreter.InterpretedFunction.run = original
