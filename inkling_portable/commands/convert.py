"""Store a checkpoint's experts in another number format: NVFP4, MXFP4, FP8 or BF16.

Only routed experts change. Memory stays below 2 GB for a checkpoint of any size. A conversion that
was ended in the middle goes on when the same command is repeated, and until it is whole nothing in
DST loads.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_portable import __version__
from inkling_portable.commands._options import OptionParser
from inkling_portable.conversion import plan as planning
from inkling_portable.conversion.plan import COPY_BLOCK, Job, Plan, make_plan
from inkling_portable.conversion.source import ConvertError, Source, Weight, read_source
from inkling_portable.model.quant_layouts import LAYOUTS

if TYPE_CHECKING:
    from torch import Tensor

    from inkling_portable.conversion.blocks import Energy
    from inkling_portable.conversion.output import Output
    from inkling_portable.conversion.source import Reader

COPY_PIECE = 1 << 23
"""Bytes that are copied at a time."""
MOST_THREADS = 10
"""Each takes about 90 MB."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 = written, 2 = refused or stopped with one sentence on stderr."""
    try:
        args = _arguments(argv)
        print(
            convert(
                args.source, args.target, args.to, args.layout, args.layers, force=args.force,
                plan_only=args.dry_run, progress=None if args.quiet else Progress(),
            )
        )  # fmt: skip
    except (ValueError, OSError) as error:
        said = str(error)
        if isinstance(error, OSError):
            said = (f"{error.filename or 'a file'} cannot be used ({error.strerror or error}); "
                    "name an SRC that can be read and a DST that can be written")  # fmt: skip
        print(f"inkling-portable convert: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("inkling-portable convert: interrupted; repeat the command to go on", file=sys.stderr)
        return 130
    return 0


def convert(
    source_folder: str | Path, target_folder: str | Path, number_format: str,
    layout: str | None = None, layers: set[int] | None = None, *, force: bool = False,
    plan_only: bool = False, progress: Progress | None = None, commit_seconds: float | None = None,
    threads: int | None = None,
) -> str:  # fmt: skip
    """Convert a checkpoint and return a report of what was written and what rounding cost.

    Args:
        number_format: one of `planning.FORMATS`; "fp32" holds every dequantised number exactly
            but for one rounding in NVFP4.
        layout: how a quantised format spells its tensors; None for its usual layout.
        layers: sparse layers to quantise; None for those that are quantised already, or else all
            but the first sparse one.
        force: replace a checkpoint, or unfinished output of another conversion, in the target.
        plan_only: write nothing and return what would be written.
        commit_seconds: blocks finished within this time become durable together.
        threads: experts that are converted at the same time; None for torch's number of threads.

    Raises:
        ConvertError, CheckpointError, ConfigError: one sentence with file, tensor and remedy.
    """
    folder, into = Path(source_folder), Path(target_folder)
    if number_format not in planning.FORMATS:
        raise ConvertError(
            f"there is no format {number_format!r}; use one of {', '.join(planning.FORMATS)}"
        )
    _keep_apart(folder, into)
    source = read_source(folder)
    plan = make_plan(source, number_format, layout, layers)
    if plan_only:
        return _head(source, plan, into, "would be")
    from inkling_portable.conversion.output import COMMIT_SECONDS, Output

    with Output(into, plan, COMMIT_SECONDS if commit_seconds is None else commit_seconds) as out:
        out.start(force)
        if not out.moving:
            _write_all(source, plan, out, progress, threads)
        rows = _errors(plan, out.done)
        out.place(source, _report(source, plan, rows))
    lines = [_head(source, plan, into, "is"), *_table(rows)]
    return "\n".join(lines)


def _keep_apart(source: Path, target: Path) -> None:
    first, second = source.resolve(), target.resolve()
    if first == second or first in second.parents or second in first.parents:
        raise ConvertError(
            f"SRC and DST need to be folders apart; found {source} and {target}; name another DST"
        )


def _write_all(
    source: Source, plan: Plan, out: Output, progress: Progress | None, threads: int | None
) -> None:
    """Write every block that is not on the disk yet.

    Python threads do whole experts, since threads within torch leave cores idle between its ops.
    """
    import torch

    from inkling_portable.conversion.source import Reader

    count = min(threads or torch.get_num_threads(), MOST_THREADS)
    todo = [(job, block) for job in plan.jobs for block in range(job.blocks)
            if (job.key, block) not in out.done]  # fmt: skip
    total = sum(job.nbytes for job in plan.jobs)
    left = sum(job.nbytes / job.blocks for job, _ in todo)
    if progress:
        progress.start(total, total - left if out.done else 0.0)
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    waiting: deque[tuple[Job, int, Future[Energy]]] = deque()

    def note_first() -> None:
        nonlocal left
        job, block, result = waiting.popleft()
        out.finish_block(job, block, result.result())
        left -= job.nbytes / job.blocks
        if progress:
            progress.show(total - left, job.key)

    with Reader(source) as reader, pool:
        try:
            for job, block in todo:
                waiting.append((job, block, pool.submit(_block, job, block, reader, out)))
                # Not far ahead of the journal, since a killed run does again what is not in it.
                if len(waiting) > 2 * count:
                    note_first()
            while waiting:
                note_first()
        finally:
            pool.shutdown(cancel_futures=True)
    out.commit()
    if progress:
        progress.stop()


def _block(job: Job, block: int, reader: Reader, out: Output) -> Energy:
    from inkling_portable.conversion import blocks

    if isinstance(job.source, Weight):
        return blocks.convert_block(job, block, reader, partial(_write, out, job))
    end = min(job.source.nbytes, (block + 1) * COPY_BLOCK)
    for at in range(block * COPY_BLOCK, end, COPY_PIECE):
        data = reader.bytes_at(job.source, at, min(COPY_PIECE, end - at))
        out.write_bytes(job.source.name, at, memoryview(data))
    return blocks.Energy(0.0, 0.0)


def _write(out: Output, job: Job, role: str, row: int, values: Tensor) -> None:
    out.write(job.target[role].name, row, values)


# --- what is said of it ---------------------------------------------------------------------------


def _errors(plan: Plan, done: dict[tuple[str, int], Energy]) -> list[tuple[str, float]]:
    """(weight, signal to noise in dB) of every weight that was written in another form."""
    rows = []
    for job in plan.jobs:
        if isinstance(job.source, Weight):
            blocks = [done[job.key, block] for block in range(job.blocks)]
            signal, noise = sum(b.signal for b in blocks), sum(b.noise for b in blocks)
            rows.append((job.key, 10 * math.log10(signal / noise) if noise else math.inf))
    return rows


def _report(source: Source, plan: Plan, rows: list[tuple[str, float]]) -> dict[str, Any]:
    return {
        "by": f"inkling-portable {__version__}",
        "from": source.folder.name,
        "to": plan.form.key if plan.form else plan.number_format,
        "layers": list(plan.layers),
        "notes": list(plan.notes),
        "sqnr_db": {name: "exact" if math.isinf(db) else round(db, 2) for name, db in rows},
    }


def _head(source: Source, plan: Plan, into: Path, verb: str) -> str:
    from inkling_portable.conversion.output import gigabytes

    form = plan.form.key if plan.form else plan.number_format
    where = f", experts of layers {planning.ranges(list(plan.layers))}" if plan.layers else ""
    before = sum(f.nbytes for f in source.rest)
    before += sum(f.nbytes for w in source.weights for f in w.tensors.values())
    text = (
        f"{into} {verb} {form}{where}: {len(plan.slots)} tensors in {len(plan.files)} files, "
        f"{gigabytes(plan.nbytes)} from {gigabytes(before)}"
    )
    return "\n".join([text, *(f"note: {note}" for note in plan.notes)])


def _table(rows: list[tuple[str, float]]) -> list[str]:
    """One line per layer: what rounding cost in its w13 and in its w2, or in a linear layer."""
    layers: dict[str, dict[str, float]] = {}
    for name, db in rows:
        layer, _, rest = name.removeprefix("model.llm.layers.").partition(".")
        layers.setdefault(layer, {})[rest.removeprefix("mlp.experts.")] = db
    if rows and all(math.isinf(db) for _, db in rows):
        return ["every number is what it was"]
    lines = ["SQNR in dB, of signal to what rounding changed:"]
    for layer in sorted(layers, key=lambda name: (len(name), name)):
        found = layers[layer]
        said = "  ".join(f"{name.removesuffix('_weight')} {_db(db)}" for name, db in found.items())
        lines.append(f"  layer {layer:>3}  {said}")
    return lines


def _db(value: float) -> str:
    return "exact" if math.isinf(value) else f"{value:5.2f}"


class Progress:
    """A line on stderr with the share done, speed and time left; a plain line a minute in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = 0.0 if self._terminal else time.monotonic()

    def start(self, total: float, before: float) -> None:
        self._total, self._before, self._began = max(total, 1), before, time.monotonic()
        if before:
            print(f"going on after {100 * before / self._total:.0f} %", file=sys.stderr)

    def show(self, written: float, name: str) -> None:
        now = time.monotonic()
        if now - self._shown < (0.2 if self._terminal else 60):
            return
        self._shown = now
        share = written / self._total
        speed = max(written - self._before, 0) / max(now - self._began, 1e-3)
        left = f"{(self._total - written) / speed / 60:.0f} min left" if speed else ""
        short = name.removeprefix("model.")[-40:]
        line = f"{100 * share:5.1f} %  {speed / 1e6:.0f} MB/s  {left}  {short}"
        if self._terminal:
            bar = "#" * int(24 * share)
            print(f"\r[{bar:24}] {line:<90.90}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        if self._terminal:
            print("\r" + " " * 118 + "\r", end="", file=sys.stderr, flush=True)


# --- arguments ------------------------------------------------------------------------------------


def _layer_set(text: str) -> set[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise argparse.ArgumentTypeError(
                f"needs layers such as 3-65 or 2,5,7-9; found {text!r}"
            )
        chosen |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = OptionParser(prog="inkling-portable convert", description=__doc__)
    parser.add_argument("source", metavar="SRC", type=Path, help="folder of a checkpoint")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to write")
    parser.add_argument("--to", required=True, choices=planning.FORMATS, metavar="FORMAT",
                        help=f"{', '.join(planning.FORMATS)}; fp32 is for comparison")  # fmt: skip
    names = list(dict.fromkeys(form.name for form in LAYOUTS.values()))
    parser.add_argument("--layout", choices=names,
                        help="how tensors are called; nvfp4 has modelopt (default) and "
                             "compressed-tensors")  # fmt: skip
    parser.add_argument("--layers", type=_layer_set, metavar="LIST",
                        help="sparse layers to quantise, such as 3-65; default: those that are "
                             "quantised in SRC, or all but the first sparse one")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace what is in DST")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser.parse_args(argv)
