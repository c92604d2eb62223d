"""The demo's server handling against a stand-in for `vllm serve` that misbehaves as told."""

import json
import os
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from inkling_portable.commands import _server, demo_media
from inkling_portable.commands._server import Server, ServerError
from inkling_portable.commands.tiny import write_tiny

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


LOG = """
WARNING 11-29 19:30:57 [interface.py:7] Failed to import from vllm._C: ImportError: not the cause
(Worker_TP0 pid=7) ERROR 11-29 19:30:57 [executor.py:9] Traceback (most recent call last):
(Worker_TP0 pid=7) ERROR 11-29 19:30:57 [executor.py:9]     raise ValueError("heads")
(Worker_TP0 pid=7) ERROR 11-29 19:30:57 [executor.py:9] a.b.ConfigError: heads not divisible
{filler}
RuntimeError: Engine core initialization failed. See root cause above.
"""


def early_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str) -> str:
    code = f"print({log!r})\nraise SystemExit(7)"
    with (
        stand_in(tmp_path, monkeypatch, code) as server,
        pytest.raises(ServerError, match=r"the server ended with status 7 before") as error,
    ):
        server.wait_until_ready(30, lambda seconds: None)
    return str(error.value)


def test_early_end_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first exception, which stands far above the end of the log."""
    message = early_end(tmp_path, monkeypatch, LOG.format(filler="noise\n" * 60))
    first, _, tail = message.partition("\n")
    assert first.endswith("ready with a.b.ConfigError: heads not divisible; the end of its log:")
    assert "heads" not in tail
    assert "Engine core initialization failed" in tail


def test_early_end_of_a_config_that_pydantic_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no [x]"
    assert "for ModelConfig Value error, no [x]; the end" in early_end(tmp_path, monkeypatch, log)


def test_early_end_without_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "before it was ready; the end" in early_end(tmp_path, monkeypatch, "vllm: error: --x")


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
    monkeypatch.setattr(demo_media, "media_tokens", lambda checkpoint: (1, 1))
    checkpoint = tmp_path / "kept" / "checkpoint"
    checkpoint.mkdir(parents=True)
    added = [{"id": 7, "content": "<|content_text|>"}]
    (checkpoint / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert demo.main(["--keep", str(tmp_path / "kept"), "--timeout", "30"]) == 1
    assert "demo: InternalServerError: Error code: 501" in capsys.readouterr().err
    assert psutil.Process().children(recursive=True) == []


class Deaf:
    """Stands for a server that counts its prompts rightly and hears and sees some parts only."""

    def __init__(self, *parts: str, extra: int = 0) -> None:
        self.parts, self.extra = parts, extra
        self.chat = self.completions = self

    def create(self, messages: list[dict[str, Any]], **_: Any) -> SimpleNamespace:
        tokens, seen = 10, ""
        for message in messages:
            parts = message["content"] or ""
            for part in parts if isinstance(parts, list) else [{"type": "text", "text": parts}]:
                if part["type"] != "text":
                    tokens += 20 + self.extra
                if part["type"] in self.parts:
                    seen += json.dumps(part)
        if len(messages) > 1:
            tokens += 9
        value = -(zlib.crc32(seen.encode()) % 1000) / 100
        top = [SimpleNamespace(logprob=value)]
        logprobs = SimpleNamespace(content=[SimpleNamespace(top_logprobs=top)])
        choice = SimpleNamespace(logprobs=logprobs, message=SimpleNamespace(content="x"))
        usage = SimpleNamespace(prompt_tokens=tokens)
        return SimpleNamespace(choices=[choice], usage=usage)


EVERYTHING = ("text", "image_url", "input_audio")


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (Deaf("text", "input_audio"), "the picture upside down should have moved"),
        (Deaf("text", "image_url"), "the clip backwards should have moved"),
        (Deaf(*EVERYTHING, extra=1), "the prompt should have 50 tokens; it has 52"),
    ],
    ids=["blind", "deaf", "longer"],
)
def test_media_that_do_not_arrive_fail_the_demo(client: Deaf, sentence: str) -> None:
    demo_media.picture_and_clip(Deaf(*EVERYTHING), "model", (20, 20))
    with pytest.raises(demo_media.DemoError, match=sentence):
        demo_media.picture_and_clip(client, "model", (20, 20))


def test_a_tool_result_that_does_not_arrive_fails_the_demo() -> None:
    demo_media.tool_result(Deaf("text"), "model")
    with pytest.raises(demo_media.DemoError, match="another result should have moved"):
        demo_media.tool_result(Deaf(), "model")


def test_media_are_counted_by_the_checkpoint(tmp_path: Path) -> None:
    write_tiny(tmp_path / "omni", preset="omni")
    # 128x96 pixels in patches of 16, one column more than fits; 0.6 s in frames of 50 ms.
    assert demo_media.media_tokens(tmp_path / "omni") == (3 + 6 * 9, 4 + 12)
