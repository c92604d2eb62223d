"""Write what this machine's kernels compute on seeded inputs, for comparison with another vendor.

One safetensors file: inputs made on the CPU, outputs, the decisions that led here, versions, and
the hash of every contract.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from inkling_portable import __version__
from inkling_portable.commands._options import new_file
from inkling_portable.commands.verify import leaves, machine, parser, runnable
from inkling_portable.registry import Offer, SelectionError

if TYPE_CHECKING:
    from torch import Tensor


def main(argv: list[str]) -> int:
    """Returns 0, or 2 for a request that cannot be met."""
    p = parser("record", __doc__)
    p.add_argument("--out", type=new_file, required=True, metavar="FILE", help="the file to write")
    p.set_defaults(examples=3)
    options = p.parse_args(argv)
    try:
        tensors, metadata = record(
            options.device, options.ops, options.provider, options.seed, options.examples
        )
    except SelectionError as error:
        print(f"inkling-portable record: {error}", file=sys.stderr)
        return 2
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, options.out, {"inkling_portable": json.dumps(metadata)})
    except (OSError, SafetensorError) as error:
        print(
            f"inkling-portable record: {options.out} cannot be written ({error}); "
            "name a file in a folder that exists and has room",
            file=sys.stderr,
        )
        return 2
    print(f"{options.out}: {len(metadata['entries'])} recordings of {metadata['target']}")
    return 0


def record(device: str | None, ops: list[str], provider: str | None, seed: int, examples: int,
           ) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """Tensors named `op/provider/seed/in|out/name`, and the metadata object of the file.

    device: None for this machine, or what `code_objects.executed_target` takes. Raises
    SelectionError for what cannot be met, or a kernel that fails.
    """
    target, where, counted = machine(device)
    with counted as objects:
        rows = runnable(target, ops, provider, device is not None)
        tensors, entries = _outputs(rows, where, range(seed, seed + examples))
    shown = f"{target} executed on a CPU" if device else str(target)
    return tensors, {"target": shown, "version": __version__, "entries": entries,
                     "code_objects": dict(objects)}  # fmt: skip


def _outputs(rows: Iterator[Offer], where: str, seeds: range
             ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:  # fmt: skip
    from inkling_portable.agreement import output_names, run
    from inkling_portable.inputs import SeededDraw
    from inkling_portable.registry import contract

    tensors: dict[str, Tensor] = {}
    entries = []
    for row in rows:
        op, function = contract(row.op), row.load()
        for current in seeds:
            arguments = op.inputs(SeededDraw(current))
            try:
                outputs = run(function, op, arguments, device=where)
            except Exception as error:
                if leaves(error, arguments):
                    continue
                raise SelectionError(
                    f"{row.op}={row.provider} failed on seed {current} ({error}); leave it out, or "
                    f"see `inkling-portable verify {row.op} --seed {current}`"
                ) from error
            key = f"{row.op}/{row.provider}/{current}"
            plain = {k: v for k, v in arguments.items() if not hasattr(v, "dtype")}
            for name, value in arguments.items():
                if name not in plain:
                    tensors[f"{key}/in/{name}"] = value.clone().contiguous()
            for name, value in zip(output_names(op, len(outputs)), outputs, strict=True):
                tensors[f"{key}/out/{name}"] = value.clone().contiguous()
            entries.append(
                {
                    "op": row.op,
                    "provider": row.provider,
                    "seed": current,
                    "code": row.code,
                    "contract": op.digest,
                    "plain": plain,
                }
            )
    return tensors, entries
