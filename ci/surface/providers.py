"""Signatures of what rows lead to and cannot run here: AITER's, FlashInfer's, vLLM's exchange.

    python -m ci.surface.providers LIBRARY VERSION PATH [LIBRARY VERSION PATH ...]

Of FlashInfer's kernels vLLM is the caller: what it passes is a fact too, as `module>name`.
PATH is a wheel, or a git directory in which the tag v<VERSION> is read. Writes what the source text
says of the names below into tests/facts/providers.json; nothing is imported.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from .facts import ROOT
from .syntax import Function, signature

FACTS = ROOT / "tests" / "facts" / "providers.json"
EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
NAMES = {
    "amd-aiter": (
        "aiter.ops.triton.moe.moe_op_gemm_a16w4:moe_gemm_a16w4",
        "aiter.ops.triton.moe.moe_routing.routing:ExptData",
        "aiter.ops.triton.moe.moe_routing.routing:RoutingData",
    ),
    "flashinfer-python": (
        "flashinfer.fused_moe.core:cutlass_fused_moe",
        "flashinfer.fused_moe.core:trtllm_fp4_block_scale_routed_moe",
    ),
    "vllm": (
        "vllm.models.inkling.nvidia.ops.lamport:LamportRSConv.__init__",
        "vllm.models.inkling.nvidia.ops.lamport:LamportRSConv.rs_sconv_ag_add_norm",
        f"{EXPERTS}.flashinfer_cutlass_moe>flashinfer_cutlass_fused_moe",
        f"{EXPERTS}.trtllm_nvfp4_moe>trtllm_fp4_block_scale_routed_moe",
    ),
}


def read(path: Path, version: str, name: str) -> str | None:
    """Source text of a file of a wheel or of a git directory's tag."""
    if path.is_file():
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(name).decode() if name in wheel.namelist() else None
    found = subprocess.run(["git", "-C", str(path), "show", f"v{version}:{name}"],
                           capture_output=True, text=True)  # fmt: skip
    return None if found.returncode else found.stdout


def fact(text: str | None, name: str) -> str | None:
    """Parameters of a function or method, or fields of a dataclass as such; None where absent."""
    owner, _, method = name.rpartition(".")
    nodes = ast.parse(text or "").body
    if owner:
        nodes = [
            n for c in nodes if isinstance(c, ast.ClassDef) and c.name == owner for n in c.body
        ]
    for node in nodes:
        if owner and isinstance(node, Function) and node.name == method:
            return signature(node, True)
        if isinstance(node, Function) and node.name == name:
            return signature(node, False)
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            # `field()` without arguments gives no default.
            optional = [n.value is not None and ast.unparse(n.value) != "field()" for n in fields]
            names = [f"{ast.unparse(n.target)}{'=' * given}"
                     for n, given in zip(fields, optional, strict=True)]  # fmt: skip
            return f"({', '.join(names)})"
    return None


def keywords(text: str | None, name: str) -> str | None:
    """What all calls of a function pass, by name, as a signature; None where there is none."""
    calls = [n for n in ast.walk(ast.parse(text or "")) if isinstance(n, ast.Call)
             and ast.unparse(n.func).rpartition(".")[2] == name]  # fmt: skip
    passed = {k.arg or "**" for call in calls for k in call.keywords}
    if any(call.args for call in calls):
        raise ValueError(f"{name} is called with arguments by position, which are not read here")
    return f"({', '.join(sorted(passed))})" if calls else None


def pinned(path: Path, version: str, library: str) -> str | None:
    """The version of a library that a wheel of vLLM asks for."""
    text = read(path, version, f"vllm-{version}.dist-info/METADATA") or ""
    found = re.search(rf"^Requires-Dist: {library}==(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def main(arguments: list[str]) -> None:
    facts = json.loads(FACTS.read_text()) if FACTS.is_file() else {}
    for library, version, path in zip(*(arguments[i::3] for i in range(3)), strict=True):
        found = {}
        for key in NAMES[library]:
            module, mark, name = re.split("([:>])", key)
            text = read(Path(path), version, module.replace(".", "/") + ".py")
            found[key] = (fact if mark == ":" else keywords)(text, name)
        if library == "vllm":
            found["flashinfer-python"] = pinned(Path(path), version, "flashinfer-python")
        facts.setdefault(library, {})[version] = found
    FACTS.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
