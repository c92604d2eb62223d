"""The shapes that attention is timed on, their data, and whether a result on them is right."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inkling_portable.registry import contract


@dataclass(frozen=True)
class Case:
    """One call: `lengths` are KV lengths; each request has `fresh` new tokens among them."""

    name: str
    kind: str  # decode, verify, local, prefill, local prefill
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    fresh: int = 1
    window: int = 0
    page: int = 128
    width: int = 128
    goal_us: float = 0.0
    goal_tflops: float = 0.0

    @property
    def extent(self) -> int:
        return self.window or 1024

    @property
    def flops(self) -> float:
        """Of the visible keys only: two products of 2 * width for each query, head and key."""
        total = 0
        for length, times in Counter(self.lengths).items():
            seen = range(length - self.fresh + 1, length + 1)
            total += times * sum(min(n, self.window or n) for n in seen)
        return 4.0 * self.width * self.heads * total

    @property
    def kv_bytes(self) -> int:
        """Keys and values that must be read once."""
        seen = [min(n, self.window + self.fresh - 1) if self.window else n for n in self.lengths]
        return sum(seen) * self.kv_heads * self.width * 2 * 2

    @property
    def stored_bytes(self) -> int:
        rows = sum(-(-n // self.page) * self.page for n in self.lengths)
        return rows * self.kv_heads * self.width * 2 * 2


def _mix(count: int, median: float, spread: float) -> tuple[int, ...]:
    """A log-normal mix of lengths by its quantiles, so that it is the same everywhere."""
    points = [(i + 0.5) / count for i in range(count)]
    normal = torch.distributions.Normal(0.0, 1.0)
    steps = [float(normal.icdf(torch.tensor(p))) for p in points]
    return tuple(min(400_000, max(16, round(median * math.exp(spread * x)))) for x in steps)


GLOBAL, LOCAL = {"heads": 8, "kv_heads": 1}, {"heads": 8, "kv_heads": 2, "window": 512}
CASES = (
    Case("global 1 x 8K", "decode", lengths=(8192,), goal_us=7, **GLOBAL),
    Case("global 1 x 64K", "decode", lengths=(65536,), goal_us=14, **GLOBAL),
    Case("global 1 x 256K", "decode", lengths=(262144,), goal_us=40, **GLOBAL),
    Case("global 1 x 1M", "decode", lengths=(1_000_000,), goal_us=128, **GLOBAL),
    Case("global 64 x 8K", "decode", lengths=(8192,) * 64, goal_us=74, **GLOBAL),
    Case("global 512K + 63 x 2K", "decode", lengths=(524288, *(2048,) * 63), goal_us=105, **GLOBAL),
    Case("global log-normal 64", "decode", lengths=_mix(64, 8192, 1.2), **GLOBAL),
    Case("global 64K, page 16", "decode", lengths=(65536,), page=16, **GLOBAL),
    Case("TP4 global 1 x 64K", "decode", 16, 2, (65536,)),
    Case("Small TP2 global 1 x 64K", "decode", 16, 4, (65536,)),
    Case("Small TP1 global 16 x 8K", "decode", 32, 8, (8192,) * 16),
    Case("verify 9, 8K", "verify", lengths=(8192,), fresh=9, **GLOBAL),
    Case("verify 9, 64K", "verify", lengths=(65536,), fresh=9, **GLOBAL),
    Case("verify 9, 16 x 8K", "verify", lengths=(8192,) * 16, fresh=9, **GLOBAL),
    Case("local 1 x 8K", "local", lengths=(8192,), goal_us=5.5, **LOCAL),
    Case("local 64 x 8K", "local", lengths=(8192,) * 64, goal_us=12, **LOCAL),
    Case("local verify 9, 64K", "local", lengths=(65536,), fresh=9, **LOCAL),
    Case("global prefill 4K", "prefill", lengths=(4096,), fresh=4096, goal_tflops=300, **GLOBAL),
    Case("global prefill 16K", "prefill", lengths=(16384,), fresh=16384, goal_tflops=520, **GLOBAL),
    Case("global 2K on 126K", "prefill", lengths=(131072,), fresh=2048, goal_tflops=450, **GLOBAL),
    Case("global 64 on 126K", "prefill", lengths=(129088,), fresh=64, **GLOBAL),
    Case("TP1 global prefill 8K", "prefill", 64, 8, (8192,), 8192),
    Case("local prefill 4K", "local prefill", lengths=(4096,), fresh=4096, **LOCAL),
    Case("local prefill 16K", "local prefill", lengths=(16384,), fresh=16384, goal_tflops=250,
         **LOCAL),
)  # fmt: skip


def arguments(case: Case, device: str, seed: int = 0) -> dict[str, Any]:
    """The contract's arguments. Caches are views of one engine buffer [pages, Hkv, page, K | V]."""
    counts = [-(-n // case.page) for n in case.lengths]
    total, batch = sum(counts), len(case.lengths)
    rows = batch * case.fresh
    meta = device == "meta"
    generator = None if meta else torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        if meta:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    buffer = noise(total + 1, case.kv_heads, case.page, 2 * case.width).transpose(1, 2)
    keys, values = buffer.split(case.width, dim=-1)
    table = torch.zeros((batch, max(counts)), dtype=torch.int32)
    order = (1 + torch.randperm(total, generator=torch.Generator().manual_seed(seed))).int()
    at = 0
    for b, n in enumerate(counts):
        table[b, :n] = order[at : at + n]
        at += n
    starts = torch.arange(batch + 1, dtype=torch.int32) * case.fresh
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return {
        "q": noise(rows, case.heads, case.width), "k_cache": keys, "v_cache": values,
        "rel": noise(rows, case.heads, case.extent), "pages": table.to(device),
        "q_starts": starts.to(device), "kv_lens": lengths.to(device), "max_q": case.fresh,
        "max_kv": max(case.lengths), "window": case.window, "scale": 1 / case.width,
        "out": torch.empty((rows, case.heads, case.width), dtype=torch.bfloat16, device=device),
    }  # fmt: skip


def faults(case: Case, call: dict[str, Any], rows_each: int = 40) -> list[str]:
    """Hold `call["out"]` to the contract, per row, on rows of a few requests.

    The first, a middle and the last rows of the first, second and last request, against the
    reference in float64 and in bfloat16 on that request's pages.
    """
    op = contract("rel_attention")
    found = []
    for b in sorted({0, min(1, len(case.lengths) - 1), len(case.lengths) - 1}):
        length, first = case.lengths[b], b * case.fresh
        middle = max(0, case.fresh // 2 - 13)
        for i in sorted({0, middle, max(0, case.fresh - rows_each)}):
            rows = slice(first + i, first + min(case.fresh, i + rows_each))
            count = rows.stop - rows.start
            seen = length - case.fresh + i + count
            used = call["pages"][b, : -(-seen // case.page)].long()
            part = {
                "k_cache": call["k_cache"][used], "v_cache": call["v_cache"][used],
                "q": call["q"][rows], "rel": call["rel"][rows],
            }  # fmt: skip
            shared = {
                "pages": torch.arange(len(used), device=used.device, dtype=torch.int32)[None],
                "q_starts": torch.tensor([0, count], dtype=torch.int32, device=used.device),
                "kv_lens": torch.tensor([seen], dtype=torch.int32, device=used.device),
                "max_q": count, "max_kv": seen, "window": case.window, "scale": call["scale"],
            }  # fmt: skip
            results = []
            for dtype in (torch.float64, torch.bfloat16):
                tensors = {k: v.to(dtype) for k, v in part.items()}
                out = torch.empty_like(tensors["q"])
                op.reference(**tensors, **shared, out=out)
                results.append(out)
            truth, baseline = results
            reason = op.tolerances[0].check(call["out"][rows], baseline, truth)
            if reason:
                found.append(f"request {b}, rows {i} .. {i + count - 1}: {reason}")
    return found


def smaller(case: Case) -> Case:
    """The same kind of call within a few thousand keys, for a quick test."""
    lengths = tuple(max(16 + case.fresh, min(n, 700 + 61 * b)) for b, n in enumerate(case.lengths))
    fresh = min(case.fresh, 300)
    return replace(case, lengths=tuple(max(n, fresh) for n in lengths), fresh=fresh)
