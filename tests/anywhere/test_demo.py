"""The demo's server handling against a stand-in for `vllm serve` that misbehaves as told."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from inkling_portable.commands import _server, demo, eval_media, eval_tasks
from inkling_portable.commands._server import Server, ServerError
from inkling_portable.commands.eval_tasks import Case

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


def test_what_a_killed_server_leaves_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed for memory, say: what it had started knows nothing of it."""
    server = stand_in(tmp_path, monkeypatch, HEALTHY.format(stubborn=False, line=OURS))
    with server:
        server.wait_until_ready(30, lambda seconds: None)
        assert server.process is not None
        (child,) = psutil.Process(server.process.pid).children()
        server.process.kill()
        assert child.is_running()
    assert not child.is_running()


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
    assert message.endswith("before it was ready with a.b.ConfigError: heads not divisible")


def test_early_end_of_a_config_that_pydantic_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no [x]"
    assert "for ModelConfig Value error, no [x]" in early_end(tmp_path, monkeypatch, log)


def test_early_end_without_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *tail = early_end(tmp_path, monkeypatch, "vllm: error: --x").splitlines()
    assert first.endswith("before it was ready; the end of its log:")
    assert tail == ["  | vllm: error: --x"]


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
    stand_in(tmp_path, monkeypatch, HEALTHY.format(stubborn=False, line=OURS))
    monkeypatch.setattr(demo, "run_own_command", lambda *arguments: None)
    assert demo.main(["--keep", str(tmp_path / "kept"), "--timeout", "30"]) == 1
    said = capsys.readouterr().err
    assert "inkling-portable demo: InternalServerError: Error code: 501" in said
    assert psutil.Process().children(recursive=True) == []


class Model:
    """Stands for a client of a server whose model gives the answers of a case, bent as told."""

    def __init__(self, case: Case, bend: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.answers = [m for m in case.messages if m["role"] == "assistant"]
        self.bend, self.asked = bend, 0
        self.chat = self.completions = self
        self.seen: list[Any] = []

    def create(self, messages: list[Any], **_: Any) -> Iterator[SimpleNamespace]:
        self.seen = messages
        message = self.bend(self.answers[self.asked])
        self.asked += 1
        for key in ("reasoning", "content"):
            for letter in message.get(key) or "":
                yield self.chunk(**{key: letter})
        for index, call in enumerate(message.get("tool_calls") or ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            pieces = [("own-id", name, ""), *((None, None, letter) for letter in arguments)]
            for identity, title, text in pieces:
                function = SimpleNamespace(name=title, arguments=text)
                part = SimpleNamespace(index=index, id=identity, function=function)
                yield self.chunk(tool_calls=[part])
        finish = message.get("finish", "stop")
        usage = SimpleNamespace(prompt_tokens=1, completion_tokens=1)
        yield self.chunk(finish=finish, usage=usage)

    @staticmethod
    def chunk(finish: str | None = None, usage: Any = None, **given: Any) -> SimpleNamespace:
        fields = {"content": None, "reasoning": None, "tool_calls": None} | given
        choice = SimpleNamespace(finish_reason=finish, delta=SimpleNamespace(**fields))
        return SimpleNamespace(usage=usage, choices=[choice])


CASES = [eval_tasks.case(task, 0) for task in ("copy", "think", "tool result")]
CASES += [eval_media.case(task, 0) for task in eval_media.TASKS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.task)
def test_only_right_answers_pass(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(case, lambda message: message)
    demo.converse(model, "nano", case)
    assert capsys.readouterr().out.count("right;") == model.asked == len(model.answers)
    identities = [m.get("tool_call_id") for m in model.seen if m["role"] == "tool"]
    assert identities == ["own-id"] * (len(model.answers) - 1)
    for bent in ({"content": "something else", "tool_calls": None}, {"content": ""}):
        with pytest.raises(demo.DemoError, match="the right answer was: "):
            demo.converse(Model(case, lambda m, bent=bent: m | bent if m["content"] else m | {
                "tool_calls": None}), "nano", case)  # fmt: skip
    with pytest.raises(demo.DemoError, match="ended with reason length"):
        demo.converse(Model(case, lambda message: message | {"finish": "length"}), "nano", case)
