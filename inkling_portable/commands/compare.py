"""Compare two recordings: each against the contract, and the two with each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_portable.commands._options import OptionParser
from inkling_portable.registry import contract

if TYPE_CHECKING:
    from torch import Tensor


class RecordingError(ValueError):
    """A file that is no recording, or a pair that cannot be compared; one sentence."""


def main(argv: list[str]) -> int:
    """Returns 0 if all shared recordings agree, 1 if not, 2 if the files cannot be compared."""
    p = OptionParser(prog="inkling-portable compare", description=__doc__)
    p.add_argument("first", type=Path)
    p.add_argument("second", type=Path)
    options = p.parse_args(argv)
    try:
        lines, failed = compare(options.first, options.second)
    except RecordingError as error:
        print(f"inkling-portable compare: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 1 if failed else 0


def load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata object and the tensors of a recording."""
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise RecordingError(f"{path} is a folder; name a file that `record` wrote")
    try:
        with safe_open(path, "pt") as file:
            metadata = (file.metadata() or {}).get("inkling_portable")
            if metadata is None:
                raise RecordingError(
                    f"{path} is no recording; write one with `inkling-portable record`"
                )
            return json.loads(metadata), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecordingError(f"{path} cannot be read ({error}); record it again") from error


def compare(first: Path, second: Path) -> tuple[list[str], int]:
    """Report lines and the number of failures; providers may differ, ops and seeds are paired."""
    (meta_a, a), (meta_b, b) = load(first), load(second)
    entries_b: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for entry in meta_b["entries"]:
        entries_b.setdefault((entry["op"], entry["seed"]), []).append(entry)
    lines = [f"{first}: {meta_a['target']}", f"{second}: {meta_b['target']}"]
    failed = pairs = 0
    for left in meta_a["entries"]:
        for right in entries_b.get((left["op"], left["seed"]), []):
            pairs += 1
            reason = compare_entry(left, a, right, b)
            if reason:
                failed += 1
                lines.append(f"{left['op']} seed {left['seed']}: {left['provider']} against "
                             f"{right['provider']}: {reason}")  # fmt: skip
    if not pairs:
        raise RecordingError(
            f"{first} and {second} share no op and seed; record the same ops and seeds"
        )
    lines.append(f"{pairs - failed} of {pairs} pairs agree")
    return lines, failed


def compare_entry(left: dict[str, Any], a: dict[str, Tensor], right: dict[str, Any],
                  b: dict[str, Tensor]) -> str | None:  # fmt: skip
    """None, or why the two recordings of one op and seed do not agree."""
    import torch

    from inkling_portable.agreement import output_names, run

    op = contract(left["op"])
    if left["contract"] != right["contract"] or left["contract"] != op.digest:
        return "made under another contract; record both again with this version"
    keys = [f"{e['op']}/{e['provider']}/{e['seed']}" for e in (left, right)]
    arguments: dict[str, Any] = dict(left["plain"])
    for name in op.signature.parameters:
        one, two = a.get(f"{keys[0]}/in/{name}"), b.get(f"{keys[1]}/in/{name}")
        if (one is None) != (two is None) or (one is not None and not _same(one, two)):
            return f"the input {name} differs; record both from the same seeds and version"
        if one is not None:
            arguments[name] = one
    truth = run(op.reference, op, arguments, torch.float64)
    baseline = run(op.reference, op, arguments)
    names = output_names(op, len(truth))
    tolerances = op.tolerances_of(len(truth))
    for name, tolerance, t, base in zip(names, tolerances, truth, baseline, strict=True):
        for key, tensors, which in ((keys[0], a, "first"), (keys[1], b, "second")):
            reason = tolerance.check(tensors[f"{key}/out/{name}"], base, t)
            if reason:
                return f"{which} file, {name}: {reason}"
    return None


def _same(one: Tensor, two: Tensor | None) -> bool:
    import torch

    if two is None or one.dtype != two.dtype:
        return False
    if one.is_floating_point():  # those of 8 bits have no comparison of their own
        one, two = one.double().nan_to_num(7e77), two.double().nan_to_num(7e77)
    return torch.equal(one, two)
