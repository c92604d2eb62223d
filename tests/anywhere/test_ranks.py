"""Several ranks as gloo processes: the portable exchange keeps its contract; start-up is a vote."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.agreement import run
from inkling_portable.backends import triton as table
from inkling_portable.backends.reference.batch import draw_batch, poison
from inkling_portable.backends.reference.short_conv import draw_stream, sources_of
from inkling_portable.inputs import Draw
from inkling_portable.model import ranks as voting
from inkling_portable.registry import Facts, Offer, SelectionError, choose, contract
from inkling_portable.target import Target
from tests.hypothesis_draw import HypothesisDraw
from tests.quick_interpreter import install
from tests.ranks import Ranks

install()
OP = contract("conv_residual_norm")
SIZES = (2, 4)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    started = {size: Ranks(size, tmp_path_factory.mktemp("ranks")) for size in SIZES}
    yield started
    for one in started.values():
        one.close()


# --- the portable exchange -----------------------------------------------------------------------


def drawn(draw: Draw, size: int, kind: str = "normal") -> dict[str, Any]:
    """Arguments of all ranks: `partial` and `extra` [ranks, T, H], the state with all channels."""
    dtype = draw.choice((torch.float32, torch.bfloat16))
    batch = draw_batch(draw)
    paged, heads, width, taps = draw_stream(draw, batch)
    hidden = size * heads * width
    shape = (batch.rows, hidden)

    def every() -> torch.Tensor:
        return torch.stack([poison(draw.tensor(shape, dtype, kind), batch) for _ in range(size)])

    normed = draw.choice((True, True, False))
    return {
        "partial": every(),
        "extra": every() if draw.choice((False, True)) else None,
        "residual": poison(draw.tensor(shape, dtype, kind), batch),
        "conv_weight": draw.tensor((hidden, taps), dtype, kind),
        "norm_weight": draw.tensor((hidden,), dtype, "gain") if normed else None,
        "eps": 1e-6,
        "state": paged.cache(draw, size * heads, width, dtype),
        "slots": paged.slots,
        "sources": sources_of(batch, paged, taps),
    }


def of_rank(whole: dict[str, Any], rank: int, size: int, group: str) -> dict[str, Any]:
    """One rank's arguments: its partial sums, its heads of the state, its rows of the weights."""
    heads = whole["state"].shape[2] // size
    channels = whole["conv_weight"].shape[0] // size
    extra = whole["extra"]
    return {
        **whole,
        "partial": whole["partial"][rank],
        "extra": None if extra is None else extra[rank],
        "conv_weight": whole["conv_weight"][rank * channels : (rank + 1) * channels],
        "state": whole["state"][:, :, rank * heads : (rank + 1) * heads],
        "group": group,
    }


def portable(rank: int, size: int, whole: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """On one rank: outputs of the reference and of the Triton row."""
    row = next(r for r in table.OFFERS if r.op == OP.name and r.provider == "triton")
    mine = of_rank(whole, rank, size, dist.group.WORLD.group_name)
    return run(OP.reference, OP, mine), run(row.load(), OP, mine)


def one_process(whole: dict[str, Any], dtype: torch.dtype | None = torch.float64) -> list[Any]:
    """The contract on one rank that has all partial sums."""
    sums = whole["partial"].double()
    if whole["extra"] is not None:
        sums = sums + whole["extra"].double()
    dtype_now = whole["partial"].dtype
    alone = {**whole, "partial": sums.sum(0), "extra": None, "group": ""}
    if dtype is None:
        alone["partial"] = alone["partial"].to(dtype_now)
    return run(OP.reference, OP, alone, dtype)


def check_split(whole: dict[str, Any], baselines: list[Any], found: list[Any]) -> None:
    """Every rank has the whole's rows and its own channels of the state."""
    truth, size = one_process(whole), len(found)
    for rank in range(size):
        heads = truth[2].shape[2] // size
        mine = [*truth[:2], truth[2][:, :, rank * heads : (rank + 1) * heads]]
        # The state has sums over ranks, which are rounded as the rows are.
        for tolerance, g, b, t in zip(
            (*OP.tolerances[:2], OP.tolerances[0]), found[rank], baselines[rank], mine, strict=True
        ):
            reason = tolerance.check(g, b, t)
            assert reason is None, f"rank {rank} of {size}: {reason}"
        # The residual is kept by every rank: the same bits everywhere.
        assert torch.equal(found[rank][1].nan_to_num(7e7), found[0][1].nan_to_num(7e7))


@pytest.mark.parametrize("size", SIZES)
@given(data=st.data())
@settings(max_examples=20)
def test_every_split_is_the_single_process(
    groups: dict[int, Ranks], size: int, data: st.DataObject
) -> None:
    whole = drawn(HypothesisDraw(data), size)
    baselines, found = zip(*groups[size].run(portable, whole), strict=True)
    check_split(whole, list(baselines), list(found))


@pytest.mark.parametrize("size", SIZES)
@given(data=st.data())
@settings(max_examples=5)
def test_sums_that_need_no_rounding_are_exact(
    groups: dict[int, Ranks], size: int, data: st.DataObject
) -> None:
    """Quarters whose sums fit bfloat16: the state has the very sum, whatever the order."""
    whole = drawn(HypothesisDraw(data), size, "grid")
    expected = one_process(whole, None)[2]
    heads = expected.shape[2] // size
    for rank, (_, found) in enumerate(groups[size].run(portable, whole)):
        assert torch.equal(found[2], expected[:, :, rank * heads : (rank + 1) * heads])


# --- the vote ------------------------------------------------------------------------------------

MACHINE = "cpu+triton=3.9.0+vllm=0.32.0+interpret"
prepared: list[str] = []


def prepare(target: Target, facts: Facts, group: str, gather: Callable[[Any], list[Any]]
            ) -> str | None:  # fmt: skip
    """A row that rank 1 cannot have."""
    prepared.append(group)
    ranks = gather(dist.get_rank())
    return "needs a link to rank 0; found none" if ranks.index(dist.get_rank()) == 1 else None


def vote(rank: int, size: int, machines: list[str], facts: list[Facts], requests: Any = (),
         shared: bool = False) -> Any:  # fmt: skip
    """Take part; the decisions for conv_residual_norm as (provider, verdict, reason)."""
    row = Offer(OP.name, "lamport", "tests.anywhere.test_ranks:portable",
                prepare="tests.anywhere.test_ranks:prepare")  # fmt: skip
    original = table.OFFERS
    table.OFFERS = (row, *original) if shared else original
    choose.cache_clear()
    target = Target.parse(machines[rank % len(machines)])
    try:
        found = voting.agreed(target, facts[rank % len(facts)], requests, "tp",
                              partial(voting.gather, group=dist.group.WORLD))  # fmt: skip
        decisions = choose(target, found, requests)
    finally:
        table.OFFERS = original
        choose.cache_clear()
    return [(d.provider, d.verdict, d.reason) for d in decisions if d.op == OP.name]


@pytest.mark.parametrize("size", SIZES)
def test_what_one_rank_lacks_no_rank_uses(groups: dict[int, Ranks], size: int) -> None:
    bare = MACHINE.replace("+interpret", "")
    found = groups[size].run(vote, [MACHINE, bare], [Facts(tp=size)])
    reason = "rank 1: needs an accelerator or TRITON_INTERPRET=1"
    assert found[0] == [("triton", "refused", reason), ("reference", "chosen", "")]
    assert [f[1][:2] for f in found] == [("reference", "chosen")] * size


def test_what_is_asked_for_is_refused_on_all_ranks(groups: dict[int, Ranks]) -> None:
    asked = ((OP.name, "triton"),)
    bare = MACHINE.replace("+interpret", "")
    for error in groups[2].outcomes(vote, [MACHINE, bare], [Facts(tp=2)], asked):
        assert isinstance(error, SelectionError)
        assert "conv_residual_norm=triton cannot be obeyed" in str(error)
        assert "needs an accelerator" in str(error)


@pytest.mark.parametrize("size", SIZES)
def test_one_refusal_to_prepare_is_everybodys(groups: dict[int, Ranks], size: int) -> None:
    found = groups[size].run(vote, [MACHINE], [Facts(tp=size)], (), True)
    assert found == [found[0]] * size
    assert found[0][0] == ("lamport", "refused", "rank 1: needs a link to rank 0; found none")
    assert found[0][1][:2] == ("triton", "chosen")


def test_settings_that_differ_are_named(groups: dict[int, Ranks]) -> None:
    facts = [Facts(tp=4), Facts(tp=4), replace(Facts(tp=4), kv_dtype="fp8"), Facts(tp=4)]
    for error in groups[4].outcomes(vote, [MACHINE], facts):
        assert isinstance(error, SelectionError)
        assert "the same kv_dtype; rank 0 has 'auto' and rank 2 'fp8'" in str(error)


def test_other_failures_and_formats_stay_what_they_are() -> None:
    assert voting.united([(("a", "x"),), (), (("b", "y"), ("a", "z"))]) == (
        ("a", "rank 0: x"), ("b", "rank 2: y"))  # fmt: skip
    facts = Facts(tp=4, weights="bf16", failed=(("code", "broke"),))
    target = Target.parse("h200+triton=3.6.0+vllm=0.33.0")
    found = voting.agreed(target, facts, (), "tp", lambda value: [value, value])
    assert found.failed == (("code", "broke"),)  # `mma`, refused for bf16, may serve 4 bits


def test_choices_that_differ_are_refused() -> None:
    """By another provider, and, where those agree, by another kernel under its name."""
    one = [("rms_norm", "triton"), (OP.name, "lamport")]
    voting.check_choices([(one, "aa"), (list(one), "aa")])
    apart = (
        r"rank 1 \(bb\) differ in conv_residual_norm=lamport, conv_residual_norm=triton; install"
    )
    with pytest.raises(SelectionError, match=apart):
        voting.check_choices([(one, "aa"), ([one[0], (OP.name, "triton")], "bb")])
    with pytest.raises(SelectionError, match="differ in each op=another kernel; install"):
        voting.check_choices([(one, "aa"), (one, "aa"), (one, "cc")])


def leave(rank: int, size: int, victim: int, how: str) -> Any:
    os.environ[voting.VARIABLE] = "1.5"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected {rank}", "")
    if rank == victim:
        # Not while others still connect to it, which is another error.
        store.wait([f"connected {other}" for other in range(size)])
        if how == "dies":
            os._exit(1)
        time.sleep(3)
        return None
    began = time.monotonic()
    try:
        return voting.gather(rank, dist.group.WORLD)
    except voting.RankError as error:
        return time.monotonic() - began, str(error)


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_does_not_come_ends_the_start_in_time(
    tmp_path: Path, how: str, victim: int
) -> None:
    started = Ranks(3, tmp_path)
    try:
        found = started.outcomes(leave, victim, how, seconds=20)
    finally:
        started.close()
    for rank in {0, 1, 2} - {victim}:
        seconds, said = found[rank]
        assert seconds < 2.8
        assert "within 1.5 s" in said
        assert f"rank {rank} waited in vain for rank {victim}, which died or hangs" in said


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", "1e9"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(voting.VARIABLE, text)
    words = f"needs seconds above 0 and below 1e9; found '{text}'; unset it for 600"
    with pytest.raises(SelectionError, match=words):
        voting.patience()
