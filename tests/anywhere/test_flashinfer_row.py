"""FlashInfer's NVFP4 experts without FlashInfer: who gets them, and whether vLLM's calls fit it.

The row is vLLM's layer, so the calls are vLLM's; both sides are facts of their sources
(`python -m ci.surface.providers`), for each vLLM with the FlashInfer that it pins.
"""

import json
from typing import Any

import pytest

from ci.surface.compare import binds, parsed
from ci.surface.providers import FACTS, NAMES
from inkling_portable.__main__ import main
from inkling_portable.registry import Facts, SelectionError, choose, resolve
from inkling_portable.target import Target

FOUND: dict[str, dict[str, Any]] = json.loads(FACTS.read_text())
B200 = "b200+triton=3.6.0+vllm=0.33.0+flashinfer-python="
CUTLASS = Facts(weights="nvfp4", tp=8, moe_backend="flashinfer_cutlass")
ASKED = (("routed_experts", "flashinfer"),)


@pytest.mark.parametrize("version", FOUND["vllm"])
def test_vllm_calls_the_flashinfer_that_it_pins_as_it_can_be_called(version: str) -> None:
    ours = FOUND["vllm"][version]
    theirs = FOUND["flashinfer-python"][ours["flashinfer-python"]]
    calls = [name for name in NAMES["vllm"] if ">" in name]
    assert len(calls) == len(theirs) == 2
    for call, kernel in zip(calls, theirs, strict=True):
        assert kernel.rpartition(":")[2] in call
        keywords = dict.fromkeys(parsed(ours[call]).parameters)
        assert len(keywords) > 10 and binds(theirs[kernel], 0, keywords) is None
        assert binds(theirs[kernel], 0, {**keywords, "no_such": None}) is not None


def experts(target: str, facts: Facts, asked: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    decisions = choose(Target.parse(target), facts, asked)
    return {d.provider: d.verdict for d in decisions if d.op == "routed_experts"}


def test_it_is_chosen_where_its_kernel_is_named_and_is_the_engines_layer() -> None:
    found = experts(B200 + "0.7.2", CUTLASS)
    assert [name for name, verdict in found.items() if verdict == "chosen"] == ["flashinfer"]
    assert resolve(Target.parse(B200 + "0.7.2"), CUTLASS, {}).routed_experts is None
    plain = Facts(weights="nvfp4", tp=8)
    assert experts(B200 + "0.7.2", plain)["flashinfer"] == "refused"
    assert experts(B200 + "0.7.2", plain)["engine"] == "chosen"


@pytest.mark.parametrize(
    ("target", "backend", "sentence"),
    [
        (B200 + "0.7.2", "auto", "needs --moe-backend flashinfer_trtllm or flashinfer_cutlass"),
        (B200 + "0.7.2", "flashinfer_cutedsl", "asked is flashinfer_cutedsl"),
        (B200 + "0.5.3", "flashinfer_cutlass", "found 0.5.3"),
        ("h200+vllm=0.33.0+flashinfer-python=0.7.2", "flashinfer_cutlass", "this is sm90"),
        ("b200+vllm=0.33.0", "flashinfer_cutlass", "needs flashinfer-python"),
    ],
)
def test_a_request_that_it_cannot_serve_is_refused(
    target: str, backend: str, sentence: str
) -> None:
    facts = Facts(weights="nvfp4", tp=8, moe_backend=backend)
    with pytest.raises(SelectionError, match=sentence):
        experts(target, facts, ASKED)


def test_explain_says_that_only_signatures_were_checked(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--weights", "nvfp4", "--tp", "8", "--moe-backend", "flashinfer_trtllm", "--json"]
    assert main(["explain", "--target", B200 + "0.6.14", *asked]) == 0
    rows = json.loads(capsys.readouterr().out)["decisions"]
    (row,) = (r for r in rows if r["provider"] == "flashinfer")
    assert (row["verdict"], row["verified"]) == ("chosen", "signature only")
