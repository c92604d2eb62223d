"""Transformers as the oracle: load a checkpoint with its Inkling classes and see what it missed.

Transformers maps the original tensor names for its multimodal class only, so its text class gets
the same map here with the text model one level up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LOADING_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def load(
    folder: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, Any]]:
    """The checkpoint in `folder` as an eager transformers model, and its loading report.

    The report has the keys of `LOADING_FAULTS`, each empty after a clean load.
    """
    import transformers
    from transformers import conversion_mapping as names

    config = json.loads((Path(folder) / "config.json").read_text())
    class_name = config["architectures"][0]
    if names.get_checkpoint_conversion_mapping("InklingForCausalLM") is None:
        nested = names.get_checkpoint_conversion_mapping("inkling_mm_model")
        up = names.WeightRenaming(r"model\.language_model\.", "model.")
        names.register_checkpoint_conversion_mapping("InklingForCausalLM", [*nested, up])
    model, report = getattr(transformers, class_name).from_pretrained(
        folder,
        output_loading_info=True,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped product has no float64
    )
    return model.eval(), {name: report[name] for name in LOADING_FAULTS}


@torch.no_grad()
def logits(model: nn.Module, ids: list[int], **inputs: Any) -> Tensor:
    """Logits [len(ids), valid vocabulary] of one prompt in one pass."""
    return model(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits[0]
