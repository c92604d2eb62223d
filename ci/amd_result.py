"""What one AMD machine can tell in ten minutes, as one file to send: `ci/run rocm`.

    python -m ci.amd_result benchmark FOLDER [--dry-run]     times kernels into FOLDER
    python -m ci.amd_result pack FOLDER [--dry-run]          verdicts, recording, times in one file

With --dry-run the kernels are executed on this CPU (`ci/cdna/`), and no time is taken.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = "inkling-rocm-result.zip"
# Where vLLM's packaging or a chip lets one down, the others still count.
SECONDS = 180
BENCHMARKS = {
    "rocm-small-ops.json": ["benchmarks.small_ops", "--rows", "1,16,64"],
    "rocm-attention.json": ["benchmarks.attention", "--no-peers", "--target", "{target}",
                            "--cases", "decode,verify,local,prefill 4K"],
    "rocm-experts.json": ["benchmarks.experts", "--formats", "mxfp4", "--tokens", "1,16,256"],
}  # fmt: skip
PARTS = ("rocm-verify.json", "rocm.safetensors", *BENCHMARKS)
# Ops that stand for each benchmark in a dry run.
REHEARSED = {
    "rocm-small-ops.json": ("rms_norm", "conv_residual_norm", "route"),
    "rocm-attention.json": ("rel_attention",),
    "rocm-experts.json": ("routed_experts",),
}


def benchmark(folder: Path) -> int:
    """Time every benchmark; returns how many failed or took too long."""
    from inkling_portable.target import Target

    failed = 0
    for name, words in BENCHMARKS.items():
        words = [word.replace("{target}", Target.detect().key) for word in words]
        command = [sys.executable, "-m", *words, "--out", str(folder / name)]
        print(" ".join(command[1:]), flush=True)
        try:
            failed += (
                subprocess.run(command, cwd=ROOT, timeout=SECONDS, check=False).returncode != 0
            )
        except subprocess.TimeoutExpired:
            print(f"{words[0]} took longer than {SECONDS} s and was ended")
            failed += 1
    return failed


def rehearse(folder: Path, chip: str = "gfx942") -> int:
    """Execute instead of timing: the same files, with verdicts and without times."""
    from ci.executed_code import cases, executed
    from inkling_portable.backends.triton import OFFERS

    rows = {row.op: row for row in OFFERS}
    failed = 0
    for name, ops in REHEARSED.items():
        results = []
        for op in ops:
            objects, faults = executed(rows[op], chip, cases(op, seeds=(4,)))
            failed += bool(faults)
            results.append({"op": op, "contract": faults or "holds", "code_objects": objects})
            print(f"{op}: {faults or 'holds'}, not timed", flush=True)
        write(folder / name, {"dry_run": True, "executed": chip, "results": results})
    return failed


def pack(folder: Path, dry: bool) -> int:
    """One archive of what there is; returns how many parts are missing."""
    missing = [name for name in PARTS if not (folder / name).exists()]
    verdicts = folder / PARTS[0]
    found = json.loads(verdicts.read_text()) if verdicts.exists() else {}
    agree = [ok for _, _, ok in found.get("agree", [])]
    lines = [
        f"target {found.get('target', 'unknown')}",
        f"{sum(agree)} of {len(agree)} kernels agree with their contracts",
        *found.get("code_objects", [])[-1:],
        f"missing: {', '.join(missing) or 'nothing'}",
    ]
    if dry:
        lines.append("dry run: executed on a CPU; nothing in here was run or measured on a GPU")
    with zipfile.ZipFile(folder / RESULT, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("summary.txt", "\n".join(lines) + "\n")
        for name in PARTS:
            if name not in missing:
                archive.write(folder / name, name)
    print("\n".join(lines))
    print(f"send {folder / RESULT}")
    return len(missing)


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: list[str]) -> int:
    """Returns 0, 1 if something is missing or failed, or 2 for another usage."""
    dry = argv[2:] == ["--dry-run"]
    if argv[:1] not in (["benchmark"], ["pack"]) or (argv[2:] and not dry) or len(argv) < 2:
        print("usage: python -m ci.amd_result benchmark|pack FOLDER [--dry-run]", file=sys.stderr)
        return 2
    folder = Path(argv[1])
    if not folder.is_dir():
        print(f"ci.amd_result needs a folder; found {folder}; make it first", file=sys.stderr)
        return 2
    if argv[0] == "pack":
        return 1 if pack(folder, dry) else 0
    return 1 if (rehearse(folder) if dry else benchmark(folder)) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
