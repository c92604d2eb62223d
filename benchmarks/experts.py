"""Time the routed experts from route output to combined output, on one GPU, from a cold cache.

    python -m benchmarks.experts [--models large-tp8,large-tp4,small-tp1,small-tp2:mxfp4]
        [--formats nvfp4,mxfp4,fp8,bf16] [--tokens 1,4,16] [--peers] [--proxy]
        [--tiles mi300x,mi355x] [--kernels] [--no-check] [--tune] [--together] [--out FILE]

Each call routes its tokens to other experts (spread routing), so that weights come from memory.
Every timed shape is first held to its contract: the dequantised experts one by one, in float64.
The floor is the bytes of the chosen experts at the chip's bandwidth, or the products at its matrix
rate if that is more. `--peers` times vLLM's Humming and Marlin on the same weights and routing (for
NVFP4 and MXFP4), `--proxy` what vLLM does with them on an MI300X. `--tiles mi300x` also times our
Triton kernels with what the tuning picks for that chip. `--kernels` adds the time of each kernel,
`--tune` tries launch settings of the CUDA kernels first and reports with the best ones.
With `--together` a process for each model and format makes ready what takes its peers a minute to
compile, side by side with the others; then all are timed one after the other. What is not ready
after `--seconds` is timed last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import counts, environment, median_us, need_gpus
from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import routed_experts_mma
from inkling_portable.backends.triton import routed_experts as triton_experts
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.formats import ARRANGED, arranged
from inkling_portable.registry import contract
from inkling_portable.target import Target

EXPERTS, TOP_K = 256, 6
MODELS = {"large-tp8": (6144, 384), "large-tp4": (6144, 768), "small-tp2": (4096, 1024),
          "small-tp1": (4096, 2048)}  # fmt: skip
FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
TOKENS = (1, 2, 4, 9, 16, 36, 64, 256, 1024, 8192)
MATRIX_TFLOPS = 989  # H200, dense bfloat16
LATEST = 900  # seconds after which a process that still makes its peers ready is given up
Provider = Callable[..., Tensor]
Peer = Callable[[dict[str, Any]], Tensor]


def stack(form: str, rows: int, columns: int, device: str) -> tuple[Tensor | None, ...]:
    """(codes, scale, global scale) of all experts; on "meta" without memory."""

    def bytes_of(low: int, high: int, last: int) -> Tensor:
        shape = (EXPERTS, rows, last)
        if device == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=device)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    def near(value: float, *shape: int) -> Tensor:
        return (torch.rand(shape, device=device) + 0.5) * value

    if form == "nvfp4":
        # 0x30 .. 0x40 are 0.5 .. 2.
        return (bytes_of(0, 256, columns // 2), bytes_of(0x30, 0x41, columns // 16),
                near(0.01, EXPERTS))  # fmt: skip
    if form == "mxfp4":
        return bytes_of(0, 256, columns // 2), bytes_of(119, 122, columns // 32), None
    if form == "fp8":
        codes = bytes_of(0, 0x7F, columns)
        return codes, near(2.0**-11, EXPERTS, rows, 1), None
    if device == "meta":
        return torch.empty(EXPERTS, rows, columns, dtype=torch.bfloat16, device=device), None, None
    values = torch.empty(EXPERTS, rows, columns, dtype=torch.bfloat16, device=device)
    return values.normal_(std=0.02), None, None


def weights_of(model: str, form: str, device: str = "cuda") -> dict[str, Any]:
    """Everything of a call but its tokens."""
    hidden, width = MODELS[model]
    found: dict[str, Any] = {"format": form, "act": "bf16", "interleaved": True}
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        # Drawn codes need no arranging: any eight are as likely.
        parts = stack(form.removesuffix(ARRANGED), rows, columns, device)
        found |= {name: parts[0], f"{name}_scale": parts[1], f"{name}_global": parts[2]}
    return found


def tokens_of(hidden: int, tokens: int, count: int, device: str = "cuda") -> list[dict[str, Any]]:
    """`count` sets of x, ids, weights; small steps take experts that no neighbour took."""
    sets = []
    order = torch.randperm(EXPERTS, device=device) if device != "meta" else None
    for i in range(count):
        x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
        if order is None:
            ids = torch.empty(tokens, TOP_K, device=device, dtype=torch.int32)
        elif tokens * TOP_K <= EXPERTS // 2:
            place = torch.arange(tokens * TOP_K, device=device) + i * tokens * TOP_K
            ids = order[place % EXPERTS].view(tokens, TOP_K).int()
        else:
            ids = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices.int()
        sets.append({"x": x, "ids": ids, "weights": torch.rand(tokens, TOP_K, device=device)})
    return sets


def realistic(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Independent tokens: experts that several tokens share occur as often as chance has it."""
    for one in sets:
        scores = torch.rand(one["x"].shape[0], EXPERTS, device=one["x"].device)
        one["ids"] = scores.topk(TOP_K).indices.int()
    return sets


def floor_us(model: str, weights: dict[str, Any], ids: Tensor, bandwidth: float) -> float:
    """Bytes of the distinct experts, x and output once; or the products at the matrix rate."""
    hidden, width = MODELS[model]
    per_expert = sum(v[0].numel() * v.element_size() for k, v in weights.items()
                     if k.startswith(("w13", "w2")) and isinstance(v, Tensor))  # fmt: skip
    moved = per_expert * len(ids.unique()) + 4 * ids.shape[0] * hidden
    products = 2.0 * ids.numel() * 3 * hidden * width
    return max(moved / bandwidth / 1e3, products / MATRIX_TFLOPS / 1e6)


def calls_for(tokens: int) -> int:
    """Calls in one graph: enough that no expert's weights survive in the L2 until used again."""
    return 40 if tokens <= 2 else 12 if tokens <= 64 else 4 if tokens <= 1024 else 2


def launched_for(machine: Target, /, **call: Any) -> Tensor:
    """Our Triton kernels as they would be launched on `machine`."""
    with launching_for(machine):
        return triton_experts.routed_experts(**call)


def providers(form: str, tiles: Sequence[str] = ()) -> dict[str, Provider]:
    """Ours, by name; Triton's also with the settings of other chips, `tiles`."""
    found: dict[str, Provider] = {}
    if form in ("nvfp4", "mxfp4") and torch.cuda.get_device_capability() >= (9, 0):
        found["mma"] = routed_experts_mma.routed_experts
    found["triton"] = triton_experts.routed_experts
    for chip in tiles:
        found[f"triton, tiles of {chip}"] = partial(launched_for, Target.parse(chip))
    return found


class Table:
    """Rows of one model and format, with contracts and peers made ready before any is timed."""

    def __init__(self, model: str, form: str, asked: argparse.Namespace) -> None:
        self.model, self.form, self.asked = model, form, asked
        self.tokens: list[int] = asked.tokens
        tiles = [chip for chip in asked.tiles.split(",") if chip]
        self.providers = providers(form, tiles)
        self.weights = weights_of(model, form)
        self.given = dict.fromkeys(self.providers, self.weights)
        if "mma" in self.given:  # as a server does
            there = {name: arranged(self.weights[name]) for name in ("w13", "w2")}
            self.given["mma"] = self.weights | there | {"format": form + ARRANGED}
        self.verdicts: dict[int, Any] = {}
        self.peers: dict[int, dict[str, Peer]] = {tokens: {} for tokens in self.tokens}

    def prepare(self, seconds: float) -> None:
        """Check, and let the peers compile; begin nothing else once `seconds` are over."""
        start = time.monotonic()
        if not self.asked.tune:
            self.check(self.tokens, start + seconds / 3)
        if self.asked.peers or self.asked.proxy:
            self.prepare_peers(start + seconds)
        if not self.asked.tune:
            self.check(self.tokens, start + seconds)
        torch.cuda.empty_cache()

    def data(self, tokens: int, count: int) -> list[dict[str, Any]]:
        sets = tokens_of(MODELS[self.model][0], tokens, count)
        return realistic(sets) if tokens > 1 else sets

    def check(self, tokens_list: list[int], until: float) -> None:
        """Hold the shapes that are not yet to their contract, as long as there is time."""
        for tokens in tokens_list:
            if self.asked.no_check or time.monotonic() > until:
                return
            if tokens not in self.verdicts:
                one, op = self.data(tokens, 1)[0], contract("routed_experts")
                faults = [
                    f"{name}: {reason}"
                    for name, provider in self.providers.items()
                    for reason in disagreements(op, provider, self.given[name] | one)
                ]
                self.verdicts[tokens] = faults or "holds"
                torch.cuda.empty_cache()  # others may be at work beside

    def prepare_peers(self, until: float) -> None:
        from benchmarks.experts_peers import peers

        calls = [self.data(tokens, 1)[0] for tokens in self.tokens]
        for name, make in peers(self.weights, TOP_K, self.asked.peers, self.asked.proxy).items():
            try:
                peer = make()
                for tokens, call in zip(self.tokens, calls, strict=True):
                    if time.monotonic() > until:
                        break
                    peer(call)
                    torch.cuda.synchronize()
                    self.peers[tokens][name] = peer
            except Exception as error:
                print(f"{self.model} {self.form}: peer {name} is absent: {type(error).__name__}: "
                      f"{str(error)[:400]}", file=sys.stderr, flush=True)  # fmt: skip

    def row(self, tokens: int) -> dict[str, Any]:
        """One row of the table."""
        settings: dict[str, Any] = {}
        if self.asked.tune and "mma" in self.providers:
            from benchmarks.experts_tune import tune

            settings = tune(self.model, self.given["mma"], tokens)
        if self.asked.tune:
            self.check([tokens], float("inf"))
        row = self.measure(tokens)
        if settings:
            row["settings"] = settings
        torch.cuda.empty_cache()
        return row

    def measure(self, tokens: int) -> dict[str, Any]:
        hidden, width = MODELS[self.model]
        sets = self.data(tokens, calls_for(tokens))
        runs: dict[str, list[Callable[[], Tensor]]] = {}
        for name, provider in self.providers.items():
            runs[name] = [partial(provider, **self.given[name], **one) for one in sets]
        for name, peer in self.peers[tokens].items():
            # All experts at once are hundreds of times an L2: a few calls are cold as well.
            some = sets[:4] if unpacks(name, self.form) else sets
            runs[name] = [partial(peer, one) for one in some]
        times, temporary, differences = {}, {}, {}
        ours: Tensor | None = None
        for name, calls in runs.items():
            got = calls[0]().double()
            ours = got if ours is None else ours
            differences[name] = round(((got - ours).norm() / ours.norm()).item(), 5)
            for call in calls[1:]:
                call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            calls[-1]()
            temporary[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)
            times[name] = round(median_us(calls, *((7, 4) if unpacks(name, self.form) else ())), 2)
        bandwidth = Target.detect().bandwidth_gbs or 4800
        floors = [floor_us(self.model, self.weights, one["ids"], bandwidth) for one in sets]
        row: dict[str, Any] = {
            "op": "routed_experts", "model": self.model, "hidden": hidden, "width": width,
            "format": self.form, "tokens": tokens,
            "distinct": sum(len(one["ids"].unique()) for one in sets) / len(sets),
            "floor_us": round(sum(floors) / len(floors), 2), "us": times,
            "temporary_mb": temporary, "difference": differences,
            "contract": self.verdicts.get(tokens, "unchecked"),
        }  # fmt: skip
        if self.asked.kernels:
            row["kernels_us"] = {name: by_kernel(calls) for name, calls in runs.items()}
        return row


def unpacks(peer: str, form: str) -> bool:
    """Whether a peer unpacks all experts on each call."""
    return form == "mxfp4" and peer in ("emulation", "whole stack")


def by_kernel(calls: Sequence[Callable[[], Any]]) -> dict[str, float]:
    """Mean device time of one call by kernel name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in calls:
            call()
        torch.cuda.synchronize()
    return {e.key[:40]: round(e.self_device_time_total / len(calls), 2)
            for e in found.key_averages() if e.self_device_time_total}  # fmt: skip


def line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{k} {v:.1f}" for k, v in row["us"].items())
    return (f"{row['model']} {row['format']} {row['tokens']} tokens: {times} us  floor "
            f"{row['floor_us']:.1f}  distinct {row['distinct']:.0f}  {row['contract']}  "
            f"{row.get('settings', '')}  {row.get('kernels_us', '')}")  # fmt: skip


def take_part(link: Any, model: str, form: str, asked: argparse.Namespace) -> None:
    """Make a table ready, say so, and time the rows that are asked for; in a process of its own."""
    torch.manual_seed(0)
    table = Table(model, form, asked)
    table.prepare(asked.seconds)
    link.send("ready")
    with suppress(EOFError):  # the end: nothing more is asked for
        while tokens := link.recv():
            try:
                link.send(table.row(tokens))
            except Exception as error:
                print(f"{model} {form} {tokens} tokens: {type(error).__name__}: {str(error)[:300]}",
                      file=sys.stderr, flush=True)  # fmt: skip
                link.send(None)


def answer(link: Any, name: tuple[str, str], until: float) -> Any:
    """What the process of a table sends until then; None where it sends nothing or has died."""
    try:
        return link.recv() if link.poll(max(0.0, until - time.monotonic())) else None
    except EOFError:
        print(f"{' '.join(name)}: its process has ended", file=sys.stderr, flush=True)
        return None


def together(
    work: list[tuple[str, str]], asked: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """`keep` every row: a process for each model and format, one of them timing at a time."""
    context, waiting, workers = get_context("spawn"), {}, {}
    start, tokens_list = time.monotonic(), asked.tokens
    try:
        for name in work:
            waiting[name], other = context.Pipe()
            workers[name] = context.Process(target=take_part, args=(other, *name, asked))
            workers[name].start()
            other.close()
        for seconds in (asked.seconds, LATEST):
            ready = [name for name in waiting if answer(waiting[name], name, start + seconds)]
            print(f"ready after {time.monotonic() - start:.0f} s: "
                  f"{', '.join(' '.join(name) for name in ready)}", flush=True)  # fmt: skip
            links = {name: waiting.pop(name) for name in ready}
            waiting = {name: link for name, link in waiting.items() if workers[name].is_alive()}
            for tokens, (name, link) in itertools.product(tokens_list, links.items()):
                try:
                    link.send(tokens)
                except BrokenPipeError:
                    continue
                if row := answer(link, name, time.monotonic() + LATEST):
                    keep(row)
    finally:
        for worker in workers.values():
            worker.terminate()


def write(path: Path | None, results: list[dict[str, Any]]) -> None:
    """After every row, so that a run that is cut short leaves what it has."""
    if path:
        report = {"environment": environment(), "cold": True, "results": results}
        path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="large-tp8")
    parser.add_argument("--formats", default="nvfp4")
    parser.add_argument("--tokens", type=counts, default=",".join(map(str, TOKENS)))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--proxy", action="store_true")
    parser.add_argument("--tiles", default="", help="other chips, comma-separated")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--seconds", type=float, default=120, help="to make ready --together")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    need_gpus(parser)
    started, results = time.perf_counter(), []

    def keep(row: dict[str, Any]) -> None:
        results.append(row)
        write(asked.out, results)
        print(line(row), flush=True)

    work = []
    for one in asked.models.split(","):
        model, _, form = one.partition(":")
        work += [(model, f) for f in ([form] if form else asked.formats.split(","))]
    if asked.together:
        together(work, asked, keep)
        work = []
    torch.manual_seed(0)
    for model, form in work:
        table = Table(model, form, asked)
        table.prepare(float("inf"))
        for tokens in table.tokens:
            keep(table.row(tokens))
        del table
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
