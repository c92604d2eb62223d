"""Time the vision and audio towers, eager and in a CUDA graph, on one GPU.

    python -m benchmarks.towers [--patches 64,1000,4096] [--widths 6144,4096] [--seconds 60]
                                [--out benchmarks/results/towers/h200.json]

Pictures: patches as they come from the processor (one time slot, bfloat16), through the tower as
the engine runs it eagerly, through vLLM's encoder graph manager's bucket (copy, replay), and
through transformers' tower, which gets both time slots. Sound: levels from samples (the
preprocessing, on the GPU) and rows from levels (the tower). What is timed is compared first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import counts, environment, median_us, need_gpus
from inkling_portable.backends.reference import towers as reference
from inkling_portable.backends.triton import towers as triton
from inkling_portable.model import preprocess
from inkling_portable.model.config import AudioConfig, VisionConfig
from inkling_portable.model.preprocess import AudioSettings, dmel_levels
from inkling_portable.model.towers import AudioTower, VisionTower

GPU = torch.device("cuda")
TRITON = SimpleNamespace(norm_gelu=triton.norm_gelu, dmel_embed_norm=triton.dmel_embed_norm)
PLAIN = SimpleNamespace(norm_gelu=reference.norm_gelu, dmel_embed_norm=reference.dmel_embed_norm)


def seeded(tower: torch.nn.Module) -> torch.nn.Module:
    """`tower` on the GPU in bfloat16, with weights that keep activations near 1."""
    generator = torch.Generator(GPU).manual_seed(1)
    tower = tower.to(GPU, torch.bfloat16).requires_grad_(False)
    for name, parameter in tower.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=GPU)
        is_norm = "norm" in name.split(".")[-2]
        parameter.copy_(1 + 0.2 * noise if is_norm else noise / parameter.shape[-1] ** 0.5)
    return tower


def eager_us(call: Callable[[], Any], calls: int = 20) -> float:
    """Median microseconds of a call from the CPU, waiting for each, as a first token does."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def bucket_of(patches: int) -> int:
    bucket = 64
    while bucket < patches:
        bucket *= 2
    return bucket


def picture_row(width: int, patches: int) -> dict[str, Any]:
    """All ways to embed `patches` patches with a tower of this width."""
    tower = seeded(VisionTower(VisionConfig(width, 40, 2, 3, 4, 1e-6), TRITON))
    plain = VisionTower(tower.config, PLAIN)  # type: ignore[arg-type]
    plain.load_state_dict(tower.state_dict())
    plain.to(GPU, torch.float64)
    pixels = torch.randn(patches, 1, 40, 40, 3, device=GPU, dtype=torch.bfloat16)
    row: dict[str, Any] = {"what": "pictures", "width": width, "patches": patches}

    bucket = bucket_of(patches)
    held = torch.zeros(bucket, 1, 40, 40, 3, device=GPU, dtype=torch.bfloat16)
    tower(held)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = tower(held)
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        held[patches:].zero_()
        held[:patches].copy_(pixels)
        graph.replay()
        return out[:patches]

    def both_slots() -> Tensor:
        return tower(pixels.expand(-1, 2, -1, -1, -1))

    few = pixels[:64].double()
    exact = plain(few)
    for name, rows in (("eager", tower(pixels)), ("graph", replay()), ("twice", both_slots())):
        row[f"{name}_error"] = float((rows[:64].double() - exact).abs().max())
    # What fills a bucket must change nothing.
    clean = replay().clone()
    held[patches:] = float("nan")
    graph.replay()
    row["filled_with_nan_equal"] = bool(torch.equal(clean, out[:patches]))
    row["eager_us"] = eager_us(lambda: tower(pixels))
    row["eager_two_slots_us"] = eager_us(both_slots)
    row["graph_us"] = eager_us(replay)
    row["gpu_us"] = median_us([lambda: tower(pixels)] * 2)
    row["gpu_two_slots_us"] = median_us([both_slots] * 2)
    row |= transformers_row(tower, pixels)
    return row


def transformers_row(tower: VisionTower, pixels: Tensor) -> dict[str, Any]:
    """transformers' tower with the same weights, where it has one."""
    try:
        from transformers.models.inkling.configuration_inkling import InklingVisionConfig
        from transformers.models.inkling.modeling_inkling import InklingVisionModel
    except ImportError:
        return {}
    config = InklingVisionConfig(
        text_hidden_size=tower.config.out_width, patch_size=40, temporal_patch_size=2,
        num_channels=3, num_hidden_layers=4,
    )  # fmt: skip
    theirs = InklingVisionModel(config).to(GPU, torch.bfloat16).requires_grad_(False)
    for (name, parameter), (ours, value) in zip(
        sorted(theirs.state_dict().items()), sorted(_their_names(tower).items()), strict=True
    ):
        assert parameter.shape == value.shape, (name, ours)
        parameter.copy_(value)
    twice = pixels.expand(-1, 2, -1, -1, -1).contiguous()
    rows = theirs(twice).last_hidden_state.reshape(len(pixels), -1)
    return {
        "transformers_difference": float((rows - tower(pixels)).abs().max()),
        "transformers_us": eager_us(lambda: theirs(twice)),
    }


def _their_names(tower: VisionTower) -> dict[str, Tensor]:
    names = {}
    for name, value in tower.state_dict().items():
        for kind, theirs in (("linear", "projection"), ("norm", "layer_norm")):
            for index in range(len(tower.stages)):
                name = name.replace(f"layers.{kind}_{index}.", f"encoder_layers.{index}.{theirs}.")
        names[name] = value
    return names


def stage_rows(width: int, patches: int) -> list[dict[str, Any]]:
    """GPU time of each step of the tower on its own, and of a first stage of 80 columns."""
    tower = seeded(VisionTower(VisionConfig(width, 40, 2, 3, 4, 1e-6), TRITON))
    from inkling_portable.model.towers import fold

    x = torch.randn(patches, 1, 40, 40, 3, device=GPU, dtype=torch.bfloat16)
    rows = []
    for index, stage in enumerate(tower.stages):
        if stage.time > 1:
            x = x.expand(-1, 2, -1, -1, -1)
        layer = tower.layers[f"linear_{index}"]
        folded = fold(x, stage.time, stage.side)
        row = {"what": f"stage {index}", "width": width, "patches": patches}
        row["fold_us"] = median_us([lambda x=x, s=stage: fold(x, s.time, s.side)] * 4)
        row["linear_us"] = median_us([lambda f=folded, n=layer: n(f)] * 4)
        if folded.shape[-1] % 8:
            wide = -(-folded.shape[-1] // 8) * 8
            more = torch.nn.functional.pad(folded, (0, wide - folded.shape[-1]))
            weight = torch.nn.functional.pad(layer.weight, (0, wide - folded.shape[-1]))
            row["linear_padded_us"] = median_us(
                [lambda f=more, w=weight: torch.nn.functional.linear(f, w)] * 4
            )
            row["pad_us"] = median_us(
                [lambda f=folded, n=wide: torch.nn.functional.pad(f, (0, n - f.shape[-1]))] * 4
            )
        x = layer(folded)
        if index < len(tower.stages) - 1:
            gain = tower.layers.get_parameter(f"norm_{index}.weight")
            flat = x.flatten(0, -2)
            row["norm_gelu_us"] = median_us(
                [lambda f=flat, g=gain: triton.norm_gelu(f, g, 1e-6)] * 4
            )
            x = triton.norm_gelu(flat, gain, 1e-6).view(x.shape)
        else:
            flat = x.reshape(patches, -1)
            gain = tower.final_norm.weight
            row["final_norm_us"] = median_us(
                [lambda f=flat, g=gain: reference.two_step_norm(f, g, 1e-6)] * 4
            )
        rows.append(row)
    return rows


def sound_row(width: int, seconds: float) -> dict[str, Any]:
    """Levels and rows of a clip: the preprocessing on CPU and GPU, and the tower."""
    settings = AudioSettings(max_tokens=1 << 20)
    wave = 0.1 * torch.randn(int(seconds * settings.sampling_rate), generator=torch.Generator()
                             .manual_seed(2))  # fmt: skip
    there = wave.to(GPU)
    on_cpu, levels = dmel_levels(wave, settings), dmel_levels(there, settings)
    tower = seeded(AudioTower(AudioConfig(width, 80, 16, -7.0, 2.0, 1e-6), TRITON))
    plain = AudioTower(tower.config, PLAIN).to(GPU, torch.bfloat16)  # type: ignore[arg-type]
    plain.load_state_dict(tower.state_dict())
    began = time.perf_counter()
    dmel_levels(wave, settings)
    cpu_us = (time.perf_counter() - began) * 1e6
    return {
        "what": "sound",
        "width": width,
        "seconds": seconds,
        "differing_levels": int((levels.cpu() != on_cpu).sum()),
        "largest_difference": int((levels.cpu() - on_cpu).abs().max()),
        "levels": on_cpu.numel(),
        "levels_cpu_us": cpu_us,
        "levels_eager_us": eager_us(lambda: dmel_levels(there, settings)),
        "levels_gpu_us": median_us([lambda: preprocess._levels(there, settings)] * 2),
        "tower_error": float((tower(levels) - plain(levels)).abs().max()),
        "tower_eager_us": eager_us(lambda: tower(levels)),
        "tower_gpu_us": median_us([lambda: tower(levels)] * 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--patches", type=counts, default="64,1000,4096")
    parser.add_argument("--widths", type=counts, default="6144,4096")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus(parser)
    rows: list[dict[str, Any]] = []

    def done(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"machine": environment(), "rows": rows}, indent=1))

    with torch.inference_mode():
        for width in options.widths:
            for patches in options.patches:
                done(picture_row(width, patches))
            done(sound_row(width, options.seconds))
        for row in stage_rows(options.widths[0], 1000):
            done(row)


if __name__ == "__main__":
    main()
