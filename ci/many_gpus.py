"""Write the tables and command lines of docs/many-gpus.md: `python ci/many_gpus.py`.

The cost model adds to what two GPUs were measured to take what its assumptions say of more.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from inkling_portable.recipes import STRATEGIES, render  # noqa: E402

DOCS = ROOT / "docs" / "many-gpus.md"
RESULTS = ROOT / "benchmarks" / "results" / "ranks"
MEASURED = RESULTS / "h200-x2.json"
STEPS = RESULTS.parent / "serving" / "pair-h200.json"
HIDDEN, LAYERS, STORED = 6144, 66, 2  # bfloat16
PEER_US, LINK_GBS = 0.1, 220.0  # each rank more; what long steps reach of 450 GB/s each way
HOP_US, NCCL_GBS = 1.7, 250.0  # of each collective, for each rank more


def measured(prompts: bool) -> list[dict[str, Any]]:
    """Steps of rows of one request each, or of one prompt, by their number of rows."""
    rows = json.loads(MEASURED.read_text())["us"]
    found = [row for row in rows if row.get("prompt", False) == prompts]
    return sorted(found, key=lambda row: int(row["tokens"]))


def on_two(name: str, rows: int) -> float:
    """Microseconds of an exchange between two GPUs, between measured steps by a straight line."""
    found = [(row["tokens"], row[name]) for row in measured(prompts=False)]
    below = max(pair for pair in found if pair[0] <= rows)
    above = min((pair for pair in found if pair[0] >= rows), default=below)
    part = (rows - below[0]) / max(1, above[0] - below[0])
    return float(below[1] + part * (above[1] - below[1]))


def more_bytes(rows: int, ranks: int) -> float:
    """Bytes that a rank sends in both halves of an exchange beyond those of one of two."""
    return 2 * rows * HIDDEN * STORED * ((ranks - 1) / ranks - 1 / 2)


def lamport_us(rows: int, ranks: int) -> float:
    return on_two("lamport", rows) + PEER_US * (ranks - 2) + more_bytes(rows, ranks) / (
        LINK_GBS * 1e3)  # fmt: skip


def portable_us(rows: int, ranks: int) -> float:
    return on_two("nccl", rows) + 2 * HOP_US * (ranks - 2) + more_bytes(rows, ranks) / (
        NCCL_GBS * 1e3)  # fmt: skip


def measured_table() -> str:
    """Rows of Markdown: tokens, and microseconds of each exchange between two GPUs."""
    lines = ["| tokens | lamport | triton (NCCL) | vllm | a prompt: lamport | triton |",
             "|---" * 6 + "|"]  # fmt: skip
    of_prompts = {row["tokens"]: row for row in measured(prompts=True)}
    for row in measured(prompts=False):
        times = [row.get(name) for name in ("lamport", "nccl", "vllm")]
        times += [of_prompts.get(row["tokens"], {}).get(name) for name in ("lamport", "nccl")]
        cells = " | ".join("-" if time is None else f"{time:.3g}" for time in times)
        lines.append(f"| {row['tokens']} | {cells} |")
    return "\n".join(lines)


def step_table() -> str:
    """Rows of Markdown: a decode step of two ranks, milliseconds with each exchange."""
    times = {
        (found["layers"], found["shape"], row["batch"], row["context"], found["exchange"]): row
        for found in json.loads(STEPS.read_text())["results"] for row in found["rows"]
    }  # fmt: skip
    lines = ["| layers of | requests x context | lamport | triton (NCCL) | vllm | vLLM's model |",
             "|---" * 6 + "|"]  # fmt: skip
    for layers, shape, batch, context in sorted({key[:4] for key in times}):
        found = [times.get((layers, shape, batch, context, name))
                 for name in ("lamport", "triton", "vllm", "off")]  # fmt: skip
        cells = " | ".join("-" if row is None else f"{row['us'] / 1e3:.3g}" for row in found)
        lines.append(f"| {layers}, {shape} | {batch} x {context:,} | {cells} |")
    return "\n".join(lines)


def cost_table() -> str:
    """Rows of Markdown: tokens, both exchanges on 4 and 8 ranks, and a step's worth of them."""
    names = [f"TP{ranks} {what}, us" for ranks in (4, 8) for what in ("lamport", "triton")]
    lines = [f"| tokens | {' | '.join(names)} | saved in a TP8 step, ms |", "|---" * 6 + "|"]
    for rows in (1, 4, 16, 64, 512):
        figures = [f(rows, ranks) for ranks in (4, 8) for f in (lamport_us, portable_us)]
        saved = 2 * LAYERS * (figures[3] - figures[2]) / 1e3
        cells = " | ".join(f"{figure:.3g}" for figure in figures)
        lines.append(f"| {rows} | {cells} | {saved:.1f} |")
    return "\n".join(lines)


def recipe(strategy: str) -> str:
    """Command lines as a block, every option on a line of its own."""
    lines = render(strategy, "thinkingmachines/Inkling-NVFP4", 8, 2, "node0")
    shown = [re.sub(r" (?=--)", " \\\\\n  ", f"vllm {shlex.join(line)}") for line in lines]
    return "```\n" + "\n".join(shown) + "\n```"


def rendered(text: str) -> str:
    """The document with what stands between its marks made anew."""
    tables = {"measured": measured_table(), "steps": step_table(), "cost": cost_table()}
    parts = tables | {name: recipe(name) for name in STRATEGIES}
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not mark or not end:
            raise ValueError(f"docs/many-gpus.md lacks the mark {name} or its end; restore it")
        text = before + mark + part + end + after
    return text


if __name__ == "__main__":
    DOCS.write_text(rendered(DOCS.read_text()))
