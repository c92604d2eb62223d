"""Filling parameters from safetensors: headers are checked first, values while they are copied."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from inkling_portable.model.checkpoint import (
    BLOCK_SCALE,
    FP8,
    PACKED,
    POSITIVE,
    POWERS,
    CheckpointError,
    Shape,
    Stored,
)
from inkling_portable.model.quant_layouts import NVFP4_RANGE, TILE

logger = logging.getLogger("vllm.inkling_portable")

INDEX = "model.safetensors.index.json"

RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "spread": lambda x: x,
    "reciprocal": torch.reciprocal,
    "range": lambda x: x / NVFP4_RANGE,
}
"""What a copy does to a few numbers, which then spread over all that they stand for."""

RANGES = ("_input_scale", "_input_global_scale")
"""Ends of the engine's parameters for the range of activations, which a checkpoint may lack."""

WIDENED = 1 << 22
"""Values of an 8-bit tensor that are looked at together."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that load together: which one this is, and how each learns of all lists."""

    rank: int
    gather: Callable[[list[str]], Sequence[list[str]]]


ALONE = Ranks(0, lambda own: [own])

_warned: set[Path | None] = set()
"""Checkpoints whose target has had its warning; the draft looks here."""


@dataclass
class Files:
    """What the headers of a checkpoint's files say: shape, type and file of every tensor."""

    folder: Path | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    def note_stream(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the shapes from tensors, where a loader streams and there are no files."""
        self.shapes = {name: tuple(tensor.shape) for name, tensor in weights}
        self.file_of = dict.fromkeys(self.shapes, "the weight stream")


def read_headers(folder: Path) -> Files:
    """Read every safetensors header; an index decides which files count, MTP files always do.

    Raises CheckpointError for a file that is missing, cut off or unreadable, and for a tensor that
    stands in two files.
    """
    files = Files(folder)
    for path in _weight_files(folder):
        for name, (type_, shape) in _read_header(path).items():
            if name in files.shapes:
                raise CheckpointError(
                    f"tensor {name} stands in {files.file_of[name]} and in {path.name}; "
                    "remove one of them"
                )
            files.shapes[name] = shape
            files.types[name] = type_
            files.file_of[name] = path.name
    return files


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        listed = json.loads(index.read_text())["weight_map"]
        named = {str(name) for name in listed.values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"file {INDEX} is damaged: it should be a JSON object whose weight_map gives the file "
            "of every tensor; download it again"
        ) from error
    for name in sorted(named):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"file {name} is named in {INDEX} and missing from {folder.name}; "
                "complete the download"
            )
    # Released MTP files are not always in the index.
    named |= {path.name for path in folder.glob("mtp*.safetensors")}
    return [folder / name for name in sorted(named)]


def _read_header(path: Path) -> dict[str, tuple[str, Shape]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise CheckpointError(
                f"file {path.name} is cut off inside its header ({size} bytes); download it again"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"file {path.name} has an unreadable header ({error}); download it again"
            ) from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"file {path.name} has a damaged header, a {type(header).__name__} where an object is "
            "needed; download it again"
        )
    header.pop("__metadata__", None)
    body = size - 8 - length
    for name, entry in header.items():
        if not _is_entry(entry):
            raise CheckpointError(
                f"file {path.name} has a damaged header: tensor {name} needs a dtype, a shape and "
                "two data_offsets; download it again"
            )
        if entry["data_offsets"][1] > body:
            raise CheckpointError(
                f"file {path.name} is cut off inside tensor {name}: its data needs "
                f"{8 + length + entry['data_offsets'][1]} bytes and the file has {size}; "
                "download it again"
            )
    spans = sorted(entry["data_offsets"] for entry in header.values())
    if [first for first, _ in spans] + [body] != [0] + [last for _, last in spans]:
        raise CheckpointError(f"file {path.name} has bytes that no tensor owns, or that two "
                              "tensors own; download it again")  # fmt: skip
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _is_entry(entry: object) -> bool:
    """Whether a header says of a tensor all that reading it takes."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    return _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def load(
    module: nn.Module, weights: Iterable[tuple[str, Tensor]], plan: Mapping[str, Stored],
    files: Files, allow_nonfinite: bool, skip: frozenset[str] = frozenset(),
    draft: bool = False, ranks: Ranks = ALONE,
) -> set[str]:  # fmt: skip
    """Copy every tensor of a plan into the parameters of `module`.

    Tensors of the plan that `weights` does not bring (MTP files outside the index) are read from
    `files`. Parameters in `skip` are filled by somebody else.
    Where NaN and infinite values are allowed, one warning speaks for all of `ranks`, which must
    load together, and for the draft (`draft`) that is loaded after the target.

    Returns the names of the filled parameters. Raises CheckpointError, naming the tensor and its
    file, for one that is missing or has NaN or infinite values, for a parameter left unfilled, and
    for parameters without memory.
    """
    params = {name: p for name, p in module.named_parameters() if name not in skip}
    if any(p.is_meta for p in params.values()):
        # What is copied there is lost; vLLM would warn at most, and go on answering.
        raise CheckpointError(
            "Inkling's weights are loaded once, at start, as they are stored; found parameters "
            "without memory, as vLLM prepares them for a reload (after sleep level 2) or for "
            "rounding (--quantization); start the server anew, sleep at level 1, or store that "
            "format with `inkling-portable convert`"
        )
    for name in padded_parameters(params):
        params[name].data.fill_(1) if name.endswith(RANGES) else params[name].data.zero_()
    filled = dict.fromkeys(params, 0)
    seen: set[str] = set()
    infected: list[str] = []
    scales: dict[str, Tensor] = {}
    waiting: dict[str, tuple[str, Tensor]] = {}  # FP8 numbers by the name of their scale

    def take(name: str, tensor: Tensor) -> None:
        stored = plan.get(name)
        if stored is None or name in seen:
            return
        seen.add(name)
        where = files.file_of.get(name, "the weight stream")
        if tuple(tensor.shape) != stored.shape:
            raise CheckpointError(
                f"tensor {name} in {where} needs shape {list(stored.shape)}; found "
                f"{list(tensor.shape)}; correct the config or the file"
            )
        if stored.is_scale:
            _check_values(stored.kind, tensor, name, where)
            scales[name] = tensor
            if name in waiting:
                fill(*waiting.pop(name))
        elif stored.scale is not None and stored.scale not in scales:
            waiting[stored.scale] = (name, tensor)
        else:
            fill(name, tensor)

    def fill(name: str, tensor: Tensor) -> None:
        stored = plan[name]
        where = files.file_of.get(name, "the weight stream")
        if stored.scale is not None and stored.copies:
            tensor = _plain(tensor, scales[stored.scale], f"tensor {name} in {where}")
        if stored.view is not None:
            tensor = tensor.view(stored.view)
        for copy in stored.copies:
            source = tensor[copy.of]
            if stored.kind in (BLOCK_SCALE, POWERS, POSITIVE):
                _check_values(stored.kind, source, name, where)
            elif stored.kind != PACKED and not _finite(source):
                if not allow_nonfinite:
                    raise CheckpointError(
                        f"tensor {name} in {where} has NaN or infinite values; repair it, or allow "
                        'them with --additional-config \'{"inkling_portable": '
                        '{"allow_nonfinite": true}}\''
                    )
                infected.append(f"{name} in {where}")
            target = params[copy.param].data[copy.into]
            if copy.rule:
                source = RULES[copy.rule](source.float())
                same = source.numel() == target.numel()
                source = source.reshape(target.shape) if same else source.expand(target.shape)
            if target.shape != source.shape:
                raise CheckpointError(
                    f"tensor {name} in {where} does not fit parameter {copy.param}: a part of "
                    f"{list(source.shape)} should fill {list(target.shape)}; report this"
                )
            if stored.kind in (PACKED, FP8, BLOCK_SCALE, POWERS) and stored.scale is None:
                # Codes, which a conversion between types would change.
                target, source = target.view(torch.uint8), source.view(torch.uint8)
            target.copy_(source)
            filled[copy.param] += target.numel()

    for name, tensor in weights:
        take(name, tensor)
    for name, tensor in _unstreamed(plan, seen, files):
        take(name, tensor)
    missing = [name for name in plan if name not in seen]
    if missing:
        raise CheckpointError(
            f"tensor {missing[0]} did not arrive from {files.file_of.get(missing[0], 'any file')}; "
            "complete the checkpoint"
        )
    _check_filled(params, filled)
    if allow_nonfinite:
        _warn_nonfinite(infected, files.folder, draft, ranks)
    return set(params)


def _warn_nonfinite(own: list[str], folder: Path | None, draft: bool, ranks: Ranks) -> None:
    """Warn of tensors with NaN or infinite values, also of those that only other ranks loaded."""
    found = list(dict.fromkeys(name for names in ranks.gather(own) for name in names))
    if not draft:
        _warned.discard(folder)
    if not found or ranks.rank or folder in _warned:
        return
    _warned.add(folder)
    logger.warning(
        "NaN or infinite values, which additional_config allows, are in %d of the tensors loaded; "
        "the first is %s", len(found), found[0],
    )  # fmt: skip


def _plain(codes: Tensor, scale: Tensor, where: str) -> Tensor:
    """The numbers of an FP8 matrix, in float32."""
    from inkling_portable.formats import dequantize_fp8

    channel = tuple(scale.shape) == (*codes.shape[:-1], 1)
    # The scale was checked when it came; NaN codes are seen like those of any other weight.
    return dequantize_fp8(codes, scale, block=None if channel else TILE, check=False, name=where)


def _check_values(kind: str, values: Tensor, name: str, where: str) -> None:
    """Refuse a scale that would make its weights NaN or nothing, whatever is allowed of weights."""
    if kind == POWERS:
        bad = "E8M0 code 255, which is NaN" if bool((_bytes(values) == 255).any()) else None
    elif kind == BLOCK_SCALE:
        bad = "a NaN" if bool(((_bytes(values) & 127) == 127).any()) else None
    else:
        usable = torch.isfinite(values) & (values > 0)
        bad = None if bool(usable.all()) else f"the value {values[~usable].flatten()[0].item():g}"
    if bad is not None:
        raise CheckpointError(
            f"tensor {name} in {where} has {bad} where a scale is needed; quantise the weight "
            "again or fetch the file again"
        )


def _bytes(values: Tensor) -> Tensor:
    return values if values.dtype == torch.uint8 else values.view(torch.uint8)


def padded_parameters(params: Mapping[str, Tensor]) -> list[str]:
    """Parameters that an engine may make larger than their tensors; the rest of them is zero."""
    return [
        name for name in params if name.startswith("lm_head.") or ".experts.routed_experts." in name
    ]


def _check_filled(params: Mapping[str, Tensor], filled: Mapping[str, int]) -> None:
    padded = set(padded_parameters(params))
    absent = [n for n in params if n in padded and n.endswith(RANGES) and not filled[n]]
    if absent:
        logger.warning(
            "the checkpoint has no range of activations for %s; a kernel that rounds activations "
            "takes them as they are", ", ".join(absent[:2]),
        )  # fmt: skip
    for name, param in params.items():
        if name not in absent and filled[name] < (1 if name in padded else param.numel()):
            raise CheckpointError(
                f"parameter {name} got {filled[name]} of its {param.numel()} values; report this"
            )


def _unstreamed(
    plan: Mapping[str, Stored], seen: set[str], files: Files
) -> Iterator[tuple[str, Tensor]]:
    wanted: dict[str, list[str]] = {}
    for name in plan:
        if name not in seen and name in files.file_of:
            wanted.setdefault(files.file_of[name], []).append(name)
    if not wanted or files.folder is None:
        return
    from safetensors import safe_open

    for file, names in wanted.items():
        with safe_open(files.folder / file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)


def _finite(values: Tensor) -> bool:
    """Whether all values are finite, without a mask as large as the tensor."""
    if not values.numel() or not values.dtype.is_floating_point:
        return True
    if values.dtype.itemsize > 1:
        return _all_finite(values)
    # Bytes have no comparisons; they are widened a part at a time, to need little memory.
    return all(_all_finite(part.float()) for part in values.reshape(-1).split(WIDENED))


def _all_finite(values: Tensor) -> bool:
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
