"""Serving one rank of eight on one GPU: decode, prefill, drafts and throughput, by variant.

    python -m benchmarks.serving --all --out benchmarks/results/serving/rank-h200.json
    python -m benchmarks.serving --variant plugin [--cases decode,profile=1x8192,prefill=65536]
        [--drafts K] [--layers 66] [--weights nvfp4] [--out FILE]
    python -m benchmarks.serving --tiny --variant plugin    # tries the script itself, on a CPU
    python -m benchmarks.serving --all --dry-run            # what would run, and the floors

Variants: the plugin, the engine's own model as shipped (off), and that model with its split
heuristic enabled where it ships switched off (off-split). All layers, dummy weights, routers drawn
after the start (`serving_rank.py`), vLLM's offline engine in this process, or with `--own-process`
in one of its own, where what it says is read beside the next step, CUDA graphs. A step's time is
the period of the engine's steps while all requests decode, the median of many; a profile
has such a period too, taken before. A rank alone exchanges nothing: the estimate for eight adds 132
exchanges, and says so. The file is written anew after every case.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import serving_rank
from benchmarks.timing import counts, environment, need_gpus

VARIANTS = ("plugin", "off", "off-split")
Sizes = tuple[int, ...]
Case = tuple[str, Sizes]
# Batch and context; tokens; requests, tokens in and tokens out.
CASES: dict[str, tuple[Sizes, ...]] = {
    "decode": ((1, 8192), (1, 65536), (1, 262144), (16, 2048), (64, 8192)),
    "prefill": ((8192,), (65536,)),
    "throughput": ((64, 2048, 256),),
    "profile": ((1, 8192), (64, 8192)),
}
TINY: dict[str, tuple[Sizes, ...]] = {
    "decode": ((1, 96), (4, 48)), "prefill": ((64,), (96,)), "throughput": ((4, 48, 8),),
    "profile": ((1, 96),),
}  # fmt: skip
STEPS, WARM = 40, 6
BEHIND = 1200
"""Tokens that a request may write: it decodes while others are still read, and is then timed."""
EXCHANGES, EXCHANGE_US = 132, 8.0
"""Of eight ranks in a step, two for each of 66 layers, at what one was measured to take."""
BANDWIDTH = {"H200": 4.3e12}
"""Bytes a second, device to device, as measured."""

# Names of kernels, tried in this order.
OPS = (
    ("towers", r"_norm_gelu|_dmel_"),
    ("rel_attention", r"attend|combine_split|join_spans|rel_attn|rel_attention|flash|fmha|fa4"),
    ("short conv, sum, norm", r"_conv_kernel|conv_rows|_by_rank_kernel|_sources_kernel|"
                              r"_exchange_kernel|sconv|conv1d|lamport|add_rmsnorm|CUDAFunctor_add|"
                              r"_seq_metadata"),
    ("qkvr_prep", r"_prep_kernel|qkvr|qk_norm|reshape_and_cache"),
    ("routed_experts", r"gemv_(up|down)|_count_kernel|_place_kernel|(?<!_)tile_kernel|wgmma|"
                       r"combine_kernel|^combine$|arrange_kernel|moe|expert|humming|marlin|routed|silu_and_mul|act_and_mul|"
                       r"align_block|process_input"),
    ("route and gate_logits", r"_(route|weigh)_kernel|gate(?!d_kernel)|topk|ll_bf16"),
    ("sinks and dense activation", r"_swiglu_kernel|swiglu|sink|_gated_kernel"),
    ("norms and embedding", r"_norm_kernel|_embed_norm|_halves|rms_?norm|index_select|embedding"),
    ("linear layers", r"nvjet|gemm|gemv|cublas|cutlass|splitK|_row_kernel|_tile_kernel|_sum_kernel|"
                      r"addmm|::mm|matmul|linear|few_rows"),
    ("sampling", r"argmax|sampl|softmax|gumbel|logit"),
    ("inputs and metadata", r"memcpy|memset|copy|fill|arange|cumsum|slot|block_table|elementwise|"
                            r"index|prepare|gather|scatter|cat|reduce|_post_update|apply_write"),
)  # fmt: skip
PRODUCTS = re.compile(r"^_(row|tile|sum)_kernel$|few_rows")
"""Of gates, sinks and linear layers alike: which one, says what runs before and after them."""
PLACES = re.compile(r"_(route|weigh|gated|prep|conv)_kernel|conv_rows|combine_split|attend")

SINKS_FOLLOW = ("_route_kernel", "_weigh_kernel", "_gated_kernel")


def op_of(kernel: str) -> str:
    """The op that a kernel belongs to, by its name."""
    return next((op for op, names in OPS if re.search(names, kernel, re.I)), "unknown")


def ops_of(kernels: Sequence[str]) -> list[str]:
    """The op of each kernel of a step, in the order in which they start."""
    ops = [op_of(kernel) for kernel in kernels]
    places = [PLACES.search(kernel) for kernel in kernels]
    before = ""
    for i, kernel in enumerate(kernels):
        if PRODUCTS.search(kernel):
            after = next((place[0] for place in places[i:] if place), "")
            if after == "_route_kernel":
                ops[i] = "route and gate_logits"
            elif after == "_weigh_kernel" or before in SINKS_FOLLOW:
                ops[i] = "sinks and dense activation"
        found = places[i]
        before = found[0] if found else before
    return ops


def busy(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the (start, end), in order of their starts, goes on."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def shares(spans: Sequence[tuple[float, float]]) -> list[float]:
    """What each of the (start, end), in order of their starts, has of the time that `busy` counts.

    A moment is that of what ends first: a kernel that was started early waits for the others.
    """
    found, running, now = [0.0] * len(spans), list[tuple[float, int]](), 0.0

    def go_on(until: float) -> None:
        nonlocal now
        while running and now < until:
            end, which = running[0]
            found[which] += max(0.0, min(end, until) - now)
            now = max(now, min(end, until))
            if end <= now:
                heapq.heappop(running)
        now = max(now, until)

    for which, (start, end) in enumerate(spans):
        go_on(start)
        heapq.heappush(running, (end, which))
    go_on(max((end for _, end in spans), default=0.0))
    return found


# --- the engine -----------------------------------------------------------------------------------


def enable_splits() -> None:
    """Have vLLM's own model split long contexts on Hopper, as it does on other chips."""
    from vllm.models.inkling.nvidia import attention
    from vllm.models.inkling.nvidia.ops import fa4_rel_attention
    from vllm.platforms import current_platform

    original = fa4_rel_attention.inkling_fa4_num_splits

    class NotHopper:
        def __getattr__(self, name: str) -> Any:
            return getattr(current_platform, name)

        def get_device_capability(self, *_: Any) -> None:
            return None

    def splits(**shape: Any) -> int:
        own, fa4_rel_attention.current_platform = current_platform, NotHopper()
        try:
            return int(original(**shape))
        finally:
            fa4_rel_attention.current_platform = own

    for module in (attention, fa4_rel_attention):
        module.inkling_fa4_num_splits = splits


class Decoded(NamedTuple):
    """Seconds of each step, tokens written in one, different last tokens of the requests."""

    seconds: list[float]
    tokens: float
    distinct: int
    profile: dict[str, Any] | None


class Served:
    """vLLM's offline engine over a folder; prompts are random ids."""

    def __init__(self, folder: Path, options: argparse.Namespace, longest: int) -> None:
        from vllm import LLM

        more: dict[str, Any] = {"tensor_parallel_size": getattr(options, "ranks", 1)}
        if options.drafts:
            spec = {"method": "mtp", "num_speculative_tokens": options.drafts}
            more["speculative_config"] = spec
        if options.tiny:
            more |= {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "block_size": 16,
                     "gpu_memory_utilization": 0.1}  # fmt: skip
        else:
            # What `vllm serve` schedules at once there. A given size leaves profiling out.
            more |= {"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": options.cache << 30,
                     "gpu_memory_utilization": options.memory}  # fmt: skip
        if getattr(options, "variant", "") == "off-split":
            # It would compile for every number of splits; a kernel's first use does as well.
            more["kernel_config"] = {"enable_jit_warmup": False}
        began = time.monotonic()
        self.llm = LLM(
            str(folder), load_format="dummy", tokenizer_mode="hf", skip_tokenizer_init=True,
            max_model_len=longest, max_num_seqs=options.seqs, enable_prefix_caching=False, seed=0,
            **more,
        )  # fmt: skip
        self.start_s = time.monotonic() - began
        self.routers = self.llm.apply_model(serving_rank.draw_routers)[0]
        if not self.routers:
            raise SystemExit("no router was found to draw; its parameters' names have changed")
        gc.collect()
        gc.freeze()  # as vLLM does in an engine's process of its own
        self.rng, self.count = random.Random(1), 0
        self.behind = min(BEHIND, longest // 2)

    def draw(self, length: int) -> list[int]:
        """Random ids, which takes a prompt of 64K 25 ms: not to be timed."""
        return [self.rng.randrange(2, 400) for _ in range(length)]

    def add(self, ids: list[int], tokens: int) -> None:
        """A request of these ids."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self.count += 1
        prompt: Any = {"prompt_token_ids": ids}
        self.llm.llm_engine.add_request(str(self.count), prompt, params)

    def step(self) -> list[Any]:
        """One step of the engine: what it says of every request with a first token or more."""
        return list(self.llm.llm_engine.step())

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def settle(self, batch: int, context: int) -> None:
        """Begin `batch` requests of `context` tokens; return when all decode, caches warm."""
        for _ in range(batch):
            self.add(self.draw(context), self.behind)
        while len(self.step()) < batch:
            continue
        for _ in range(WARM):
            self.step()

    def decode(self, batch: int, context: int, profiled: bool) -> Decoded:
        """Steps in which `batch` requests of `context` tokens decode."""
        self.settle(batch, context)
        times, written = [], []
        for _ in range(STEPS):
            began = time.perf_counter()
            found = self.step()
            times.append(time.perf_counter() - began)
            written.append(sum(len(request.outputs[0].token_ids) for request in found))
        last = {request.outputs[0].token_ids[-1] for request in found}
        per_step = (written[-1] - written[0]) / (STEPS - 1)
        profile = self.profile(10, self.step) if profiled else None
        self.abort()
        return Decoded(times, per_step, len(last), profile)

    def abort(self) -> None:
        engine = self.llm.llm_engine
        engine.abort_request([str(i) for i in range(1, self.count + 1)], internal=False)
        self.finish()

    def prefill(self, length: int, repeats: int) -> list[float]:
        """Seconds until the first token of a prompt."""
        times = []
        for _ in range(repeats + 1):  # without the first
            ids = self.draw(length)
            began = time.perf_counter()
            self.add(ids, 1)
            self.finish()
            times.append(time.perf_counter() - began)
        return times[1:]

    def throughput(self, batch: int, length: int, tokens: int) -> float:
        """Output tokens a second of wall time, prompts included."""
        prompts = [self.draw(length) for _ in range(batch)]
        began = time.perf_counter()
        for ids in prompts:
            self.add(ids, tokens)
        self.finish()
        return batch * tokens / (time.perf_counter() - began)

    def experts(self) -> list[int]:
        """How many experts 64 rows of a prompt choose, by layer; few were routing not spread."""
        self.llm.apply_model(serving_rank.watch_routers)
        self.add(self.draw(min(self.behind, 512)), 1)
        self.finish()
        found: list[int] = self.llm.apply_model(serving_rank.chosen_experts)[0]
        return found

    def profile(self, times: int, run: Callable[[], Any]) -> dict[str, Any]:
        """Microseconds of a run, of so many, by op and by kernel; unknown kernels by name."""
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        wait = torch.cuda.synchronize if on_gpu else lambda: None
        wait()
        kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        with profile(activities=kinds) as recorded:
            for _ in range(times):
                run()
            wait()
        events = [e for e in recorded.events() if (e.device_type == DeviceType.CUDA) == on_gpu]
        events.sort(key=lambda event: event.time_range.start)
        ops: Counter[str] = Counter()
        kernels: Counter[tuple[str, str]] = Counter()
        calls: Counter[tuple[str, str]] = Counter()
        own: Counter[str] = Counter()
        own_of: Counter[tuple[str, str]] = Counter()
        spans = [(event.time_range.start, event.time_range.end) for event in events]
        names = ops_of([event.name for event in events])
        for event, op, share in zip(events, names, shares(spans), strict=True):
            us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            ops[op] += us / times
            own[op] += share / times
            kernels[op, event.name[:90]] += us / times
            own_of[op, event.name[:90]] += share / times
            calls[op, event.name[:90]] += 1
        known = ops.total() - ops["unknown"]
        return {
            "busy us": round(busy(spans) / times, 1),
            "from first to last us": round((max(e for _, e in spans) - spans[0][0]) / times, 1),
            "us": {name: round(us, 1) for name, us in ops.most_common()},
            "own us": {name: round(us, 1) for name, us in own.most_common()},
            "sum us": round(ops.total(), 1),
            "named share": round(known / max(ops.total(), 1e-9), 4),
            "kernels": [[op, kernel, round(us, 1), calls[op, kernel] / times,
                         round(own_of[op, kernel], 1)]
                        for (op, kernel), us in kernels.most_common(40)],
        }  # fmt: skip


# --- what runs ------------------------------------------------------------------------------------


def text(sizes: Sizes) -> str:
    return " x ".join(map(str, sizes))


def name_of(kind: str, sizes: Sizes) -> str:
    return f"{kind} {text(sizes)}"


def cases(asked: str, known: Mapping[str, tuple[Sizes, ...]]) -> list[Case]:
    """The cases that "decode,profile=1x8192" stands for, in its order; a bare kind is all of it.

    Raises SystemExit with a sentence for anything else.
    """
    found: list[Case] = []
    for part in asked.split(","):
        kind, _, sizes = part.partition("=")
        if kind not in known or not re.fullmatch(r"(\d+(x\d+)*)?", sizes):
            raise SystemExit(
                f"--cases takes {', '.join(known)}, each alone or as decode=1x8192; found {part}"
            )
        own = tuple(int(size) for size in sizes.split("x")) if sizes else ()
        found += [(kind, own)] if own else [(kind, usual) for usual in known[kind]]
    return found


def row(case: str, seconds: list[float], floor_us: float, tp: int) -> dict[str, Any]:
    """A timed case: median and spread in milliseconds, its floor, and the guess for all ranks."""
    median = statistics.median(seconds) * 1e3
    found = {"case": case, "ms": round(median, 4), "fastest ms": round(min(seconds) * 1e3, 4),
             "slowest ms": round(max(seconds) * 1e3, 4), "samples": len(seconds),
             "mean ms": round(statistics.mean(seconds) * 1e3, 4),
             "floor ms": round(floor_us / 1e3, 4)}  # fmt: skip
    if tp > 1 and case.startswith("decode"):
        found["ms with exchanges, estimated"] = round(median + EXCHANGES * EXCHANGE_US / 1e3, 3)
    return found


def measure(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """One variant: all of its cases, in this process; `save` is given what is known, each time."""
    config = serving_rank.tiny_config() if options.tiny else serving_rank.rank_config(
        options.model, options.tp, options.layers, options.weights
    )  # fmt: skip
    weights = "bf16" if options.tiny else options.weights
    plan = cases(options.cases, TINY if options.tiny else CASES)
    longest = 512 if options.tiny else max(sizes[-1 if kind != "throughput" else 1]
                                           for kind, sizes in plan) + BEHIND  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="inkling-serving-") as scratch:
        described = serving_rank.write(Path(scratch) / "rank", config)

        def floors(batch: int, context: int) -> dict[str, float]:
            return serving_rank.floors_us(
                described, weights, batch, context, options.bandwidth, options.drafts
            )

        if options.dry_run:
            totals = {name_of(kind, sizes): round(sum(floors(*sizes).values()) / 1e3, 3)
                      for kind, sizes in plan if kind == "decode"}  # fmt: skip
            return {"variant": options.variant, "drafts": options.drafts,
                    "plan": [name_of(*case) for case in plan], "floors ms": totals}  # fmt: skip
        own_process = options.own_process  # which no profiler here looks into
        if options.variant == "off-split":
            enable_splits()
        served = Served(Path(scratch) / "rank", options, longest)
        model = served.llm.apply_model(serving_rank.module_of)[0]
        if ("inkling_portable" in model) != (options.variant == "plugin"):
            raise SystemExit(f"{options.variant} was to be measured; {model} serves")
        compilation = served.llm.llm_engine.vllm_config.compilation_config
        rows: list[dict[str, Any]] = []
        found: dict[str, Any] = {
            "variant": options.variant, "asked": options.ask, "drafts": options.drafts,
            "serves": model, "start s": round(served.start_s, 1),
            "graphs": str(compilation.cudagraph_mode), "routers drawn": served.routers,
            "rows": rows,
        }  # fmt: skip
        print(json.dumps(found), flush=True)
        save(found)
        tp = 1 if options.tiny else options.tp
        for kind, sizes in plan:
            if kind in ("decode", "profile"):
                floor = floors(*sizes)
                done = served.decode(*sizes, profiled=kind == "profile" and not own_process)
                rows.append(row(f"decode {text(sizes)}", done.seconds, sum(floor.values()), tp))
                rows[-1] |= {"tokens a step": round(done.tokens, 2), "distinct": done.distinct}
                if done.profile:
                    done.profile["floors us"] = {n: round(us, 1) for n, us in floor.items()}
                    rows[-1]["profile"] = done.profile
            elif kind == "prefill":
                # Every weight once; what the rows compute is not in it.
                times = served.prefill(sizes[0], options.repeats)
                rows.append(
                    row(f"prefill {text(sizes)}", times, sum(floors(*sizes, 0).values()), tp)
                )
                if sizes[0] <= 8192 and not own_process:
                    rows[-1]["profile"] = served.profile(1, partial(served.prefill, sizes[0], 0))
                    rows[-1]["profile"]["floors us"] = {}
            else:
                rates, before = list[float](), list(rows)
                while len(rates) < options.repeats:
                    rates.append(served.throughput(*sizes))
                    rows[:] = [*before, {
                        "case": f"throughput {text(sizes)}", "samples": len(rates),
                        "tokens/s": round(statistics.median(rates), 1),
                        "lowest": round(min(rates), 1), "highest": round(max(rates), 1),
                    }]  # fmt: skip
                    save(found)  # each takes seconds, and a run may be cut
            print(json.dumps(rows[-1]), flush=True)
            save(found)
        found["experts that 64 rows choose"] = served.experts()
        return found


def about() -> dict[str, Any]:
    """Date, machine, versions, commit and command."""
    import torch

    if torch.cuda.is_available():
        return environment()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    return {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "gpu": "none",
            "torch": torch.__version__, "commit": commit.strip(),
            "command": " ".join(sys.orig_argv)}  # fmt: skip


def passes(options: argparse.Namespace) -> list[tuple[str, int]]:
    """(variant, drafts) of every process that `--all` starts."""
    found = [(variant, 0) for variant in VARIANTS]
    return found + [("plugin", k) for k in options.all_drafts] + [("off", k) for k in
                                                                  options.all_drafts]  # fmt: skip


def run_all(argv: list[str], options: argparse.Namespace) -> int:
    """Every variant in a process of its own; one that fails is named and the others still run."""
    failed = []
    for variant, drafts in passes(options):
        more = ["--variant", variant, "--drafts", str(drafts)]
        if drafts and options.cases == ",".join(CASES):
            more += ["--cases", "decode,throughput"]
        print(f"=== {variant}" + (f", {drafts} drafts" if drafts else ""), flush=True)
        own = [text for text in argv if text != "--all"]
        command = [sys.executable, "-m", "benchmarks.serving", *own, *more]
        if subprocess.run(command, check=False).returncode:
            failed.append(f"{variant}, {drafts} drafts")
    print("failed: " + "; ".join(failed) if failed else "all passes ended")
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant in turn")
    parser.add_argument("--variant", choices=VARIANTS, default="plugin")
    parser.add_argument("--cases", default=",".join(CASES), metavar="KIND[=SIZES],...")
    parser.add_argument("--repeats", type=int, default=5, help="of prefill and throughput")
    parser.add_argument("--ask", default="", metavar="OP=PROVIDER,...", help="of the plugin")
    parser.add_argument("--drafts", type=int, default=0, metavar="K")
    parser.add_argument("--all-drafts", type=counts, default="1,2,3,4,5,6,7,8", metavar="K,...")
    parser.add_argument("--model", default="Inkling")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int, help="the first ones only; all if left out")
    parser.add_argument("--weights", default="nvfp4", choices=("nvfp4", "bf16"))
    # One rank alone keeps the convolutions' inputs of all channels, eight times what it would.
    parser.add_argument("--cache", type=int, default=46, metavar="GIB", help="of keys and values")
    parser.add_argument("--memory", type=float, default=0.9, metavar="SHARE", help="of the GPU")
    parser.add_argument("--seqs", type=int, default=64, metavar="N", help="requests at once, most")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH["H200"], metavar="B/s")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument(
        "--own-process",
        action="store_true",
        help="the engine in a process of its own, as a server has it; no profiles",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    cases(options.cases, CASES)
    if options.own_process and options.variant == "off-split":
        parser.error("--own-process leaves out off-split, which is enabled in this process")
    if not (options.tiny or options.dry_run):
        need_gpus(parser, instead=", or try it with --tiny")
    if options.all:
        return run_all(argv, options)
    # Read when the engine is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(options.own_process))
    if options.own_process:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions, for apply_model
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["INKLING_PORTABLE"] = options.ask if options.variant == "plugin" else "off"
    report: dict[str, Any] = {"environment": None, "results": []}
    if options.out and options.out.exists():
        report = json.loads(options.out.read_text())
    before = list(report["results"])

    def save(found: dict[str, Any]) -> None:
        if options.out and not options.dry_run:
            report["environment"] = report["environment"] or about()
            report["results"] = [*before, found]
            options.out.write_text(json.dumps(report, indent=1) + "\n")

    found = measure(options, save)
    save(found)
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
