"""What every command does with options that it cannot use, and when it is interrupted."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import pytest

from inkling_portable.__main__ import available, main

ELSEWHERE = [
    ["eval", "--count", "0"], ["eval", "--count", "-1"], ["eval", "--requests", "0"],
    ["eval", "--limit", "-5"], ["eval", "--json", "no/such/folder/file.json"],
    ["demo", "--tokens", "0"], ["demo", "--keep", __file__],
    ["recipe", "single_node_tp", "--gpus", "0"], ["recipe", "nope"],
    ["record", "--out", "no/such/folder/file"], ["verify", "--out", "no/such/folder/file"],
    ["compare", ".", "."], ["tiny", f"{__file__}/model"],
    ["recipe", "single_node_tp", "--gpus", "3"], ["recipe", "multi_node_tp", "--nodes", "5"],
    ["recipe", "single_node_tep", "--nodes", "2"], ["recipe", "pd_cluster", "--head", "a"],
]  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [*([name, "--colour"] for name in available()), *ELSEWHERE], ids=" ".join
)
def test_one_sentence_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"inkling-portable {arguments[0]}: ")
    assert shown.err.count("\n") == 1 and not shown.out


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("inkling_portable.commands.verify"), "main", run)
    assert main(["verify"]) == 130
    assert capsys.readouterr().err == "inkling-portable verify: interrupted\n"


def test_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM, which by default would leave servers behind, ends a command as Ctrl-C does."""

    def run(argv: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(importlib.import_module("inkling_portable.commands.verify"), "main", run)
    monkeypatch.setattr(sys, "argv", ["inkling-portable", "verify"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "inkling-portable verify: interrupted\n"
