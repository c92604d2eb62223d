"""The vision tower under CUDA graphs, as vLLM's encoder graph manager asks for it.

With `--compilation-config '{"cudagraph_mm_encoder": true}'` the engine captures the tower once for
each of some numbers of patches, puts as many pictures as fit into a bucket, and fills it up with
zeros. No patch sees another one, so what fills a bucket changes nothing. Clips stay eager: their
tower is a single launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inkling_portable.model.engine import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
    VllmConfig,
)
from inkling_portable.model.towers import VisionTower

SMALLEST, LARGEST = 64, 16_384
"""Patches in the smallest and, at most, the largest bucket; powers of two lie between."""


class GraphedImages(SupportsEncoderCudaGraph):
    """The engine's questions, answered for a model whose `visual` is the vision tower."""

    visual: VisionTower | None

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Raises ValueError without a tower, which is then nothing to capture."""
        return EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=["pixel_values"],
            out_hidden_size=self._tower.config.out_width,
        )

    @property
    def _tower(self) -> VisionTower:
        if self.visual is None:
            raise ValueError(
                "cudagraph_mm_encoder needs a vision tower on every pipeline stage; this one has "
                "none; leave it out of --compilation-config"
            )
        return self.visual

    def get_encoder_cudagraph_budget_range(self, vllm_config: VllmConfig) -> tuple[int, int]:
        """Patches in the smallest and the largest bucket."""
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        return SMALLEST, max(SMALLEST, min(LARGEST, rows))

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        _, sizes = _pictures(mm_kwargs)
        return [EncoderItemSpec(input_size=size, output_tokens=size) for size in sizes]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """The fields of some pictures, in the order of `indices`."""
        rows, sizes = _pictures(mm_kwargs)
        parts = rows.split(sizes)
        chosen = [parts[index] for index in indices]
        return {
            "pixel_values": torch.cat(chosen) if chosen else rows[:0],
            "num_patches": torch.tensor([len(part) for part in chosen]),
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, max_batch_size: int, max_frames_per_batch: int,
        device: torch.device, dtype: torch.dtype, path: str = "default", axis_keys: Any = None,
    ) -> EncoderCudaGraphCaptureInputs:  # fmt: skip
        """Room for `token_budget` patches, one time slot of each."""
        config = self._tower.config
        shape = (token_budget, 1, config.patch_size, config.patch_size, config.channels)
        dtype = self._tower.final_norm.weight.dtype
        return EncoderCudaGraphCaptureInputs(
            {"pixel_values": torch.zeros(shape, dtype=dtype, device=device)}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int,
        path: str = "default",
    ) -> EncoderCudaGraphReplayBuffers:  # fmt: skip
        return EncoderCudaGraphReplayBuffers({"pixel_values": _pictures(mm_kwargs)[0]})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """`[bucket, H]`, captured and replayed."""
        return self._tower(inputs["pixel_values"])

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """`[patches, H]` for pictures that no bucket holds."""
        weight = self._tower.final_norm.weight
        return self._tower(_pictures(mm_kwargs)[0].to(weight.device, weight.dtype))


def joined(items: Any, sizes: Any) -> tuple[Tensor, list[int]]:
    """All rows and the rows of each item; the engine gives a list of items or one tensor."""
    if isinstance(items, list | tuple):
        return torch.cat(list(items)), [len(item) for item in items]
    return items, [int(size) for size in sizes]


def _pictures(mm_kwargs: dict[str, Any]) -> tuple[Tensor, list[int]]:
    return joined(mm_kwargs["pixel_values"], mm_kwargs.get("num_patches"))
