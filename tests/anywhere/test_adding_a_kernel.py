"""The worked example of docs/adding-a-kernel.md runs as printed, and a wrong one is caught.

Its blocks become a small package whose row joins the Triton table; then the page's commands run, in
a process under Triton's interpreter.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from inkling_portable.registry import contract

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-kernel.md").read_text()
KERNEL, ROW = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[COMMANDS] = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

TABLE = """
from inkling_portable.backends.triton import accelerator
from inkling_portable.registry import needs, offers_in

offer = offers_in(__name__)
OFFERS = (
{row})
"""

RUN = """
import contextlib, importlib, io, json, sys
from inkling_portable.backends import triton
from inkling_portable.__main__ import main

package, calls = json.loads(sys.argv[1])
triton.OFFERS += importlib.import_module(package).OFFERS
results = []
for arguments in calls:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(arguments)
    results.append([status, printed.getvalue()])
print(json.dumps(results))
"""

CHECK = """
import contextlib, importlib, io, json, sys
from inkling_portable.commands.verify import verify_row
from inkling_portable.registry import SelectionError, check_schema, contract

results = {}
for name in json.loads(sys.argv[1]):
    [row] = importlib.import_module(name).OFFERS
    printed = io.StringIO()
    try:
        check_schema(contract(row.op), row.load(), row.code)
        with contextlib.redirect_stdout(printed):
            verify_row(row, "cpu", 0, 25)
        results[name] = printed.getvalue()
    except SelectionError as error:
        results[name] = str(error)
print(json.dumps(results))
"""


def write_example(folder: Path, name: str = "worked_example", kernel: str = KERNEL) -> None:
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text(TABLE.format(row=ROW))
    (package / "swiglu_rows.py").write_text(kernel)


def python(folder: Path, code: str, data: Any, interpret: bool = True) -> Any:
    """What `code`, given `data`, prints as JSON in a process that finds the examples."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(data)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def commands() -> list[tuple[bool, list[str]]]:
    """(whether under the interpreter, arguments) of each command of the page."""
    found = []
    for line in COMMANDS.splitlines():
        words = shlex.split(line.removeprefix("$ "))
        interpret = words[0] == "TRITON_INTERPRET=1"
        program, *arguments = words[interpret:]
        assert program == "inkling-portable"
        found.append((interpret, arguments))
    return found


def test_commands_do_what_the_page_says(tmp_path: Path) -> None:
    write_example(tmp_path)
    outputs = {}
    for interpret, group in itertools.groupby(commands(), key=lambda command: command[0]):
        calls = [arguments for _, arguments in group]
        for arguments, (status, output) in zip(
            calls, python(tmp_path, RUN, ["worked_example", calls], interpret), strict=True
        ):
            outputs[arguments[0]] = output
            assert status == 0, output
    assert set(outputs) == {"explain", "verify", "record", "compare"}
    assert re.search(r"^ +rows +- +would do; an earlier row", outputs["explain"], re.MULTILINE)
    assert "1 of 1 kernels agree" in outputs["verify"]
    assert re.search(r"swiglu +rows +agrees +25 examples", outputs["verify"])
    assert "3 of 3 pairs agree" in outputs["compare"]


WRONG = {
    "other_gate": ("tl.sigmoid(gate)", "tl.sigmoid(up)"),
    "no_interleaving": ("2 * column + 1", "2 * column"),
    "first_weight": ("product *= tl.load(weight + row)", "product *= tl.load(weight)"),
    "last_rows": ("row * stride", "row * (stride + 1)"),
    "schema": ("weight: Tensor | None)", "weight: Tensor)"),
}


def test_a_wrong_kernel_is_caught(tmp_path: Path) -> None:
    """The printed kernel agrees; with one change it does not, or is refused for its signature."""
    write_example(tmp_path, "printed")
    for name, (right, wrong) in WRONG.items():
        assert right in KERNEL
        write_example(tmp_path, name, KERNEL.replace(right, wrong))
    found = python(tmp_path, CHECK, ["printed", *WRONG])
    assert "agrees" in found.pop("printed")
    assert "does not have the schema of op swiglu" in found.pop("schema")
    for name, output in found.items():
        assert "FAILED" in output and "verify swiglu --provider rows --seed" in output, name


def test_a_machine_without_triton_is_refused_with_the_need(tmp_path: Path) -> None:
    write_example(tmp_path)
    call = ["explain", "--target", "cuda:sm90/132+vllm=0.33.0"]
    [(status, output)] = python(tmp_path, RUN, ["worked_example", [call]], interpret=False)
    assert status == 0
    refusal = r"^ +rows +no +needs triton >=3.6, which is not installed"
    assert re.search(refusal, output, re.MULTILINE)


def test_the_contract_is_quoted_as_it_stands() -> None:
    quoted = re.search(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert quoted is not None
    assert inspect.getsource(contract("swiglu").reference).startswith(quoted[1])
    assert KERNEL.splitlines()[0] == "# inkling_portable/backends/triton/swiglu_rows.py"
    assert KERNEL.splitlines()[1].startswith('"""')
