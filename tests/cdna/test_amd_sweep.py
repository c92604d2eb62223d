"""What the sweep does on request: inputs by Hypothesis, and a record of a Triton's code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import amd_drawn, amd_sweep
from ci.amd_inputs import cases


def test_a_kernel_that_keeps_its_contract_is_left_alone() -> None:
    assert amd_drawn.drawn("route", "gfx950", 3) == []


def test_the_smallest_call_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(op: object, function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
        rows = len(arguments["gate_up"])
        return [f"row {rows - 1} is off"] if rows > 2 else []

    monkeypatch.setattr(amd_drawn, "disagreements", wrong)
    command = ["--drawn", "100", "--only", "swiglu", "--chips", "gfx942"]
    assert amd_sweep.main(command) == 1
    told = capsys.readouterr().out
    assert (
        "gfx942, swiglu, drawn: AssertionError: row 2 is off, given gate_up bfloat16 [3, " in told
    )
    monkeypatch.setattr(amd_drawn, "disagreements", lambda *_: [])
    assert amd_sweep.main(command) == 0
    assert "1 ops on 1 chips, each on 100 drawn inputs, 0 with faults" in capsys.readouterr().out


def test_a_record_says_what_was_not_executed(tmp_path: Path) -> None:
    """Two of all cases, one of them twice; what other Tritons did stays."""
    into = tmp_path / "tritons.json"
    done = [
        amd_sweep.Result(name, "gfx942", seed, faults, 1.0, {(name, (), ())})
        for name, seed, faults in (("route", 1, []), ("route", 2, ["is off"]), ("norm_gelu", 1, []))
    ]
    amd_sweep.record("3.7.0", "gfx950", [], into)
    amd_sweep.record("3.6.0", "gfx942", done, into)
    found = json.loads(into.read_text())
    assert list(found) == ["3.6.0", "3.7.0"] and found["3.7.0"]["gfx950"]["executed"] == 0
    assert found["3.6.0"]["gfx942"] == {
        "cases": len(cases("gfx942")), "executed": 2, "configurations": 2, "executions": 3,
        "faults": ["route: is off"],
    }  # fmt: skip
