"""The exchange without barriers on GPUs: virtual ranks on one of them, and real ranks on several.

A virtual rank has a stream and memory of its own on the one device; all ranks' programs have to fit
the chip together, since they wait for one another, so steps are short.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Streams that share a hardware queue would wait for one another.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch

from inkling_portable.agreement import convert
from inkling_portable.backends.triton.lamport import GAVE_UP, Workspace, words_of
from inkling_portable.inputs import fill
from inkling_portable.registry import contract

HIDDEN, LIMIT, PAGE = 6144, 16, 8
REFERENCE = contract("conv_residual_norm").reference
SEND = 0 if torch.version.hip else 2
PATIENCE = 1 << 20  # about a second: a rank that waits in vain is soon found
COUNTS = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]


@dataclass
class Step:
    """One call of all ranks: `mine[rank]` are arguments, `summed` and `states[rank]` are right."""

    mine: list[dict[str, Any]]
    summed: torch.Tensor
    states: list[torch.Tensor]


def step(rows: int, ranks: int, seed: int, device: str = "cuda", two: bool = False) -> Step:
    """Decode rows of one page each; quarters, whose sums are exact; the last of 3 rows is padding.

    Padding holds NaN, of which nothing may arrive anywhere. `two`: each rank has two partial sums.
    """
    share = HIDDEN // ranks
    bf = torch.bfloat16
    real = rows - (rows > 2)
    slots = torch.arange(rows) * PAGE + 4
    slots[real:] = -1
    sources = -2 - (torch.arange(rows)[:, None] * PAGE + torch.arange(1, 4))
    sources[real:] = -1
    if real > 1:
        sources[1] = torch.tensor([-1, -1, 0])  # a row of this step
    partials = [fill((rows, HIDDEN), bf, "grid", seed + rank) for rank in range(ranks)]
    residual = fill((rows, HIDDEN), bf, "grid", seed + 50)
    extras = [fill((rows, HIDDEN), bf, "grid", seed + 30 + rank) for rank in range(ranks * two)]
    for one in (*partials, *extras, residual):
        one[real:] = float("nan")
    weight = fill((HIDDEN, 4), bf, "grid", seed + 51)
    drawn = fill((min(rows, 211), PAGE, 1, HIDDEN), bf, "grid", seed + 52)  # more takes seconds
    state = drawn.repeat(-(-rows // len(drawn)), 1, 1, 1)[:rows]
    whole = torch.stack([*partials, *extras]).float().sum(0).to(bf)
    kept = state.clone()
    _, summed = REFERENCE(whole, None, residual, weight, None, 1e-6, kept, slots, sources, "")
    parts = [slice(rank * share, (rank + 1) * share) for rank in range(ranks)]
    mine = [
        {"partial": partials[rank], "extra": extras[rank] if two else None, "residual": residual,
         "conv_weight": weight[part].contiguous(), "norm_weight": torch.ones(HIDDEN, dtype=bf),
         "eps": 1e-6, "state": state[..., part].contiguous(), "slots": slots, "sources": sources}
        for rank, part in enumerate(parts)
    ]  # fmt: skip
    mine = [{k: convert(v, device=device) for k, v in one.items()} for one in mine]
    return Step(mine, summed[:real].to(device), [kept[..., part].to(device) for part in parts])


class Virtual:
    """Ranks on one device. `wrong` counts calls with any wrong number, without waiting for them."""

    def __init__(self, ranks: int, send: int | None = None) -> None:
        words = words_of(LIMIT, HIDDEN, True)
        self.memory = torch.zeros(ranks, words, dtype=torch.int32, device="cuda")
        addresses = [self.memory[rank].data_ptr() for rank in range(ranks)]
        peers = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        self.ranks = [
            Workspace(peers, torch.zeros(8, dtype=torch.int32, device="cuda"), rank, ranks, HIDDEN,
                      LIMIT, send=SEND if send is None else send, patience=PATIENCE, trap=False)
            for rank in range(ranks)
        ]  # fmt: skip
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        self.wrong = torch.zeros(ranks, dtype=torch.int64, device="cuda")

    def compile(self, of: Step, programs: int, pieces: int, warps: int) -> None:
        """Run once over memory in which nothing is empty, so that nobody waits for a compiler.

        Nor for PyTorch's kernels, which are loaded, and memory found, when first used.
        """
        self.memory.zero_()
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10)
                self.call(rank, of, programs, pieces, warps)
        self.reset()

    def reset(self) -> None:
        torch.cuda.synchronize()
        self.memory.fill_(-1)
        for work in self.ranks:
            work.control.zero_()
        self.wrong.zero_()
        torch.cuda.synchronize()

    def call(self, rank: int, of: Step, programs: int, pieces: int, warps: int) -> None:
        """One call of one rank on the current stream."""
        mine = of.mine[rank]
        normed, summed = self.ranks[rank].run(**mine, programs=programs, pieces=pieces, warps=warps)
        real = of.summed.shape[0]
        bad = (summed[:real] != of.summed).any() | (mine["state"] != of.states[rank]).any()
        self.wrong[rank] += bad | normed[:real].isnan().any()

    def check(self) -> None:
        torch.cuda.synchronize()
        assert [int(work.control[GAVE_UP]) for work in self.ranks] == [0] * len(self.ranks)
        assert self.wrong.tolist() == [0] * len(self.ranks)


def shapes(ranks: int) -> list[tuple[int, int, int, int]]:
    """(rows, programs, pieces, warps) that all ranks' programs fit the chip with."""
    units = torch.cuda.get_device_properties(0).multi_processor_count // ranks
    wanted = [(1, 1, 8, 8), (1, 1, 1, 4), (3, 3, 4, 8), (8, 8, 1, 8), (12, 5, 2, 4),
              (2, 2, 4, 4), (9, 9, 1, 4)]  # fmt: skip
    return [(r, n, p if n * p <= units else 1, w) for r, n, p, w in wanted if n <= units]


@pytest.mark.parametrize(("ranks", "send"), [(2, SEND), (4, SEND), (8, SEND), (2, 0), (2, 1)])
def test_ten_thousand_calls_of_skewed_ranks(ranks: int, send: int) -> None:
    """Steps shrink and grow; each rank sleeps on the GPU when it likes."""
    virtual = Virtual(ranks, send)
    # Two of each, since stale words of the same numbers would be right.
    steps = [(step(r, ranks, 100 * r + s), *how) for r, *how in shapes(ranks) for s in (0, 5000)]
    for one in steps:
        virtual.compile(*one)
    draw = random.Random(ranks)
    calls = 10_000 if (ranks, send) == (2, SEND) else 2_000
    for i in range(calls):
        which = steps[draw.randrange(len(steps))]
        for rank, stream in enumerate(virtual.streams):
            with torch.cuda.stream(stream):
                if draw.random() < 0.02:
                    torch.cuda._sleep(draw.randrange(1, 200_000))
                virtual.call(rank, *which)
        if i == 20 or i % 250 == 249:  # the host is far ahead
            virtual.check()
    virtual.check()


@pytest.mark.parametrize("ranks", [2, 4])
def test_graphs_replay_in_any_order(ranks: int) -> None:
    """Graphs of one, two and five calls leave the generation anywhere, and eager calls between."""
    virtual = Virtual(ranks)
    steps = [(step(r, ranks, 7 * r), *how) for r, *how in shapes(ranks)[:3]]
    for one in steps:
        virtual.compile(*one)
    graphs = []
    for count in (1, 2, 5):
        of_ranks = []
        for rank, stream in enumerate(virtual.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(count):
                    virtual.call(rank, *steps[i % len(steps)])
            of_ranks.append(graph)
        graphs.append(of_ranks)
    virtual.reset()
    draw = random.Random(1)
    for _ in range(300):
        which = draw.randrange(len(graphs) + 1)
        for rank, stream in enumerate(virtual.streams):
            with torch.cuda.stream(stream):
                if draw.random() < 0.05:
                    torch.cuda._sleep(draw.randrange(1, 100_000))
                if which < len(graphs):
                    graphs[which][rank].replay()
                else:
                    virtual.call(rank, *steps[0])
    virtual.check()


def test_a_rank_that_is_gone_is_given_up() -> None:
    virtual = Virtual(2)
    one = (step(1, 2, 3), 1, 1, 8)
    virtual.compile(*one)
    virtual.ranks[0].patience = 100_000
    virtual.call(0, *one)
    torch.cuda.synchronize()
    assert int(virtual.ranks[0].control[GAVE_UP]) == 1


def gather(value: Any, size: int) -> list[Any]:
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, value)
    return found


def on_gpu(rank: int, size: int, store: str) -> None:
    """A real rank: prepare as a server does, then what the virtual ones do, and long steps.

    All ranks draw the same steps, each its own sleeps. Norms may be a rounding off.
    """
    import torch.distributed as dist

    from inkling_portable.backends.triton import lamport
    from inkling_portable.registry import Facts
    from inkling_portable.target import Target

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.group.WORLD.group_name
    refusal = lamport.prepare(
        Target.detect(), Facts(tp=size), group, partial(gather, size=size)
    )  # fmt: skip
    assert refusal is None, refusal
    device, wrong = f"cuda:{rank}", torch.zeros((), dtype=torch.int64, device="cuda")
    same, own = random.Random(size), random.Random(100 + rank)

    def call(of: Step) -> None:
        mine, real = of.mine[rank], of.summed.shape[0]
        normed, summed = lamport.conv_residual_norm(**mine, group=group)
        right = of.summed.float()
        right *= torch.rsqrt(right.square().mean(1, keepdim=True) + mine["eps"])
        near = (normed[:real].float() - right).abs() <= 2**-7 * right.abs() + 2**-10
        wrong.add_(~near.all() | (summed[:real] != of.summed).any()
                   | (mine["state"] != of.states[rank]).any())  # fmt: skip

    def sleep() -> None:
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(1, 200_000))

    def nothing_wrong(when: str) -> None:
        torch.cuda.synchronize()
        assert int(wrong) == 0, when

    short = [step(rows, size, 11 * rows + two, device, bool(two))
             for rows in (1, 3, 16, 200, 2) for two in (0, 1)]  # fmt: skip
    for of in short:
        call(of)
    nothing_wrong("first calls")
    for i in range(3_000):
        sleep()
        call(same.choice(short))
        if i % 250 == 249:
            nothing_wrong(f"call {i}")
    graphs = []
    for count in (1, 2, 5):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for of in short[:count]:
                call(of)
    for _ in range(300):
        sleep()
        which = same.randrange(len(graphs) + 1)
        if which < len(graphs):
            graphs[which].replay()
        else:
            call(short[0])
    nothing_wrong("graphs")
    for rows in (2_049, lamport.HAND_OVER, lamport.HAND_OVER + 1):  # the last is the portable one's
        call(step(rows, size, rows, device, two=True))
        nothing_wrong(f"{rows} rows")
    dist.destroy_process_group()


@pytest.mark.parametrize("count", COUNTS)
def test_real_ranks(count: int, tmp_path: Path) -> None:
    import torch.multiprocessing as mp

    mp.spawn(on_gpu, (count, str(tmp_path / "store")), nprocs=count)
