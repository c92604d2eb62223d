"""Every tensor of every released checkpoint has its place, on every rank of the served splits.

The lists come from the published tables; the published counts and sizes hold them to that.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from inkling_portable.commands.released_configs import released
from inkling_portable.commands.released_index import index
from inkling_portable.commands.tiny_quant import ADAPTER
from inkling_portable.model import checkpoint
from inkling_portable.model.checkpoint import Copy, Experts, Shard, Stored
from inkling_portable.model.config import InklingConfig, parse
from inkling_portable.model.quant_layouts import EXPERT_WEIGHTS, LAYOUTS, Part, find

WIDTH = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "I64": 8}


@pytest.mark.parametrize(
    ("model", "plain", "with_mtp", "modelopt", "billions", "gigabytes"),
    [
        ("Inkling", 1392, 1552, 2056, 952.378, 592),
        ("Inkling-Small", 888, 1048, 1360, 265.956, 171),
    ],
)
def test_published_counts(
    model: str, plain: int, with_mtp: int, modelopt: int, billions: float, gigabytes: int
) -> None:
    whole, packed = index(model), index(model, "nvfp4/modelopt")
    assert sum(not name.startswith("model.mtp.") for name in whole) == plain
    assert len(whole) == with_mtp
    assert len(packed) == modelopt
    assert round(sum(math.prod(p.shape) for p in whole.values()) / 1e9, 3) == billions
    size = sum(math.prod(p.shape) * WIDTH[p.dtype] for p in packed.values())
    assert round(size / 1e9) == gigabytes


def tower_shapes(parts: dict[str, Part]) -> dict[str, tuple[int, ...]]:
    return {
        name.removeprefix("model."): part.shape
        for name, part in parts.items()
        if name.startswith(("model.visual.", "model.audio."))
    }


def experts(
    config: InklingConfig, key: str | None, names: set[str], rank: int, size: int, ep: bool,
    own: bool,
) -> dict[int, Experts]:  # fmt: skip
    """The routed experts of each layer as a rank holds them: whole ones, or a part of each."""
    ids = None
    if ep:
        share = config.text.num_experts // size
        ids = tuple(range(rank * share, (rank + 1) * share))
    found = {}
    for layer in range(config.text.num_layers):
        where = f"model.llm.layers.{layer}.mlp.experts."
        form = LAYOUTS[key] if key else None
        if form is not None and find(form, where + "w13_weight", names) is None:
            form = None
        found[layer] = Experts(
            ids, 0 if ep else rank, 1 if ep else size, own=own and form is not None, layout=form
        )
    return found


def count(stored: Stored, copy: Copy) -> int:
    """How many numbers of the tensor a copy takes."""
    taken = 1
    for i, size in enumerate(stored.view or stored.shape):
        part = copy.of[i] if i < len(copy.of) else slice(None)
        taken *= len(range(*part.indices(size))) if isinstance(part, slice) else 1
    return taken


@pytest.mark.parametrize("key", [None, *LAYOUTS])
@pytest.mark.parametrize(
    ("model", "split"),
    [("Inkling", "8 by width"), ("Inkling-Small", "1"), ("Inkling-Small", "8 by expert"),
     ("Inkling-Small", "8 by width, the engine's")],
)  # fmt: skip
def test_every_tensor_is_placed(model: str, key: str | None, split: str) -> None:
    config, parts = parse(released(model)), index(model, key)
    shapes = {name: part.shape for name, part in parts.items()}
    types = {name: part.dtype for name, part in parts.items()}
    files = dict.fromkeys(parts, "model.safetensors")
    size, ep, own = int(split[0]), "expert" in split, "engine" not in split
    taken: Counter[str] = Counter()
    for rank in range(size):
        shard = Shard(rank, size, layers=experts(config, key, set(parts), rank, size, ep, own))
        trunk = checkpoint.plan(
            config, shapes, shard, range(config.text.num_layers), towers=tower_shapes(parts)
        )
        draft = checkpoint.plan_draft(config, shapes, shard, 8)
        checkpoint.check(trunk, shapes, files, types=types)
        checkpoint.check(draft, shapes, files, 8, types)
        # Once each, but for the norm that the draft shares; an adapter's belong to nobody.
        both = Counter([*trunk, *draft])
        assert both.keys() == parts.keys() - ADAPTER.keys()
        assert [name for name, times in both.items() if times > 1] == [
            "model.llm.embed_norm.weight"
        ]
        for name, stored in (trunk | draft).items():
            assert stored.copies or stored.is_scale or stored.kind == checkpoint.NOTE, name
            if ".mlp.experts." in name:
                taken[name] += sum(count(stored, copy) for copy in stored.copies)
    for name, times in taken.items():
        # All ranks together take each number once; some small tensors every rank needs.
        whole = math.prod(shapes[name])
        note = name.endswith(("input_amax", "original_shape", "input_global_scale"))
        for_all = not ep and (name.endswith(("scale2", "global_scale")) or (
            key == "fp8/compressed-tensors" and name.endswith("w2_weight_scale")))  # fmt: skip
        if not note:
            assert times == whole * (size if for_all else 1), name


def test_the_first_sparse_layer_is_plain_in_every_form() -> None:
    for key in LAYOUTS:
        parts = index("Inkling", key)
        for name in EXPERT_WEIGHTS:
            assert parts[f"model.llm.layers.2.mlp.experts.{name}"].dtype == "BF16"
        assert not any(p.dtype != "BF16" for n, p in parts.items() if n.startswith("model.mtp."))
