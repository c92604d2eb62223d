"""Count the kernels that one decoder layer launches in decode: `python -m ci.layer_launches`.

The ops are those that the resolver would choose among ours for the chip, run on tensors without
memory, so that every launch is recorded and none happens. Two products of the engine's linear
layers (qkvr, o_proj) come on top. Writes docs/performance/launches.json.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch

from benchmarks.experts import MODELS, tokens_of, weights_of
from benchmarks.small_ops_shapes import RANKS, arguments
from ci.cross_compile import recorded
from inkling_portable.backends.evidence import MEASURED
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.rel_attention import attend
from inkling_portable.target import Target

TARGET = Path(__file__).parents[1] / "docs" / "performance" / "launches.json"
CHIPS = ("h200", "b200", "mi300x", "mi355x")
# Small ops of a layer with experts, in the order of a step; attention stands behind the first.
OPS = ("qkvr_prep", "conv_residual_norm", "gate_logits", "route", "sink_experts",
       "conv_residual_norm")  # fmt: skip
TOGETHER = ("qkvr_prep", "conv_residual_norm", "gated_sinks", "conv_residual_norm")


def launches(chip: str, window: int, requests: int) -> list[str]:
    """Names of the kernels of ours that one layer launches, with NVFP4 experts of our own."""
    functions = {row.op: row.load() for row in OFFERS}
    target, rank = Target.parse(chip), RANKS["large-tp8-local" if window else "large-tp8-global"]

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    together = requests == 1 and target.key in MEASURED.get(("gated_sinks", "triton"), ())
    with launching_for(target), recorded() as found:
        for op in TOGETHER if together else OPS:
            functions[op](**arguments(op, requests, rank, "meta"))
        cache = tensor(4096, rank.kv_heads, 128, 256).transpose(1, 2)
        attend(
            target, tensor(requests, 8, 128), cache[..., :128], cache[..., 128:],
            tensor(requests, 8, rank.extent), tensor(requests, 8192, dtype=torch.int32),
            tensor(requests + 1, dtype=torch.int32), tensor(requests, dtype=torch.int32),
            1, 8192, window, 1 / 128, tensor(requests, 8, 128),
        )  # fmt: skip
        functions["routed_experts"](
            **weights_of("large-tp8", "nvfp4", "meta"),
            **tokens_of(MODELS["large-tp8"][0], requests, 1, "meta")[0],
        )
    return [launch.name.strip("_") for launch in found]


def report() -> list[dict[str, object]]:
    """One entry for each chip, kind of layer and number of decoding requests."""
    rows: list[dict[str, object]] = []
    for chip in CHIPS:
        for window in (0, 512):
            for requests in (1, 16):
                names = launches(chip, window, requests)
                which = ", ".join(f"{n} {name}" if n > 1 else name
                                  for name, n in Counter(names).items())  # fmt: skip
                layer = "local" if window else "global"
                rows.append({"chip": chip, "layer": layer, "requests": requests,
                             "launches": len(names), "which": which})  # fmt: skip
    return rows


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(report(), indent=1) + "\n")
