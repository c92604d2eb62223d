"""Pictures and clips from formulas, and what transformers or the written-out rules make of them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor
from transformers.models.inkling.processing_inkling import InklingProcessor

from ci.record_images import picture

__all__ = ["picture", "ruled_pixels", "tone", "transformers_levels"]

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def ruled_pixels(pixels: NDArray[np.uint8], patch: int, upscale: bool) -> NDArray[np.float64]:
    """Normalised patches [rows * columns, 2, patch, patch, 3] by the published rules.

    upscale: resize first, with PIL, to at most twice the long edge or 2048, never smaller.
    """
    if upscale:
        long_edge = max(pixels.shape[:2])
        ratio = min(2.0 * long_edge, max(2048, long_edge)) / long_edge
        height, width = (max(1, math.floor(n * ratio + 0.5)) for n in pixels.shape[:2])
        resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS)
        pixels = np.asarray(resized)
    height, width = pixels.shape[:2]
    rows, columns = math.ceil(height / patch), width // patch + 1
    canvas = np.full((rows * patch, columns * patch, 3), -1.0)
    canvas[:height, :width] = pixels
    canvas = (canvas / 255 - MEAN) / STD
    cells = [
        canvas[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack([np.stack([cell, cell]) for cell in cells])


def tone(samples: int, seed: int = 0) -> NDArray[np.float32]:
    """A sweep with noise, [samples] at 16 kHz."""
    time = np.arange(samples) / 16_000
    noise = np.random.default_rng(seed).normal(size=samples)
    wave = 0.4 * np.sin(2 * np.pi * (200 + 900 * time) * time) + 0.02 * noise
    return wave.astype(np.float32)


def transformers_levels(wave: NDArray[np.float32]) -> Tensor:
    """dMel levels [frames, 80] of one clip by transformers' extractor and quantiser."""
    features = InklingFeatureExtractor()(wave, sampling_rate=16_000, return_tensors="pt")
    centres = torch.linspace(-7.0, 2.0, 16, dtype=torch.float64).float()
    stub = SimpleNamespace(bin_centers=centres, dmel_min_value=-7.0, dmel_max_value=2.0)
    levels: Tensor = InklingProcessor._extract_dmel_bins(stub, features["input_features"])[0]
    return levels
