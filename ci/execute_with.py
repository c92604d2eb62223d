"""Execute every kernel with another Triton: `python -m ci.execute_with 3.7.0`.

What ROCm images carry is older than what compiles in CI, and a compiler that breaks a kernel shows
here first. The wheel is unpacked as `make compile-with` does; options are those of `ci.amd_sweep`,
or behind `digests` those of `ci.executed_code`, which lists the code for `verify`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from ci.compile_with import ROOT, WHEELS, unpacked


def main(argv: list[str]) -> int:
    """Returns the sweep's exit status, or 2 for something that is no version."""
    if not argv or not re.fullmatch(r"\d+\.\d+\.\d+", argv[0]):
        print("usage: python -m ci.execute_with 3.7.0 [--chips gfx942] [--seeds 1] [--only TEXT] "
              "[--record], or 3.7.0 digests [--chips gfx942] [OP ...], with a version that pip can "
              "download", file=sys.stderr)  # fmt: skip
        return 2
    version = argv[0]
    settings = {"PYTHONPATH": os.pathsep.join([str(unpacked(version)), str(ROOT)]),
                "TRITON_INTERPRET": "0",
                "TRITON_CACHE_DIR": str(WHEELS / f"cache-{version}")}  # fmt: skip
    digests = argv[1:2] == ["digests"]
    rest = ["ci.executed_code", *argv[2:]] if digests else ["ci.amd_sweep", *argv[1:]]
    command = [sys.executable, "-m", *rest]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
