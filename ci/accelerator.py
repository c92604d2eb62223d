"""Checks that this machine can run `ci/run cuda` or `ci/run rocm`: `python -m ci.accelerator LANE`.

First suite of both lanes. Prints the target and makes the folder for the recording, or says in one
sentence what is missing. In CI, CI_TARGET and CI_VLLM say what the lane of ci/matrix.toml
promises, and a runner with the wrong label is refused. --dry-run asks for no GPU, but for the
executor's tools (`ci/run rocm --dry-run`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from inkling_portable.target import Target

ROOT = Path(__file__).resolve().parent.parent
CHIPS = {"cuda": "an NVIDIA GPU (H100, H200 or B200)", "rocm": "an AMD GPU (one MI300X will do)"}
TOOLS = ("torch", "triton", "safetensors", "pytest", "hypothesis")


def refusal(
    lane: str, target: Target, environ: Mapping[str, str], missing: list[str]
) -> str | None:
    """Why this machine cannot run the lane, in one sentence; None if it can.

    missing: modules of TOOLS that cannot be imported.
    """
    if "torch" in missing or target.vendor != lane:
        found = "torch is not installed" if "torch" in missing else f"this machine is {target.key}"
        return (
            f"ci/run {lane} needs {CHIPS[lane]} that torch sees; {found}; run it there with "
            "PYTHON naming an interpreter that has vLLM, or run `ci/run cpu`"
        )
    if missing:
        tools = " ".join(missing)
        return f"ci/run {lane} needs {tools} beside torch; install with `pip install {tools}`"
    vllm = target.lib("vllm")
    if vllm is None:
        return (
            f"ci/run {lane} needs vLLM 0.26 to 0.33, which {sys.executable} does not have; set "
            "PYTHON to the interpreter of a vLLM installation"
        )
    promised = environ.get("CI_TARGET")
    if promised and promised != target.key:
        return f"the lane is for {promised} and this machine is {target.key}; correct its labels"
    version = environ.get("CI_VLLM")
    if version and vllm.partition("+")[0] != version:
        return f"the lane is for vLLM {version} and this is vLLM {vllm}; use that image"
    return None


def main(argv: list[str]) -> int:
    """Returns 0, 1 where the lane cannot run, or 2 for an unknown lane."""
    if argv[:1] not in ([chip] for chip in CHIPS) or argv[1:] not in ([], ["--dry-run"]):
        print(f"usage: python -m ci.accelerator {'|'.join(CHIPS)} [--dry-run]", file=sys.stderr)
        return 2
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if argv[1:]:
        if missing:
            print(f"ci/run {argv[0]} --dry-run needs {' '.join(missing)}; set PYTHON to an "
                  "interpreter with it, such as .venv/bin/python after `make setup`",
                  file=sys.stderr)  # fmt: skip
            return 1
        (ROOT / "recordings" / "dry-run").mkdir(parents=True, exist_ok=True)
        print("dry run: AMD code is executed on this CPU, and nothing is measured")
        return 0
    target = Target("cpu", "cpu") if "torch" in missing else Target.detect()
    reason = refusal(argv[0], target, os.environ, missing)
    if reason:
        print(reason, file=sys.stderr)
        return 1
    (ROOT / "recordings").mkdir(exist_ok=True)
    print(f"target {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
