"""`inkling-portable tiny`: a random but valid checkpoint that any reader of Inkling can load.

Written in the original naming, with everything a server needs: config, weights (MTP in a file of
its own that the index does not list, as in the released repositories), tokenizer, processor and
generation settings. Random weights produce nonsense; the arithmetic on them is the real one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_portable.commands import tiny_presets, tiny_quant, tiny_tensors
from inkling_portable.commands._options import OptionParser
from inkling_portable.commands.tiny_tokenizer import write_tokenizer
from inkling_portable.model.config import parse
from inkling_portable.model.quant_layouts import layout as known_layout

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
OWN_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "mtp.safetensors", "config.json",
    "generation_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json",
    "hf_quant_config.json",
)  # fmt: skip
"""What a forced run removes first; other files in the folder stay."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 = written, 2 = refused with one sentence on stderr."""
    try:
        args = _arguments(argv)
        report = write_tiny(
            args.dir,
            preset=args.preset,
            vocab=args.vocab,
            layers=args.layers,
            seed=args.seed,
            dtype=args.dtype,
            weights=args.weights,
            layout=args.layout,
            towers=args.towers,
            mtp_depths=args.mtp_depths,
            shard_mb=args.shard_mb,
            force=args.force,
        )
    except OSError as error:
        print(f"inkling-portable tiny: {args.dir} cannot be written ({error}); name a folder where "
              "you may write", file=sys.stderr)  # fmt: skip
        return 2
    except ValueError as error:
        print(f"inkling-portable tiny: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0


def write_tiny(
    path: str | Path,
    preset: str = "text",
    *,
    vocab: int | None = None,
    layers: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    weights: str | None = None,
    layout: str | None = None,
    towers: bool | None = None,
    mtp_depths: int | None = None,
    shard_mb: float | None = None,
    force: bool = False,
    **overrides: Any,
) -> str:
    """Write a checkpoint into folder `path` and return one line that describes it.

    Args:
        preset: one of `tiny_presets.PRESETS`; None below means what the preset says.
        vocab: number of valid token ids; the stored tables have some padding rows more.
        layers: number of decoder layers.
        dtype: "float32" or "bfloat16", of all tensors but those that are always fp32.
        weights: "nvfp4", "mxfp4" or "fp8" for routed experts in that format, as the released
            checkpoints have them (see `tiny_quant`); None for plain tensors.
        layout: "modelopt", "compressed-tensors" or "quark"; None for the usual one of the format.
        towers: with the image and the audio tower, which makes the nested config.
        mtp_depths: number of MTP depths, 0 for none.
        shard_mb: split the weights into files of at most this many million bytes.
        force: replace a checkpoint that is in the folder; files of other kinds stay.
        overrides: text_config fields of the original dialect.

    Raises:
        ValueError: an argument is out of range, or the config they make is not valid.
        FileExistsError: the folder holds something and `force` is not given.
    """
    base = tiny_presets.preset(preset)
    dtype = dtype or base.dtype
    if dtype not in DTYPES:
        raise ValueError(f"no weights are written as {dtype!r}; use {' or '.join(DTYPES)}")
    if layout is not None and weights is None:
        raise ValueError(f"layout {layout} is one of quantised weights; give --weights as well")
    form = None if weights is None else known_layout(weights, layout)
    if shard_mb is not None and not shard_mb > 0:
        raise ValueError(f"shards need a positive size; found {shard_mb} MB; give one or none")
    low, high = tiny_presets.SMALLEST_VOCABULARY, tiny_presets.LARGEST_VOCABULARY
    vocab = base.vocab if vocab is None else vocab
    if not low <= vocab <= high:
        raise ValueError(
            f"the vocabulary needs 256 bytes and the special tokens, {low} to {high} ids; found "
            f"{vocab}; give a number in that range"
        )
    depths = base.mtp_depths if mtp_depths is None else mtp_depths
    if depths > tiny_presets.MOST_DEPTHS:
        raise ValueError(f"Inkling has at most {tiny_presets.MOST_DEPTHS} MTP depths; found "
                         f"{depths}; give 0 to {tiny_presets.MOST_DEPTHS}")  # fmt: skip
    raw = tiny_presets.config(
        base,
        vocab=vocab,
        layers=base.layers if layers is None else layers,
        dtype=dtype,
        towers=base.towers if towers is None else towers,
        mtp_depths=depths,
        overrides=overrides,
    )
    config = parse(raw)
    folder = Path(path)
    _make_room(folder, force)

    import torch

    precision = getattr(torch, dtype)
    valid = config.text.vocab_size

    quantised = [] if form is None else tiny_quant.quantised_names(config, form)

    def drawn(specs: Iterable[tiny_tensors.TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            tensor = tiny_tensors.draw(spec, seed, precision, valid)
            if form is not None and spec.name in quantised:
                yield from tiny_quant.quantise(form, spec.name, tensor.float(), seed)
            else:
                yield spec.name, tensor
        if form is not None and form.name == "quark":
            yield from tiny_quant.adapter(seed)

    specs = list(tiny_tensors.tensor_specs(config))
    size, count = _write_weights(folder, drawn(specs), shard_mb)
    mtp = {spec.name: tiny_tensors.draw(spec, seed, precision, valid)
           for spec in tiny_tensors.mtp_specs(config)}  # fmt: skip
    if mtp:
        size += _save(folder / "mtp.safetensors", mtp)
    if form is not None:
        plain = [spec.name for spec in specs if spec.name not in quantised]
        block, file = tiny_quant.blocks(form, plain, quantised)
        if file == "config.json":
            raw["quantization_config"] = block
        else:
            _write_json(folder / file, block)
    _write_json(folder / "config.json", raw)
    eos, start = raw["eos_token_id"], valid - tiny_presets.SPECIAL_BLOCK
    pad = start + tiny_presets.SPECIAL_TOKENS["<|endoftext|>"]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad})
    write_tokenizer(folder, valid, config.text.max_positions or 0)
    if config.vision is not None or config.audio is not None:
        _write_json(folder / "processor_config.json", tiny_presets.processor_config())
    return (
        f"{folder}: {preset}, {config.text.num_layers} layers, {valid} token ids, {dtype}"
        f"{f' and {form.format} as {form.name}' if form else ''}, "
        f"{count + len(mtp)} tensors, {size / 1e6:.1f} MB of random weights (seed {seed})"
    )


def _make_room(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; name a folder")
    if folder.exists() and any(folder.iterdir()):
        if not force:
            raise FileExistsError(f"{folder} is not empty; name another folder or pass --force")
        for pattern in OWN_FILES:
            for file in folder.glob(pattern):
                file.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def _write_weights(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_mb: float | None
) -> tuple[int, int]:
    """Write model.safetensors, or shards and their index; returns bytes and tensor count."""
    if shard_mb is None:
        everything = dict(tensors)
        return _save(folder / "model.safetensors", everything), len(everything)
    limit = shard_mb * 1e6
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in tensors:
        # A tensor larger than the limit gets a shard of its own.
        if used and used + tensor.nbytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    places: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        total += _save(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    index_file = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index_file)
    return total, len(places)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    from safetensors.torch import save

    # Not save_file: what it writes nobody else may read, and a server may run as another user.
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = OptionParser(
        prog="inkling-portable tiny",
        description="Write a random but valid Inkling checkpoint in the original naming.",
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="folder to write")
    parser.add_argument("--preset", choices=tiny_presets.PRESETS, default="text")
    parser.add_argument("--vocab", type=int, metavar="N", help="number of valid token ids")
    parser.add_argument("--layers", type=int, metavar="N", help="number of decoder layers")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--weights", choices=tiny_quant.WEIGHTS, help="quantise routed experts")
    parser.add_argument("--layout", choices=tiny_quant.LAYOUTS, help="how --weights are stored")
    parser.add_argument("--towers", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--mtp-depths", type=int, metavar="N", help="0 writes no MTP tensors")
    parser.add_argument("--shard-mb", type=float, metavar="N", help="split the weights")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint in DIR")
    return parser.parse_args(argv)
