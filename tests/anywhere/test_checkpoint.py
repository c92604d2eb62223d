"""Where tensors go: counts of the released checkpoints, and every rank's share by plain slicing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from inkling_portable.commands.released_configs import released
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.model import checkpoint, loading
from inkling_portable.model.checkpoint import CheckpointError, Experts, Shard
from inkling_portable.model.config import InklingConfig, parse

FOUND = {"model.llm.layers.0.attn_norm.weight": (1,)}
"""Enough for the naming to be recognised."""

MTP = {"model.mtp.layers.0.hidden_norm.weight": (1,)}


@pytest.mark.parametrize(
    ("name", "tensors", "billions"),
    [("Inkling", 1392, 947.026), ("Inkling-Small", 888, 263.655)],
)
def test_counts_of_released_checkpoints(name: str, tensors: int, billions: float) -> None:
    # Ten tensors of the two towers are counted with the published number.
    config = parse(released(name))
    plan = checkpoint.plan(config, FOUND, Shard(), range(config.text.num_layers))
    assert len(plan) == tensors - 10
    total = sum(math.prod(stored.shape) for stored in plan.values())
    assert round(total / 1e9, 3) == billions
    draft = checkpoint.plan_draft(config, {**FOUND, **MTP}, Shard(), 8)
    assert len(draft) == 8 * 20 + 1  # and the backbone's embedding norm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[InklingConfig, loading.Files]:
    folder = tmp_path_factory.mktemp("small-like")
    write_tiny(folder, preset="small-like", layers=6, dtype="float32", force=True)

    return parse(json.loads((folder / "config.json").read_text())), loading.read_headers(folder)


def tensors_of(files: loading.Files) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    assert files.folder is not None
    found: dict[str, Tensor] = {}
    for name in sorted(set(files.file_of.values())):
        found |= load_file(files.folder / name)
    return found


def half(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    return x.chunk(ranks, dim)[rank]


def expected(w: dict[str, Tensor], layer: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """Parameters of one sparse layer, sliced by head, channel or pair of rows."""

    def get(name: str) -> Tensor:
        return w[f"model.llm.{layer}.{name}"]

    def pairs(x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        split = x.reshape(*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :])
        mine = half(split, dim, rank, ranks)
        return mine.reshape(*shape[:dim], -1, *shape[dim + 1 :])

    w13, w2 = get("mlp.experts.w13_weight"), get("mlp.experts.w2_weight")
    gate, up = (half(w13[:, i::2], 1, rank, ranks) for i in (0, 1))
    return {
        "attn.qkvr.weight": torch.cat(
            [
                half(get(f"attn.{p}.weight"), 0, rank, ranks)
                for p in ("wq_du", "wk_dv", "wv_dv", "wr_du")
            ]
        ),
        "attn.wo_ud.weight": half(get("attn.wo_ud.weight"), 1, rank, ranks),
        "attn.k_sconv.weight": half(get("attn.k_sconv.weight")[:, 0], 0, rank, ranks),
        "mlp_sconv.weight": half(get("mlp_sconv.weight")[:, 0], 0, rank, ranks),
        "attn.rel_logits_proj.proj": get("attn.rel_logits_proj.proj"),
        "mlp.gate.weight": get("mlp.gate.weight"),
        "mlp.experts.routed_experts.w13_weight": torch.cat([gate, up], 1),
        "mlp.experts.routed_experts.w2_weight": half(w2, 2, rank, ranks),
        "mlp.sink_experts.w13_weight": pairs(get("mlp.shared_experts.shared_w13_weight"), 1),
        "mlp.sink_experts.w2_weight": half(
            get("mlp.shared_experts.shared_w2_weight"), 2, rank, ranks
        ),
    }


class Parameters(nn.Module):
    """Empty parameters under dotted names."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.params = {n: nn.Parameter(torch.full(s, torch.nan), False) for n, s in shapes.items()}

    def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def, override]
        return iter(self.params.items())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_its_share(tiny: tuple[InklingConfig, loading.Files], ranks: int) -> None:
    config, files = tiny
    weights = tensors_of(files)
    layer = "layers.3"
    for rank in range(ranks):
        shard = Shard(rank, ranks, Experts(rank=rank, size=ranks))
        plan = checkpoint.plan(config, files.shapes, shard, range(config.text.num_layers))
        checkpoint.check(plan, files.shapes, files.file_of)
        wanted = {f"model.{layer}.{k}": v for k, v in expected(weights, layer, rank, ranks).items()}
        mine = {
            name: checkpoint.Stored(stored.shape, copies)
            for name, stored in plan.items()
            if (copies := tuple(c for c in stored.copies if c.param in wanted))
        }
        module = Parameters({name: value.shape for name, value in wanted.items()})
        loading.load(module, weights.items(), mine, files, allow_nonfinite=False)
        for name, value in wanted.items():
            assert torch.equal(module.params[name], value), f"{name} of rank {rank}"


def test_whole_experts_of_a_rank(tiny: tuple[InklingConfig, loading.Files]) -> None:
    # Expert parallelism: this rank's slots hold experts 1 and 5; the third slot is padding.
    config, files = tiny
    weights = tensors_of(files)
    shard = Shard(1, 2, Experts((1, 5, config.text.num_experts)))
    plan = checkpoint.plan(config, files.shapes, shard, range(config.text.num_layers))
    name = "model.llm.layers.3.mlp.experts.w2_weight"
    param = "model.layers.3.mlp.experts.routed_experts.w2_weight"
    module = Parameters({param: torch.Size([3, *weights[name].shape[1:]])})
    loading.load(module, weights.items(), {name: plan[name]}, files, allow_nonfinite=False)
    loaded = module.params[param]
    assert torch.equal(loaded[:2], weights[name][[1, 5]])
    assert not loaded[2].any()


@pytest.mark.parametrize("hf", [False, True])
def test_our_own_experts_keep_gate_and_up_rows_alternating(
    tiny: tuple[InklingConfig, loading.Files], hf: bool
) -> None:
    config, files = tiny
    w13 = tensors_of(files)["model.llm.layers.3.mlp.experts.w13_weight"]
    name, found, stored = "model.llm.layers.3.mlp.experts.w13_weight", files.shapes, w13
    if hf:
        name = "model.language_model.layers.3.mlp.experts.gate_up_proj"
        stored = torch.cat([w13[:, 0::2], w13[:, 1::2]], 1)
        found = {"model.language_model.layers.0.x": ()}
    share = Experts((2, 3, 4), 1, 2, own=True)
    plan = checkpoint.plan(config, found, Shard(experts=share), range(config.text.num_layers))
    param = "model.layers.3.mlp.experts.routed_experts.w13_weight"
    rows = w13.shape[1] // 2
    module = Parameters({param: torch.Size([3, rows, w13.shape[2]])})
    loading.load(module, [(name, stored)], {name: plan[name]}, files, allow_nonfinite=False)
    assert torch.equal(module.params[param], w13[2:5, rows:])


def test_a_stage_of_a_pipeline_copies_its_layers_only(
    tiny: tuple[InklingConfig, loading.Files],
) -> None:
    config, files = tiny
    plan = checkpoint.plan(config, files.shapes, Shard(), range(2, 4), first=False, last=False)
    params = {copy.param for stored in plan.values() for copy in stored.copies}
    assert {p.split(".")[2] for p in params} == {"2", "3"}
    assert all(p.startswith("model.layers.") for p in params)


def test_an_unembedding_stored_without_padding(tiny: tuple[InklingConfig, loading.Files]) -> None:
    config, files = tiny
    name, hidden = "model.llm.unembed.weight", config.text.hidden_size
    cut = {**files.shapes, name: (config.text.vocab_size, hidden)}
    plan = checkpoint.plan(config, cut, Shard(), range(config.text.num_layers))
    assert plan[name].shape == cut[name]
    with pytest.raises(CheckpointError, match=f"{name} .*needs shape"):
        other = {**files.shapes, name: (config.text.vocab_size - 1, hidden)}
        checkpoint.check(plan, other, files.file_of)


def test_a_checkpoint_of_another_family(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no decoder layers under model\.llm\.layers"):
        checkpoint.naming(["transformer.h.0.attn.weight"])
