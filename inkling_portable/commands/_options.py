"""How every command reads its options: what is wrong with them is one sentence, without usage."""

from __future__ import annotations

import argparse
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
