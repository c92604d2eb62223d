"""`bench serve` against a stand-in for vLLM's two commands: what it asks, shows and refuses."""

from __future__ import annotations

import json
import sys
import time
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inkling_portable.__main__ import main
from inkling_portable.commands import _server, bench
from inkling_portable.commands.bench_shown import Point, plot, table

# Serves, or measures: with `off` everything takes twice as long, and 64 at once fail.
VLLM = """
import http.server, json, os, sys
given = dict(zip(sys.argv, sys.argv[1:]))
slow = 2 if os.environ.get("INKLING_PORTABLE") == "off" else 1
with open({log!r}, "a") as log:
    print(json.dumps([slow, *sys.argv[1:]]), file=log)
if sys.argv[1] == "serve":
    if {dies!r} and slow == {dies!r}:
        sys.exit("AssertionError: no kernel for this")
    if slow == 1:
        print("INFO inkling_portable 0.1.0 serves Inkling (X) on cpu", flush=True)

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Health).serve_forever()
if "--help" in sys.argv:
    sys.exit({broken!r})
prompts, at_once = int(given["--num-prompts"]), int(given["--max-concurrency"])
found = dict(completed=prompts - (at_once == 64), total_input_tokens=1, total_output_tokens=2,
             median_ttft_ms=10.0 * slow, median_tpot_ms=2.5 * slow, output_throughput=100.0 / slow,
             p99_ttft_ms=11.0, p99_tpot_ms=3.0)
with open(os.path.join(given["--result-dir"], given["--result-filename"]), "w") as out:
    json.dump(found, out)
if at_once == 64:
    print("Failed requests during benchmark run detected (capping to 10):\\nError 0: Timed out")
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts the script in vLLM's place; it returns the file of what was asked."""
    monkeypatch.delenv("INKLING_PORTABLE", raising=False)
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: time.sleep(s / 10))
    monkeypatch.setattr(_server, "time", quick)

    def put(dies: int = 0, broken: str = "") -> Path:
        log, script = tmp_path / "asked", tmp_path / "vllm"
        code = VLLM.format(log=str(log), dies=dies, broken=broken or 0)
        script.write_text(f"#!{sys.executable}\n{code}")
        script.chmod(0o755)
        for module in (_server, bench):
            monkeypatch.setattr(module, "vllm_command", lambda: str(script))
        return log

    return put


def asked(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_both_variants_are_asked_the_same(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = stand_in(), tmp_path / "out"
    given = ["serve", "some/model", "--contexts", "64,1K", "--concurrency", "1,2", "--prompts", "2"]
    assert bench.main([*given, "--out", str(out), "--", "--enforce-eager"]) == 0
    lines = asked(log)
    serves = [line for line in lines if line[1] == "serve"]
    runs = [line for line in lines if line[1] == "bench" and "--help" not in line]
    assert [line[0] for line in serves] == [1, 2] and [line[0] for line in runs] == [1] * 4 + [
        2
    ] * 4

    def but(line: list[Any], *names: str) -> list[Any]:
        """Without the pass's own port and folder."""
        values = [line[line.index(name) + 1] for name in names]
        return [part for part in line[1:] if part not in values]

    own = ("--port", "--gpu-memory-utilization")
    assert but(serves[0], *own) == but(serves[1], *own)
    for ours, theirs in zip(runs[:4], runs[4:], strict=True):
        own = ("--base-url", "--result-dir")
        assert but(ours, *own) == but(theirs, *own)
    for flags in (["--no-enable-prefix-caching"], ["--max-model-len", "1152"], ["--enforce-eager"]):
        at = serves[0].index(flags[0])
        assert serves[0][at : at + len(flags)] == flags
    seeds = [line[line.index("--seed") + 1] for line in runs[:4]]
    assert len(set(seeds)) == 4, "prompts of two points would be the same"
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()[1:]] == [
        [context, n, "0", "10.0", "20.0", "2.00", "2.50", "5.00", "2.00", "100", "50.0", "2.00"]
        for context in ("64", "1,024") for n in ("1", "2")
    ]  # fmt: skip
    report = json.loads((out / "bench.json").read_text())
    assert {"date", "machine", "versions", "commit", "command", "serve", "points"} <= set(report)
    assert len(report["points"]["plugin"]) == 4 and report["notes"] == []
    drawn = ET.parse(out / "bench.svg").getroot()
    assert len(drawn.findall("{*}circle")) == 3 * 8


def test_the_launch_workload(stand_in: Any) -> None:
    log = stand_in()
    assert bench.main(["serve", "m", "--preset", "launch", "--variants", "plugin"]) == 0
    lines = asked(log)
    assert ["--speculative-config" in line for line in lines if line[1] == "serve"] == [False, True]
    for run in (line for line in lines if line[1] == "bench" and "--help" not in line):
        flags = dict(pairwise(run))
        assert flags["--random-input-len"] == "8192" and flags["--max-concurrency"] == "1"
        assert flags["--random-output-len"] == "1024"


SMALL = ["serve", "m", "--contexts", "64", "--concurrency"]


def test_a_variant_that_does_not_start_is_said(
    stand_in: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(dies=2)
    assert bench.main([*SMALL, "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[3:6] == ["10.0", "-", "-"]
    assert (
        "off: the server ended with status 1 before it was ready with AssertionError: no" in shown
    )


def test_a_plugin_that_does_not_start_stops_it(
    stand_in: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(dies=1)
    assert bench.main([*SMALL, "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "plugin: the server ended with status 1" in said and "no kernel for this" in said


def test_what_is_cut_off_leaves_what_it_had(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in()
    run = bench.measure

    def once(server: Any, options: Any, point: Any, folder: Path) -> Point:
        if point[2] == 2:
            raise KeyboardInterrupt
        return run(server, options, point, folder)

    monkeypatch.setattr(bench, "measure", once)
    with pytest.raises(KeyboardInterrupt):
        bench.main([*SMALL, "1,2", "--out", str(tmp_path)])
    (point,) = json.loads((tmp_path / "bench.json").read_text())["points"]["plugin"]
    assert point["at_once"] == 1 and point["tpot_ms"] == 2.5


def test_failed_requests_give_no_figure(stand_in: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in()
    assert bench.main([*SMALL, "1,64", "--variants", "plugin"]) == 1
    shown = capsys.readouterr().out
    assert (
        "plugin, context 64, 64 at once: 1 of 256 requests failed (Timed out), and a figure needs "
        "all of them; pass fewer --concurrency or shorter --contexts, or what the servers lack "
    ) in shown
    assert len(shown.splitlines()) == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["--max-model-len", "100"],
            "and 128 behind it need 192; --max-model-len is 100; pass",
        ),
        (["--", "--max-model-len", "100"], "needs --max-model-len before the --"),
        (["--", "--port=9"], "and sets --drafts, by itself; found --port behind"),
        (["--", "--served_model_name", "x"], "found --served-model-name behind the --; leave"),
        (["--contexts", ""], "bench needs whole numbers such as 64,8K; found ''"),
        (["--contexts", "8M"], "bench needs whole numbers such as 64,8K; found '8M'"),
        (["--contexts", "64,0"], "at least 1; found '64,0'"),
        (["--timeout", "nan"], "--timeout needs seconds above 0; found nan"),
        (["--output", "0"], "--output: needs to be 1 or more; found 0"),
        (["--prompts", "-1"], "needs to be 1 or more"),
    ],
)
def test_refused(
    stand_in: Any, capsys: pytest.CaptureFixture[str], given: list[str], sentence: str
) -> None:
    log = stand_in()
    assert main(["bench", *SMALL, "1", *given]) == 2
    assert sentence in capsys.readouterr().err
    assert not log.exists(), "a process was started"


def test_the_checkpoints_limit(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from inkling_portable.commands.tiny import write_tiny

    stand_in()
    write_tiny(tmp_path / "model", preset="text", dtype="float32")
    given = ["serve", str(tmp_path / "model"), "--contexts"]
    assert bench.main([*given, "1K,4096K"]) == 2
    assert "the checkpoint's limit is" in capsys.readouterr().err
    assert bench.main([*given, "64", "--drafts", "0,99"]) == 2
    assert "--drafts 99 is more than the 2 MTP depths" in capsys.readouterr().err


def test_no_checkpoint_and_no_place_for_results(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is refused before a server starts; an hour of measuring must not end without its file."""
    log, file, folder = stand_in(), tmp_path / "file", tmp_path / "folder"
    file.write_text("")
    folder.mkdir()
    for target in (file, folder, tmp_path / "none", "a/b/c"):
        assert bench.main(["serve", str(target)]) == 2
        assert "has no config.json" in capsys.readouterr().err
    (folder / "config.json").write_text("{")
    assert bench.main(["serve", str(folder)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not log.exists()
    assert bench.main([*SMALL, "1", "--out", str(file / "out")]) == 2
    assert "Not a directory" in capsys.readouterr().err
    assert all(words[1] == "bench" for words in asked(log)), "a server was started"


def test_without_vllms_benchmark(stand_in: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(broken="ModuleNotFoundError: No module named 'pandas'")
    assert bench.main([*SMALL, "1"]) == 2
    said = capsys.readouterr().err
    assert (
        "status 1 with ModuleNotFoundError: No module named 'pandas'; install vllm[bench]" in said
    )


def test_off_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INKLING_PORTABLE", "off")
    assert bench.main(["serve", "m"]) == 2
    assert "unset INKLING_PORTABLE" in capsys.readouterr().err


def test_a_plot_of_nothing_and_of_zero() -> None:
    zero = Point(0, 64, 1, 2, 1, 2, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert "<circle" not in plot({"plugin": []}, "a & b") and "a &amp; b" in plot({}, "a & b")
    assert plot({"plugin": [zero]}, "t").count("<circle") == 3
    assert table({"plugin": [zero], "off": []}).splitlines()[1].split()[3:6] == ["0.00", "-", "-"]
