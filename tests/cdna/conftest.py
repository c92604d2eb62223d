"""Kernels are compiled for AMD's chips here: they must be real Triton functions."""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
SUMMARY: list[str] = []
"""Lines for the end of the report."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in SUMMARY:
        terminalreporter.write_line(line)
