"""What a checkpoint on disk holds: its tensors, their places in files, and its stacks of experts.

Values are read by rows with plain file reads, never mapped or loaded whole: one stack of Inkling
has 19 GB.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_portable.model import checkpoint
from inkling_portable.model.config import ConfigError, InklingConfig, parse
from inkling_portable.model.quant_layouts import (
    CODES,
    GLOBAL,
    LAYOUTS,
    SCALE,
    Layout,
    Shape,
    find,
    linear_scale,
    parts,
)
from inkling_portable.model.weight_format import agree, read_block

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SIDECAR = "hf_quant_config.json"
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
         "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip
PLAIN = {"BF16": "bf16", "F32": "fp32", "F16": "fp16"}
"""Floats that need no scale."""
ADAPTER = re.compile(r"\.lora_[AB]\.")
_STACK = re.compile(r"(.*\.layers\.(\d+)\.mlp\.experts\.(?:w13|w2))_(.+)")


class ConvertError(ValueError):
    """A conversion that cannot be done: one sentence with file, tensor and a remedy."""


@dataclass(frozen=True)
class Found:
    """One tensor of the source; `start` is the offset of its data in the file."""

    name: str
    file: str
    dtype: str
    shape: Shape
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.file}"


@dataclass(frozen=True)
class Weight:
    """One weight whose number format may change: a stack of routed experts, or a linear layer.

    `name` is that of the tensor in a BF16 checkpoint. `layout` is None for plain floats. A linear
    layer has a shape of two dimensions and no `layer`.
    """

    name: str
    layer: int | None
    shape: Shape
    layout: Layout | None
    tensors: Mapping[str, Found]

    @property
    def codes(self) -> Found:
        return self.tensors[CODES]

    @property
    def format(self) -> str:
        return PLAIN[self.codes.dtype] if self.layout is None else self.layout.format


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be converted. `rest`: tensors that belong to no weight."""

    folder: Path
    config: InklingConfig
    raw_config: dict[str, Any]
    weights: tuple[Weight, ...]
    rest: tuple[Found, ...]
    adapters: tuple[Found, ...]
    """Tensors of a bundled adapter, which no loader reads."""
    metadata: Mapping[str, Mapping[str, str]]
    """By file, what its header says beside tensors."""
    indexed: frozenset[str] | None
    """Names in the index; None without one."""

    @property
    def sparse_layers(self) -> list[int]:
        return sorted({w.layer for w in self.weights if w.layer is not None})


def read_source(folder: Path) -> Source:
    """Read configs and headers and recognise every weight.

    Raises ConvertError, CheckpointError or ConfigError for a checkpoint that is damaged, incomplete
    or in an unknown form.
    """
    from inkling_portable.model.loading import read_headers

    if not folder.is_dir():
        raise ConvertError(
            f"{folder} is no folder; name the folder of a checkpoint, downloading it first if need "
            "be"
        )
    raw = _read_json(folder / "config.json")
    config = parse(raw)
    sidecar = _read_json(folder / SIDECAR) if (folder / SIDECAR).is_file() else None
    allowed = _declared(raw, sidecar)
    files = read_headers(folder)
    if not files.shapes:
        raise ConvertError(f"{folder} has no *.safetensors file; name the folder of a checkpoint")
    if checkpoint.naming(files.shapes).hf:
        raise ConvertError(
            f"{folder.name} has tensors in the Hugging Face naming, in which no quantised layout "
            "is known; convert the released checkpoint in the original naming"
        )
    found, metadata = _headers(folder, sorted(set(files.file_of.values())))
    indexed = _indexed(folder, found)
    adapters = tuple(f for f in found.values() if ADAPTER.search(f.name))
    names = {name: f for name, f in found.items() if not ADAPTER.search(name)}
    stacks = tuple(_stacks(names, config))
    linears = tuple(_linears(names))
    for weight in (*stacks, *linears):
        key = weight.layout.key if weight.layout else None
        if key and key not in allowed:
            raise ConvertError(
                f"{weight.codes} is stored as {key}, but the quantisation block of the checkpoint "
                f"says {' and '.join(sorted(allowed)) or 'nothing'}; restore its config.json"
            )
    used = {f.name for weight in (*stacks, *linears) for f in weight.tensors.values()}
    rest = tuple(f for f in names.values() if f.name not in used)
    for tensor in rest:
        if tensor.dtype not in PLAIN and not tensor.dtype.startswith(("I", "BOOL")):
            raise ConvertError(
                f"{tensor} is {tensor.dtype} and no layout explains it; convert a checkpoint in "
                "one of the known layouts"
            )
    return Source(folder, config, raw, stacks + linears, rest, adapters, metadata, indexed)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConvertError(
            f"file {path.name} is missing from {path.parent}; name the folder of a checkpoint"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"file {path.name} is damaged ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ConvertError(f"file {path.name} is damaged: it is no object; download it again")
    return content


def _declared(raw: Mapping[str, Any], sidecar: Mapping[str, Any] | None) -> set[str]:
    """Keys of the layouts that the quantisation blocks allow; none without a block."""
    block = raw.get("quantization_config")
    if block is None and isinstance(raw.get("text_config"), Mapping):
        block = raw["text_config"].get("quantization_config")
    file = "config.json" if block is not None else SIDECAR
    block = sidecar if block is None else block
    if block is None:
        return set()
    if not isinstance(block, Mapping):
        raise ConvertError(f"quantization_config in {file} is {block!r}; it needs to be an object")
    try:
        form = read_block(block).layout
        if file == "config.json" and sidecar is not None:
            agree(block, sidecar)
    except ConfigError as error:
        raise ConvertError(f"{file}: {error}") from None
    # Releases by compressed-tensors have linear layers in FP8 beside experts in NVFP4.
    linears = {"fp8/compressed-tensors"} if form and form.name == "compressed-tensors" else set()
    return linears | ({form.key} if form else set())


def _headers(
    folder: Path, files: list[str]
) -> tuple[dict[str, Found], dict[str, Mapping[str, str]]]:
    """Every tensor; the headers have been checked for form by `read_headers`."""
    found: dict[str, Found] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file in files:
        # The output has files of the same names beside others.
        sound = file.endswith(".safetensors") and not file.startswith(".")
        if not sound or not (folder / file).is_file():
            raise ConvertError(
                f"file {file} is named in {INDEX}, and weights need to be *.safetensors files in "
                "the folder itself; correct the index"
            )
        with (folder / file).open("rb") as opened:
            length = struct.unpack("<Q", opened.read(8))[0]
            header = json.loads(opened.read(length))
        said = header.pop("__metadata__", None)
        metadata[file] = said if isinstance(said, dict) and said else {"format": "pt"}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensor = Found(name, file, entry["dtype"], tuple(entry["shape"]), 8 + length + first)
            if tensor.dtype not in BYTES:
                raise ConvertError(
                    f"{tensor} has the dtype {tensor.dtype}, which is not known; convert a "
                    "checkpoint in one of the known layouts"
                )
            if tensor.nbytes != last - first:
                raise ConvertError(
                    f"{tensor} has {last - first} bytes where its shape {list(tensor.shape)} needs "
                    f"{tensor.nbytes}; download it again"
                )
            found[name] = tensor
    return found, metadata


def _indexed(folder: Path, found: Mapping[str, Found]) -> frozenset[str] | None:
    if not (folder / INDEX).is_file():
        return None
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, file in listed.items():
        if name not in found or found[name].file != file:
            raise ConvertError(
                f"tensor {name} is not in {file}, where {INDEX} has it; complete the download"
            )
    return frozenset(listed)


def _stacks(names: Mapping[str, Found], config: InklingConfig) -> Iterator[Weight]:
    """The routed experts of every sparse layer, which must all be there."""
    text = config.text
    groups: dict[str, dict[str, Found]] = {}
    for name, tensor in names.items():
        if match := _STACK.fullmatch(name):
            groups.setdefault(match[1], {})[name] = tensor
    shapes = {"w13": (text.num_experts, 2 * text.expert_width, text.hidden_size),
              "w2": (text.num_experts, text.hidden_size, text.expert_width)}  # fmt: skip
    for layer in range(text.num_layers):
        if text.layer_is_dense(layer):
            continue
        for kind, shape in shapes.items():
            stem = f"model.llm.layers.{layer}.mlp.experts.{kind}"
            if stem not in groups:
                raise ConvertError(
                    f"tensor {stem}_weight is missing from the checkpoint; restore it or correct "
                    "the config that asks for it"
                )
            yield _recognised(f"{stem}_weight", layer, shape, groups.pop(stem))
    for group in groups.values():
        raise ConvertError(
            f"{next(iter(group.values()))} belongs to no sparse layer of config.json; correct the "
            "config or the file"
        )


def _recognised(name: str, layer: int, shape: Shape, group: Mapping[str, Found]) -> Weight:
    """The weight that a group of tensors stands for, by their names, dtypes and shapes."""
    first = group.get(name) or next(iter(group.values()))
    if set(group) == {name} and first.dtype in PLAIN:
        _require_shape(first, shape)
        return Weight(name, layer, shape, None, {CODES: first})
    for form in LAYOUTS.values():
        roles = find(form, name, group)
        if roles is None or set(group) != set(roles.values()):
            continue
        tensors = {role: group[tensor] for role, tensor in roles.items()}
        wanted = parts(form, name, shape)
        dtypes = {role: {wanted[role].dtype} for role in (CODES, SCALE)}
        dtypes[GLOBAL] = {*PLAIN, "F64"}
        if form.format == "fp8":
            dtypes[SCALE] |= {"BF16", "F16"}
        if form.format == "mxfp4":
            dtypes[SCALE] |= {"F8_E8M0"}
        if any(f.dtype not in dtypes.get(role, {f.dtype}) for role, f in tensors.items()):
            continue
        experts, rows, _ = shape
        _require_shape(tensors[CODES], wanted[CODES].shape)
        _require_shape(
            tensors[SCALE], wanted[SCALE].shape, (experts, rows, wanted[SCALE].shape[-1])
        )
        if GLOBAL in tensors:
            _require_shape(tensors[GLOBAL], (experts,), (experts, 1), (experts, 2))
        return Weight(name, layer, shape, form, tensors)
    held = ", ".join(f"{f.name.rpartition('experts.')[2]} {f.dtype}" for f in group.values())
    raise ConvertError(
        f"{first} is quantised in no known layout (found {held}); convert a checkpoint in BF16 or "
        f"in one of {', '.join(LAYOUTS)}"
    )


def _require_shape(tensor: Found, *shapes: Shape) -> None:
    if tensor.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ConvertError(
            f"{tensor} needs shape {wanted}; found {list(tensor.shape)}; correct the config or the "
            "file"
        )


def _linears(names: Mapping[str, Found]) -> Iterator[Weight]:
    """Linear layers in FP8, which some releases have beside their experts."""
    for name, tensor in names.items():
        if tensor.dtype != "F8_E4M3" or len(tensor.shape) != 2 or not name.endswith(".weight"):
            continue
        scale = names.get(linear_scale(name))
        if scale is None or scale.dtype not in PLAIN:
            raise ConvertError(
                f"{tensor} is FP8 and has no scale {linear_scale(name)}; complete the checkpoint"
            )
        rows, columns = tensor.shape
        _require_shape(scale, (rows, 1), (-(-rows // 128), -(-columns // 128)))
        layout = LAYOUTS["fp8/compressed-tensors"]
        yield Weight(name, None, tensor.shape, layout, {CODES: tensor, SCALE: scale})


class Reader:
    """Reads rows and whole tensors of a source's files into fresh memory, from any thread."""

    def __init__(self, source: Source) -> None:
        self._open = {file: os.open(source.folder / file, os.O_RDONLY) for file in source.metadata}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def bytes_at(self, tensor: Found, offset: int, count: int) -> bytearray:
        """`count` bytes of a tensor's data from `offset` on."""
        buffer = bytearray(count)
        view, at = memoryview(buffer), tensor.start + offset
        while view:
            try:
                got = os.preadv(self._open[tensor.file], [view], at)
            except OSError as error:
                raise ConvertError(
                    f"{tensor} cannot be read ({error.strerror}); repeat the command when its disk "
                    "works"
                ) from error
            if got == 0:
                raise ConvertError(f"{tensor} is cut off; download the file again")
            view, at = view[got:], at + got
        return buffer

    def rows(self, tensor: Found, first: int, last: int) -> Tensor:
        """Rows first to last - 1 of a tensor seen as [rows of all experts, columns]."""
        columns = tensor.shape[-1] if tensor.shape else 1
        width = columns * BYTES[tensor.dtype]
        data = self.bytes_at(tensor, first * width, (last - first) * width)
        return as_tensor(data, tensor.dtype).view(last - first, columns)

    def whole(self, tensor: Found) -> Tensor:
        """A small tensor in its own shape."""
        return as_tensor(self.bytes_at(tensor, 0, tensor.nbytes), tensor.dtype).view(tensor.shape)


def as_tensor(data: bytearray, dtype: str) -> Tensor:
    """Bytes as a flat tensor of a safetensors dtype; E8M0 and E4M3 keep their own dtypes."""
    import torch

    types = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16,
             "F16": torch.float16, "I64": torch.int64, "U8": torch.uint8,
             "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8}  # fmt: skip
    return torch.frombuffer(data, dtype=types[dtype])
