"""The demo's server handling against a stand-in for `vllm serve` that misbehaves as told."""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from inkling_portable.commands import _server
from inkling_portable.commands._server import Server, ServerError

HEALTHY = """
import http.server, signal, subprocess, sys
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print({line!r}, flush=True)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
OURS = "INFO inkling_portable 0.1.0 serves Inkling (InklingForCausalLM) on cpu"


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Server:
    """A server whose `vllm` command is a script of ours."""
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n{code}")
    script.chmod(0o755)
    monkeypatch.setattr(_server, "vllm_command", lambda: str(script))
    return Server(tmp_path / "model", ["--dtype", "float32"], tmp_path / "log")


def test_ready_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stand_in(tmp_path, monkeypatch, HEALTHY.format(stubborn=False, line=OURS))
    with server:
        assert server.wait_until_ready(30, lambda seconds: None) < 30
        assert server.plugin_line() == OURS.removeprefix("INFO ")
        sizes = server.memory_gib()
        assert len(sizes) == 2
        assert 0.001 < sum(sizes.values()) < 0.5
        assert server.process is not None
        family = [
            psutil.Process(server.process.pid),
            *psutil.Process(server.process.pid).children(),
        ]
        assert len(family) == 2
    assert [process for process in family if process.is_running()] == []
    assert not server.is_healthy()


def test_a_stubborn_server_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stand_in(tmp_path, monkeypatch, HEALTHY.format(stubborn=True, line=OURS))
    with server:
        server.wait_until_ready(30, lambda seconds: None)
        monkeypatch.setattr(_server, "STOP_LIMIT_S", 0.5)
        assert server.process is not None
        pids = [server.process.pid, *(p.pid for p in psutil.Process(server.process.pid).children())]
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_another_model_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that failed to load leaves a healthy server, which must not pass."""
    line = "ERROR Failed to load plugin inkling_portable"
    with stand_in(tmp_path, monkeypatch, HEALTHY.format(stubborn=False, line=line)) as server:
        server.wait_until_ready(30, lambda seconds: None)
        with pytest.raises(ServerError, match="did not report that it serves"):
            server.plugin_line()


def test_early_end_shows_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('ValueError: heads not divisible')\nraise SystemExit(7)"
    with (
        stand_in(tmp_path, monkeypatch, code) as server,
        pytest.raises(ServerError, match=r"(?s)status 7 .*heads not divisible"),
    ):
        server.wait_until_ready(30, lambda seconds: None)


def test_slow_start_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    started = time.monotonic()
    with (
        stand_in(tmp_path, monkeypatch, "import time\ntime.sleep(120)") as server,
        pytest.raises(ServerError, match="not ready after 2 s"),
    ):
        server.wait_until_ready(2, seen.append)
    assert len(seen) >= 2
    assert time.monotonic() - started < 25


def test_missing_command_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(ServerError, match="needs the `vllm` command"):
        _server.vllm_command()


def test_failed_step_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that is healthy but cannot chat ends the demo with an error and no process."""
    from inkling_portable.commands import demo

    stand_in(tmp_path, monkeypatch, HEALTHY.format(stubborn=False, line=OURS))
    monkeypatch.setattr(demo, "run_own_command", lambda *arguments: None)
    checkpoint = tmp_path / "kept" / "checkpoint"
    checkpoint.mkdir(parents=True)
    added = [{"id": 7, "content": "<|content_text|>"}]
    (checkpoint / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert demo.main(["--keep", str(tmp_path / "kept"), "--timeout", "30"]) == 1
    assert "demo: InternalServerError: Error code: 501" in capsys.readouterr().err
    assert psutil.Process().children(recursive=True) == []
