"""What a conversion will write: every tensor, its place in a file, and the configs."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from inkling_portable import __version__
from inkling_portable.conversion.source import BYTES, ConvertError, Found, Source, Weight
from inkling_portable.model.quant_layouts import (
    CODES,
    INPUT,
    LAYOUTS,
    Layout,
    Part,
    config_block,
    layout,
    parts,
)

FORMATS = ("nvfp4", "mxfp4", "bf16", "fp8", "fp32")
COPY_BLOCK = 1 << 26
"""Bytes that are copied between two entries of the journal."""
PLAIN_DTYPES = {"bf16": "BF16", "fp32": "F32"}


@dataclass(frozen=True)
class Job:
    """One source tensor to copy, or one weight to write in another form, in `blocks` steps.

    target: the tensors written, by role. form: layout of the target, None for plain floats.
    """

    source: Found | Weight
    target: Mapping[str, Part]
    form: Layout | None
    blocks: int

    @property
    def key(self) -> str:
        return self.source.name

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(part_bytes(part) for part in self.target.values())


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the output stands."""

    part: Part
    file: str
    start: int


@dataclass(frozen=True)
class Plan:
    """A whole conversion. `files`: header and size in bytes of every weight file."""

    number_format: str
    form: Layout | None
    layers: tuple[int, ...]
    """Sparse layers whose experts are stored in `number_format`."""
    jobs: tuple[Job, ...]
    slots: Mapping[str, Slot]
    files: Mapping[str, tuple[bytes, int]]
    index: dict[str, Any] | None
    config: dict[str, Any]
    sidecar: dict[str, Any] | None
    notes: tuple[str, ...]
    """What the output lacks or how it differs, beside rounding; each a clause."""
    digest: str

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.files.values())


def part_bytes(part: Part) -> int:
    return math.prod(part.shape) * BYTES[part.dtype]


def make_plan(
    source: Source, number_format: str, layout_name: str | None, layers: Collection[int] | None
) -> Plan:
    """Plan the conversion of `source`; raises ConvertError for one that makes no sense.

    layers: sparse layers to store in `number_format`, the other ones in bf16; None for those that
    are quantised already, or else all but the first sparse one, as released checkpoints have it.
    """
    form = _target(number_format, layout_name)
    chosen = _layers(source, form, layers)
    stacks = [w for w in source.weights if w.layer is not None]
    mine = [w for w in stacks if w.layer in chosen]
    calibrated = _keeps_input(form, mine)
    jobs = [Job(f, {CODES: Part(f.name, f.dtype, f.shape)}, None, _copy_blocks(f))
            for f in source.rest]  # fmt: skip
    changed = False
    for weight in source.weights:
        wanted = form if weight.layer in chosen else None
        plain = number_format if number_format in PLAIN_DTYPES else "bf16"
        stays = wanted == weight.layout and (
            wanted is not None or weight.format == plain or form is not None
        )
        if stays:
            jobs += [Job(f, {CODES: Part(f.name, f.dtype, f.shape)}, None, _copy_blocks(f))
                     for f in weight.tensors.values()]  # fmt: skip
            continue
        changed = True
        jobs.append(Job(weight, _target_parts(weight, wanted, plain, calibrated), wanted,
                        weight.shape[0] if weight.layer is not None else 1))  # fmt: skip
    if not changed:
        raise ConvertError(
            f"{source.folder.name} already has its experts in {form.key if form else number_format}"
            ", so there is nothing to convert; copy the folder or choose another format"
        )
    slots, files = _place(jobs, source)
    quantised = {w.name for w in mine} if form else set()
    kept = [f.name for f in source.rest] + [w.name for w in source.weights]
    config, sidecar = _configs(
        source, number_format, form, [n for n in kept if n not in quantised], sorted(quantised),
        calibrated,
    )  # fmt: skip
    index = _index(source, jobs)
    seed = {
        "version": __version__, "format": number_format, "config": config, "index": index,
        "jobs": [[asdict(j.source), list(j.target.values())] for j in jobs],
        "files": [[file, *_stamp(source, file)] for file in source.metadata],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(seed, sort_keys=True).encode()).hexdigest()
    notes = _notes(source, form, mine, calibrated)
    return Plan(number_format, form, tuple(sorted(chosen)), tuple(jobs), slots, files, index,
                config, sidecar, notes, digest)  # fmt: skip


def _stamp(source: Source, file: str) -> tuple[int, int]:
    stat = (source.folder / file).stat()
    return stat.st_size, stat.st_mtime_ns


def _target(number_format: str, name: str | None) -> Layout | None:
    if number_format in PLAIN_DTYPES:
        if name is not None:
            raise ConvertError(f"{number_format} has no layouts; leave out --layout {name}")
        return None
    try:
        return layout(number_format, name)
    except ValueError as error:
        raise ConvertError(str(error)) from None


def _layers(source: Source, form: Layout | None, asked: Collection[int] | None) -> set[int]:
    sparse = source.sparse_layers
    if form is None:
        if asked is not None:
            raise ConvertError(
                "--layers chooses the layers to quantise, and bf16 and fp32 quantise none; leave "
                "it out"
            )
        return set()
    if asked is not None:
        for layer in sorted(asked):
            if layer not in sparse:
                kind = "is dense" if layer < source.config.text.num_layers else "does not exist"
                raise ConvertError(
                    f"layer {layer} {kind} and has no routed experts; choose from the sparse "
                    f"layers {ranges(sparse)}"
                )
        return set(asked)
    quantised = {w.layer for w in source.weights if w.layout is not None and w.layer is not None}
    chosen = quantised or set(sparse[1:])
    if not chosen:
        raise ConvertError(
            f"the only sparse layer is {ranges(sparse) or 'none'}, and the first one stays in "
            "bf16 as in the released checkpoints; name the layers to quantise with --layers"
        )
    return chosen


def ranges(numbers: list[int]) -> str:
    """[2, 3, 4, 7] as "2-4, 7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _keeps_input(form: Layout | None, mine: list[Weight]) -> bool:
    """Whether every quantised stack has a scale for activations that the target can carry."""
    return form is not None and form.format == "nvfp4" and all(INPUT in w.tensors for w in mine)


def _target_parts(
    weight: Weight, form: Layout | None, plain: str, calibrated: bool
) -> dict[str, Part]:
    if form is None:
        return {CODES: Part(weight.name, PLAIN_DTYPES[plain], weight.shape)}
    assert len(weight.shape) == 3, "only stacks are quantised"
    try:
        made = parts(form, weight.name, weight.shape)
    except ValueError as error:
        raise ConvertError(f"{error} (file {weight.codes.file})") from None
    return {role: part for role, part in made.items() if role != INPUT or calibrated}


def _copy_blocks(tensor: Found) -> int:
    return max(1, -(-tensor.nbytes // COPY_BLOCK))


def _main(job: Job) -> Found:
    """The source tensor whose file a job's output goes to."""
    return job.source.codes if isinstance(job.source, Weight) else job.source


def _place(jobs: list[Job], source: Source) -> tuple[dict[str, Slot], dict[str, tuple[bytes, int]]]:
    """Lay the tensors into files called as the source's: wide dtypes first, without holes."""
    held: dict[str, list[Part]] = {}
    for job in jobs:
        held.setdefault(_main(job).file, []).extend(job.target.values())
    slots: dict[str, Slot] = {}
    files: dict[str, tuple[bytes, int]] = {}
    for file, members in held.items():
        ordered = sorted(members, key=lambda part: (-BYTES[part.dtype], part.name))
        header: dict[str, Any] = {"__metadata__": dict(source.metadata[file])}
        at = 0
        for part in ordered:
            end = at + part_bytes(part)
            header[part.name] = {"dtype": part.dtype, "shape": list(part.shape),
                                 "data_offsets": [at, end]}  # fmt: skip
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        prefix = struct.pack("<Q", len(text)) + text
        files[file] = (prefix, len(prefix) + at)
        for part in ordered:
            if part.name in slots:
                raise ConvertError(
                    f"tensor {part.name} would be written twice, to {slots[part.name].file} and "
                    f"{file}; remove one of its sources"
                )
            start = len(prefix) + header[part.name]["data_offsets"][0]
            slots[part.name] = Slot(part, file, start)
    return slots, files


def _index(source: Source, jobs: list[Job]) -> dict[str, Any] | None:
    """The index of the output: tensors that came from outside the source's index stay outside."""
    if source.indexed is None:
        return None
    places: dict[str, str] = {}
    total = 0
    for job in jobs:
        if _main(job).name in source.indexed:
            places |= {part.name: _main(job).file for part in job.target.values()}
            total += job.nbytes
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _configs(
    source: Source, number_format: str, form: Layout | None, kept: list[str],
    quantised: list[str], calibrated: bool,
) -> tuple[dict[str, Any], dict[str, Any] | None]:  # fmt: skip
    """config.json and hf_quant_config.json."""
    config = copy.deepcopy(source.raw_config)
    text = config.get("text_config")
    for place in (config, text):
        if isinstance(place, dict):
            place.pop("quantization_config", None)
            if number_format == "fp32":
                place |= {key: "float32" for key in ("torch_dtype", "dtype") if key in place}
    if form is None:
        return config, None
    block = config_block(form, kept, quantised)
    if form.key == "nvfp4/compressed-tensors" and not calibrated:
        block["config_groups"]["group_0"]["input_activations"] = None
    if form.name == "compressed-tensors":
        # The engine asks for names below the module of the experts.
        plain = [rf"re:.*[.]{name.split('.layers.')[1].split('.')[0]}[.]mlp[.]experts[.].*"
                 for name in kept if name.endswith("experts.w13_weight")]  # fmt: skip
        block["ignore"] = plain + block["ignore"]
    sidecar = None
    if form.name == "modelopt":
        if not calibrated:
            block["quant_algo"] = "W4A16_NVFP4"
        # The engine tells this file from others by its producer.
        block["producer"] = {"name": "modelopt", "version": f"inkling-portable {__version__}"}
        fields = ("quant_algo", "group_size", "kv_cache_quant_algo", "exclude_modules")
        sidecar = {"producer": block["producer"],
                   "quantization": {key: block[key] for key in fields}}  # fmt: skip
        # In config.json the engine before 0.33 reads the list under this name only.
        block["ignore"] = block.pop("exclude_modules")
    config["quantization_config"] = block
    return config, sidecar


def _notes(
    source: Source, form: Layout | None, mine: list[Weight], calibrated: bool
) -> tuple[str, ...]:
    notes = []
    stacks = [w for w in source.weights if w.layer is not None]
    if any(INPUT in w.tensors for w in stacks) and not calibrated:
        notes.append("the scales of activations are left out")
    if form is not None and form.format == "nvfp4" and not calibrated:
        notes.append("without scales of activations, kernels compute with 16-bit activations")
    if source.adapters:
        notes.append(
            f"{len(source.adapters)} tensors of a bundled adapter are left out, since no loader "
            "reads them"
        )
    linears = len(source.weights) - len(stacks)
    if linears:
        notes.append(f"{linears} linear layers in FP8 become BF16")
    moved = {w.format for w in mine} - {form.format if form else ""}
    if form is not None and form.format == "mxfp4" and "nvfp4" in moved:
        notes.append(
            "each scale of NVFP4, an E4M3 number for 16 weights times one of an expert, becomes a "
            "power of two for 32 weights, and weights that do not fit it are rounded"
        )
    if form is not None and form.format == "nvfp4" and "mxfp4" in moved:
        notes.append(
            "a power of two for 32 weights becomes two E4M3 numbers for 16 with the same codes; "
            "only blocks 2^17 times smaller than an expert's largest are rounded"
        )
    return tuple(notes)


assert set(FORMATS) == {form.format for form in LAYOUTS.values()} | set(PLAIN_DTYPES)
