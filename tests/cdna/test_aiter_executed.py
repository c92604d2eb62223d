"""AITER is called executed only for what `ci.aiter_executed` found; its sources are not here."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from ci import aiter_executed
from ci.cdna.launch import CHIPS
from inkling_portable.backends.rocm import OFFERS, routed_experts_aiter
from inkling_portable.registry import contract

ROW = next(row for row in OFFERS if row.provider == "aiter")


def test_the_row_is_called_what_the_stored_results_show() -> None:
    stored = json.loads(aiter_executed.FILE.read_text())
    served = {
        version: of for version, of in stored.items() if Version(version) >= Version("0.1.16")
    }
    assert served and all(set(of["chips"]) == set(CHIPS) for of in served.values())
    results = [result for of in served.values() for result in of["chips"].values()]
    executed = all(not r["faults"] and "_moe_gemm_a16w4" in r["kernels"] for r in results)
    assert ROW.verified == ("executed" if executed else "signature only")


def test_inputs_are_those_that_the_row_serves() -> None:
    for seed in aiter_executed.SEEDS:
        arguments = contract("routed_experts").inputs(aiter_executed.Served(seed))
        assert arguments["format"] == "mxfp4" and arguments["interleaved"]
        assert arguments["x"].dtype == torch.bfloat16


def test_wrong_code_and_missing_sources_are_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the interpreter is left as it was: no `aiter`, no driver."""
    found = aiter_executed.execute(tmp_path, "gfx942", [1])
    assert "ImportError cannot import name 'moe_op_gemm_a16w4'" in found["faults"][0]
    assert not [name for name in sys.modules if name.startswith("aiter")]

    def gemm(x: Any, w: Any, *args: Any, swiglu_add_residual: bool = True, **of: Any) -> Any:
        rows = len(of["gather_indx"]) if "gather_indx" in of else len(x) // 1
        return torch.full((rows, w.shape[-1] // (2 if of.get("apply_swiglu") else 1)), 9.0)

    table = ModuleType("routing")
    table.ExptData = table.RoutingData = SimpleNamespace  # type: ignore[attr-defined]
    table.ExptData = lambda *parts: parts  # type: ignore[attr-defined]
    monkeypatch.setattr(routed_experts_aiter, "_aiter", lambda: (gemm, table))
    found = aiter_executed.execute(tmp_path, "gfx942", [1])
    assert found["faults"] and found["faults"][0].startswith("seed 1: ")
    assert aiter_executed.main([str(tmp_path), "0.1.16"]) == 2
    assert "needs a checkout of AITER; found" in capsys.readouterr().err
