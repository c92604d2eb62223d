"""The exchange without barriers, by processes that map one another's memory, under the interpreter.

Each process is a rank with memory of its own and addresses of the others' (kept from before the
fork), so it runs the protocol that GPUs run, but for their caches and their memory order.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ci.surface.compare import binds
from ci.surface.providers import FACTS, NAMES
from inkling_portable.agreement import convert, run
from inkling_portable.backends.cuda import incumbent
from inkling_portable.backends.triton import lamport
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.lamport import GAVE_UP, Workspace, words_of
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import Facts, choose
from inkling_portable.target import Target
from tests.anywhere.test_ranks import OP, check_split, drawn, of_rank, one_process
from tests.hypothesis_draw import HypothesisDraw
from tests.quick_interpreter import install
from tests.ranks import Ranks

install()
LIMIT, WIDEST = 40, 4 * 3 * 64
SIZES = (2, 4)
MEMORY = torch.full((max(SIZES), words_of(LIMIT, WIDEST, False)), -1, dtype=torch.int32)
MEMORY.share_memory_()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    """Only one of the groups works at a time, so they share the memory."""
    started = {size: Ranks(size, tmp_path_factory.mktemp("ranks")) for size in SIZES}
    yield started
    for one in started.values():
        one.close()


def workspace(rank: int, size: int, hidden: int, **options: Any) -> Workspace:
    """A fresh start on all ranks: memory is empty before any of them goes on."""
    MEMORY[rank].fill_(-1)
    addresses = torch.tensor([MEMORY[i].data_ptr() for i in range(size)], dtype=torch.int64)
    control = torch.zeros(8, dtype=torch.int32)
    dist.barrier()
    how = {"send": 0, "trap": False, "patience": 200_000, **options}
    return Workspace(addresses, control, rank, size, hidden, LIMIT, **how)


def slow(rank: int, seed: int, emptying: float, reading: float) -> Any:
    """Make this rank's kernels dawdle: before memory is emptied, and at random before reads."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    draw, store, load = random.Random(seed * 8 + rank), Builder.create_masked_store, (
        Builder.create_masked_load)  # fmt: skip

    def late_store(self: Any, ptrs: Any, value: Any, *rest: Any) -> Any:
        if value.data.size > 1 and (value.data == -1).all():
            time.sleep(emptying)
        return store(self, ptrs, value, *rest)

    def late_load(self: Any, ptrs: Any, mask: Any, other: Any, cache: Any, volatile: bool) -> Any:
        if volatile and draw.random() < 0.2:
            time.sleep(draw.random() * reading)
        return load(self, ptrs, mask, other, cache, volatile)

    Builder.create_masked_store, Builder.create_masked_load = late_store, late_load
    return lambda: (setattr(Builder, "create_masked_store", store),
                    setattr(Builder, "create_masked_load", load))  # fmt: skip


def call(work: Workspace, mine: dict[str, Any], programs: int = 1, pieces: int = 1
         ) -> list[torch.Tensor]:  # fmt: skip
    """(normed, summed, state) of one call on copies of the arguments."""
    copies = {name: convert(value) for name, value in mine.items()}
    copies.pop("group")
    normed, summed = work.run(**copies, programs=programs, pieces=pieces, warps=1)
    return [normed, summed, copies["state"]]


def once(rank: int, size: int, whole: dict[str, Any], programs: int, pieces: int) -> Any:
    """Programs that follow one another cannot wait for each other, so several call three times:
    what nobody empties is published by the first, summed by the second and gathered by the third.
    """
    mine = of_rank(whole, rank, size, dist.group.WORLD.group_name)
    several = programs * pieces > 1
    more = {"patience": 0} if several else {}
    work = workspace(rank, size, whole["residual"].shape[1], **more)
    for _ in range(3 if several else 1):
        work.control.zero_()
        found = call(work, mine, programs, pieces)
        dist.barrier()
    assert several or not int(work.control[GAVE_UP])
    return run(OP.reference, OP, mine), found


@pytest.mark.parametrize("size", SIZES)
@given(data=st.data())
@settings(max_examples=12)
def test_every_split_is_the_single_process(
    groups: dict[int, Ranks], size: int, data: st.DataObject
) -> None:
    whole = drawn(HypothesisDraw(data), size)
    share = whole["residual"].shape[1] // size
    assume(0 < whole["slots"].shape[0] <= 9 and share % 2 == 0)
    programs, pieces = data.draw(st.sampled_from(((1, 1), (1, 1), (9, 1), (2, 2), (1, 4))))
    pieces = pieces if share % (2 * pieces) == 0 else 1
    baselines, found = zip(*groups[size].run(once, whole, programs, pieces), strict=True)
    check_split(whole, list(baselines), list(found))


def cases(size: int, kind: str = "grid") -> list[dict[str, Any]]:
    """Steps of one width and of very unlike numbers of rows, in bfloat16 and without rounding."""
    found = []
    for seed in range(400):
        whole = drawn(SeededDraw(seed), size, kind)
        rows = whole["slots"].shape[0]
        small = 0 < rows <= 9
        fits = whole["residual"].shape == (rows, size * 64) and small
        if fits and whole["residual"].dtype == torch.bfloat16:
            found.append(whole)
    found.sort(key=lambda whole: whole["slots"].shape[0])
    return [found[0], found[-1], found[1], found[-2]]


def both(rank: int, size: int, whole: dict[str, Any]) -> list[int]:
    """How many numbers the two exchanges give unlike: of normed, of summed and of the state."""
    mine = of_rank(whole, rank, size, dist.group.WORLD.group_name)
    found = call(workspace(rank, size, whole["residual"].shape[1]), mine)
    rows = mine["slots"] >= 0
    pairs = zip(found, run(lamport.portable, OP, mine), strict=True)
    return [
        int((a != b).sum() if a.dim() != 2 or not len(a) else (a != b)[rows].sum())
        for a, b in pairs
    ]


def test_two_ranks_round_as_the_portable_exchange_does(groups: dict[int, Ranks]) -> None:
    """To the bit: two numbers have one sum, and both round it once, as the contract says.

    Norms are equal here, too, where a row is summed in one order whatever holds it.
    """
    for whole in cases(2, "normal"):
        for extra in (None, whole["partial"].flip(0)):
            assert groups[2].run(both, whole | {"extra": extra}) == [[0, 0, 0]] * 2


def many(
    rank: int, size: int, wholes: list[dict[str, Any]], calls: int, how: dict[str, Any],
    **options: Any,
) -> list[str]:  # fmt: skip
    """Alternate between steps; what went wrong, as sentences. Ranks dawdle, each in its own way."""
    mine = [of_rank(whole, rank, size, "") for whole in wholes]
    wanted = how["wanted"]
    heads = wanted[0][2].shape[2] // size
    work = workspace(rank, size, wholes[0]["residual"].shape[1], **how.get("options", {}))
    draw, wrong = random.Random(rank), []
    restore = slow(rank, 3, how["emptying"] if rank == 0 else 0, how["reading"])
    try:
        for i in range(calls):
            # Long steps among short ones, and never the numbers that a generation held before.
            case = i % 2 * 2 + (i % 9 == 4)
            if draw.random() < 0.1:
                time.sleep(draw.random() * 0.01)
            _, summed, state = call(work, mine[case])
            right = wanted[case][2][:, :, rank * heads : (rank + 1) * heads]
            rows = mine[case]["slots"] >= 0
            if int(work.control[GAVE_UP]):
                return [*wrong, f"call {i} gave up"]
            if not torch.equal(state, right) or not torch.equal(
                summed[rows], wanted[case][1][rows]
            ):
                wrong.append(f"call {i} is wrong")
    finally:
        restore()
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_hundreds_of_calls_of_dawdling_ranks(groups: dict[int, Ranks], size: int) -> None:
    """Known fault BL-125: steps shrink and grow again; every word of every call is right."""
    wholes = cases(size)
    assert wholes[1]["slots"].shape[0] > 4 * wholes[0]["slots"].shape[0]
    how = {"wanted": [one_process(whole, None) for whole in wholes], "emptying": 0.002,
           "reading": 0.001}  # fmt: skip
    assert groups[size].run(many, wholes, 100 if size == 2 else 24, how) == [[]] * size


def test_two_generations_would_not_do(groups: dict[int, Ranks]) -> None:
    """With a rank that empties late: the reason for the third, and the power of the test above."""
    wholes = cases(2)
    how = {"wanted": [one_process(whole, None) for whole in wholes], "emptying": 0.05,
           "reading": 0.0, "options": {"generations": 2, "patience": 300}}  # fmt: skip
    assert any(groups[2].run(many, wholes, 12, how))
    how["options"] = {"generations": 3}
    assert groups[2].run(many, wholes, 12, how) == [[], []]


def special(rank: int, size: int, bits: int, dtype: torch.dtype) -> tuple[Any, bool]:
    """The state that one value everywhere on all ranks leaves, after a call in each generation."""
    hidden = size * 16
    none = torch.zeros(1, hidden, dtype=dtype)
    codes = torch.full((1, hidden), bits, dtype=torch.int32 if dtype.itemsize == 4 else torch.int16)
    work = workspace(rank, size, hidden)
    mine = {
        "partial": codes.view(dtype), "extra": None, "residual": none,
        "conv_weight": torch.zeros(16, 4, dtype=dtype), "norm_weight": None, "eps": 1e-6,
        "state": torch.ones(1, 4, 1, 16, dtype=dtype), "slots": torch.arange(1),
        "sources": torch.full((1, 3), -1), "group": "",
    }  # fmt: skip
    found = [call(work, mine)[2][0, 0].flatten() for _ in range(3)]
    return found[0], not int(work.control[GAVE_UP])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [-1, -32768, 0x7FFF, -128, 0x7F80, 1, -32767])
def test_no_value_makes_a_reader_wait(
    groups: dict[int, Ranks], bits: int, dtype: torch.dtype
) -> None:
    """The empty word, NaN of any sign, infinities, the smallest numbers, negative zero."""
    if dtype == torch.float32 and bits != -1:
        bits <<= 16
    view = torch.int32 if dtype.itemsize == 4 else torch.int16
    value = torch.tensor([bits], dtype=view).view(dtype)
    for found, patient in groups[2].run(special, bits, dtype):
        assert patient
        wanted = (value.float() * 2).to(dtype).expand(16)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(0), wanted.nan_to_num(0))
        assert wanted.isnan().all() or torch.equal(found.signbit(), wanted.signbit())


def alone(rank: int, size: int, whole: dict[str, Any]) -> tuple[float, int]:
    mine = of_rank(whole, rank, size, "")
    work = workspace(rank, size, whole["residual"].shape[1], patience=200)
    began = time.monotonic()
    if rank == 0:
        call(work, mine)
    return time.monotonic() - began, int(work.control[GAVE_UP])


def test_a_rank_that_is_gone_is_given_up(groups: dict[int, Ranks]) -> None:
    (seconds, gave_up), _ = groups[2].run(alone, cases(2)[0])
    assert gave_up == 1 and seconds < 20


def tried(rank: int, size: int) -> str | None:
    """What a trial says while a server builds its model, whose default device is a GPU's."""
    group, work = dist.group.WORLD.group_name, workspace(rank, size, 256)
    with torch.device("meta"):
        return lamport._try(Facts(tp=size, hidden=256), group, [work])


def test_a_trial_wherever_tensors_are_made(groups: dict[int, Ranks]) -> None:
    assert groups[2].run(tried) == [None, None]


def test_plans_fit_the_chip_and_the_words() -> None:
    with launching_for(Target.parse("h200")):
        for rows in (1, 4, 16, 64, 132, 133, 512):
            for share in (3072, 1536, 768, 2048, 512):
                programs, pieces, warps = lamport.plan(rows, share)
                assert share % (2 * pieces) == 0
                assert programs * pieces <= 264 and programs >= min(rows, 132)
                assert 2 * warps * 32 * 256 <= 65536  # registers of a unit, at most 256 a thread
        assert lamport.plan(1, 3072)[1] == 4 and lamport.plan(64, 3072)[1] == 2


def test_steps_beyond_the_memory_are_refused() -> None:
    work = Workspace(torch.zeros(2, dtype=torch.int64), torch.zeros(8, dtype=torch.int32), 0, 2, 8,
                     limit=1)  # fmt: skip
    rows = torch.zeros(2, 8)
    with pytest.raises(
        ValueError, match="2 rows of 8 channels in 1 pieces do not fit memory for 1"
    ):
        work.run(rows, None, rows, rows[:, :4], None, 1e-6, rows, rows[:, 0].long(),
                 torch.zeros(2, 3, dtype=torch.int64), 1, 1)  # fmt: skip


@pytest.mark.parametrize(("step_rows", "limit"), [(2, 16), (2048, 2048), (20_000, 8192)])
def test_memory_is_for_the_longest_step(
    monkeypatch: pytest.MonkeyPatch, step_rows: int, limit: int
) -> None:
    """Of the engine's, and never for more rows than it is faster for."""
    import torch.distributed._symmetric_memory as symmetric

    for name in ("current_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    here = torch.device("cpu")
    monkeypatch.setattr(torch, "device", lambda *_: here)
    monkeypatch.setattr(symmetric, "empty", lambda words, **given: torch.empty(words, **given))
    found: list[Workspace] = []
    facts = Facts(hidden=64, step_rows=step_rows)
    assert lamport._allocate(facts, "tp", found) is None
    assert found[0].limit == limit
    assert found[0].keep.numel() == words_of(limit, 64, True)
    assert (found[0].keep == -1).all()


# --- vLLM's own exchange -------------------------------------------------------------------------


def test_steps_that_no_memory_holds_are_the_portable_exchanges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, words = lamport.HAND_OVER, torch.empty(0, dtype=torch.int64)
    monkeypatch.setattr(lamport, "portable", lambda *given: "portable")
    monkeypatch.setattr(Workspace, "run", lambda self, *given: "own")
    monkeypatch.setitem(lamport._prepared, "tp", Workspace(words, words, 0, 2, 64))
    with launching_for(Target.parse("h200")):
        for rows, who in ((0, "portable"), (1, "own"), (most, "own"), (most + 1, "portable")):
            given = (torch.empty(rows, 64), *[None] * 8)
            assert lamport.conv_residual_norm(*given, "tp") == who, rows
            with pytest.raises(ValueError, match="have prepared none; use provider triton"):
                lamport.conv_residual_norm(*given, "another")


class OneRank:
    """What vLLM's exchange computes on one rank, as its arguments say."""

    def rs_sconv_ag_add_norm(
        self, input_tensor: Any, residual: Any, conv_weight: Any, norm_weight: Any, eps: float,
        cache: Any, positions: Any, block_table: Any, seq_idx: Any, slot_mapping: Any, off_s: int,
        ws: int, block_size: int, shared_tensor: Any = None,
    ) -> Any:  # fmt: skip
        z = input_tensor if shared_tensor is None else input_tensor + shared_tensor
        cells = cache.transpose(1, 2)[..., off_s : off_s + ws]
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cells[slot // block_size, slot % block_size] = z[row].view(cells.shape[2:])
        branch = z.clone()
        taps = conv_weight.shape[1]
        for row, at in enumerate(positions.tolist()):
            for back in range(taps):
                if at >= back and slot_mapping[row] >= 0:
                    page = block_table[seq_idx[row], (at - back) // block_size]
                    tap = cells[page, (at - back) % block_size].flatten()
                    branch[row] += tap * conv_weight[:, taps - 1 - back]
        summed = residual + branch
        normed = None if norm_weight is None else summed * torch.rsqrt(
            summed.square().mean(1, keepdim=True) + eps) * norm_weight  # fmt: skip
        return normed, summed


@given(data=st.data())
@settings(max_examples=15)
def test_vllm_is_told_where_the_taps_are(data: st.DataObject) -> None:
    whole = drawn(HypothesisDraw(data), 1)
    assume(whole["conv_weight"].shape[1] == 4 and whole["slots"].numel())
    plain = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
             for k, v in of_rank(whole, 0, 1, "one").items()}  # fmt: skip
    wanted = run(OP.reference, OP, {**plain, "group": ""})
    incumbent._exchanges["one"] = OneRank()
    found = run(incumbent.conv_residual_norm, OP, plain)
    rows = plain["slots"] >= 0  # vLLM leaves padding rows to others
    for name, a, b in zip(("normed", "summed", "state"), found, wanted, strict=True):
        keep = slice(None) if name == "state" or not a.numel() else rows
        torch.testing.assert_close(a[keep], b[keep], rtol=1e-4, atol=1e-4, msg=name)


def refused(rank: int, size: int) -> tuple[str | None, list[Any]]:
    """Prepare vLLM's exchange, whose set-up waits for all ranks, where rank 1 lacks it."""
    made: list[Any] = []

    def set_up(*given: Any) -> Any:
        dist.barrier()
        made.append(given)
        return OneRank()

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, value)
        return found

    name = "vllm.models.inkling.nvidia.ops.lamport"
    whole = {name: SimpleNamespace(LamportRSConv=set_up)}
    reasons = []
    for group, found in (("lacking", {} if rank else whole), ("whole", whole)):
        with mock.patch.object(incumbent, "import_module", lambda name, of=found: of[name]):
            reasons.append(incumbent.prepare(Target.parse("cpu"), Facts(tp=size), group, gather))
    assert "lacking" not in incumbent._exchanges and reasons[1] is None
    return reasons[0], made


def test_no_rank_enters_vllms_set_up_alone(groups: dict[int, Ranks]) -> None:
    (fine, made), (why, _) = groups[2].run(refused)
    assert fine is None and made == [(Facts().hidden, 4, incumbent.MOST_ROWS)]
    assert "vLLM's exchange cannot be loaded (KeyError" in str(why)


def test_vllm_still_takes_what_it_is_given() -> None:
    versions = json.loads(FACTS.read_text())["vllm"]
    assert len(versions) >= 4
    for found in versions.values():
        made, called = (found[key] for key in NAMES["vllm"] if ":" in key)
        assert binds(made, 3, {}) is None
        second = {"shared_tensor": 0} if "shared_tensor" in called else {}
        assert binds(called, 13, second) is None
    assert "shared_tensor" in versions["0.33.0"][NAMES["vllm"][1]]


def test_who_offers_the_exchange() -> None:
    """By default two H200, who were timed; on AMD only where the memory is stated to be proved."""

    def verdicts(machine: str, tp: int = 8, ask: tuple[tuple[str, str], ...] = ()) -> Any:
        target = Target.parse(f"{machine}+triton=3.6.0+vllm=0.33.0")
        found = [d for d in choose(target, Facts(tp=tp), ask) if d.op == OP.name]
        return [(d.provider, d.verdict) for d in found], {d.provider: d.reason for d in found}

    for machine in ("h200", "b200"):
        rows, why = verdicts(machine)
        assert [row for row in rows if row[1] == "chosen"] == [("triton", "chosen")]
        never = (f"nobody has timed this exchange of 8 ranks on {Target.parse(machine).key}; ask "
                 "with conv_residual_norm=lamport")  # fmt: skip
        assert why["lamport"] == never
        for provider in ("lamport", "vllm"):
            asked, _ = verdicts(machine, 8, ((OP.name, provider),))
            assert [row for row in asked if row[1] == "chosen"] == [(provider, "chosen")]
    for machine, default in (("h200", "lamport"), ("b200", "triton")):
        rows, _ = verdicts(machine, 2)
        assert [row for row in rows if row[1] == "chosen"] == [(default, "chosen")], machine
    assert "needs tp 2 or 4 or 8; asked is 16" in verdicts("h200", 16)[1]["lamport"]
    assert "needs proof of whole stores" in verdicts("mi300x")[1]["lamport"]
    assert ("lamport", "only if asked") in verdicts("mi300x+fine-grained")[0]
