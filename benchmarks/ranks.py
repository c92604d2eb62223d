"""Time the end of a branch over the GPUs of this host: three exchanges beside one another.

    python -m benchmarks.ranks [--ranks 2] [--tokens 1,4,16,64,512] [--hidden 6144]
                               [--exchanges nccl,lamport,vllm] [--hand-over 8192]
                               [--prompts 512,2048] [--out benchmarks/results/ranks/h200-x2.json]

`lamport` is ours without barriers, `nccl` the portable one (reduce-scatter, convolution, gather,
add and norm), `vllm` the engine's `LamportRSConv` with its tables made beforehand. Microseconds of
one call, bfloat16, one partial sum, under graph replay of 60 calls; the slowest rank's median
counts. What is timed is compared first. Rows are of one request each, and those of `--prompts` of
one request together. The hand-over in `backends/triton/lamport.py` is to be set where `nccl`
becomes the faster, which `--hand-over` finds: memory for more rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import counts, environment, median_us, need_gpus
from inkling_portable.backends.cuda import incumbent
from inkling_portable.backends.triton import lamport
from inkling_portable.backends.triton.short_conv import conv_residual_norm as portable
from inkling_portable.commands._options import positive
from inkling_portable.registry import Facts
from inkling_portable.target import Target

CALLS, PAGE = 60, 16
EXCHANGES, WRITTEN = ("nccl", "lamport", "vllm"), ("norm", "sum", "state")
Call = Callable[[], Any]


def arguments(
    tokens: int, hidden: int, rank: int, ranks: int, prompt: bool = False
) -> dict[str, Any]:
    """Decode rows, each in its own page of the state, or the first rows of one prompt."""
    torch.manual_seed(tokens)  # the residual is the same on every rank
    share = hidden // ranks

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    residual, norm = draw(tokens, hidden), draw(hidden)
    every = torch.arange(tokens, device="cuda")
    slots = every if prompt else every * PAGE + 5
    taps = (every if prompt else slots)[:, None] - torch.arange(3, 0, -1, device="cuda")
    torch.manual_seed(1000 + rank)
    return {
        "partial": draw(tokens, hidden), "extra": None, "residual": residual,
        "conv_weight": draw(share, 4) * 0.3, "norm_weight": norm, "eps": 1e-6,
        "state": draw(tokens, PAGE, 1, share), "slots": slots,
        "sources": taps.clamp(min=-1) if prompt else -2 - taps,
    }  # fmt: skip


def peers(a: dict[str, Any], group: str, engine: Any, asked: list[str]) -> dict[str, Call]:
    """What is timed, by name."""
    found: dict[str, Call] = {}
    if "nccl" in asked:
        found["nccl"] = partial(portable, **a, group=group)
    if "lamport" in asked and a["partial"].shape[0] <= lamport.HAND_OVER:
        found["lamport"] = partial(lamport.conv_residual_norm, **a, group=group)
    if engine is not None:
        positions, pages = incumbent.as_positions(a["slots"], a["sources"], PAGE)
        rows = torch.arange(len(a["slots"]), dtype=torch.int32, device="cuda")
        width = a["state"].shape[3]
        found["vllm"] = partial(
            engine.rs_sconv_ag_add_norm, a["partial"], a["residual"], a["conv_weight"],
            a["norm_weight"], a["eps"], a["state"].transpose(1, 2), positions, pages, rows,
            a["slots"], 0, width, PAGE,
        )  # fmt: skip
    return found


def engines_exchange(rank: int, ranks: int, hidden: int, most: int) -> Any:
    """vLLM's exchange in a tensor-parallel group of its own."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.models.inkling.nvidia.ops.lamport import LamportRSConv

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, "env://", rank, "nccl")
        initialize_model_parallel(ranks)
        return LamportRSConv(hidden, 4, most)


def measure(
    rank: int, ranks: int, store: str, tokens: list[int], hidden: int, asked: list[str],
    prompts: list[int], hand_over: int, out: str, command: str,
) -> None:  # fmt: skip
    torch.cuda.set_device(rank)
    lamport.HAND_OVER = hand_over
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD.group_name

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, value)
        return found

    if "lamport" in asked:
        facts = Facts(tp=ranks, hidden=hidden, step_rows=max(tokens + prompts))
        if refusal := lamport.prepare(Target.detect(), facts, group, gather):
            raise SystemExit(f"lamport: {refusal}; leave it out of --exchanges")
    most = max(tokens, default=1)
    engine = engines_exchange(rank, ranks, hidden, most) if "vllm" in asked else None
    rows: list[dict[str, Any]] = []
    for count, prompt in [(n, False) for n in tokens] + [(n, True) for n in prompts]:
        a = arguments(count, hidden, rank, ranks, prompt)
        before = a["state"].clone()
        wanted = [*portable(**a, group=group), a["state"].clone()]
        row: dict[str, Any] = {"tokens": count, "prompt": prompt}
        # vLLM's is told of requests, which the rows of `arguments` have one each of.
        for name, call in peers(a, group, None if prompt else engine, asked).items():
            a["state"].copy_(before)
            for _ in range(3):
                found = call()
            torch.cuda.synchronize()
            for what, got, right in zip(WRITTEN, (*found, a["state"]), wanted, strict=True):
                apart = (got.float() - right.float()).abs().max() / right.float().abs().max()
                if not float(apart) < 2**-6:
                    raise SystemExit(f"{name} computes another {what}: {float(apart):.3g} apart")
            dist.barrier()
            calls = max(4, min(CALLS, 60_000 // count))
            row[name] = round(max(gather(median_us([call] * calls, least=1))), 2)
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
        if rank == 0 and out:  # after each row, as a run may be cut
            result = {**environment(), "command": command, "ranks": ranks, "hidden": hidden,
                      "us": rows}  # fmt: skip
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=positive, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--tokens", type=counts, default="1,4,16,64,128,256,512")
    parser.add_argument("--hidden", type=positive, default=6144)
    parser.add_argument("--exchanges", default=",".join(EXCHANGES))
    parser.add_argument("--prompts", type=counts, default="")
    parser.add_argument("--hand-over", type=positive, default=lamport.HAND_OVER)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    exchanges = asked.exchanges.split(",")
    if unknown := set(exchanges) - set(EXCHANGES):
        parser.error(f"--exchanges takes {', '.join(EXCHANGES)}; found {', '.join(unknown)}")
    if asked.ranks not in (2, 4, 8) or asked.hidden % (8 * asked.ranks):
        parser.error("--ranks takes 2, 4 or 8, and --hidden multiples of 8 for each of them; found "
                     f"{asked.ranks} and {asked.hidden}")  # fmt: skip
    if not asked.tokens + asked.prompts:
        parser.error("nothing is to be timed; give --tokens or --prompts some numbers of rows")
    need_gpus(parser, asked.ranks)
    command = " ".join(["python", "-m", "benchmarks.ranks", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            measure, (asked.ranks, f"{folder}/store", asked.tokens, asked.hidden, exchanges,
                      asked.prompts, asked.hand_over, asked.out, command),
            nprocs=asked.ranks,
        )  # fmt: skip


if __name__ == "__main__":
    main()
