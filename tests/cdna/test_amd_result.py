"""`ci/run rocm`, as far as a machine without an AMD GPU can go: one file, and what it says."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ci import amd_result

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_executes_and_packs_one_file() -> None:
    """As a user starts it; GPUs' tests are named as left out, and nothing counts as measured."""
    folder = ROOT / "recordings" / "dry-run"
    (folder / amd_result.RESULT).unlink(missing_ok=True)
    done = subprocess.run(
        ["ci/run", "rocm", "--dry-run"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "suites: 6 passed, 0 failed" in done.stdout
    assert "left out, since they need the machine: accelerator" in done.stdout
    with zipfile.ZipFile(folder / amd_result.RESULT) as archive:
        assert set(archive.namelist()) == {"summary.txt", *amd_result.PARTS}
        summary = archive.read("summary.txt").decode()
        times = [json.loads(archive.read(name)) for name in amd_result.BENCHMARKS]
    assert "17 of 17 kernels agree with their contracts" in summary
    assert "missing: nothing" in summary and "nothing in here was run or measured" in summary
    assert all(part["dry_run"] and "us" not in part["results"][0] for part in times)


def test_what_failed_is_named_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rocm-attention.json").write_text("{}")
    assert amd_result.main(["pack", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "target unknown" in out and "dry run" not in out
    assert "missing: rocm-verify.json, rocm.safetensors, rocm-small-ops.json" in out
    with zipfile.ZipFile(tmp_path / amd_result.RESULT) as archive:
        assert set(archive.namelist()) == {"summary.txt", "rocm-attention.json"}
    assert amd_result.main(["pack", str(tmp_path / "missing")]) == 2
    assert amd_result.main(["send", str(tmp_path)]) == 2


def test_a_benchmark_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU all of them fail, and each by itself."""
    quick = {name: ["benchmarks.no_such", "{target}"] for name in amd_result.BENCHMARKS}
    monkeypatch.setattr(amd_result, "BENCHMARKS", quick)
    assert amd_result.benchmark(tmp_path) == len(quick)


def test_a_wrong_kernel_fails_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ci import executed_code

    monkeypatch.setattr(amd_result, "REHEARSED", {"rocm-small-ops.json": ("route",)})
    assert amd_result.rehearse(tmp_path) == 0
    monkeypatch.setattr(executed_code, "disagreements", lambda *_: ["off"])
    assert amd_result.rehearse(tmp_path) == 1
    content = json.loads((tmp_path / "rocm-small-ops.json").read_text())
    assert "off" in content["results"][0]["contract"][0]
