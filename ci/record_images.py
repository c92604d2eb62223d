"""Record what transformers' image processor makes of pictures: `python ci/record_images.py OUT`.

Its module needs torchvision, which is no dependency of ours (it resizes differently, and its wheels
fit few torch builds). So its answers are recorded once, in an environment that has it, and
committed as tests/facts/image_pixels.json. Resizing is left to PIL: only what follows is recorded.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import numpy as np

SIZES = ((80, 80), (81, 79), (40, 40), (37, 123), (120, 160), (1, 1), (40, 79))
SAMPLES = 40


def picture(height: int, width: int) -> np.ndarray:
    """A uint8 picture [height, width, 3] from a formula, so that tests can draw it again."""
    y, x, c = np.ogrid[:height, :width, :3]
    return ((y * 7 + x * 13 + c * 59 + x * y) % 256).astype(np.uint8)


def main(out: Path) -> None:
    module = import_module("transformers.models.inkling.image_processing_inkling")
    image = import_module("PIL.Image")
    processor = module.InklingImageProcessor()
    cases = []
    for height, width in SIZES:
        result = processor(image.fromarray(picture(height, width)), return_tensors="pt")
        pixels = result["pixel_values"].double()
        step = max(1, pixels.numel() // SAMPLES)
        cases.append(
            {
                "height": height,
                "width": width,
                "shape": list(pixels.shape),
                "step": step,
                "samples": [round(v, 9) for v in pixels.flatten()[::step].tolist()],
                "sum": pixels.sum().item(),
                "sum_of_squares": pixels.square().sum().item(),
            }
        )
    facts = {"transformers": version("transformers"), "cases": cases}
    out.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
