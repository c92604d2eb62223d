"""`verify`, `record` and `compare`: agreement is shown, a wrong kernel is caught and repeatable."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from inkling_portable.__main__ import main
from inkling_portable.backends.reference import experts
from inkling_portable.commands import compare as compare_module


def test_reference_verifies_and_records_compare_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "rms_norm", "route", "--provider", "reference", "--examples", "3"]) == 0
    assert "2 of 2 kernels agree" in capsys.readouterr().out
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    for path in (one, two):
        assert (
            main(["record", "rms_norm", "rel_attention", "--provider", "reference", "--out", path])
            == 0
        )
    assert main(["compare", one, two]) == 0
    assert "6 of 6 pairs agree" in capsys.readouterr().out


def test_a_wrong_kernel_fails_with_its_reproduce_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from inkling_portable.commands import verify
    from inkling_portable.registry import contract, ordered_rows
    from inkling_portable.target import Target

    row = next(r for r in ordered_rows("swiglu", Target.parse("cpu")) if r.provider == "reference")
    right = contract("swiglu").reference
    monkeypatch.setattr(
        experts, "swiglu", lambda gate_up, interleaved, weight: right(gate_up, False, weight)
    )
    assert not verify.verify_row(row, "cpu", 0, 20)
    out = capsys.readouterr().out
    assert "FAILED" in out and "verify swiglu --provider reference --seed" in out


def test_kernels_of_one_weight_format_are_judged_on_what_they_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine's rows for 4-bit weights are among those that it can run, as `record` has them."""
    from inkling_portable.commands import record, verify
    from inkling_portable.registry import contract, ordered_rows
    from inkling_portable.target import Target

    h200 = Target.parse("h200+triton=3.6.0")
    assert "mma" in {row.provider for row in verify.runnable(h200, ["routed_experts"], None)}
    served = ["nvfp4"]
    right = contract("routed_experts").reference

    def picky(*args: object, **arguments: object) -> torch.Tensor:
        if arguments["format"] not in served:
            raise ValueError(f"needs format nvfp4; found {arguments['format']}")
        result: torch.Tensor = right(*args, **arguments)
        return result

    rows = ordered_rows("routed_experts", Target.parse("cpu"))
    row = next(r for r in rows if r.provider == "reference")
    monkeypatch.setattr(experts, "routed_experts", picky)
    assert verify.verify_row(row, "cpu", 0, 12)
    assert 0 < int(capsys.readouterr().out.split("agrees")[1].split()[0]) < 12
    _, entries = record._outputs(iter([row]), "cpu", range(12))
    assert 0 < len(entries) < 12 and {e["plain"]["format"] for e in entries} == {"nvfp4"}
    served.clear()
    assert not verify.verify_row(row, "cpu", 0, 2)
    assert "FAILED  serves no input: needs format nvfp4" in capsys.readouterr().out


def test_a_kernel_that_raises_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error is the report, and the kernels behind it are judged."""

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("first line\ncannot be compiled")

    monkeypatch.setattr(experts, "route", broken)
    ops = ["route", "swiglu", "--provider", "reference", "--examples", "1"]
    assert main(["verify", *ops]) == 1
    out = capsys.readouterr().out
    assert "FAILED  raised RuntimeError: cannot be compiled" in out
    assert "verify route --provider reference --seed 0" in out
    assert "1 of 2 kernels agree" in out


def altered(source: Path, target: Path, change: str) -> None:
    tensors = load_file(source)
    with safe_open(source, "pt") as file:
        metadata = json.loads(file.metadata()["inkling_portable"])
    if change == "contract":
        for entry in metadata["entries"]:
            entry["contract"] = "0" * 16
    else:
        name = next(n for n, x in tensors.items() if f"/{change}/" in n and x.is_floating_point()
                    and x.numel() > 4)  # fmt: skip
        tensors[name] = tensors[name] + 1
    save_file(tensors, target, {"inkling_portable": json.dumps(metadata)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("out", "second file, result0"),
        ("in", "the input "),
        ("contract", "another contract"),
    ],
)
def test_compare_names_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["record", "rms_norm", "--provider", "reference", "--out", str(one)]) == 0
    altered(one, two, change)
    assert main(["compare", str(one), str(two)]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "rmsnorm"], "unknown op 'rmsnorm'"),
        (["verify", "--provider", "gluon"], "no op asked for is offered by 'gluon'"),
        (["compare", "missing-a", "missing-b"], "cannot be read"),
        (["record", "rms_norm", "--out", "missing/folder/file"], "in a folder that exists"),
    ],
)
def test_bad_requests_are_sentences(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("count", ["0", "-3", "some"])
def test_nothing_run_is_no_agreement(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "route", "--examples", count]) == 2
    assert "needs to be 1 or more" in capsys.readouterr().err


def test_compare_refuses_files_that_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(compare_module.RecordingError, match="is no recording"):
        compare_module.load(path)
