"""Generated pages are in step with the code they describe."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def generator(name: str) -> ModuleType:
    """A script of ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"ci/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numerics_page_is_current() -> None:
    module = generator("generate_numerics")
    assert module.TARGET.read_text() == module.render()


def test_evidence_follows_from_the_committed_results() -> None:
    module = generator("generate_evidence")
    assert module.TARGET.read_text() == module.render()


def test_evidence_needs_right_results_and_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = generator("generate_evidence")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    machine = {"target": "cuda:sm90/132+torch=2.11.0"}

    def report(*rows: dict) -> dict:
        (tmp_path / "one.json").write_text(json.dumps({"machine": machine, "results": list(rows)}))
        return module.evidence()

    won = {"op": "route", "us": {"triton": 2.0, "vllm": 4.0}, "contract": "holds"}
    lost = {"op": "route", "us": {"triton": 9.0, "vllm": 4.0}, "contract": "holds"}
    wrong = {"op": "route", "us": {"triton": 1.0}, "contract": ["off"]}
    alone = {"op": "route", "us": {"triton": 2.0}, "contract": "holds"}
    assert report(won) == report(alone) == {("route", "triton"): ("cuda:sm90/132",)}
    assert report(won, lost) == report(won, wrong) == {}
    assert module.dependent_launch() == ()
    overlaps = {"op": "route", "us": {"triton": 2.0, "triton+pdl": 1.5}, "contract": "holds"}
    report(overlaps)
    assert module.dependent_launch() == ("cuda:sm90/132",)
    report(overlaps, {**overlaps, "us": {"triton": 2.0, "triton+pdl": 2.1}})
    assert module.dependent_launch() == ()
    # The engine has experts of its own, so a time without theirs beside it says nothing.
    assert report({**alone, "op": "routed_experts"}) == {}
