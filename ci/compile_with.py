"""Compile every kernel with another Triton: `make compile-with TRITON=3.7.0`.

The wheel is unpacked into a folder of its own, never into the environment. What came out is written
to docs/performance/, from where docs/performance.md shows it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".cache" / "triton"


def unpacked(version: str) -> Path:
    """The folder with that Triton, downloaded by pip at its first use."""
    folder = WHEELS / version
    if not (folder / "triton").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(WHEELS),
             f"triton=={version}"],
            check=True,
        )  # fmt: skip
        (wheel,) = WHEELS.glob(f"triton-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        for tool in (folder / "triton").glob("backends/*/bin/*"):
            tool.chmod(0o755)  # a wheel is a zip file, and unpacking one drops the modes
    return folder


def main(argv: list[str]) -> int:
    """Returns 0, 2 for something that is no version, or the exit status of what failed."""
    if len(argv) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", argv[0]):
        print("usage: make compile-with TRITON=3.7.0, with a version that pip can download",
              file=sys.stderr)  # fmt: skip
        return 2
    version = argv[0]
    paths = [str(unpacked(version)), str(ROOT)]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0",
                "TRITON_CACHE_DIR": str(WHEELS / f"cache-{version}")}  # fmt: skip
    target = ROOT / "docs" / "performance" / f"kernels-triton-{version}.json"
    done = subprocess.run([sys.executable, "-m", "ci.kernel_table", str(target)], cwd=ROOT,
                          env={**os.environ, **settings}, check=False)  # fmt: skip
    if done.returncode:
        return done.returncode
    done = subprocess.run([sys.executable, "ci/generate_performance.py"], cwd=ROOT, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
