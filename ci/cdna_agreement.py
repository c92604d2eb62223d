"""How far the CPU reference and executed AMD code are apart, for docs/numerics.md.

    python -m ci.cdna_agreement            writes docs/numerics/agreement.json, minutes on one core
    python ci/generate_numerics.py         writes the page from it

portable-nano runs layer by layer on the references; at every op, both chips' code is executed on
the very same inputs, and all are compared with the reference in float64. Then each chip generates
on its own, where errors add up. What an H200 computed from these inputs is read from a recording
(`ci/layer_recording.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ci.cdna.launch import CHIPS, executing
from ci.layer_recording import Recording
from inkling_portable.agreement import output_names, run
from inkling_portable.backends.triton import OFFERS
from inkling_portable.numerics import Tolerance
from inkling_portable.registry import Facts, contract, op_names, resolve
from inkling_portable.target import Target

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "numerics" / "agreement.json"
RECORDED = {"h200": ROOT / "docs" / "numerics" / "h200.safetensors.xz"}
NANO = ROOT / "inkling_portable" / "portable_nano"
COMMAND = "python -m ci.cdna_agreement"
# Where in portable-nano a layer of each kind is; the last one is a depth of its drafts.
KINDS = {
    "llm.layers.0": "local dense",
    "llm.layers.2": "local sparse",
    "llm.layers.5": "global sparse",
    "mtp.layers.1.transformer_block": "global dense",
}
PROMPT = 48  # longer than the window of 32
CHUNK = 16  # prefilled at a time
GENERATED = 6
KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(op: str) -> Callable[..., Any]:
    """The Triton kernel of an op."""
    if not KERNELS:
        KERNELS.update({row.op: row.load() for row in OFFERS})
    return KERNELS[op]


def share(kind: Tolerance, got: Tensor, other: Tensor, baseline: Tensor, truth: Tensor) -> float:
    """Largest distance of a row between `got` and `other`, as a share of what the contract allows.

    All have one shape; rows are the last axis. For exact outputs, how many values differ.
    """
    if kind.kind == "exact" or not got.dtype.is_floating_point:
        return float(((got != other) & ~(got.isnan() & other.isnan())).sum())
    g, o, b, t = (x.double().reshape(-1, x.shape[-1]) for x in (got, other, baseline, truth))
    rows = torch.isfinite(t).all(dim=-1)
    if not rows.any():
        return 0.0
    allowed = kind.allowed(b[rows], t[rows], got.dtype).clamp_min(1e-300)
    return float(((g[rows] - o[rows]).abs().amax(dim=-1) / allowed).max())


class Witness:
    """Resolved ops that compute by reference and, in a watched layer, compare the chips' code."""

    def __init__(self, chips: Iterable[str], ops: Iterable[str],
                 recordings: Mapping[str, Recording]) -> None:  # fmt: skip
        self.chips, self.watched = tuple(chips), set(ops)
        self.recordings = recordings
        self.layer = ""
        self.found: dict[tuple[str, str, str], dict[str, float]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = contract(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if self.layer and name in self.watched:
                self.compare(name, dict(bound.arguments))
            return op.reference(*args, **kwargs)

        return call

    def compare(self, name: str, arguments: dict[str, Any]) -> None:
        """Run one call everywhere and keep the worst shares."""
        op = contract(name)
        truth = run(op.reference, op, arguments, torch.float64)
        outputs = {"cpu": run(op.reference, op, arguments)}
        for device, recording in self.recordings.items():
            outputs[device] = recording.outputs(name, arguments)
        for chip in self.chips:
            with executing(chip):
                outputs[chip] = run(kernel(name), op, arguments)
        labels = output_names(op, len(truth))
        for i, (label, kind) in enumerate(zip(labels, op.tolerances_of(len(truth)), strict=True)):
            base, exact = outputs["cpu"][i], truth[i]
            if kind.kind == "exact" or not base.dtype.is_floating_point:
                exact = base
            worst = self.found.setdefault((self.layer, name, label), {})
            names = list(outputs)
            for number, one in enumerate(names):
                value = share(kind, outputs[one][i], exact, base, exact)
                worst[one] = max(worst.get(one, 0.0), value)
                for two in names[number + 1 :]:
                    value = share(kind, outputs[one][i], outputs[two][i], base, exact)
                    pair = f"{one} - {two}"
                    worst[pair] = max(worst.get(pair, 0.0), value)


def prompt(length: int = PROMPT) -> list[int]:
    """Words of portable-nano's language, the same ones always."""
    return torch.randint(0, 700, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def chunks(tokens: list[int]) -> list[list[int]]:
    """The steps in which a prompt is prefilled."""
    return [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]


def layers(chips: Iterable[str], ops: Iterable[str], length: int = PROMPT,
           recordings: Mapping[str, Recording] | None = None) -> list[dict[str, Any]]:  # fmt: skip
    """One entry for each kind of layer, op and output: a prompt, and then one token alone."""
    witness = Witness(chips, ops, recordings or {})
    watch(witness, length)
    order = {kind: i for i, kind in enumerate(KINDS.values())}
    return [{"layer": layer, "op": op, "output": output, "shares": shares}
            for (layer, op, output), shares in sorted(
                witness.found.items(), key=lambda item: order[item[0][0]])]  # fmt: skip


def watch(witness: Witness, length: int = PROMPT) -> None:
    """Run portable-nano on a prompt, in chunks, and one token alone, with its drafts."""
    from tests.plain_inkling import PlainInkling

    class Watched(PlainInkling):
        def block(self, name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            witness.layer = KINDS.get(name, "")
            try:
                return super().block(name, *args, **kwargs)
            finally:
                witness.layer = ""

    model = Watched(NANO, witness, torch.bfloat16, length=length + 2)
    tokens = prompt(length + 2)
    hidden = torch.cat([model.forward([0], [part]) for part in chunks(tokens[:-1])])
    for depth in range(2):
        steps = []
        for start in range(0, len(hidden) - 1, CHUNK):
            rows = hidden[start : min(start + CHUNK, len(hidden) - 1)]
            shifted = tokens[start + 1 + depth :][: len(rows)]
            steps.append(model.draft_hidden(depth, [0], rows, [shifted], [start]))
        hidden = torch.cat(steps)


def generated(ops: Any, dtype: torch.dtype, chip: str | None = None, count: int = GENERATED,
              length: int = PROMPT) -> tuple[list[int], Tensor]:  # fmt: skip
    """Tokens that portable-nano says next, and the logits [count, valid ids] they were taken from.

    ops: functions of CPU tensors; chip: whose code Triton's kernels among them are executed as.
    """
    from tests.plain_inkling import PlainInkling

    tokens: list[int] = []
    rows: list[Tensor] = []
    with executing(chip) if chip else nullcontext():
        model = PlainInkling(NANO, ops, dtype, length=length + count)
        for part in chunks(prompt(length)):
            hidden = model.forward([0], [part])
        while True:
            rows.append(model.logits(hidden[-1:])[0])
            tokens.append(int(rows[-1].argmax()))
            if len(tokens) == count:
                break
            hidden = model.forward([0], [tokens[-1:]])
    return tokens, torch.stack(rows)


def generation(chips: Iterable[str], recordings: Mapping[str, Recording]) -> dict[str, Any]:
    """Tokens and the largest distance of logits from float64's, by device."""
    reference = resolve(Target.parse("cpu"), Facts(), {})
    kernels = SimpleNamespace(**{name: kernel(name) for name in op_names()})
    wanted, truth = generated(reference, torch.float64)
    found: dict[str, Any] = {"float64": {"tokens": wanted}}
    said = {"cpu": generated(reference, torch.bfloat16)}
    said |= {device: (of.tokens, of.logits) for device, of in recordings.items()}
    said |= {chip: generated(kernels, torch.bfloat16, chip) for chip in chips}
    for device, (tokens, rows) in said.items():
        same = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b),
                    len(wanted))  # fmt: skip
        # Beyond the first other token the contexts differ, and so do the logits.
        off = (rows.double() - truth)[: min(same + 1, len(wanted))].abs().max()
        found[device] = {"tokens": tokens, "logits_off": float(off)}
    return found


def main() -> int:
    """Write the file."""
    import triton

    recordings = {name: Recording(file) for name, file in RECORDED.items()}
    content = {
        "command": COMMAND, "triton": triton.__version__, "prompt": PROMPT,
        "recorded": {name: {"target": of.target, "chosen": of.chosen}
                     for name, of in recordings.items()},
        "layers": layers(CHIPS, op_names(), recordings=recordings),
        "generation": generation(CHIPS, recordings),
    }  # fmt: skip
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
