"""What named machines would choose, pinned: a change for one vendor cannot move another unseen.

Regenerate after an intended change: `python tests/anywhere/test_selection.py`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from inkling_portable.registry import MODELS, SelectionError, choose
from inkling_portable.target import Target

GOLDEN = Path(__file__).with_name("golden_selection.json")
CHIPS = ("cuda:sm90/132", "cuda:sm90/78", "cuda:sm100/148", "cuda:sm103/148", "cuda:sm120/188",
         "rocm:gfx942/304", "rocm:gfx942/80", "rocm:gfx950/256")  # fmt: skip
VENDOR_LIBS = {"cuda": "+flash-attn-4=4.0.0+flashinfer-python=0.6.14", "rocm": "+amd-aiter=0.1.16"}
WEIGHTS = ("bf16", "nvfp4", "mxfp4", "fp8")


def targets() -> list[str]:
    """Each chip bare, with the engine and Triton, and with the vendor's libraries too."""
    found = ["cpu", "cpu+triton=3.9.0+vllm=0.32.0", "cpu+triton=3.9.0+vllm=0.32.0+interpret"]
    for chip in CHIPS:
        libs = VENDOR_LIBS[chip.split(":")[0]]
        found += [
            chip,
            f"{chip}+triton=3.6.0+vllm=0.33.0",
            f"{chip}+triton=3.6.0+vllm=0.33.0{libs}",
        ]
    return found


def selection(target: str, weights: str, moe_backend: str = "auto") -> dict[str, str] | str:
    facts = replace(MODELS["large"], weights=weights, tp=8, moe_backend=moe_backend)
    try:
        decisions = choose(Target.parse(target), facts)
    except SelectionError as error:
        return str(error)
    return {d.op: d.provider for d in decisions if d.verdict == "chosen"}


def current() -> dict[str, object]:
    table: dict[str, object] = {}
    for target in targets():
        for weights in WEIGHTS:
            table[f"{target} {weights}"] = selection(target, weights)
        if target.startswith("rocm"):
            table[f"{target} mxfp4 --moe-backend aiter"] = selection(target, "mxfp4", "aiter")
    return table


@pytest.mark.parametrize("target", targets())
def test_choices_are_the_pinned_ones(target: str) -> None:
    pinned = json.loads(GOLDEN.read_text())
    now = current()
    keys = [key for key in now if key.split(" ")[0] == target]
    assert len(keys) >= len(WEIGHTS)
    assert {k: now[k] for k in keys} == {k: pinned[k] for k in keys}


def test_no_pinned_target_is_stale() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(current())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
