"""The committed facts: what each vLLM offers of the names that this package uses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .offered import Source, Surface
from .used import Usage

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "inkling_portable"
FACTS = ROOT / "tests" / "facts" / "vllm_surface.json"
VERSIONS = ("0.26.0", "0.28.0", "0.30.0", "0.32.0", "0.33.0")


def extract(source: Source, usage: Usage) -> dict[str, Any]:
    """Facts of every name in `usage`, by key; None where this vLLM lacks it."""
    surface = Surface(source)
    overrides = usage.overrides()
    facts: dict[str, Any] = {}
    for key in sorted(usage.names()):
        reached = {m.rstrip("?") for m in usage.members.get(key, ())}
        own = overrides.get(key, set())
        fact = surface.fact(key, reached | own, subclassed=key in overrides)
        if fact and "members" in fact:
            # A method of ours that vLLM lacks is no override and no fact.
            members = {m: v for m, v in sorted(fact["members"].items()) if v or m in reached}
            fact["members"] = members
            if not members:
                del fact["members"]
        facts[key] = fact
    return facts


def installed() -> Path:
    """Folder of the installed vLLM, found without importing it."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no vLLM is installed; install one or name a wheel")
    return Path(spec.submodule_search_locations[0])


def download(version: str, into: Path) -> Path:
    """The Linux wheel of a version, from pip's configured index (about 300 MB)."""
    found = list(into.glob(f"vllm-{version}-*.whl"))
    if not found:
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 35)]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        target = ["--python-version=3.12", *platforms, "-d", str(into), f"vllm=={version}"]
        subprocess.run([*command, *target], check=True)
        found = list(into.glob(f"vllm-{version}-*.whl"))
    return found[0]


def dump(facts: dict[str, Any]) -> str:
    """One line per name, sorted, so that a diff shows what changed."""
    versions = []
    for version, names in sorted(facts.items()):
        lines = [f'  "{key}": {json.dumps(fact, sort_keys=True)}'
                 for key, fact in sorted(names.items())]  # fmt: skip
        versions.append(f' "{version}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"
