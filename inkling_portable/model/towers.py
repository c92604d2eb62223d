"""The vision and audio towers: one embedding per image patch, one per audio frame.

Plain torch modules over two ops that are passed in, so that the same towers run on every backend.
Nothing mixes patches or frames, hence both work through long inputs in bounded memory. Parameter
names are the checkpoint's (`layers.linear_0.weight`, `encoder.weight`, ...).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from inkling_portable.backends.reference.towers import two_step_norm
from inkling_portable.model.config import AudioConfig, VisionConfig

PATCHES_AT_ONCE = 1024
"""Image patches that pass through the stages together; the first stage widens each of them."""
FEWEST_AT_ONCE = 16
"""Where memory ran out, fewer do: an error in a step would end the engine, with all its requests.
"""


class TowerOps(Protocol):
    """The ops of the towers, as `registry.Resolved` holds them."""

    def norm_gelu(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def dmel_embed_norm(
        self, bins: Tensor, table: Tensor, weight: Tensor, eps: float
    ) -> Tensor: ...


class NormWeight(nn.Module):
    """The scale of a norm; the arithmetic is in the ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)


class VisionTower(nn.Module):
    """Patches `[N, time, patch, patch, channels]` to embeddings `[N, width]`.

    A still picture fills all its time slots alike, so `time` may be 1: the stages before time is
    folded then see each pixel once.
    """

    def __init__(self, config: VisionConfig, ops: TowerOps) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.stages = config.stages()
        self.layers = nn.ModuleDict()
        for index, stage in enumerate(self.stages):
            linear = nn.Linear(stage.in_features, stage.out_features, bias=False)
            self.layers[f"linear_{index}"] = linear.requires_grad_(False)
            if index < len(self.stages) - 1:
                self.layers[f"norm_{index}"] = NormWeight(stage.out_features)
        self.final_norm = NormWeight(config.out_width)

    def forward(self, patches: Tensor) -> Tensor:
        """Embed patches of the parameters' dtype and device."""
        at_once = min(PATCHES_AT_ONCE, max(1, len(patches)))
        while True:
            try:
                parts = [self._embed(part) for part in patches.split(at_once)]
                return parts[0] if len(parts) == 1 else torch.cat(parts)
            except torch.OutOfMemoryError:
                if at_once <= FEWEST_AT_ONCE:
                    raise
            at_once = max(FEWEST_AT_ONCE, at_once // 4)

    def _embed(self, x: Tensor) -> Tensor:
        count, last, eps = x.shape[0], len(self.stages) - 1, self.config.norm_eps
        for index, stage in enumerate(self.stages):
            if stage.time > 1 and x.shape[1] == 1:
                x = x.expand(-1, self.config.temporal_patch_size, -1, -1, -1)
            x = self.layers[f"linear_{index}"](fold(x, stage.time, stage.side))
            if index < last:
                weight = self.layers.get_parameter(f"norm_{index}.weight")
                x = self.ops.norm_gelu(x.flatten(0, -2), weight, eps).view(x.shape)
        return two_step_norm(x.reshape(count, -1), self.final_norm.weight, eps)


class AudioTower(nn.Module):
    """dMel levels `[frames, mel bins]` to embeddings `[frames, width]`."""

    def __init__(self, config: AudioConfig, ops: TowerOps) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        table = nn.Embedding(config.mel_bins * config.mel_levels, config.out_width)
        self.encoder = table.requires_grad_(False)
        self.final_norm = NormWeight(config.out_width)

    def forward(self, levels: Tensor) -> Tensor:
        """Embed integer levels below `mel_levels`, on the parameters' device."""
        return self.ops.dmel_embed_norm(
            levels, self.encoder.weight, self.final_norm.weight, self.config.norm_eps
        )


def fold(x: Tensor, time: int, side: int) -> Tensor:
    """Merge `time x side x side` neighbours of `[N, T, Y, X, C]` into channels.

    Channel order is time, row, column, channel: `((dt*side + dy)*side + dx)*C + c`.
    """
    n, t, y, x_, c = x.shape
    if time == side == 1:
        return x
    cells = x.reshape(n, t // time, time, y // side, side, x_ // side, side, c)
    merged = cells.permute(0, 1, 3, 5, 2, 4, 6, 7)
    return merged.reshape(n, t // time, y // side, x_ // side, time * side * side * c)
