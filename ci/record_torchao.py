"""Record what torchao makes of chosen numbers: `python ci/record_torchao.py OUT.json`.

torchao is an oracle for the formats' tests but no dependency: where it is installed, transformers
imports it in every process, which costs seconds. So its answers are recorded once, in any
environment that has torchao, and committed as tests/facts/torchao_formats.json.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def hexadecimal(x: Tensor) -> str:
    """The bytes of x, row after row."""
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist()).hex()


def code_inputs() -> Tensor:
    """Every E2M1 value, every midpoint, the floats beside both, and values that saturate."""
    exact = torch.tensor([*GRID, *EDGES, 5.5, 7.0, 8.0, 100.0, 1e30])
    up = torch.nextafter(exact, torch.full_like(exact, torch.inf))
    down = torch.nextafter(exact, torch.zeros_like(exact))
    positive = torch.cat((exact, up, down))
    return torch.cat((positive, -positive))


def block_inputs(block: int) -> Tensor:
    """fp32 [16, 2 * block]: block maxima just below, at and above where a scale rule changes."""
    generator = torch.Generator().manual_seed(block)
    maxima = torch.tensor([1.0, 1.25, 1.4375, 1.5, 1.6, 1.71875, 1.75, 1.96875]).repeat(4)
    powers = torch.tensor([0, -3, 5, 10]).repeat_interleave(8)
    body = torch.rand(32, block, generator=generator) * 2 - 1
    body[::2] = (body[::2] * 24).round() / 24
    body[:, block // 2] = 1.0
    amax = (maxima * 2.0**powers)[:, None]
    return (body * amax).reshape(16, 2 * block)


def main(out: Path) -> None:
    config = import_module("torchao.prototype.mx_formats.config")
    kernels = import_module("torchao.prototype.mx_formats.kernels")
    mx = import_module("torchao.prototype.mx_formats.mx_tensor")
    nv = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    values = code_inputs()
    facts: dict[str, object] = {
        "torchao": version("torchao"),
        "e2m1": {
            "x_fp32": hexadecimal(values),
            "codes": hexadecimal(kernels.f32_to_f4_unpacked(values.clamp(-6, 6))),
        },
        "pack": {
            "codes": hexadecimal(torch.arange(16, dtype=torch.uint8)),
            "bytes": hexadecimal(kernels.pack_uint4(torch.arange(16, dtype=torch.uint8)[None])),
        },
    }
    w = block_inputs(32)
    mxfp4: dict[str, object] = {"x_fp32": hexadecimal(w), "columns": w.shape[1]}
    modes = {"floor": "FLOOR", "even": "EVEN", "ceil": "RCEIL"}
    for rule, mode in modes.items():
        scale, packed = mx.to_mx(w, torch.float4_e2m1fn_x2, 32, config.ScaleCalculationMode[mode])
        mxfp4[rule] = {"scale": hexadecimal(scale), "packed": hexadecimal(packed)}
    w = block_inputs(16)
    nvfp4: dict[str, object] = {"x_fp32": hexadecimal(w), "columns": w.shape[1]}
    for exponent in (0, -4, 3):
        scale, packed = nv.nvfp4_quantize(w, 16, torch.tensor(2.0**exponent))
        nvfp4[str(exponent)] = {"scale": hexadecimal(scale), "packed": hexadecimal(packed)}
    facts |= {"mxfp4": mxfp4, "nvfp4": nvfp4}
    out.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
