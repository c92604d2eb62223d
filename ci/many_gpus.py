"""Write the tables and command lines of docs/many-gpus.md: `python ci/many_gpus.py`.

The cost model is arithmetic on stated assumptions, none of them measured on more than two GPUs.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from inkling_portable.recipes import STRATEGIES, render  # noqa: E402

DOCS = ROOT / "docs" / "many-gpus.md"
HIDDEN, LAYERS, STORED = 6144, 66, 2  # bfloat16
LINK_US, LINK_GBS = 1.0, 400.0  # one way over NVLink; of 450 GB/s each way, what stores reach
LAUNCH_US, START_US, MEMORY_GBS = 1.2, 2.0, 4300.0
ONE_LAUNCH = 132
NCCL_US, NCCL_HOP_US, NCCL_GBS = 31.0, 1.7, 250.0


def lamport_us(rows: int, ranks: int) -> float:
    """Two exchanges of a row's parts; beyond ONE_LAUNCH rows three launches; emptying and norm."""
    line = rows * HIDDEN * STORED
    launches = 1 if rows <= ONE_LAUNCH else 3
    sent = 2 * line * (ranks - 1) / ranks / (LINK_GBS * 1e3)
    local = 7 * line / (MEMORY_GBS * 1e3)  # read parts and rows, empty both, residual, two outputs
    return START_US + LAUNCH_US * (launches - 1) + 2 * LINK_US + sent + local


def portable_us(rows: int, ranks: int) -> float:
    """What two ranks take at one row, a hop of each collective for every rank more, the bytes."""
    line = rows * HIDDEN * STORED
    return NCCL_US + 2 * NCCL_HOP_US * (ranks - 1) + 2 * line * (ranks - 1) / ranks / (
        NCCL_GBS * 1e3)  # fmt: skip


def cost_table() -> str:
    """Rows of Markdown: tokens, both exchanges on 4 and 8 ranks, and a step's worth of them."""
    names = [f"TP{ranks} {what}, us" for ranks in (4, 8) for what in ("lamport", "triton")]
    lines = [f"| tokens | {' | '.join(names)} | saved in a TP8 step, ms |", "|---" * 6 + "|"]
    for rows in (1, 4, 16, 64, 512):
        figures = [f(rows, ranks) for ranks in (4, 8) for f in (lamport_us, portable_us)]
        saved = 2 * LAYERS * (figures[3] - figures[2]) / 1e3
        cells = " | ".join(f"{figure:.0f}" for figure in figures)
        lines.append(f"| {rows} | {cells} | {saved:.1f} |")
    return "\n".join(lines)


def recipe(strategy: str) -> str:
    """Command lines as a block, every option on a line of its own."""
    lines = render(strategy, "thinkingmachines/Inkling-NVFP4", 8, 2, "node0")
    shown = [re.sub(r" (?=--)", " \\\\\n  ", f"vllm {shlex.join(line)}") for line in lines]
    return "```\n" + "\n".join(shown) + "\n```"


def rendered(text: str) -> str:
    """The document with what stands between its marks made anew."""
    parts = {"cost": cost_table(), **{name: recipe(name) for name in STRATEGIES}}
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not mark or not end:
            raise ValueError(f"docs/many-gpus.md lacks the mark {name} or its end; restore it")
        text = before + mark + part + end + after
    return text


if __name__ == "__main__":
    DOCS.write_text(rendered(DOCS.read_text()))
