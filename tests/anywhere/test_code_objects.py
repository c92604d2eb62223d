"""Without a checkout, or under the interpreter, the executor is refused with a sentence."""

from pathlib import Path

import pytest

from inkling_portable import code_objects
from inkling_portable.__main__ import main


def test_an_installation_without_the_executor_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(code_objects, "__file__", str(tmp_path / "inkling_portable" / "x.py"))
    assert main(["record", "--device", "executed:gfx942", "--out", "unused"]) == 2
    error = capsys.readouterr().err
    assert "needs the executor of a checkout, ci/cdna" in error and error.count("\n") == 1


def test_interpreted_kernels_are_not_executed_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["verify", "--device", "executed:gfx950"]) == 2
    error = capsys.readouterr().err
    assert "TRITON_INTERPRET=1 interprets them; unset it" in error and error.count("\n") == 1


def test_explain_says_how_much_of_a_chip_was_executed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of that chip, by Triton; nothing for chips that no CI can execute."""
    listed = {"3.9.0": {"gfx942": {"a": ["1", "2"], "b": ["3"]}, "gfx950": {"a": ["4"]}}}
    monkeypatch.setattr(code_objects, "executed_in_ci", lambda: listed)
    assert main(["explain", "--target", "mi300x+triton=3.6.0"]) == 0
    out = capsys.readouterr().out
    assert "code objects for gfx942 that CI executed on a CPU: 3 with Triton 3.9.0" in out
    assert main(["explain", "--target", "h200+triton=3.6.0"]) == 0
    assert "executed" not in capsys.readouterr().out
