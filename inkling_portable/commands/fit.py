"""Say whether a model fits a machine, with how many requests, and the `vllm serve` line for it.

Weights and cache pages are exact and follow vLLM's planner; activations, CUDA graphs and the
driver's share are estimates. Answers for any described machine without importing torch.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from inkling_portable.commands._options import OptionParser
from inkling_portable.commands.fit_cache import (
    CachePlan,
    Demand,
    held_blocks,
    layer_caches,
    plan,
    reserved_blocks,
)
from inkling_portable.commands.fit_memory import (
    CONTEXT_BYTES,
    GIB,
    Load,
    activation_bytes,
    graph_bytes,
    weights_per_gpu,
)
from inkling_portable.commands.released_configs import released
from inkling_portable.model.config import ConfigError, InklingConfig, parse
from inkling_portable.registry import MODELS, SelectionError, choose, reference_warnings
from inkling_portable.target import CHIPS, Target, TargetError

REPOSITORIES = {
    ("large", "bf16"): "thinkingmachines/Inkling",
    ("large", "nvfp4"): "thinkingmachines/Inkling-NVFP4",
    ("large", "mxfp4"): "lightseekorg/Inkling-MXFP4",
    ("large", "fp8"): "RedHatAI/Inkling-FP8-dynamic",
    ("small", "bf16"): "thinkingmachines/Inkling-Small",
    ("small", "nvfp4"): "thinkingmachines/Inkling-Small-NVFP4",
    ("small", "mxfp4"): "EmbeddedLLM/Inkling-Small-MXFP4",
    ("small", "fp8"): "RedHatAI/Inkling-Small-FP8-dynamic",
}
WEIGHTS = ("nvfp4", "mxfp4", "fp8", "bf16")
SMALLER_WEIGHTS = {"rocm": ("mxfp4", "fp8"), "cuda": ("nvfp4", "mxfp4", "fp8")}
"""What a vendor's kernels serve instead of bfloat16."""
RELEASED = {"large": "Inkling", "small": "Inkling-Small"}
PARALLEL_SIZES = (1, 2, 4, 8)
DRIVER_SHARE = {"cuda": 0.015}
"""Part of a chip's nominal memory that its driver keeps; ROCm reports nearly all of it as free."""
DEFAULT_REQUESTS = 256
KV_BYTES = {"auto": 2, "fp8": 1}
SHORT_BATCH = 2048
MOST_BATCHED = 1 << 20


class FitError(ValueError):
    """A question that has no answer; one sentence with the remedy."""


@dataclass(frozen=True)
class Question:
    """What is to be served on what. Memory in bytes per GPU, the rest as the options say."""

    model: str
    weights: str
    target: Target
    memory: int
    tp: int
    context: int
    concurrency: int | None
    mtp: int
    kv_dtype: str
    block_size: int
    batch_tokens: int
    utilization: float

    @property
    def config(self) -> InklingConfig:
        return parse(released(RELEASED[self.model]))

    @property
    def requests(self) -> int:
        """`--max-num-seqs`."""
        return self.concurrency or min(DEFAULT_REQUESTS, self.batch_tokens)


@dataclass(frozen=True)
class Fit:
    """The answer, in bytes per GPU."""

    question: Question
    weights: dict[str, int]
    activations: int
    graphs: int
    plan: CachePlan

    @property
    def usable(self) -> int:
        return int(self.question.memory * self.question.utilization)

    @property
    def cache(self) -> int:
        """What is left for the cache; negative when not even the weights fit."""
        fixed = sum(self.weights.values()) + self.activations + self.graphs + CONTEXT_BYTES
        return self.usable - fixed

    @cached_property
    def demand(self) -> Demand:
        q = self.question
        # Steps are scheduled ahead on accelerators; vLLM switches that off on a CPU.
        return Demand(q.context, q.batch_tokens, 1 if q.target.vendor == "cpu" else 2, q.mtp)

    @property
    def needed(self) -> int:
        """Cache bytes for the requests that were asked for, or for one."""
        return self.plan.memory_for(self.question.concurrency or 1, self.demand)

    @property
    def missing(self) -> int:
        return max(0, self.needed - self.cache)

    @property
    def blocks(self) -> int:
        return self.plan.blocks(self.cache)

    @property
    def engine_concurrency(self) -> float:
        return self.plan.engine_concurrency(self.cache, self.demand)

    @property
    def resident(self) -> int:
        return self.plan.resident(self.cache, self.demand)

    @property
    def conv_share(self) -> float:
        """Part of one request's reserve that convolution groups take."""
        conv = [g for g in self.plan.groups if g.cache.kind == "conv"]
        reserve = sum(reserved_blocks(g.cache, self.demand) for g in conv)
        return reserve / self.plan.reserve(self.demand)


def answer(question: Question) -> Fit:
    """Plan one question. Raises ConfigError where the model does not split over the GPUs."""
    config = question.config
    config.text.check_tensor_parallel(question.tp)
    load = Load(question.batch_tokens, question.requests, question.mtp)
    caches = layer_caches(
        config,
        tp=question.tp,
        block=question.block_size,
        kv_bytes=KV_BYTES[question.kv_dtype],
        mtp=question.mtp,
    )
    on_cpu = question.target.vendor == "cpu"
    return Fit(
        question=question,
        weights=weights_per_gpu(
            config, question.weights, question.tp, question.mtp, expert_padding(question)
        ),
        activations=activation_bytes(config, question.tp, load),
        graphs=0 if on_cpu else graph_bytes(config, question.tp, load),
        plan=plan(caches),
    )


def expert_padding(question: Question) -> int:
    """AITER rounds the expert width of a GPU up to a multiple of 256."""
    return 256 if question.weights == "mxfp4" and question.target.arch == "gfx950" else 1


# --- options --------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = OptionParser(prog="inkling-portable fit", description=__doc__)
    p.add_argument("--model", choices=sorted(RELEASED), default="large")
    p.add_argument("--weights", choices=WEIGHTS, default="bf16")
    p.add_argument("--target", metavar="T", help="as in explain; this machine if left out")
    p.add_argument("--memory-gib", type=float, metavar="F", help="memory of one GPU, if not T's")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size")
    p.add_argument("--context", type=int, metavar="N", help="tokens; all that the model can")
    p.add_argument("--concurrency", type=int, metavar="N", help="requests of that length at once")
    p.add_argument("--mtp", type=int, default=0, metavar="K", help="draft depths")
    p.add_argument("--kv-dtype", choices=sorted(KV_BYTES), default="auto")
    p.add_argument("--block-size", type=int, default=16, metavar="N")
    p.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="vLLM's default for T if left out"
    )
    p.add_argument("--gpu-memory-utilization", type=float, default=0.92, metavar="F")
    p.add_argument("--json", action="store_true", help="machine-readable output")
    return p


def question_of(options: argparse.Namespace) -> Question:
    """Check the options. Raises FitError, TargetError or ConfigError, each one sentence."""
    target = Target.parse(options.target) if options.target else Target.detect()
    memory = _memory(target, options)
    batch = options.max_num_batched_tokens
    question = Question(
        model=options.model,
        weights=options.weights,
        target=target,
        memory=memory,
        tp=options.tp,
        context=options.context or 0,
        concurrency=options.concurrency,
        mtp=options.mtp,
        kv_dtype=options.kv_dtype,
        block_size=options.block_size,
        batch_tokens=default_batch(memory) if batch is None else batch,
        utilization=options.gpu_memory_utilization,
    )
    config = question.config
    longest = config.text.max_positions or 0
    depths = config.mtp.num_depths if config.mtp else 0
    if options.context is None:
        question = replace(question, context=longest)
    limits = [
        ("--context", question.context, 1, longest),
        ("--mtp", question.mtp, 0, depths),
        ("--block-size", question.block_size, 1, question.context),
        ("--max-num-batched-tokens", question.batch_tokens, 1, MOST_BATCHED),
    ]
    if options.concurrency is not None:
        # vLLM refuses a batch with less than one token for each request.
        limits.append(("--concurrency", options.concurrency, 1, question.batch_tokens))
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise FitError(f"{name} needs a number from {low} to {high}; found {value}")
    if not 0 < question.utilization <= 1:
        raise FitError(
            f"--gpu-memory-utilization needs a part of 1, above 0; found {question.utilization}"
        )
    config.text.check_tensor_parallel(question.tp)
    return question


def _memory(target: Target, options: argparse.Namespace) -> int:
    """Bytes that one GPU offers to programs."""
    if options.memory_gib is not None:
        if not 0 < options.memory_gib < math.inf:
            raise FitError(f"--memory-gib needs a size above 0; found {options.memory_gib:g}")
        return int(options.memory_gib * GIB)
    if not target.memory_gib:
        names = ", ".join(chip.name for chip in CHIPS)
        raise FitError(
            f"the memory of {target.key} is not known; give --memory-gib or one of the targets "
            f"{names}"
        )
    # A machine that was looked at reports what its driver left.
    share = DRIVER_SHARE.get(target.vendor, 0.0) if options.target else 0.0
    return int(target.memory_gib * (1 - share) * GIB)


def default_batch(memory: int) -> int:
    """vLLM's `--max-num-batched-tokens` for serving on a GPU of this size."""
    if memory >= 160 * GIB:
        return 16384
    return 8192 if memory >= 70 * GIB else 2048


# --- what else would do ---------------------------------------------------------------------------


def remedies(fit: Fit) -> list[str]:
    """Single changes of the question that would fit, the least costly first."""
    return [name for name, question in _changes(fit.question) if not answer(question).missing][:3]


def _changes(q: Question) -> Iterator[tuple[str, Question]]:
    if q.batch_tokens > SHORT_BATCH and q.requests <= SHORT_BATCH:
        change = replace(q, batch_tokens=SHORT_BATCH)
        yield f"--max-num-batched-tokens {SHORT_BATCH}", change
    for tp in PARALLEL_SIZES:
        if tp > q.tp:
            yield f"--tp {tp}", replace(q, tp=tp)
    for context in (1 << 18, 1 << 17, 1 << 15):
        if context < q.context:
            yield f"--context {context}", replace(q, context=context)
    for weights in SMALLER_WEIGHTS.get(q.target.vendor, ()):
        if q.weights == "bf16":
            yield f"--weights {weights}", replace(q, weights=weights)


def serve_line(q: Question) -> list[str]:
    """The words of the `vllm serve` command."""
    words = ["vllm", "serve", REPOSITORIES[q.model, q.weights]]
    words += ["--tensor-parallel-size", str(q.tp), "--max-model-len", str(q.context)]
    words += ["--max-num-seqs", str(q.requests), "--max-num-batched-tokens", str(q.batch_tokens)]
    words += ["--block-size", str(q.block_size)]
    words += ["--gpu-memory-utilization", f"{q.utilization:g}"]
    if q.kv_dtype != "auto":
        words += ["--kv-cache-dtype", q.kv_dtype]
    if q.mtp:
        config = {"method": "mtp", "num_speculative_tokens": q.mtp}
        words += ["--speculative-config", json.dumps(config)]
    words += ["--tokenizer-mode", "inkling", "--reasoning-parser", "inkling"]
    return [*words, "--tool-call-parser", "inkling", "--enable-auto-tool-choice"]


def notes(fit: Fit) -> list[str]:
    """What an operator should know about this answer."""
    q = fit.question
    found = []
    if fit.conv_share > 0.5 and q.batch_tokens > SHORT_BATCH:
        short = answer(
            replace(q, batch_tokens=SHORT_BATCH, concurrency=min(q.requests, SHORT_BATCH))
        )
        found.append(
            f"convolution groups take {fit.conv_share:.0%} of the blocks that vLLM reserves for a "
            f"request, since the reserve grows with the batch; --max-num-batched-tokens "
            f"{SHORT_BATCH} gives {short.engine_concurrency:.2f} by vLLM's count instead of "
            f"{fit.engine_concurrency:.2f}"
        )
    empty = _padding(fit.plan)
    if empty > 0.1:
        found.append(
            f"{empty:.0%} of every block stays empty, because {q.mtp} draft depths do not divide "
            "into groups of equal length"
            if q.mtp
            else f"{empty:.0%} of every block stays empty"
        )
    width = q.config.text.expert_width // q.tp
    if width % expert_padding(q):
        padded = -(-width // 256) * 256
        found.append(f"AITER pads the expert width {width} of each GPU to {padded}; counted above")
    return found + slow_ops(q)


def slow_ops(q: Question) -> list[str]:
    """Sentences on what would be served by the slow reference there, as `explain` has them."""
    target = q.target.with_usual_libraries()
    facts = replace(MODELS[q.model], weights=q.weights, tp=q.tp, kv_dtype=q.kv_dtype)
    try:
        return reference_warnings(target, choose(target, facts))
    except SelectionError as error:
        return [str(error)]


def _padding(cache_plan: CachePlan) -> float:
    """Part of the pool's pages that belongs to no layer, over all groups."""
    longest = max(group.layers for group in cache_plan.groups)
    return 1 - sum(g.layers for g in cache_plan.groups) / (longest * len(cache_plan.groups))


# --- output ---------------------------------------------------------------------------------------


def verdict(fit: Fit) -> str:
    """One sentence."""
    q = fit.question
    wanted = f"{q.concurrency} requests" if q.concurrency else "one request"
    if not fit.missing:
        return f"yes: {wanted} of {q.context:,} tokens fit" + ("" if q.concurrency else "s")
    short = f"{fit.missing / GIB:.1f} GiB per GPU are missing"
    others = remedies(fit)
    remedy = f"; would fit with {' or '.join(others)}" if others else "; use more or larger GPUs"
    if fit.cache <= 0:
        return f"no: {short}, {-fit.cache / GIB:.1f} of them before any cache{remedy}"
    return f"no: {short} for {wanted} of {q.context:,} tokens{remedy}"


def report(fit: Fit) -> dict[str, Any]:
    """The answer as plain data; sizes in bytes per GPU."""
    q = fit.question
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for group in fit.plan.groups:
        entry = groups.setdefault(
            (group.cache.kind, group.cache.block),
            {
                "kind": group.cache.kind,
                "tokens_per_block": group.cache.block,
                "groups": 0,
                "layers": 0,
                "reserved_blocks": 0,
                "held_blocks": 0,
            },
        )
        entry["groups"] += 1
        entry["layers"] += group.layers
        entry["reserved_blocks"] += reserved_blocks(group.cache, fit.demand)
        entry["held_blocks"] += held_blocks(group.cache, fit.demand)
    return {
        "fits": not fit.missing,
        "verdict": verdict(fit),
        "model": q.model,
        "weights": q.weights,
        "target": str(q.target),
        "tp": q.tp,
        "context": q.context,
        "memory": q.memory,
        "usable": fit.usable,
        "weight_bytes": fit.weights,
        "activation_bytes": fit.activations,
        "graph_bytes": fit.graphs,
        "context_bytes": CONTEXT_BYTES,
        "cache_bytes": fit.cache,
        "missing_bytes": fit.missing,
        "page_bytes": fit.plan.page,
        "block_bytes": fit.plan.block_bytes,
        "blocks": fit.blocks,
        "groups": list(groups.values()),
        "reserved_blocks": fit.plan.reserve(fit.demand),
        "held_blocks": fit.plan.held(fit.demand),
        "engine_concurrency": round(fit.engine_concurrency, 4),
        "resident_requests": fit.resident,
        "serve": serve_line(q),
        "notes": notes(fit),
    }


def lines(data: dict[str, Any], fit: Fit) -> list[str]:
    """The answer as a page of text."""
    q = fit.question

    def size(name: str, value: int) -> str:
        return f"  {name:38} {value / GIB:8.2f}"

    shown = [
        f"{RELEASED[q.model]}, {q.weights} weights, on {q.tp} x {q.target.key}",
        "",
        f"memory of one GPU{'GiB':>32}",
        size(f"usable: {q.utilization:g} of {q.memory / GIB:.1f}", data["usable"]),
    ]
    shown += [size(name, value) for name, value in data["weight_bytes"].items()]
    shown += [
        size(f"activations of {q.batch_tokens:,} tokens (estimate)", data["activation_bytes"]),
        size("graphs (estimate)", data["graph_bytes"]),
        size("driver, communication (estimate)", data["context_bytes"]),
        size("left for the cache", data["cache_bytes"]),
        "",
        f"cache: pages of {data['page_bytes'] / 1024:g} KiB, blocks of "
        f"{data['block_bytes'] / 1024:g} KiB, {data['blocks']:,} blocks",
        "  caches      layers  groups  tokens/block  blocks of a request: reserved      held",
    ]
    shown += [
        f"  {g['kind']:10} {g['layers']:7} {g['groups']:7} {g['tokens_per_block']:13}"
        f"{g['reserved_blocks']:31,}{g['held_blocks']:10,}"
        for g in data["groups"]
    ]
    shown += [
        f"  {'all':10} {'':29}{data['reserved_blocks']:31,}{data['held_blocks']:10,}",
        f"requests of {q.context:,} tokens: {data['engine_concurrency']:.2f} by vLLM's count "
        f"(reserved), {data['resident_requests']:,} decoding at once (held)",
        "",
        data["verdict"],
        *(f"note: {note}" for note in data["notes"]),
    ]
    return [*shown, "", shlex.join(data["serve"])] if data["fits"] else shown


def main(argv: list[str]) -> int:
    """Returns 0 if it fits, 1 if not, 2 for a question that has no answer."""
    try:
        options = parser().parse_args(argv)
        fit = answer(question_of(options))
    except (FitError, TargetError, ConfigError) as error:
        print(f"inkling-portable fit: {error}", file=sys.stderr)
        return 2
    data = report(fit)
    print(json.dumps(data, indent=1) if options.json else "\n".join(lines(data, fit)))
    return 0 if data["fits"] else 1
