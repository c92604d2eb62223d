"""Time the small ops of the Triton tier beside vLLM's in-tree kernels and cuBLAS, on one GPU.

    python -m benchmarks.small_ops [--rows 1,16,64] [--ops route,...] [--ranks large-tp8-global,...]
                                   [--out benchmarks/results/small_ops-h200.json] [--tune]

Cold: one CUDA graph holds many calls, each on its own copy of all arguments, together more than
four times the L2 cache; the figure is the median replay over the number of calls. Every timed
shape is first held to its contract. `--tune` times our launch settings against each other instead.
vLLM's kernels are called in place where it is importable; without it they are absent, not guessed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.small_ops_shapes import LAYERS, OPS, RANKS, Arguments, Rank, arguments
from benchmarks.timing import copies, counts, environment, median_us, need_gpus
from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import OFFERS as CUDA
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import dependent_launch
from inkling_portable.registry import contract

COPY_GBS = 4300
"""What an H200 moves in a device-to-device copy, reads and writes counted: the floor's rate."""
Call = Callable[[], Any]

# Our kernels are launched a second time with programmatic dependent launch under this name.
DEPENDENT = "triton+pdl"
OWN = {"rows": range(256, 1 << 20), "wgmma": range(2, 129)}
"""Our providers for NVIDIA's chips alone, and rows of the steps that they serve."""


def ours(op: str) -> Callable[..., Any]:
    """The Triton provider of an op."""
    return next(row for row in OFFERS if row.op == op and row.provider == "triton").load()


def tensor_bytes(values: Iterable[Any]) -> int:
    """Bytes of memory behind tensors; views of one buffer count once."""
    storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
                for v in values if isinstance(v, Tensor)}  # fmt: skip
    return sum(storages.values())


def moved_bytes(op: str, a: Any, outputs: list[Tensor]) -> int:
    """Bytes that a call must move at least: inputs read once, outputs written once.

    Of caches and tables only the rows that the step touches count.
    """
    rows = {"state", "k_state", "v_state", "k_cache", "v_cache", "table", "pages", "rows_of"}
    total = sum(v.numel() * v.element_size() for k, v in a.items()
                if isinstance(v, Tensor) and k not in rows)  # fmt: skip
    total += sum(x.numel() * x.element_size() for x in outputs)
    if op == "conv_residual_norm":
        p = a["partial"]
        requests = a.batch["kv_lens"].numel()
        total += (p.shape[0] + 3 * requests) * p.shape[1] * p.element_size()
    if op == "qkvr_prep":
        width = a["k_conv"].shape[0] * a["qkvr"].element_size()
        total += 2 * width * (2 * a["qkvr"].shape[0] + 3 * a.batch["kv_lens"].numel())
    if op.startswith("embed_norm"):
        total += a["ids"].numel() * a["table"].shape[1] * a["table"].element_size()
    if op == "dmel_embed_norm":
        table = a["table"]
        total += min(table.numel(), a["bins"].numel() * table.shape[1]) * table.element_size()
    return total


# --- peers ---------------------------------------------------------------------------------------


def vllm_module(name: str) -> Any:
    """A module of vLLM, or None where vLLM is not importable."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


OPS_OF_VLLM = "vllm.models.inkling.nvidia.ops"


def peers(op: str, a: Any) -> dict[str, Call]:
    """Other ways to compute `op` on these arguments; a name may stand for several launches."""
    found: dict[str, Call] = {}
    if op in ("skinny_linear", "gate_logits"):
        x, w = a["x"], a["weight"]
        if op == "skinny_linear":
            found["cublas"] = lambda: torch.nn.functional.linear(x, w)
        else:
            found["cublas"] = lambda: torch.mm(x, w.t(), out_dtype=torch.float32)
        ll = vllm_module("vllm.model_executor.kernels.linear.cute_dsl.ll_bf16")
        if ll is not None and ll.is_available() and x.shape[0] <= 16:
            dtype = x.dtype if op == "skinny_linear" else torch.float32
            found["ll_bf16"] = lambda: ll.ll_bf16_gemm(x, w, dtype)
        return found
    if op == "gated_sinks":
        found["parts"] = lambda: in_parts(**a)
    norm = vllm_module(f"{OPS_OF_VLLM}.norm")
    if norm is None:
        return found
    if op == "rms_norm":
        found["vllm"] = lambda: norm.add_rmsnorm(a["residual"], a["x"], a["weight"], a["eps"])
    if op == "embed_norm":
        found["vllm"] = lambda: norm.embed_rmsnorm(a["ids"], a["table"], a["weight"], a["eps"])
    if op == "embed_norm_chain":
        found["vllm"] = lambda: norm.embed_dual_rmsnorm_cat(
            a["hidden"], a["hidden_weight"], a["embed_weight"], a["eps"], input_ids=a["ids"],
            embed_table=a["table"], pre_norm_weight=a["backbone_weight"])  # fmt: skip
    if op == "concat_norms":
        found["vllm"] = lambda: norm.embed_dual_rmsnorm_cat(
            a["hidden"], a["hidden_weight"], a["embed_weight"], a["eps"], embeds=a["embeds"]
        )
    if op == "conv_residual_norm":
        found["vllm"] = _vllm_conv(a, norm)
    if op == "qkvr_prep":
        found["vllm"] = _vllm_prep(a)
    if op == "route":
        moe = vllm_module("vllm.models.inkling.nvidia.moe")
        if moe is not None:
            found["vllm"] = lambda: moe.inkling_gate_select(
                a["logits"], 258, 256, 6, 2, a["bias"], a["route_scale"], a["global_scale"]
            )
    if op == "swiglu":
        silu = importlib.import_module(f"{OPS_OF_VLLM}.silu_and_mul")
        found["vllm"] = lambda: silu.silu_and_mul_triton(a["gate_up"])
    towers = vllm_module(f"{OPS_OF_VLLM}.mm_towers")
    if op == "norm_gelu" and towers is not None:
        found["vllm"] = lambda: towers.rmsnorm_gelu(a["x"], a["weight"], a["eps"])
    return found


def in_parts(x: Tensor, gate: Tensor, bias: Tensor, global_scale: Tensor, top_k: int,
             route_scale: float, w13: Tensor, w2: Tensor) -> Any:  # fmt: skip
    """The three Triton ops that gated_sinks stands for."""
    logits = ours("gate_logits")(x, gate)
    weights, ids, gammas = ours("route")(logits, bias, global_scale, top_k, route_scale)
    return weights, ids, ours("sink_experts")(x, w13, w2, gammas)


def first_rows(a: Arguments) -> Tensor:
    """First row of each row's request, as vLLM's kernels take it; made once per step there."""
    return a.batch["q_starts"][a.batch["requests"].long()].contiguous()


def _vllm_conv(a: Arguments, norm: Any) -> Call:
    """The incumbent on one rank: convolution, then residual add with norm; the sum of two partials
    that precedes them is left out.
    """
    sconv = importlib.import_module(f"{OPS_OF_VLLM}.sconv")
    state, starts = a["state"], first_rows(a)
    base, offset = state._base, state.storage_offset()

    def call() -> Any:
        y = sconv.fused_sconv(
            a["partial"],
            a["conv_weight"],
            base,
            a.batch["positions"],
            a.batch["pages"],
            a.batch["requests"],
            a["slots"],
            starts,
            offset,
            state.shape[3],
            4,
        )
        return norm.add_rmsnorm(a["residual"], y, a["norm_weight"], a["eps"])

    return call


def _vllm_prep(a: Arguments) -> Call:
    prep = importlib.import_module(f"{OPS_OF_VLLM}.qkvr_prep")
    starts, kv = first_rows(a), a["k_cache"].shape[2]
    heads = (a["qkvr"].shape[1] - 2 * kv * 128) // 144
    gains = None
    if a["log_floor"] > 0:
        steps = (a["positions"] + 1).float() / a["log_floor"]
        gains = 1 + a["log_alpha"] * torch.log(steps.clamp_min(1))
    # vLLM's cache keeps heads before tokens, which is what our views are transposed from.
    return lambda: prep.fused_qkvr_prep(
        a["qkvr"], a["k_conv"], a["v_conv"], a["q_norm"], a["k_norm"], a["rel_proj"], a["eps"],
        heads, kv, 128, 16, a["k_state"]._base, a["k_cache"], a["v_cache"], a["positions"],
        a.batch["pages"], a.batch["requests"], a["conv_slots"], starts, a["kv_slots"], 0, 128, 4,
        gains,
    )  # fmt: skip


# --- timing --------------------------------------------------------------------------------------


def microseconds(calls: list[Call], replays: int = 15) -> float:
    """Median time of one call. Two run beforehand, to compile and let libraries choose."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    return median_us(calls, replays)


def copies_of(op: str, rows: int, rank: Rank, layer: str, decode: bool) -> list[dict[str, Any]]:
    """Enough private argument sets to leave the L2 cache cold."""
    first = arguments(op, rows, rank, "cuda", decode, layer)
    count = copies(tensor_bytes(first.values()))
    return [first] + [arguments(op, rows, rank, "cuda", decode, layer) for _ in range(count - 1)]


def bound(function: Callable[..., Any], sets: list[dict[str, Any]]) -> list[Call]:
    return [lambda a=a: function(**a) for a in sets]  # type: ignore[misc]


def measure(op: str, rows: int, rank: Rank, layer: str, decode: bool) -> dict[str, Any]:
    """One row of the table: times by provider, byte floor and contract verdict."""
    sets = copies_of(op, rows, rank, layer, decode)
    function = ours(op)
    faults = disagreements(contract(op), function, sets[0])
    outputs = function(**sets[0])
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,))
               if isinstance(x, Tensor)]  # fmt: skip
    moved = moved_bytes(op, sets[0], outputs)
    times = {}
    # Of more rows it is the library's, or the parts', that the engine then has.
    if rows <= {"skinny_linear": 16, "gated_sinks": 1}.get(op, rows):
        with dependent_launch(False):
            times["triton"] = microseconds(bound(function, sets))
        try:
            with dependent_launch():
                times[DEPENDENT] = microseconds(bound(function, sets))
        except Exception as error:
            print(f"  {op}: with dependent launch: {error}", file=sys.stderr)
    for offer in (row for row in CUDA if row.op == op and rows in OWN.get(row.provider, ())):
        faults = [*faults, *disagreements(contract(op), offer.load(), sets[0])]
        times[offer.provider] = microseconds(bound(offer.load(), sets))
    for name in peers(op, sets[0]):
        try:
            times[name] = microseconds([peers(op, a)[name] for a in sets])
        except Exception as error:
            print(f"  {op}: peer {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return {
        "op": op, "rows": rows, "rank": rank.name, "layer": layer if op == "skinny_linear" else "",
        "decode": decode, "copies": len(sets), "bytes": moved,
        "floor_us": moved / COPY_GBS / 1e3, "us": times, "contract": faults or "holds",
    }  # fmt: skip


# --- launch settings -----------------------------------------------------------------------------


def tune(rows_list: list[int], rank: Rank) -> list[dict[str, Any]]:
    """Times of alternative launch settings of the products, best first."""
    skinny = importlib.import_module("inkling_portable.backends.triton.skinny_linear")
    kept = skinny.row_tiling, skinny.tile_tiling
    results = []
    jobs = [("gate_logits", ""), *(("skinny_linear", layer) for layer in LAYERS)]
    for (op, layer), rows in ((job, rows) for job in jobs for rows in rows_list):
        sets = copies_of(op, rows, rank, layer or "qkvr", True)
        n, k = sets[0]["weight"].shape
        table = []
        if rows == 1:
            choices: list[Any] = [(e, b, w) for e in (1, 2, 4, 8) for b in (512, 1024, 2048)
                                  for w in (4, 8) if b <= max(512, k)]  # fmt: skip
        else:
            base = kept[1](rows, n, k, False)
            parts = sorted({1, 2, 4, 8, 16, base[3]})
            choices = [(base[0], bn, bk, p, s) for bn in (16, 32, 64) for bk in (64, 128, 256)
                       for p in parts for s in (3, 5) if k // p >= bk]  # fmt: skip
        for choice in choices:
            if rows == 1:
                skinny.row_tiling = lambda *_, c=choice: c
            else:
                skinny.tile_tiling = lambda *_, c=choice: c
            try:
                table.append((microseconds(bound(ours(op), sets), 7), choice))
            except Exception as error:
                print(f"  {op} {choice}: {type(error).__name__}", file=sys.stderr)
        skinny.row_tiling, skinny.tile_tiling = kept
        default = microseconds(bound(ours(op), sets), 7)
        table.sort()
        results.append({"op": op, "layer": layer, "rows": rows, "rank": rank.name,
                        "default_us": default, "best": table[:5]})  # fmt: skip
        print(json.dumps(results[-1]), flush=True)
        del sets
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=counts, default="1,4,16,64")
    parser.add_argument("--prefill", type=counts, default="4096",
                        help="token counts of single long requests")  # fmt: skip
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--ranks", default="large-tp8-global")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    chosen = parser.parse_args()
    need_gpus(parser)
    ranks = [RANKS[name] for name in chosen.ranks.split(",")]
    started, results = time.perf_counter(), []
    if chosen.tune:
        for rank in ranks:
            results += tune([n for n in chosen.rows if n <= 64], rank)
    else:
        shapes = [(n, True) for n in chosen.rows] + [(n, False) for n in chosen.prefill]
        for rank in ranks:
            for op in chosen.ops.split(","):
                layers = LAYERS if op == "skinny_linear" else ("qkvr",)
                for layer, (rows, decode) in ((la, s) for la in layers for s in shapes):
                    if op == "skinny_linear" and rows > 128:
                        continue
                    row = measure(op, rows, rank, layer, decode)
                    results.append(row)
                    times = "  ".join(f"{k} {v:.2f}" for k, v in row["us"].items())
                    print(f"{rank.name} {op} {row['layer']} rows {rows}: {times}  floor "
                          f"{row['floor_us']:.2f}  {row['contract']}", flush=True)  # fmt: skip
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": environment(), "cold": True, "results": results}
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
