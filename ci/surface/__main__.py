"""Command line of this folder; see its docstring."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from .compare import problems
from .facts import FACTS, PACKAGE, ROOT, download, dump, extract, installed
from .offered import Source
from .used import package_usage


def main() -> None:
    parser = argparse.ArgumentParser(description="Record vLLM's surface as this package uses it.")
    parser.add_argument("vllm", nargs="*", help="wheel, unpacked folder, or version to download")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels")
    options = parser.parse_args()
    usage = package_usage(PACKAGE)
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    for name in options.vllm or [str(installed())]:
        is_version = re.fullmatch(r"[0-9]+(\.[0-9]+)+", name)
        source = Source(download(name, options.wheels) if is_version else Path(name))
        facts[source.version] = extract(source, usage)
        found = problems(facts[source.version], usage)
        print(f"vLLM {source.version}: {len(facts[source.version])} names", *found, sep="\n  ")
    FACTS.parent.mkdir(exist_ok=True)
    FACTS.write_text(dump(facts))


main()
