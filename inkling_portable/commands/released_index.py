"""Name, type and shape of every tensor of the released checkpoints, from the published tables.

`python -m inkling_portable.commands.released_index Inkling nvfp4/modelopt` prints one as JSON.
"""

from __future__ import annotations

import json
import sys

from inkling_portable.commands import tiny_quant
from inkling_portable.commands.released_configs import released
from inkling_portable.commands.tiny_tensors import mtp_specs, tensor_specs
from inkling_portable.model.config import parse
from inkling_portable.model.quant_layouts import LAYOUTS, Part

ADAPTER_RANK = 32


def index(model: str, key: str | None = None) -> dict[str, Part]:
    """All tensors of "Inkling" or "Inkling-Small" in BF16, or in the layout called `key`.

    The FP8 release is taken to have its experts in FP8 alone, as its description says.
    """
    config = parse(released(model))
    form = None if key is None else LAYOUTS[key]
    quantised: set[str] = set()
    if form is not None:
        quantised = set(tiny_quant.quantised_names(config, form))
        if form.format == "fp8":
            quantised = {name for name in quantised if ".attn." not in name}
    out: dict[str, Part] = {}
    for spec in (*tensor_specs(config), *mtp_specs(config)):
        if form is not None and spec.name in quantised:
            parts = tiny_quant.stored_as(form, spec.name, spec.shape).values()
            out |= {part.name: part for part in parts}
        else:
            out[spec.name] = Part(spec.name, "F32" if spec.fp32 else "BF16", spec.shape)
    if form is not None and form.name == "quark":
        shape = (ADAPTER_RANK, config.text.hidden_size)
        out |= {name: Part(name, kind, shape) for name, kind in tiny_quant.ADAPTER.items()}
    return out


if __name__ == "__main__":
    found = index(*sys.argv[1:])
    json.dump({name: [part.dtype, part.shape] for name, part in found.items()}, sys.stdout)
