"""Digests of code objects, and `verify`, `record` and `compare` on the executor."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ci import executed_code
from ci.cdna.launch import CHIPS, executing
from ci.cross_compile import Launch, job, recorded
from inkling_portable import code_objects
from inkling_portable.__main__ import main
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton import experts as kernels
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.commands import verify
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import contract
from inkling_portable.target import Target

ROWS = {row.op: row for row in OFFERS}
QUICK = ("rms_norm", "route", "swiglu")


def swiglu_for(chip: str, rows: int = 3) -> None:
    with launching_for(Target.parse(CHIPS[chip])):
        kernels.swiglu(torch.ones(rows, 256, dtype=torch.bfloat16), False, None)


def compiled(launch: Launch, chip: str) -> Any:
    """What Triton's launcher would compile for one launch on the chip."""
    work = job(launch, chip)
    attributes = {k: [list(pair) for pair in v] for k, v in work.attributes}
    source = ASTSource(launch.kernel, dict(work.signature), dict(work.constants), attributes)
    return triton.compile(source, GPUTarget("hip", chip, 64), dict(work.options))


@pytest.fixture
def assembly() -> str:
    with recorded() as launches:
        swiglu_for("gfx942")
    return str(compiled(launches[0], "gfx942").asm["amdgcn"])


def test_a_digest_is_of_what_the_chip_gets(assembly: str) -> None:
    """Places of sources and comments do not count; an instruction, a directive and LDS do."""
    digest = code_objects.digest
    assert '"experts.py"' in assembly and "\t.loc\t" in assembly and "s_endpgm" in assembly
    elsewhere = assembly.replace("backends/triton", "site-packages/elsewhere")
    elsewhere = elsewhere.replace(".loc\t1 1", ".loc\t1 7").replace("; ", "; other ")
    assert elsewhere != assembly and digest(elsewhere, 0) == digest(assembly, 0)
    for old, new in (
        ("v_mul_f32", "v_add_f32"),
        ("vmcnt(0)", "vmcnt(1)"),
        ("denorm_mode_32 3", "denorm_mode_32 0"),
        ("max_flat_workgroup_size: 64", "max_flat_workgroup_size: 128"),
        ("gfx942", "gfx950"),
    ):
        assert old in assembly
        assert digest(assembly.replace(old, new, 1), 0) != digest(assembly, 0), old
    assert digest(assembly, 0) != digest(assembly, 64)


@pytest.mark.parametrize("chip", CHIPS)
def test_what_a_machine_launches_has_the_digest_that_was_executed(
    chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: Triton's launch returns the kernel it compiled. Another kernel is not it."""
    with executing(chip) as executed:
        swiglu_for(chip)
    (name,) = executed.objects()

    def launch(warps: int | None) -> Iterator[str]:
        with recorded() as launches:
            record: Any = JITFunction.run

            def run(self: Any, *args: Any, **kwargs: Any) -> Any:
                record(self, *args, **(kwargs if warps is None else kwargs | {"num_warps": warps}))
                return compiled(launches[-1], chip)

            JITFunction.run = run
            with code_objects.launched() as found:
                swiglu_for(chip)
            assert list(found.values()) == ["_swiglu_kernel"]
        yield from found

    assert list(launch(None)) == [name]
    assert list(launch(8)) != [name]
    listed = {"3.9.0": {chip: {"_swiglu_kernel": [name]}}}
    monkeypatch.setattr(code_objects, "executed_in_ci", lambda: listed)
    found = {name: "_swiglu_kernel"} | dict.fromkeys(launch(8), "_swiglu_kernel")
    lines = verify.report_objects(found)
    assert [line.endswith("  executed") for line in lines[:2]].count(True) == 1
    assert lines[2] == "CI executed exactly 1 of these 2 code objects"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", QUICK)
def test_the_committed_digests_are_of_this_code(op: str, chip: str) -> None:
    """A changed kernel is executed again: `python -m ci.executed_code`."""
    inputs = executed_code.cases(op, seeds=(1, 2), served=False)
    found, faults = executed_code.executed(ROWS[op], chip, inputs)
    assert found and not faults
    kernels = code_objects.executed_in_ci()[triton.__version__.partition("+")[0]][chip]
    assert [name for name, kernel in found.items() if name not in kernels.get(kernel, [])] == []


def test_only_code_that_always_agreed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [(str(s), contract("swiglu").inputs(SeededDraw(s))) for s in (1, 1)]
    found, faults = executed_code.executed(ROWS["swiglu"], "gfx942", inputs)
    assert found and not faults
    inputs[1][1]["weight"] = torch.ones(1)  # the shape is refused
    found, faults = executed_code.executed(ROWS["swiglu"], "gfx942", inputs[1:])
    assert not found and "swiglu, 1:" in faults[0]
    answers = iter([[], ["off"]])
    real = executed_code.disagreements

    def sometimes(*args: Any) -> list[str]:
        return [*real(*args), *next(answers)]

    monkeypatch.setattr(executed_code, "disagreements", sometimes)
    inputs[1] = inputs[0]
    found, faults = executed_code.executed(ROWS["swiglu"], "gfx942", inputs)
    assert not found and faults == ["gfx942 swiglu, 1: off"]


def test_the_file_keeps_other_chips_and_versions() -> None:
    old = {"3.7.0": {"gfx942": {"_a": ["1"]}}, "3.9.0": {"gfx950": {"_a": ["2"]}}}
    once = executed_code.merged(old, "3.9.0", "gfx942", {"3": "_b", "0": "_b"}, whole=True)
    assert once == {**old, "3.9.0": {**old["3.9.0"], "gfx942": {"_b": ["0", "3"]}}}
    part = executed_code.merged(once, "3.9.0", "gfx942", {"4": "_c"}, whole=False)
    assert part["3.9.0"]["gfx942"] == {"_b": ["0", "3"], "_c": ["4"]}
    whole = executed_code.merged(part, "3.9.0", "gfx942", {"4": "_c"}, whole=True)
    assert whole["3.9.0"]["gfx942"] == {"_c": ["4"]}


def test_recordings_of_both_chips_and_the_reference_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = ["rms_norm", "route", "--examples", "2"]
    files = {name: str(tmp_path / name) for name in ("cpu", *CHIPS)}
    assert main(["record", *ops, "--provider", "reference", "--out", files["cpu"]]) == 0
    for chip in CHIPS:
        device = ["--device", f"executed:{chip}"]
        assert main(["record", *ops, *device, "--out", files[chip]]) == 0
        assert main(["compare", files["cpu"], files[chip]]) == 0
        assert "executed on a CPU" in (out := capsys.readouterr().out)
        assert "4 of 4 pairs agree" in out
    assert main(["compare", files["gfx942"], files["gfx950"]]) == 0
    assert main(["verify", *ops, *device]) == 0
    out = capsys.readouterr().out
    assert "target rocm:gfx950/256+triton=" in out and "2 of 2 kernels agree" in out
    assert "CI executed exactly" in out


def test_a_fault_of_the_code_ends_a_recording_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ci.cdna import machine

    monkeypatch.delitem(machine.HANDLERS, "v_mul_f32")
    request = ["record", "swiglu", "--device", "executed:gfx942", "--out", str(tmp_path / "x")]
    assert main(request) == 2
    error = capsys.readouterr().err
    assert "swiglu=triton failed on seed 0 (" in error and "v_mul_f32 is not supported" in error
    assert error.count("\n") == 1 and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "executed:gfx90a"], "needs executed:gfx942 or executed:gfx950; found"),
        (["--device", "gfx942"], "--device needs executed:gfx942 or executed:gfx950; found gfx942"),
        (["--device", "executed:gfx942", "--provider", "reference"], "leave one of the two out"),
        (["--device", "executed:gfx942", "--provider", "vllm"], "offered by 'vllm' on rocm:gfx942"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "record"])
def test_requests_that_cannot_be_met_are_sentences(
    command: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", "unused"] if command == "record" else []
    assert main([command, "swiglu", *options, *out]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_committed_file_is_well_formed() -> None:
    content = json.loads(code_objects.EXECUTED.read_text())
    names = [name for chips in content.values() for chip in chips.values()
             for found in chip.values() for name in found]  # fmt: skip
    assert all(set(chips) <= set(CHIPS) for chips in content.values())
    assert names and all(len(name) == 16 and int(name, 16) >= 0 for name in names)
