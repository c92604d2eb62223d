"""Reads ci/matrix.toml; says where it, the workflow, the suites and pinned choices differ."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATUSES = ("required", "informative")
EXECUTED = "executed:"  # before an AMD chip whose code runs on a CPU


@dataclass(frozen=True)
class Lane:
    """One [[lane]] of the matrix."""

    name: str
    target: str
    vllm: str
    suite: str
    status: str
    runs_on: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """The whole file: lanes, and for each machine without a runner what stands in for it."""

    lanes: tuple[Lane, ...]
    no_runner: Mapping[str, str]


def parse(text: str) -> Matrix:
    """The matrix of ci/matrix.toml; raises TypeError for a lane with other keys."""
    data = tomllib.loads(text)
    lanes = [Lane(**{**entry, "runs_on": tuple(entry["runs_on"])}) for entry in data["lane"]]
    return Matrix(tuple(lanes), {e["target"]: e["instead"] for e in data.get("no_runner", [])})


def of_workflow(workflow: Mapping[str, Any]) -> list[Lane]:
    """The lanes of the workflow's jobs, as its matrices list them."""
    found = []
    for job in workflow["jobs"].values():
        for row in job.get("strategy", {}).get("matrix", {}).get("include", []):
            found.append(Lane(**{**row, "runs_on": tuple(row["runs_on"])}))
    return found


def problems(
    matrix: Matrix,
    suites: Iterable[str],
    pinned_targets: Iterable[str],
    vllm_versions: Sequence[str],
    workflow: Mapping[str, Any],
) -> list[str]:
    """One sentence for each way in which the files disagree.

    suites: lanes of ci/suites.toml; pinned_targets: machines (without libraries) whose choices are
    pinned; vllm_versions: those whose surface is known; workflow: ci.yml as data.
    """
    found = []
    known, pinned = set(suites), set(pinned_targets)
    for lane in matrix.lanes:
        if lane.suite not in known:
            found.append(f"lane {lane.name} runs the suite {lane.suite}, which does not exist")
        if lane.status not in STATUSES:
            found.append(f"lane {lane.name} is {lane.status}, neither required nor informative")
        if lane.vllm not in vllm_versions:
            found.append(f"lane {lane.name} uses vLLM {lane.vllm}, whose surface is not recorded")
        executed = lane.target.startswith(EXECUTED)
        wanted = lane.target.replace(":", "-") if executed else lane.target.partition(":")[0]
        if lane.suite != wanted:
            found.append(f"lane {lane.name} runs the suite {lane.suite} on {lane.target}")
        arch = lane.target.removeprefix(EXECUTED)
        if executed and not any(target.startswith(f"rocm:{arch}/") for target in pinned):
            found.append(f"lane {lane.name} executes {arch}, of which no machine is pinned")
        if (executed or lane.target == "cpu") == ("self-hosted" in lane.runs_on):
            found.append(f"lane {lane.name} runs on {' '.join(lane.runs_on)}, but is {lane.target}")
    names = [lane.name for lane in matrix.lanes]
    found += [
        f"two lanes are called {name}" for name in sorted(set(names)) if names.count(name) > 1
    ]
    covered = {lane.target for lane in matrix.lanes if not lane.target.startswith(EXECUTED)}
    both, listed = covered & set(matrix.no_runner), covered | set(matrix.no_runner)
    found += [f"{target} has a lane and is listed without a runner" for target in sorted(both)]
    found += [f"{target} is pinned but not in the matrix" for target in sorted(pinned - listed)]
    found += [f"{target} is in the matrix but not pinned" for target in sorted(listed - pinned)]
    found += _workflow_problems(matrix, workflow)
    return found


def _workflow_problems(matrix: Matrix, workflow: Mapping[str, Any]) -> list[str]:
    there, here = of_workflow(workflow), list(matrix.lanes)
    found = [f"ci.yml lacks {asdict(lane)}" for lane in here if lane not in there]
    found += [f"ci.yml has {asdict(lane)} of its own" for lane in there if lane not in here]
    if len(there) != len(set(there)):
        found.append("ci.yml has a lane twice")
    for name, job in workflow["jobs"].items():
        switches = [job.get("if", ""), *(step.get("if", "") for step in job["steps"])]
        if any(str(switch).strip().lower() in ("false", "${{ false }}") for switch in switches):
            found.append(f"job {name} of ci.yml is switched off; remove it instead")
    return found
