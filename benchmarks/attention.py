"""Time relative attention beside vLLM's kernels on one GPU, each shape checked first.

    python -m benchmarks.attention [--cases decode,verify] [--peers "fa4 x1,amd"] [--out FILE.json]
    python -m benchmarks.attention --sweep --seconds 300 [--cases "prefill"] [--out FILE.json]

`--cases` takes parts of names or kinds (see attention_cases.py). With `--processes N` so many
processes compile the peers' kernels side by side, peer after peer, and begin no other once
`--seconds` are over; then they time their shapes one after the other, each result written at once.
`--tiles mi300x,mi355x` also times our kernels with the tiles that those chips would get.
The sweep tries other tiles than the tuning function's and prints the best of each shape. Our
kernels are compiled beforehand by many processes, for the chip that `--target` names (default
h200), into Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_cases import CASES, Case, arguments, faults
from benchmarks.attention_peers import PEERS, peers
from benchmarks.timing import copies, environment, median_us, need_gpus
from ci.cross_compile import compile_job, job, recorded
from inkling_portable.backends.triton import rel_attention as kernel
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton.rel_attention_tuning import Plan, Split, Whole
from inkling_portable.target import Target

COPY_GBS = 4300  # device-to-device copy of one H200, reads and writes counted: what floors use


def own_plan(case: Case, target: Target) -> Plan:
    """The plan that the tuning function gives this call."""
    call = arguments(case, "meta")
    shape = kernel.describe(
        call["q"], call["k_cache"], call["v_cache"], call["rel"], call["kv_lens"], call["max_q"],
        call["max_kv"], call["window"],
    )  # fmt: skip
    return tuning.plan(target, shape)


def with_pdl(plan: Plan, pdl: bool) -> Plan:
    few = replace(plan.few, pdl=pdl) if plan.few else None
    return Plan(few, replace(plan.many, pdl=pdl) if plan.many else None, plan.few_tokens)


def candidates(case: Case, target: Target) -> list[Plan]:
    """Other plans worth a try, the likeliest first."""
    units = target.compute_units
    packed = case.fresh * case.heads // case.kv_heads
    found: list[Plan] = []

    def split(m: int, n: int, warps: int, stages: int, tma: bool = False) -> None:
        for programs in (units, 2 * units, 3 * units, 4 * units):
            for least in (1, 2, 4):
                tiles = Split(m, n, warps, stages, programs, least, tma=tma, pdl=True)
                found.append(Plan(tiles, None, case.fresh))

    def whole(*choices: tuple[int, int, int, int, bool]) -> None:
        found.extend(Plan(None, Whole(*c, pdl=True)) for c in choices)

    if case.kind == "decode" or (case.kind == "local" and packed <= 16):
        for n, warps, stages in ((64, 4, 3), (64, 4, 4), (32, 4, 4), (128, 4, 2), (128, 8, 3),
                                 (64, 8, 3), (32, 2, 4), (128, 4, 1), (64, 4, 2)):  # fmt: skip
            split(16, n, warps, stages)
    if case.kind == "local":
        m = max(16, tuning.power_of_two(packed))
        whole(*((m, n, w, s, False) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3, 4)))
        whole(*((m, n, 4, s, True) for n in (64, 128) for s in (2, 3)))
    if case.kind == "verify" or case.name == "global 64 on 126K":
        for choice in ((128, 64, 8, 3, True), (128, 32, 8, 4, False), (64, 64, 4, 3, True),
                       (64, 64, 4, 2, True), (128, 32, 8, 4, True), (64, 32, 4, 4, False),
                       (128, 128, 8, 2, True), (32, 64, 4, 3, False)):  # fmt: skip
            split(*choice)
    if "prefill" in case.kind:
        whole(*((m, n, w, s, True) for m, n, w, s in (
            (128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 128, 8, 2),
            (64, 128, 4, 2), (128, 32, 8, 4), (64, 32, 4, 4), (64, 128, 8, 2), (128, 64, 4, 3),
            (32, 64, 4, 3),
        )))  # fmt: skip
        whole((64, 64, 4, 2, False), (128, 64, 8, 3, False))
    return found


def compile_beforehand(work: Iterable[tuple[Case, Plan]], arch: str) -> None:
    """Fill Triton's cache with many processes; must run before the GPU is touched."""
    jobs = {}
    for case, plan in work:
        with recorded() as launches:
            try:
                kernel.attend(plan, **arguments(case, "meta"))
            except ValueError as error:
                print(f"{case.name}: {error}", file=sys.stderr)
        jobs.update({job(launch, arch): case.name for launch in launches})
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count() or 4, mp_context=get_context("fork")) as pool:
        futures = {pool.submit(compile_job, one): name for one, name in jobs.items()}
        for future, name in futures.items():
            if future.exception() is not None:
                print(f"{name}: does not compile: {str(future.exception())[-200:]}",
                      file=sys.stderr)  # fmt: skip
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def time_plan(plan: Plan, sets: list[dict[str, Any]]) -> float:
    kernel.attend(plan, **sets[0])
    torch.cuda.synchronize()
    return median_us([lambda call=call: kernel.attend(plan, **call) for call in sets])  # type: ignore[misc]


def data_sets(case: Case) -> list[dict[str, Any]]:
    size = case.stored_bytes + len(case.lengths) * case.fresh * case.heads * case.extent * 2
    return [arguments(case, "cuda", seed) for seed in range(copies(size))]


def others(call: dict[str, Any]) -> dict[str, Callable[..., None]]:
    """Our other providers that serve this call; none where vLLM or this Triton lacks them."""
    found: dict[str, Callable[..., None]] = {}
    try:
        from inkling_portable.backends.cuda import rel_attention_hopper as hopper

        if hopper.serves(**call):
            found["gluon"] = hopper.rel_attention
        from inkling_portable.backends.cuda import rel_attention_fa4 as fa4
        from inkling_portable.backends.cuda.incumbent import flash_attention

        if fa4.long_prefill(**call) and flash_attention():
            found["fa4"] = fa4.composed
    except ImportError as error:
        print(f"a provider is absent: {error}", file=sys.stderr)
    return found


def suits(peer: str, case: Case) -> bool:
    """Keys of a prefill are not split."""
    return "prefill" not in case.kind or peer in ("fa4 x1", "amd", "fa4 no bias")


def measure(
    case: Case, target: Target, wanted: list[str], tiles: Iterable[str] = ()
) -> dict[str, Any]:
    """One row: whether our result is right, and times of ours and of the `wanted` peers, us."""
    sets = data_sets(case)
    plan = own_plan(case, target)
    sets[0]["out"].fill_(float("nan"))
    kernel.attend(plan, **sets[0])
    wrong = faults(case, sets[0])
    times = {"ours": time_plan(plan, sets), "ours, no PDL": time_plan(with_pdl(plan, False), sets)}
    peer_faults = {}
    for chip in tiles:
        name, other = f"ours, tiles of {chip}", own_plan(case, Target.parse(chip))
        sets[0]["out"].fill_(float("nan"))
        kernel.attend(other, **sets[0])
        if reasons := faults(case, sets[0]):
            peer_faults[name] = reasons
        times[name] = time_plan(other, sets)
    for name, function in others(sets[0]).items():
        sets[0]["out"].fill_(float("nan"))
        function(**sets[0])
        if reasons := faults(case, sets[0]):
            peer_faults[name] = reasons
        calls = [lambda call=call, function=function: function(**call) for call in sets]  # type: ignore[misc]
        times[name] = median_us(calls, replays=7, least=4)
    for name, run in peers(case.window, case.extent, wanted).items():
        if not suits(name, case):
            continue
        try:
            sets[0]["out"].fill_(float("nan"))
            run(sets[0])
            torch.cuda.synchronize()
            if name != "fa4 no bias" and (reasons := faults(case, sets[0])):
                peer_faults[name] = reasons
            calls = [lambda call=call, run=run: run(call) for call in sets]  # type: ignore[misc]
            times[name] = median_us(calls, replays=7, least=4)
        except Exception as error:
            print(f"{case.name}: peer {name}: {type(error).__name__}: {str(error)[:300]}",
                  file=sys.stderr)  # fmt: skip
    return {
        "case": asdict(case), "plan": asdict(plan), "right": not wrong, "faults": wrong,
        "peer_faults": peer_faults, "us": times, "floor_us": case.kv_bytes / COPY_GBS / 1e3,
        "tflops": case.flops / times["ours"] / 1e6, "copies": len(sets),
    }  # fmt: skip


def share(
    cases: list[Case], target: Target, wanted: list[str], count: int, seconds: float,
    tiles: list[str],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """`measure` of every case, by `count` processes; failed ones are left out."""
    context = get_context("spawn")
    ready, turn, found = context.Barrier(count), context.Lock(), context.Queue()
    workers = [
        context.Process(target=take_part, args=(cases[i::count], target, wanted, ready, turn, found,
                                                time.monotonic() + seconds, tiles))
        for i in range(count)
    ]  # fmt: skip
    for worker in workers:
        worker.start()
    for _ in cases:
        if (result := found.get(timeout=900)) is not None:
            yield result
    for worker in workers:
        worker.join()


def take_part(
    cases: list[Case], target: Target, wanted: list[str], ready: Any, turn: Any, found: Any,
    until: float, tiles: list[str],
) -> None:  # fmt: skip
    """Compile beside others, then time each case undisturbed with the peers that were in time."""
    compiled: dict[str, list[str]] = {case.name: [] for case in cases}
    for peer in ("", *wanted):
        for case in cases:
            if time.monotonic() > until or (peer and not suits(peer, case)):
                continue
            try:
                call = arguments(case, "cuda")
                if peer:
                    peers(case.window, case.extent, [peer])[peer](call)
                    compiled[case.name].append(peer)
                else:
                    for function in others(call).values():
                        function(**call)
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{case.name}: {peer}: {type(error).__name__}: {str(error)[:200]}",
                      flush=True)  # fmt: skip
            torch.cuda.empty_cache()
    ready.wait(timeout=600)
    for case in cases:
        with turn:
            result = None
            try:
                result = measure(case, target, compiled[case.name], tiles)
            except Exception as error:
                print(f"{case.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            found.put(result)
            print(row(result) if result else f"{case.name:26} FAILED", flush=True)
            torch.cuda.empty_cache()


def sweep(case: Case, plans: list[Plan], seconds: float) -> dict[str, Any]:
    """Times of as many plans as fit into `seconds`, best first; wrong results are left out."""
    sets = data_sets(case)
    start, tried = time.perf_counter(), []
    for plan in plans:
        if time.perf_counter() - start > seconds:
            print(f"{case.name}: {len(tried)} of {len(plans)} plans tried", file=sys.stderr)
            break
        try:
            tried.append((time_plan(plan, sets), plan))
        except Exception as error:
            print(f"{case.name}: {plan}: {str(error)[:120]}", file=sys.stderr)
    tried.sort(key=lambda pair: pair[0])
    best = []
    for us, plan in tried[:5]:
        kernel.attend(plan, **sets[0])
        best.append({"us": us, "right": not faults(case, sets[0]), "plan": asdict(plan)})
    return {"case": asdict(case), "best": best,
            "all": [[us, str(plan.few or plan.many)] for us, plan in tried]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="", help="parts of case names or kinds, comma-separated")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=300, help="for the sweep or compiling")
    parser.add_argument("--tiles", default="", help="other chips, comma-separated")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    need_gpus(parser)
    target = Target.parse(chosen.target)
    wanted = [] if chosen.no_peers else chosen.peers.split(",")
    parts = [p for p in chosen.cases.split(",") if p]
    cases = [c for c in CASES if not parts or any(p == c.kind or p in c.name for p in parts)]
    tiles = [chip for chip in chosen.tiles.split(",") if chip]
    own = {c.name: own_plan(c, target) for c in cases}
    tries = {c.name: [own[c.name], *candidates(c, target)] for c in cases} if chosen.sweep else {
        c.name: [own[c.name], with_pdl(own[c.name], False),
                 *(own_plan(c, Target.parse(chip)) for chip in tiles)] for c in cases}  # fmt: skip
    compile_beforehand(((c, p) for c in cases for p in tries[c.name]), target.arch)
    if (found := Target.detect()).key != target.key:
        sys.exit(f"needs {target.key}, as compiled; found {found.key}; use --target {found.key}")
    results, table = [], []
    if chosen.processes:
        order = {case.name: i for i, case in enumerate(cases)}
        count = min(len(cases), chosen.processes)
        for result in share(cases, target, wanted, count, chosen.seconds, tiles):
            results.append(result)
            results.sort(key=lambda result: order[result["case"]["name"]])
            write(chosen.out, results)
        cases, table = [], [row(result) for result in results]
    for case in cases:
        start = time.perf_counter()
        try:
            if chosen.sweep:
                result = sweep(case, tries[case.name], chosen.seconds / len(cases))
                for one in result["best"][:3]:
                    tiles = one["plan"]["few"] or one["plan"]["many"]
                    wrong = "" if one["right"] else "WRONG "
                    facts = " ".join(f"{k}={v}" for k, v in tiles.items())
                    table.append(f"{case.name:26} {one['us']:9.1f} {wrong}{facts}")
            else:
                result = measure(case, target, wanted, tiles)
                table.append(row(result))
            results.append(result)
            print(table[-1], f"[{time.perf_counter() - start:.0f} s]", flush=True)
        except Exception as error:
            table.append(f"{case.name:26} FAILED {type(error).__name__}: {str(error)[:200]}")
            print(table[-1], flush=True)
        torch.cuda.empty_cache()
    write(chosen.out, results)
    print("\n" + "\n".join(table))


def write(path: Path | None, results: list[dict[str, Any]]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), "cold": True, "results": results}
        path.write_text(json.dumps(record, indent=1) + "\n")


def row(result: dict[str, Any]) -> str:
    case, us = result["case"], result["us"]
    goal = f"{case['goal_us']:g} us" if case["goal_us"] else ""
    goal = f"{case['goal_tflops']:g} TF" if case["goal_tflops"] else goal
    best = min(us.get(name, us["ours"]) for name in ("ours", "gluon", "fa4"))
    speed = f"{result['tflops'] * us['ours'] / best:4.0f} TF" if "prefill" in case["kind"] else ""
    rest = "  ".join(f"{name} {t:.1f}" for name, t in us.items() if name != "ours")
    verdict = "right" if result["right"] else "WRONG " + result["faults"][0][:60]
    return (f"{case['name']:26} {us['ours']:9.1f} us {speed} (goal {goal or '-'}, floor "
            f"{result['floor_us']:.1f}) {verdict} | {rest}")  # fmt: skip


if __name__ == "__main__":
    main()
