"""What an accelerator computes in portable-nano's layers, from inputs that were made elsewhere.

    python -m ci.layer_recording inputs FILE        on the machine of `ci.cdna_agreement`
    python -m ci.layer_recording play FILE OUT      on the accelerator; no engine is needed

`inputs` keeps every watched call's arguments by the digest of their bytes; `play` gives them to the
kernels that this machine's target gets by default, and lets it generate by itself. `Recording`
finds outputs again by the digest of their inputs, so a stale one is noticed.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from inkling_portable.agreement import run
from inkling_portable.registry import Facts, contract, op_names, resolve
from inkling_portable.target import Target

# What of portable-nano decides a choice; a machine of one rank.
NANO = Facts(model="nano", hidden=128, heads=4, local_heads=4, kv_heads=2, local_kv_heads=2,
             head_dim=32, experts=8, expert_width=64, top_k=2, sinks=1)  # fmt: skip


def digest(x: Tensor) -> str:
    """Of dtype, shape and bytes."""
    flat = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{x.dtype}{list(x.shape)}".encode() + flat).hexdigest()[:16]


def call_key(op: str, arguments: dict[str, Any]) -> str:
    """Equal for calls of an op with equal inputs."""
    read = {k: v for k, v in arguments.items() if k != "out"}  # which ops only write
    parts = [f"{k}={digest(v) if isinstance(v, Tensor) else v!r}" for k, v in read.items()]
    return hashlib.sha256(f"{op} {' '.join(parts)}".encode()).hexdigest()[:16]


def save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """One safetensors file in xz; every tensor has memory of its own in it."""
    from safetensors import torch as safetensors

    own = {name: x.clone().contiguous() for name, x in tensors.items()}
    data = safetensors.save(own, {"layer_recording": json.dumps(metadata)})
    file.write_bytes(lzma.compress(data))


def load(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote."""
    from safetensors import torch as safetensors

    data = lzma.decompress(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return safetensors.load(data), json.loads(header["__metadata__"]["layer_recording"])


def keep_inputs(file: Path) -> None:
    """Write the arguments of every call that `ci.cdna_agreement` watches."""
    from ci import cdna_agreement

    tensors: dict[str, Tensor] = {}
    calls: list[dict[str, Any]] = []

    class Notes(cdna_agreement.Witness):
        def compare(self, name: str, arguments: dict[str, Any]) -> None:
            named = {k: digest(v) for k, v in arguments.items() if isinstance(v, Tensor)}
            tensors.update({key: arguments[k].clone() for k, key in named.items()})
            plain = {k: v for k, v in arguments.items() if k not in named}
            calls.append({"op": name, "tensors": named, "plain": plain})

    cdna_agreement.watch(Notes([], op_names(), {}))
    save(file, tensors, {"calls": calls})


def on_device(function: Callable[..., Any], op: str) -> Callable[..., Any]:
    """An op for CPU tensors that is computed on the accelerator."""
    of = contract(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = of.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in bound.arguments.items()}
        result = function(**given)
        for name in of.mutates:
            bound.arguments[name].copy_(given[name])
        if isinstance(result, tuple):
            return tuple(x.cpu() if isinstance(x, Tensor) else x for x in result)
        return result.cpu() if isinstance(result, Tensor) else result

    return call


def play(file: Path, out: Path) -> None:
    """Give recorded inputs to this machine's kernels, and let portable-nano run on by itself."""
    from ci.cdna_agreement import generated

    target = Target.detect()
    # vLLM's own layers are no functions, so what is recorded is a machine's choice without it.
    target = replace(target, libs=tuple(lib for lib in target.libs if lib[0] != "vllm"))
    ops = resolve(target, NANO, {})
    tensors, content = load(file)
    kept: dict[str, Tensor] = {}
    calls: dict[str, list[str]] = {}
    for call in content["calls"]:
        of = contract(call["op"])
        named = {name: tensors[key] for name, key in call["tensors"].items()}
        arguments = {name: named[name] if name in named else call["plain"][name]
                     for name in of.signature.parameters}  # fmt: skip
        outputs = run(getattr(ops, of.name), of, arguments, device="cuda")
        names = [digest(x) for x in outputs]
        kept |= dict(zip(names, outputs, strict=True))
        calls[call_key(of.name, arguments)] = names
    own = SimpleNamespace(**{name: on_device(getattr(ops, name), name) for name in op_names()})
    tokens, kept["logits"] = generated(own, torch.bfloat16)
    chosen = {d.op: d.offer.code for d in ops.decisions if d.verdict == "chosen"}
    save(out, kept, {"target": str(target), "chosen": chosen, "calls": calls, "tokens": tokens})


class Recording:
    """What an accelerator computed, by its inputs."""

    def __init__(self, file: Path) -> None:
        self.tensors, content = load(file)
        self.target: str = content["target"]
        self.chosen: dict[str, str] = content["chosen"]
        self.calls: dict[str, list[str]] = content["calls"]
        self.tokens: list[int] = content["tokens"]
        self.logits = self.tensors["logits"]

    def outputs(self, op: str, arguments: dict[str, Any]) -> list[Tensor]:
        """Of one call; SystemExit where the recording has no call with these inputs."""
        names = self.calls.get(call_key(op, arguments))
        if names is None:
            raise SystemExit(
                f"the recording of {self.target} has no call of {op} with these inputs; record "
                "again with `python -m ci.layer_recording`, or leave it out"
            )
        return [self.tensors[name] for name in names]


if __name__ == "__main__":
    if sys.argv[1] == "inputs":
        keep_inputs(Path(sys.argv[2]))
    else:
        play(Path(sys.argv[2]), Path(sys.argv[3]))
