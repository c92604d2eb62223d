"""Starts `vllm serve` as a child, waits until it answers, measures it and stops it.

Used by the demo and by tests that need the real HTTP server. Nothing here imports vLLM.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

SERVED_BY_US = re.compile(r"inkling_portable \S+ serves Inkling")
SERVE_ARGUMENTS = [
    *("--tokenizer-mode", "inkling"),
    *("--reasoning-parser", "inkling"),
    *("--tool-call-parser", "inkling"),
    "--enable-auto-tool-choice",
]
"""What serving any Inkling takes, the released ones too."""
TINY_ARGUMENTS = [*("--dtype", "float32"), *("--max-num-seqs", "16"), *("--block-size", "16")]
"""What a tiny model on a CPU takes beside that."""
STOP_LIMIT_S = 20.0
# A line of a traceback's end, bare or behind a process's name and a log's header.
RAISED = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$")


class ServerError(Exception):
    """A sentence on what the server did; where its log names no cause, with the log's end."""


def vllm_command() -> str:
    """Path of the `vllm` command that belongs to this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ServerError(
            "serving needs the `vllm` command and there is none beside this Python or on PATH; "
            "run `make demo`, or install vLLM in this environment"
        )
    return found


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory_arguments(kv_cache: str) -> list[str]:
    """Engine arguments that fit beside what else runs on this machine.

    vLLM refuses to start when its share of all memory exceeds what is free, though the size of the
    cache is given.
    """
    memory = psutil.virtual_memory()
    share = round(0.8 * memory.available / memory.total, 2)
    return ["--kv-cache-memory-bytes", kv_cache, "--gpu-memory-utilization", str(share)]


def first_error(log: str) -> str:
    """The first exception in a log, as a clause to put behind a verb; "" without one.

    Processes report the end of each other, so the cause stands far above the end of the log.
    """
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if found := RAISED.match(line):
            # pydantic says what is wrong in the line below its own.
            more = lines[number + 1 : number + 2] if "validation error" in line else []
            return " with " + " ".join([found[1], *(text.strip() for text in more)])
    return ""


class Server:
    """`vllm serve` on a free port of 127.0.0.1 for the length of a `with` block.

    model_dir   checkpoint folder
    arguments   further arguments of `vllm serve`
    log_file    receives all that the server prints
    env         added to the environment
    name        the model name that clients use
    """

    def __init__(
        self,
        model_dir: Path,
        arguments: Sequence[str],
        log_file: Path,
        env: Mapping[str, str] | None = None,
        name: str = "inkling-tiny",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = name
        self.log_file = log_file
        self.command = [vllm_command(), "serve", str(model_dir), "--host", "127.0.0.1"]
        self.command += ["--port", str(self.port), "--served-model-name", name, *arguments]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        self.env = {**os.environ, **quiet, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def __enter__(self) -> "Server":
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the server printed, apart from what stands before them."""
        last = self.log_file.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(f"  | {line}" for line in last)

    def first_error(self) -> str:
        """The first exception in the log, see `first_error`."""
        return first_error(self.log_file.read_text(errors="replace"))

    def is_healthy(self) -> bool:
        """Whether the server answers `/health` now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_until_ready(self, limit_s: float, progress: Callable[[float], None]) -> float:
        """Waits for `/health` and returns the seconds it took.

        progress is called about once a second with the seconds so far. Raises ServerError when the
        process ends or `limit_s` passes first.
        """
        assert self.process is not None, "wait_until_ready is called inside the with block"
        started = time.monotonic()
        while True:
            seconds = time.monotonic() - started
            self._note_family()
            if self.is_healthy():
                return seconds
            status = self.process.poll()
            if status is not None:
                cause = self.first_error() or f"; the end of its log:\n{self.log_tail()}"
                raise ServerError(f"the server ended with status {status} before it was ready"
                                  f"{cause}")  # fmt: skip
            if seconds > limit_s:
                raise ServerError(
                    f"the server was not ready after {limit_s:.0f} s; the end of its log:\n"
                    f"{self.log_tail()}"
                )
            progress(seconds)
            time.sleep(1.0)

    def plugin_line(self) -> str:
        """The line by which the plugin says that it serves; raises ServerError without one.

        vLLM only logs a plugin that fails to load and goes on with its own model.
        """
        for line in self.log_file.read_text(errors="replace").splitlines():
            if SERVED_BY_US.search(line):
                return line[line.index("inkling_portable ") :]
        raise ServerError(
            "the server runs, but inkling_portable did not report that it serves the model; the "
            f"end of the log:\n{self.log_tail()}"
        )

    def memory_gib(self) -> dict[str, float]:
        """GiB of memory of each process of the server, by name and id.

        Pages that several processes share count for each in proportion, so the sum is what the
        server takes from the machine.
        """
        assert self.process is not None, "memory_gib is called inside the with block"
        parent = psutil.Process(self.process.pid)
        sizes = {}
        for process in [parent, *parent.children(recursive=True)]:
            try:
                size = process.memory_full_info().pss
                sizes[f"{process.name()} ({process.pid})"] = size / 2**30
            except psutil.NoSuchProcess:
                continue
        return sizes

    def stop(self) -> None:
        """Ends the server and everything it started, which may outlive it when it was killed."""
        if self.process is None:
            return
        # Not a session of its own, so that whoever ends this process's group ends the server too.
        self._note_family()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_LIMIT_S)
        for process in [*self._family, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.wait()
        psutil.wait_procs(self._family, timeout=10)

    def _note_family(self) -> None:
        """Remembers what the server has started: of a dead one nobody could tell any more."""
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found = psutil.Process(self.process.pid).children(recursive=True)
                self._family = found or self._family
