"""The CI matrix, the workflow, the suites and the pinned choices speak of the same machines."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from ci import accelerator, matrix, run_suites
from inkling_portable.__main__ import main
from inkling_portable.target import Target

ROOT = Path(__file__).resolve().parents[2]
SUITES = tomllib.loads((ROOT / "ci" / "suites.toml").read_text())
LANES = (ROOT / "ci" / "matrix.toml").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def pinned_targets() -> set[str]:
    """Machines of the golden file, without libraries and weight formats."""
    golden = json.loads(Path(__file__).with_name("golden_selection.json").read_text())
    return {Target.parse(key.split(" ")[0]).key for key in golden}


def recorded_versions() -> list[str]:
    """vLLM versions whose surface the package is checked against."""
    facts = json.loads((ROOT / "tests" / "facts" / "vllm_surface.json").read_text())
    return sorted(set(re.findall(r'"(0\.\d\d\.\d)"', json.dumps(facts))))


def problems(lanes: str = LANES, workflow: dict[str, Any] = WORKFLOW) -> list[str]:
    return matrix.problems(
        matrix.parse(lanes), SUITES, pinned_targets(), recorded_versions(), workflow
    )


def test_all_speak_of_the_same_machines() -> None:
    assert problems() == []
    assert {"0.26.0", "0.33.0"} <= set(recorded_versions())
    assert len(pinned_targets()) >= 9


def test_every_vendor_has_a_required_lane_with_the_newest_version() -> None:
    newest = max(recorded_versions())
    required = [lane for lane in matrix.parse(LANES).lanes if lane.status == "required"]
    targets = {lane.target for lane in required if lane.vllm == newest}
    assert targets == {"cuda:sm90/132", "cuda:sm100/148", "rocm:gfx942/304", "rocm:gfx950/256"}
    assert {"cpu", "executed:gfx942", "executed:gfx950"} <= {lane.target for lane in required}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('suite = "rocm"', 'suite = "hip"', "runs the suite hip, which does not exist"),
        ('suite = "rocm"', 'suite = "cuda"', "runs the suite cuda on rocm:gfx942/304"),
        ('status = "informative"', 'status = "off"', "neither required nor informative"),
        ('vllm = "0.30.0"', 'vllm = "0.25.0"', "whose surface is not recorded"),
        ('"self-hosted", "b200"', '"b200"', "but is cuda:sm100/148"),
        ('target = "cuda:sm120/188"', 'target = "cuda:sm120/1"', "is pinned but not in the matrix"),
        ('target = "cuda:sm120/188"', 'target = "cuda:sm120/1"', "in the matrix but not pinned"),
        ('target = "rocm:gfx942/80"', 'target = "rocm:gfx942/304"', "has a lane and is listed"),
        ('name = "h200-0.30.0"', 'name = "h200-0.33.0"', "two lanes are called"),
        ('name = "b200-0.33.0"', 'name = "b200"', "of its own"),
        (
            'target = "executed:gfx942"',
            'target = "executed:gfx90a"',
            "of which no machine is pinned",
        ),
        (
            'suite = "executed-gfx942"',
            'suite = "executed-gfx950"',
            "executed-gfx950 on executed:gfx942",
        ),
    ],
)
def test_each_difference_is_named(old: str, new: str, message: str) -> None:
    assert old in LANES
    assert any(message in problem for problem in problems(LANES.replace(old, new, 1)))


def test_a_lane_switched_off_or_missing_in_the_workflow_is_named() -> None:
    off = copy.deepcopy(WORKFLOW)
    off["jobs"]["accelerator"]["if"] = False
    assert any("switched off" in problem for problem in problems(workflow=off))
    gone = copy.deepcopy(WORKFLOW)
    gone["jobs"]["accelerator"]["strategy"]["matrix"]["include"].pop()
    assert any("ci.yml lacks" in problem for problem in problems(workflow=gone))


def test_workflow_runs_lanes_by_their_data() -> None:
    """Each job with lanes runs the lane's suite on its labels, and informative ones may fail."""
    for name in ("cpu", "accelerator"):
        job = WORKFLOW["jobs"][name]
        assert job["runs-on"] == "${{ matrix.runs_on }}"
        assert job["continue-on-error"] == "${{ matrix.status == 'informative' }}"
        assert "ci/run ${{ matrix.suite }}" in [step.get("run") for step in job["steps"]]
    environment = WORKFLOW["jobs"]["accelerator"]["env"]
    assert environment == {"CI_TARGET": "${{ matrix.target }}", "CI_VLLM": "${{ matrix.vllm }}"}
    steps = WORKFLOW["jobs"]["cpu"]["steps"]
    assert steps[-1]["if"] == "startsWith(matrix.target, 'executed:')"
    assert steps[-1]["with"]["path"] == "recordings/${{ matrix.suite }}.safetensors"
    assert WORKFLOW["jobs"]["between"]["needs"] == ["cpu", "accelerator"]
    called = re.findall(r"ci/run (\w+)", json.dumps(WORKFLOW))
    assert set(called) <= set(SUITES)
    assert "between" in called


# --- the lanes' own checks ------------------------------------------------------------------------

H200 = Target.parse("cuda:sm90/132+vllm=0.33.0")
MI300X = Target.parse("mi300x+vllm=0.33.0")


@pytest.mark.parametrize(
    ("lane", "target", "environ", "missing", "message"),
    [
        ("cuda", H200, {}, [], None),
        ("rocm", MI300X, {"CI_TARGET": "rocm:gfx942/304", "CI_VLLM": "0.33.0"}, [], None),
        ("rocm", Target.parse("mi300x+vllm=0.33.0+triton=3.6.0"), {}, [], None),
        ("rocm", H200, {}, [], "this machine is cuda:sm90/132"),
        ("cuda", Target.parse("cpu"), {}, ["torch"], "torch is not installed"),
        ("cuda", H200, {}, ["pytest"], "needs pytest beside torch"),
        ("cuda", Target.parse("cuda:sm90/132"), {}, [], "needs vLLM 0.26 to 0.33"),
        ("cuda", H200, {"CI_TARGET": "cuda:sm100/148"}, [], "the lane is for cuda:sm100/148"),
        ("cuda", H200, {"CI_VLLM": "0.26.0"}, [], "the lane is for vLLM 0.26.0"),
    ],
)
def test_machines_are_checked_against_their_lane(
    lane: str, target: Target, environ: dict[str, str], missing: list[str], message: str | None
) -> None:
    reason = accelerator.refusal(lane, target, environ, missing)
    assert (reason is None) if message is None else (reason is not None and message in reason)


@pytest.mark.parametrize("lane", ["cuda", "rocm"])
def test_without_the_accelerator_a_lane_stops_with_a_sentence(lane: str) -> None:
    """Nothing runs after the check, and the check says what to do instead."""
    done = subprocess.run(
        ["ci/run", lane],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"ci/run {lane} needs an" in done.stderr and "this machine is cpu" in done.stderr
    assert re.search(r"kernels agree +- +-  not reached", done.stdout)


@pytest.mark.parametrize("lane", ["cuda", "rocm"])
def test_accelerator_lanes_do_the_same_on_both_vendors(lane: str) -> None:
    check, verify, tests, record, explain = ([*suite["run"][1:]] for suite in SUITES[lane][:5])
    assert check == ["-m", "ci.accelerator", lane]
    assert verify[:3] == ["-m", "inkling_portable", "verify"]
    assert tests[:2] == ["-m", "pytest"] and tests[-1] == "tests/gpu"
    assert record[2:] == ["record", "--out", f"recordings/{lane}.safetensors"]
    assert explain[2:4] == ["explain", "--strict"]
    assert list((ROOT / "tests" / "gpu").glob("test_*.py"))
    recording = WORKFLOW["jobs"]["accelerator"]["steps"][-1]["with"]["path"]
    assert recording == "recordings/${{ matrix.suite }}.safetensors"
    assert "/recordings/" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_lanes_of_executed_code_hold_that_chip_to_everything(chip: str) -> None:
    """The cpu lane runs the tests of both chips; these add all verdicts, and a recording."""
    setup, tests, verify, record = (suite["run"] for suite in SUITES[f"executed-{chip}"])
    assert setup == SUITES["cpu"][0]["run"]
    whole = next(suite for suite in SUITES["cpu"] if suite["name"] == "executed AMD code")
    (other,) = {"gfx942", "gfx950"} - {chip}
    assert tests == [*whole["run"], "-k", f"not {other}"]
    assert verify[3:6] == ["verify", "--device", f"executed:{chip}"]
    assert record[3:] == ["record", "--device", f"executed:{chip}", "--out",
                          f"recordings/executed-{chip}.safetensors"]  # fmt: skip


def test_a_dry_run_is_of_what_needs_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    suites = run_suites.suites_of("rocm", (ROOT / "ci" / "suites.toml").read_text())
    kept, left_out = run_suites.rehearsed(suites)
    assert left_out == ["accelerator"]
    assert [suite.name for suite in suites if suite.name not in left_out] == [s.name for s in kept]
    for suite in kept:
        assert suite.run == suite.dry and suite.env["TRITON_INTERPRET"] == "0"
        places = [word for word in suite.run if word.startswith("recordings")]
        assert all(place.startswith("recordings/dry-run") for place in places)
    assert run_suites.main(["cuda", "--dry-run"]) == 2
    assert "this lane has no --dry-run; run it without" in capfd.readouterr().err


def test_recordings_with_8_bit_inputs_are_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Floats of 8 bits, which torch compares nothing of; NaN in padding; a changed input."""
    path = str(tmp_path / "one")
    ops = ["rel_attention", "qkvr_prep", "--provider", "reference", "--out", path]
    assert main(["record", *ops]) == 0
    with safe_open(path, "pt") as file:
        names, about = list(file.keys()), file.metadata()
        tensors = {name: file.get_tensor(name) for name in names}
    eight = [name for name in names if tensors[name].dtype == torch.float8_e4m3fn]
    assert eight and any(t.isnan().any() for t in tensors.values() if t.is_floating_point())
    assert main(["compare", path, path]) == 0
    changed = next(name for name in eight if "/in/" in name and tensors[name].numel())
    tensors[changed] = (
        tensors[changed].clone().view(torch.uint8).bitwise_xor(1).view(torch.float8_e4m3fn)
    )
    save_file(tensors, tmp_path / "two", about)
    capfd.readouterr()
    assert main(["compare", path, str(tmp_path / "two")]) == 1
    assert f"the input {changed.rpartition('/')[2]} differs" in capfd.readouterr().out


def test_between_compares_two_recordings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    for number, path in enumerate(files):
        ops = ["route", "--provider", "reference", "--seed", str(number), "--out", path]
        assert main(["record", *ops]) == 0
    assert run_suites.main(["between", files[0], files[0]]) == 0
    assert "pairs agree" in capfd.readouterr().out
    assert run_suites.main(["between", *files]) == 0  # two of the three seeds are shared
    assert run_suites.main(["between", files[0], str(tmp_path / "missing")]) == 1
    capfd.readouterr()
    assert run_suites.main(["between", files[0]]) == 2
    assert "this lane takes 2 files and got 1" in capfd.readouterr().err
    assert run_suites.main(["cpu", files[0]]) == 2
    assert "this lane takes 0 files and got 1" in capfd.readouterr().err
