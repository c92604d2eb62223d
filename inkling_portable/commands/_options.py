"""How every command reads its options: what is wrong with them is one sentence, without usage."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn


class OptionError(ValueError):
    """A sentence on an option that is missing, unknown or has no such value."""


class OptionParser(argparse.ArgumentParser):
    """argparse that raises OptionError; `__main__` prints it and exits with 2."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see --help")


def positive(text: str) -> int:
    """A whole number above 0, as the `type` of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs to be 1 or more; found {text}")
    return int(text)


def new_file(text: str) -> str:
    """The path of a file to be written, as the `type` of an option: its folder is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"needs a file in a folder that exists; found {text}")
    return text
