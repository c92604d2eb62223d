"""Generated pages are in step with the code they describe."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from inkling_portable.commands.bench_shown import Point

ROOT = Path(__file__).parents[2]


def generator(name: str) -> ModuleType:
    """A script of ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"ci/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
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
    # Of two of the engine's, the better one counts; each provider of ours stands for itself.
    both = {"op": "routed_experts", "contract": "holds",
            "us": {"mma": 2.0, "triton": 5.0, "humming": 3.0, "marlin": 9.0}}  # fmt: skip
    assert report(both) == {("routed_experts", "mma"): ("cuda:sm90/132",)}
    assert report({**both, "us": {"mma": 4.0, "humming": 3.0, "marlin": 9.0}}) == {}


def test_performance_pages_are_current() -> None:
    """Tables and plots follow from the committed results, and no plot is left over."""
    module = generator("generate_performance")
    wanted = module.render()
    for path, text in wanted.items():
        assert path.read_text() == text, f"{path.name}: run python ci/generate_performance.py"
    assert set(module.FOLDER.glob("*.svg")) == {path for path in wanted if path.suffix == ".svg"}


def test_losses_are_listed_until_they_are_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = generator("generate_performance")
    monkeypatch.setattr(module, "RESULTS", tmp_path)

    def shape(**times: float) -> dict:
        return {"op": "route", "rows": 1, "rank": "large-tp8-global", "floor_us": 0.5,
                "decode": True, "us": times, "contract": "holds"}  # fmt: skip

    def page(name: str, *rows: dict) -> str:
        report = {"machine": {"gpu": "H", "date": "d", "target": "t"}, "results": list(rows)}
        (tmp_path / name).write_text(json.dumps(report))
        return module.render()[module.PAGE]

    lost = page("a.json", shape(triton=9.0, vllm=4.0, cublas=5.0))
    assert "| a | route 1 rows decode | 9.00 | vllm 4.00 | 2.25 |" in lost
    assert "| route 1 rows decode | 0.50 | 9.00 | vllm 4.00 | **2.25** | cublas 5.00 |" in lost
    won = page("b.json", shape(**{"triton": 9.0, "triton+pdl": 3.0, "vllm": 4.0}))
    assert "Where another is faster" not in won
    assert "| route 1 rows decode | 0.50 | 3.00 | vllm 4.00 | 0.75 | triton 9.00 |" in won
    assert "breaks its contract" in page("c.json", {**shape(triton=1.0), "contract": ["off"]})


def test_serving_is_shown_beside_both_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The better variant counts, a loss is listed, and a later day's figure takes the place."""
    module = generator("generate_performance")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "serving").mkdir()

    def measured(variant: str, date: str, drafts: int = 0, asked: str = "", **ms: float) -> None:
        profile = {"us": {"rel_attention": 50.0, "unknown": 1.0}, "sum us": 51.0,
                   "named share": 0.98, "floors us": {"keys and values": 7.0}}  # fmt: skip
        rows = [{"case": case.replace("_", " "), "ms": value, "floor ms": 1.5}
                | ({"profile": profile} if case == "decode_1" else {})
                for case, value in ms.items()]  # fmt: skip
        rows.append({"case": "throughput", "tokens/s": 100.0 / ms["decode_1"]})
        report = {"environment": {"gpu": "H", "date": date, "target": "t"},
                  "results": [{"variant": variant, "drafts": drafts, "asked": asked,
                               "start s": 50.0, "rows": rows}]}  # fmt: skip
        (tmp_path / "serving" / f"rank-{variant}-{drafts}-{asked}-{date}.json").write_text(
            json.dumps(report)
        )

    measured("plugin", "2026-01-01", decode_1=9.0, decode_2=4.0)
    measured("plugin", "2026-01-02", decode_1=4.0, decode_2=4.0)
    measured("off", "2026-01-01", decode_1=12.0, decode_2=5.0)
    measured("off-split", "2026-01-01", decode_1=8.0, decode_2=3.0)
    measured("plugin", "2026-01-01", drafts=2, decode_1=6.0)
    goals = {"decode 1": (3.5, 3.0, 2.5), "decode 2": (4.0, 1.0, None), "throughput": (0, 3.1, 0)}
    monkeypatch.setattr(module, "GOALS", goals)
    page = module.render()[module.PAGE]
    assert "| decode 1 | 1.50 | 4.00 | 12.0 | 8.00 | 3.00 | 2.00 |" in page
    missed = page.partition("Goals that are missed:\n\n")[2].partition("\n\n")[0].splitlines()
    assert missed == [
        "- decode 1: 4.0 ms of 3.5, 2.00 of 2.5 times vLLM with splits.",
        "- throughput: 3.00 of 3.1 times vLLM as shipped.",
    ]
    assert "| throughput |  | 25.0 | 8.33 | 12.5 | 3.00 | 2.00 |" in page
    assert "| serving | decode 2 | 4.00 | vLLM with splits 3.00 | 1.33 |" in page
    assert "| decode 1 | 2 | 1.50 | 6.00 | not run |" in page
    assert "| rel_attention | 7.00 | 50.0 | 50.0 | 50.0 |" in page
    assert "ready: ours 50.0, vLLM as shipped 50.0, vLLM with splits 50.0." in page
    point = dict(zip(Point._fields, (0, 8192, 1, 2, 16384, 2048, 200.0, 5.0, 190.0, 210.0, 6.0),
                     strict=True))  # fmt: skip
    slow = point | {"tpot_ms": 10.0}
    bench = {"machine": {"target": "t"}, "date": "d", "commit": "c", "command": ["bench", "serve"],
             "note": "n", "points": {"plugin": [point], "off": [slow]}}  # fmt: skip
    (tmp_path / "serving" / "bench-x.json").write_text(json.dumps(bench))
    shown = module.render()[module.PAGE].partition("## `bench serve`")[2]
    assert "5.00          10.0           2.00" in shown and "Note: n." in shown
    measured("plugin", "2026-01-01", asked="route=x", decode_1=2.0)
    page = module.render()[module.PAGE]
    assert "| case | floor | ours | ours, `route=x` | vLLM as shipped |" in page
    assert "| decode 1 | 1.50 | 4.00 | 2.00 | 12.0 | 8.00 | 3.00 | 2.00 |" in page


def test_a_plot_is_well_formed_and_in_bounds() -> None:
    from xml.etree import ElementTree

    module = generator("generate_performance")
    rows = [module.Row("a <b> & c", 0.0, {"ours": 3.0, "vllm": 40000.0}, True)]
    root = ElementTree.fromstring(module.plot(rows, "one & two"))
    width = float(root.attrib["viewBox"].split()[2])
    spots = [float(e.attrib["cx"]) for e in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(spots) == 2 and all(300 < spot < width for spot in spots)
