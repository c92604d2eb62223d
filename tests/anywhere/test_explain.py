"""`inkling-portable explain`: true, quick, and a sentence for every request it cannot meet."""

import json
import subprocess
import sys
import time

import pytest

from ci.cross_compile import ARCHS
from inkling_portable.__main__ import main
from inkling_portable.recipes import SPLITS
from inkling_portable.registry import COMPILED, op_names


def test_described_target_imports_no_torch_and_takes_under_a_second() -> None:
    code = (
        "import sys; from inkling_portable.__main__ import main;"
        "status = main(['explain', '--target', 'mi300x+triton=3.7.0+vllm=0.33.0']);"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules); sys.exit(status)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 1.0
    assert all(name in done.stdout for name in op_names())


def test_this_machine_in_under_three_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "inkling_portable", "explain"], check=True)
    assert time.monotonic() - began < 3.0
    assert capfd.readouterr().out.startswith("target cpu")


def test_json_carries_every_offer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", "h200+vllm=0.33.0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in report["decisions"]} == set(op_names())
    chosen = [row["op"] for row in report["decisions"] if row["verdict"] == "chosen"]
    assert set(chosen) == set(op_names())
    assert all(
        ":" in row["code"] or row["code"] in ("engine", "parts") for row in report["decisions"]
    )


def test_a_chip_alone_has_the_usual_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", "mi300x", "--strict"]) == 0
    said = capsys.readouterr().out
    assert "+triton=3.6.0+vllm=0.33.0 (libraries assumed; name yours to be sure)" in said
    assert main(["explain", "--target", "mi300x+vllm=0.33.0", "--strict"]) == 1
    said = capsys.readouterr().out
    assert "assumed" not in said and "needs triton >=3.6, which is not installed" in said


def test_strict_fails_on_a_slow_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", "cuda:sm90/132+vllm=0.33.0", "--strict"]) == 1
    assert "slow reference" in capsys.readouterr().out
    assert main(["explain", "--target", "cpu", "--strict"]) == 0


def test_a_chip_for_which_nothing_was_compiled_is_told_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert COMPILED == ARCHS, "the chips of tests/compile"
    for target in ("cuda:sm89", "cuda:sm120", "rocm:gfx90a", "rocm:gfx1100"):
        assert main(["explain", "--target", target]) == 0
        assert f"for {target[5:]} they never were, so the self-test" in capsys.readouterr().out
    for target in ("h200", "mi300x", "cpu"):
        assert main(["explain", "--target", target]) == 0
        assert "note:" not in capsys.readouterr().out
    # Triton takes the one no more, and products spill on the other, which has no bfloat16.
    for target in ("rocm:gfx900", "cuda:sm75"):
        assert main(["explain", "--target", target, "--strict"]) == 1
        said = capsys.readouterr().out
        assert "on the slow reference: rms_norm" in said
        assert f"needs sm80 or newer, or gfx906 or newer; this is {target[5:]}" in said


@pytest.mark.parametrize("target", ["cuda:smfoo", "cuda:sm9", "rocm:gfxzzz", "cuda:sm90/0", ""])
def test_what_is_no_chip_is_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target", f"{target}+triton"]) == 2
    assert "is not understood; write cpu, cuda:smNN[/units]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "h300"], "is not understood"),
        (["--target", "cpu", "--tp", "5"], "needs num_attention_heads to be a multiple of it"),
        (["--target", "cpu", "--tp", "0"], "needs at least 1 rank; found 0"),
        (["--target", "cpu", "--tp", "64", "--model", "small"], "found 32; use one of 1, 2, 4, 8"),
        (["--target", "cpu", "--ask", "route"], "--ask='route' is not understood"),
        (["--target", "cpu", "--ask", "route=triton,route=reference"], "asks for route twice"),
        (["--target", "cpu", "--ask", "route=fast"], "route is offered by"),
        (
            ["--target", "mi300x", "--weights", "mxfp4", "--moe-backend", "aiter"],
            "cannot be obeyed",
        ),
    ],
)
def test_requests_that_cannot_be_met(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("model", ["large", "small"])
def test_every_split_that_serves_is_described(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with more ranks than KV heads, of which each is then on several."""
    for tp in SPLITS:
        assert main(["explain", "--target", "h200", "--model", model, "--tp", str(tp)]) == 0
    assert "rel_attention" in capsys.readouterr().out


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explian"]) == 2
    assert "there is no command 'explian'" in capsys.readouterr().err
    assert main([]) == 0
    assert "explain" in capsys.readouterr().out


def test_off_says_that_nothing_is_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_PORTABLE", "off")
    assert main(["explain", "--target", "cpu"]) == 0
    assert "vLLM's own model serves" in capsys.readouterr().out


def test_vllms_switch_of_aiter_counts_as_in_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "mi355x+triton=3.6.0+vllm=0.33.0+amd-aiter=0.1.16"
    asked = ["explain", "--target", target, "--weights", "mxfp4", "--moe-backend", "aiter"]
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    assert main(asked) == 0
    monkeypatch.delenv("VLLM_ROCM_USE_AITER")
    capsys.readouterr()
    assert main(asked) == 0  # ours
    assert "vLLM wants VLLM_ROCM_USE_AITER=1" in capsys.readouterr().out
    for name in ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"):
        monkeypatch.setenv(name, "0")
        assert main(asked) != 0
        assert "VLLM_ROCM_USE_AITER_MOE is set to off" in capsys.readouterr().err
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize("target", ["h200", "mi300x", "b200+triton=3.6.0+vllm=0.33.0"])
def test_nothing_is_said_twice(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An op may have several rows of one provider, which are refused for the same reason."""
    assert main(["explain", "--target", target, "--weights", "mxfp4"]) == 0
    table, _, warnings = capsys.readouterr().out.partition("warning: ")
    op, shown = "", []
    for line in table.splitlines()[1:]:
        op = op if line.startswith(" ") else line.split()[0]
        shown.append((op, line.removeprefix(op).strip()))
    assert len(shown) == len(set(shown)) and len(shown) > 30
    for warning in warnings.splitlines():
        reasons = warning.removesuffix(")").partition("(")[2].split("; ")
        assert len(reasons) == len(set(reasons))
