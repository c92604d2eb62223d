"""Makes the checkpoint folder from what stages of training left behind.

`python -m training.publish FOLDER STAGE...`, each STAGE a folder that `training.train` wrote, in
order. The weights are those of the last stage. Beside them: curves.csv (every measurement on
held-out questions), losses.csv, and training.json (options, speed and result of each stage).
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from training import nano


def entries(stage: Path) -> list[dict[str, Any]]:
    """The log of the stage's last run."""
    lines = [json.loads(line) for line in (stage / "log.jsonl").read_text().splitlines()]
    starts = [i for i, line in enumerate(lines) if "options" in line]
    return lines[starts[-1] :]


def summary(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Options, length and result of one stage."""
    options = {k: v for k, v in log[0]["options"].items() if k not in ("out", "device")}
    if options["resume"] != "None":
        options["resume"] = "the stage before"
    losses = [line for line in log if "losses" in line]
    return {
        "options": options,
        "torch": log[0]["torch"],
        "gpu": log[0].get("gpu"),
        "steps": log[-1]["step"],
        "seconds": log[-1]["seconds"],
        "tokens": losses[-1].get("tokens"),
        "losses of trunk and depths": losses[-1]["losses"][:-1],
        "right": [line["right"] for line in log if "right" in line][-1],
    }


def curves(logs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a measurement: stage, step, seconds, and the share of right answers by task."""
    return [
        {"stage": stage, "step": line["step"], "seconds": line["seconds"], **line["right"]}
        for stage, log in enumerate(logs, start=1)
        for line in log
        if "right" in line
    ]


def losses(logs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a report: stage, step, seconds, tokens so far, mean recent losses, gradient norm."""
    names = ("trunk", *(f"depth {k}" for k in range(nano.DEPTHS)), "gradient")
    return [
        {"stage": stage, "step": line["step"], "seconds": line["seconds"],
         "tokens": line["tokens"], **dict(zip(names, line["losses"], strict=True))}
        for stage, log in enumerate(logs, start=1)
        for line in log
        if "losses" in line
    ]  # fmt: skip


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file with the columns of the last row."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[-1]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main(argv: list[str]) -> int:
    folder, *stages = map(Path, argv)
    logs = [entries(stage) for stage in stages]
    nano.write(folder, nano.read_single(stages[-1] / "weights.safetensors"))
    (folder / "training.json").write_text(
        json.dumps([summary(log) for log in logs], indent=2) + "\n"
    )
    write_table(folder / "curves.csv", curves(logs))
    write_table(folder / "losses.csv", losses(logs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
