"""Put the present output of `explain` into the README: `python ci/generate_readme.py`.

The README shows one call of `inkling-portable explain` with a part of what it prints; a test
compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from inkling_portable.commands import explain

README = Path(__file__).parents[1] / "README.md"
SAMPLE = re.compile(r"(?<=```\n)\$ inkling-portable explain (?P<options>.*)\n(?:.*\n)*?(?=```\n)")
SHOWN = ("target", "conv_residual_norm", "rel_attention", "routed_experts", "warning")


def shortened(printed: str) -> str:
    """The lines of the ops in SHOWN, with `...` for each run of others."""
    lines: list[str] = []
    shown = False
    for line in printed.splitlines():
        shown = line.startswith(SHOWN) or (shown and line.startswith(" "))
        if shown or lines[-1:] != ["..."]:
            lines.append(line if shown else "...")
    return "\n".join(lines) + "\n"


def render(readme: str) -> str:
    """`readme` with the sample's output renewed; raises ValueError where it has no sample."""
    found = SAMPLE.search(readme)
    if found is None:
        raise ValueError("README.md has no block that starts with `$ inkling-portable explain`")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        explain.main(shlex.split(found["options"]))
    block = f"{found[0].splitlines()[0]}\n{shortened(printed.getvalue())}"
    return readme[: found.start()] + block + readme[found.end() :]


if __name__ == "__main__":
    README.write_text(render(README.read_text()))
