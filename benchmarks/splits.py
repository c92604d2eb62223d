"""One checkpoint of random weights, served in several ways of splitting it: are answers the same?

    python -m benchmarks.splits [--ways one,tp2,tp2-ep,pp2,dep,dp2] [--dtype bfloat16]
                                [--limit 150] [--eager] [--folder DIR] [--out FILE]
    python -m benchmarks.splits --tiny      # tries the script on a CPU, in float32

Ways: `one` GPU; two of them by tensor parallelism (tp2), with whole experts on each (tp2-ep), as
pipeline stages (pp2), as two data-parallel engines with a whole model each (dp2), or with
data-parallel attention and spread experts (dep), which are vLLM's; one-engine is one GPU with
vLLM's experts. Every way has a process group of its own, killed whole after `--limit` seconds; one
that fails or hangs is named in its row and the others still run. With `--folder` the checkpoint,
answers and logs stay, and a later run of other ways is compared with the answers found there.

Answers are compared with those of `one`, whose own second answers, with cached prefixes, show what
rounding does. They are followed until the first token that differs: behind it the contexts do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

WAYS = "one,tp2,tp2-ep,pp2,dep,dp2"
SPLITS: dict[str, dict[str, Any]] = {
    "one": {},
    "one-engine": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pp2": {"pipeline_parallel_size": 2},
    # The exchange of tokens that needs nothing but NCCL.
    "dep": {"data_parallel_size": 2, "enable_expert_parallel": True,
            "all2all_backend": "allgather_reducescatter"},
    "dp2": {"data_parallel_size": 2},
}  # fmt: skip
ENGINES_EXPERTS = ("one-engine", "dep")
LENGTHS, TOKENS, LIKELIEST = (5, 40, 103, 230), 12, 20
ALONE = 2
"""The prompt that one engine is asked for while the other has none."""
BOUNDS = {"bfloat16": (0.25, 1.0), "float32": (0.01, 0.01)}
"""Margin of a token that may differ, and how far apart log-probabilities may be."""
ASKED = (f"{len(LENGTHS)} prompts of {', '.join(map(str, LENGTHS))} tokens together, twice; "
         f"{TOKENS} greedy tokens each; of two engines also each of both at once, twice, and one "
         "prompt while the other engine idles; tokens are compared until the first that differs, "
         f"log-probabilities of the {LIKELIEST} likeliest until there")  # fmt: skip
GRACE = 20
"""Seconds in which a process that has answered may end."""


def prompt(length: int) -> list[int]:
    """Reproducible ids, for each length others: prompts share no prefix."""
    draw = random.Random(length)
    return [draw.randrange(440) for _ in range(length)]


# --- one way, in a process of its own -------------------------------------------------------------


def write(path: Path, content: Any) -> None:
    """Write JSON at once or not at all: the writer may be killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def end_with_parent() -> None:
    """Kill the process group when the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    if os.getpgid(0) == os.getpid():
        threading.Thread(target=watch, daemon=True).start()


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": str(options.folder), "dtype": options.dtype, "seed": 0, "max_model_len": 512,
        "max_num_batched_tokens": 512, "max_num_seqs": 16, "max_logprobs": LIKELIEST,
        "enable_prefix_caching": True, **SPLITS[options.way],
    }  # fmt: skip
    if options.tiny:
        return found | {"kv_cache_memory_bytes": 32 << 20, "gpu_memory_utilization": 0.1,
                        "block_size": 16}  # fmt: skip
    found |= {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.5}
    if options.eager:
        return found | {"enforce_eager": True}
    return found | {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}


async def answer(options: argparse.Namespace, said: dict[str, Any]) -> None:
    """Start the engine, ask everything, and write what is `said` after each round."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=LIKELIEST, ignore_eos=True)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(options)))
    said["started s"] = round(time.monotonic() - options.began, 1)
    write(options.answers, said)

    async def ask(number: int, salt: str, times: str, rank: int | None) -> None:
        # Salted, so that a first time finds no prefix of an earlier round.
        asked: Any = {"prompt_token_ids": prompt(LENGTHS[number]), "cache_salt": salt}
        name = f"{number} {salt} {times} {rank}"
        async for output in engine.generate(asked, params, name, data_parallel_rank=rank):
            last = output
        [found] = last.outputs
        likeliest = [sorted(((i, one.logprob) for i, one in at.items()), key=lambda p: -p[1])
                     for at in found.logprobs or ()]  # fmt: skip
        said["answers"].append({
            "prompt": number, "asked": salt, "time": times, "engine": rank,
            "tokens": list(found.token_ids), "likeliest": likeliest,
            "cached": last.num_cached_tokens,
        })  # fmt: skip

    engines = range(SPLITS[options.way].get("data_parallel_size", 1))
    prompts = range(len(LENGTHS))
    try:
        for times in ("first", "second"):
            await asyncio.gather(*(ask(n, "all", times, None) for n in prompts))
            write(options.answers, said)
        if len(engines) > 1:
            for times in ("first", "second"):
                every = (ask(n, "of each", times, rank) for rank in engines for n in prompts)
                await asyncio.gather(*every)
                write(options.answers, said)
            for rank in engines:
                await ask(ALONE, "alone", "first", rank)
                write(options.answers, said)
        said["finished"] = True
        write(options.answers, said)
    finally:
        engine.shutdown()


def serve(options: argparse.Namespace) -> int:
    """One way: its answers, or why there are none, in a file."""
    end_with_parent()
    options.began = time.monotonic()
    said: dict[str, Any] = {"way": options.way, "answers": []}
    try:
        asyncio.run(answer(options, said))
    except Exception as error:  # whatever it is, it is the result of this way
        traceback.print_exc()
        said["failed"] = f"{type(error).__name__}: {error}"[:400]
    write(options.answers, said)
    sys.stdout.flush()
    return int("failed" in said)


# --- every way ------------------------------------------------------------------------------------


def surroundings(way: str, tiny: bool) -> dict[str, str]:
    """The environment of a way: that of this process, and whose experts."""
    found = dict(os.environ)
    found.setdefault("VLLM_NO_USAGE_STATS", "1")
    found.setdefault("HF_HUB_OFFLINE", "1")
    found |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
              "PYTHONUNBUFFERED": "1"}  # fmt: skip
    if tiny:
        # By default vLLM wants a memory node of its own for every rank on a CPU.
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TRITON_INTERPRET": "0"}
        found.setdefault("OMP_NUM_THREADS", "1")
    if way in ENGINES_EXPERTS:
        others = [part for part in found.get("INKLING_PORTABLE", "").split(",")
                  if part and not part.strip().startswith("routed_experts=")]  # fmt: skip
        found["INKLING_PORTABLE"] = ",".join([*others, "routed_experts=engine"])
    return found


def kill(group: int) -> None:
    """Kill a process group and wait up to 5 s for its end, which frees the GPUs."""
    for _ in range(50):
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.1)


def load(path: Path) -> dict[str, Any]:
    """What a way has said; nothing where there is no file of it."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def run(way: str, options: argparse.Namespace, checkpoint: Path, answers: Path) -> dict[str, Any]:
    """Serve in one way until it has ended or the limit; what it said."""
    log = answers.with_suffix(".log")
    answers.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.splits", "--way", way, "--folder",
               str(checkpoint), "--answers", str(answers), "--dtype", options.dtype]  # fmt: skip
    command += [f"--{name}" for name in ("tiny", "eager") if getattr(options, name)]
    began = time.monotonic()
    until, finished, killed = began + options.limit, False, False
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=surroundings(way, options.tiny), stdin=subprocess.DEVNULL, stdout=sink,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.5)
                if not finished and load(answers).get("finished"):
                    finished, until = True, min(until, time.monotonic() + GRACE)
            killed = process.poll() is None
        finally:
            kill_all(process)
    said = load(answers) or {"way": way, "answers": []}
    if killed and not finished:
        said["failed"] = said.get("failed", f"killed after {options.limit:g} s")
    elif process.returncode and not killed:
        said["failed"] = said.get("failed", f"ended with status {process.returncode}")
    said["wall s"] = round(time.monotonic() - began, 1)
    text = log.read_text(encoding="utf-8", errors="replace")
    said["providers"] = providers(text)
    if "failed" in said:
        # What the engine's process died of; the exception often says only that it did.
        found = re.search(r"\b\w+(?:Error|Exception): .*", text)
        said["log"] = found[0][:400] if found else ""
        print("\n".join(f"    {line[:300]}" for line in text.splitlines()[-30:]), flush=True)
    write(answers, said)
    return said


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Whatever a way has left running."""
    # Reaped first where it has ended: a group is there as long as its leader is a zombie.
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kill(process.pid)


def providers(log: str) -> dict[str, str]:
    """Who computes two ops that depend on the split, as the plugin says when it starts."""
    found = {}
    for who, ops in re.findall(r"inkling_portable: (.+?) computes (.+)", log):
        for op in ("routed_experts", "conv_residual_norm"):
            if op in ops.strip().split(", "):
                found[op] = who
    return found


# --- comparison -----------------------------------------------------------------------------------


def apart(truth: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Two answers to a prompt: equal tokens, the difference of log-probabilities, a margin."""
    equal, furthest, common, margin = 0, 0.0, LIKELIEST, None
    for at, wanted in enumerate(truth["tokens"]):
        a: dict[int, float] = dict(truth["likeliest"][at])
        b: dict[int, float] = dict(found["likeliest"][at] if at < len(found["likeliest"]) else ())
        both = a.keys() & b.keys()
        common = min(common, len(both))
        for token in both:
            step = abs(a[token] - b[token])
            furthest = step if math.isnan(step) or step > furthest else furthest
        chosen = found["tokens"][at] if at < len(found["tokens"]) else -1
        if chosen != wanted:
            # By how much the truth prefers its token; to one that it does not list, at least this.
            margin = a[wanted] - a.get(chosen, min(a.values()))
            break
        equal += 1
    return {"equal": equal, "furthest": furthest, "common": common, "margin": margin}


def compare(truth: dict[str, Any], said: dict[str, Any], dtype: str) -> dict[str, Any]:
    """One way's answers beside another's, as a row; a way beside itself: the second time."""
    same = truth is said
    right = {(one["prompt"], one["time"]): one for one in truth["answers"]
             if one["asked"] == "all"}  # fmt: skip
    results, flips, unanswered = [], [], 0
    for one in said["answers"]:
        if same and one["time"] == "first":
            continue
        wanted = right.get((one["prompt"], "first" if same else one["time"]))
        if wanted is None:
            unanswered += 1
            continue
        result = apart(wanted, one)
        results.append(result)
        if result["margin"] is not None:
            flips.append({"prompt": LENGTHS[one["prompt"]], "asked": one["asked"],
                          "time": one["time"], "engine": one["engine"], "at": result["equal"],
                          "margin": round(result["margin"], 6)})  # fmt: skip
    furthest = max((r["furthest"] for r in results), key=lambda x: (math.isnan(x), x), default=0.0)
    equal = sum(r["equal"] for r in results)
    row: dict[str, Any] = {
        "way": said["way"], "against": "itself, the second time" if same else truth["way"],
        "furthest log-probability": round(furthest, 6),
        "equal tokens": equal, "of": equal + len(flips),
        "fewest ids in common": min((r["common"] for r in results), default=0),
        "where they differ": flips,
    }  # fmt: skip
    margin, distance = BOUNDS[dtype]
    # Half of the likeliest ids, or nothing would be compared.
    row["agrees"] = bool(
        results and not unanswered and said.get("finished") and furthest < distance
        and row["fewest ids in common"] >= LIKELIEST // 2
        and all(flip["margin"] <= margin for flip in flips)
    )  # fmt: skip
    return row


def rows(outcomes: dict[str, dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """A row for each way, and for `dep` one more beside one GPU with the same experts."""
    found = []
    for way, said in outcomes.items():
        seconds = [one["cached"] for one in sorted(
            (one for one in said["answers"] if one["time"] == "second"
             # Two engines share what is asked of neither, and may each meet a prompt once.
             and (one["asked"] == "of each" or way not in ("dep", "dp2"))),
            key=lambda one: (one["engine"] or 0, one["prompt"]),
        )]  # fmt: skip
        about = {"dtype": dtype, "cached the second time": seconds}
        about |= {key: said[key] for key in ("started s", "wall s", "providers", "failed", "log")
                  if key in said}  # fmt: skip
        truths = ["one", "one-engine"] if way == "dep" else ["one"]
        usable = [t for t in truths if outcomes.get(t, {}).get("answers") and said["answers"]]
        for truth in usable:
            found.append(compare(outcomes[truth], said, dtype) | about)
        if not usable:
            found.append({"way": way, "against": None, "agrees": False} | about)
    return found


def line(row: dict[str, Any]) -> str:
    """A row for whoever watches."""
    if row["against"] is None:
        return f"{row['way']}: not compared; {row.get('failed', '')} {row.get('log', '')}"
    margins = [flip["margin"] for flip in row["where they differ"]]
    return (f"{row['way']} against {row['against']}: {row['equal tokens']} of {row['of']} tokens, "
            f"furthest {row['furthest log-probability']}, margins {margins}, cached "
            f"{row['cached the second time']}, started in {row.get('started s')} s, "
            f"{row.get('providers')}, {'agrees' if row['agrees'] else 'DISAGREES'}"
            + (f"; FAILED: {row['failed']} {row.get('log', '')}" if "failed" in row else "")
            )  # fmt: skip


def run_all(options: argparse.Namespace, folder: Path) -> int:
    from benchmarks.timing import environment
    from inkling_portable.commands.tiny import write_tiny

    about = {"environment": environment(), "command": " ".join(
        ["python", "-m", "benchmarks.splits", *sys.argv[1:]]
    )}  # fmt: skip
    preset, layers = ("text", 4) if options.tiny else ("small-like", 6)
    kind = f"{preset}-{options.dtype}"
    checkpoint = folder / kind / "checkpoint"
    if not (checkpoint / "config.json").exists():  # which is written behind the weights
        began = time.monotonic()
        described = write_tiny(checkpoint, preset, layers=layers, dtype=options.dtype, towers=False,
                               mtp_depths=0, force=True)  # fmt: skip
        print(f"{described}, in {time.monotonic() - began:.1f} s", flush=True)
    outcomes = {way: said for way in SPLITS if (said := load(folder / kind / f"{way}.json"))}
    for way in options.ways:
        print(f"{way}: starts", flush=True)
        outcomes.pop(way, None)
        try:
            outcomes[way] = run(way, options, checkpoint, folder / kind / f"{way}.json")
        except Exception as error:  # a fault of this script; other ways may still have results
            traceback.print_exc()
            failed = f"{type(error).__name__}: {error}"[:400]
            outcomes[way] = {"way": way, "answers": [], "failed": failed}
        table = rows(outcomes, options.dtype)
        for row in table:
            if way in (row["way"], row["against"]):
                print(line(row), flush=True)
        if options.out:
            write(options.out, {**about, "model": f"{preset}, {layers} layers, random weights",
                                "asked": ASKED, "rows": table})  # fmt: skip
    asked = [row for row in table if row["way"] in options.ways]
    return int(not all(row["agrees"] for row in asked))


def ways_of(text: str) -> list[str]:
    """'one,tp2' -> names of ways, as the `type` of an option."""
    found = text.split(",")
    if set(found) - set(SPLITS):
        raise argparse.ArgumentTypeError(f"needs some of {', '.join(SPLITS)}; found {text!r}")
    return found


def stop(number: int, _: Any) -> None:
    """A signal ends this process as an exception, which ends what it has started."""
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.splits", description=__doc__)
    parser.add_argument("--ways", type=ways_of, help=f"of {', '.join(SPLITS)}; usually {WAYS}")
    parser.add_argument("--dtype", choices=BOUNDS)
    parser.add_argument("--limit", type=float, default=150, metavar="SECONDS")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, help="where checkpoint, answers and logs stay")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=SPLITS, help="serve a checkpoint in this way only")
    parser.add_argument("--answers", type=Path, help="where --way writes")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.tiny else "bfloat16")
    # On a CPU vLLM's experts ignore who has which.
    usual = [way for way in WAYS.split(",") if way != "dep" or not options.tiny]
    options.ways = options.ways or usual
    if os.environ.get("INKLING_PORTABLE") == "off":
        parser.error("compares ways of serving our model; unset INKLING_PORTABLE, which is off")
    if not options.limit > 0:
        parser.error(f"--limit needs seconds above 0; found {options.limit:g}")
    if options.folder and options.folder.exists() and not options.folder.is_dir():
        parser.error(f"--folder needs a folder; {options.folder} is a file")
    if options.way:
        if not options.folder or not options.answers:
            parser.error("--way needs the --folder of a checkpoint and a file of --answers")
        sys.exit(serve(options))
    if not options.tiny:
        from benchmarks.timing import need_gpus

        pair = any(SPLITS[way] for way in options.ways)
        need_gpus(parser, 2 if pair else 1, ", or try it with --tiny")
    signal.signal(signal.SIGTERM, stop)
    if options.folder:
        sys.exit(run_all(options, options.folder))
    with tempfile.TemporaryDirectory(prefix="inkling-splits-") as scratch:
        sys.exit(run_all(options, Path(scratch)))


if __name__ == "__main__":
    main()
