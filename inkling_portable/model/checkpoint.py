"""Which tensor of a checkpoint goes where: pure functions of names, shapes, config and rank.

Two namings exist, the original and the Hugging Face one. `plan` and `plan_draft` list every tensor
that must be there, its shape, and for one rank the slices that it copies into which parameters;
`check` compares that with what the files hold. Nothing here reads a file or knows a tensor type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from inkling_portable.model.config import AttentionGeometry, InklingConfig, TextConfig

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

EVEN, ODD = 0, 1  # gate and up rows alternate wherever they share a tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: one sentence naming the tensor, its file and a remedy."""


@dataclass(frozen=True)
class Copy:
    """`parameter[into] = tensor[of]`."""

    param: str
    into: Index = ()
    of: Index = ()


@dataclass(frozen=True)
class Stored:
    """One tensor that a checkpoint must hold. No copies: this rank needs none of it."""

    shape: Shape
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class Shard:
    """The share of one rank.

    `rank` of `size` splits heads, channels and widths. Experts have a split of their own:
    `expert_ids` lists the expert in each local slot (None: all, in order), whose width is split
    over `expert_size` ranks; `expert_rows` is the height of a parameter's gate block, which an
    engine may pad. `head_rows` is the number of unembedding rows per rank, padding included.
    `sink_linears`: sink experts lie side by side in two plain layers, see `model/experts.py`.
    """

    rank: int = 0
    size: int = 1
    expert_ids: tuple[int, ...] | None = None
    expert_rank: int = 0
    expert_size: int = 1
    expert_rows: int | None = None
    head_rows: int | None = None
    sink_linears: bool = False

    def part(self, width: int) -> slice:
        return _part(width, self.rank, self.size)


def _part(width: int, rank: int, size: int) -> slice:
    share = width // size
    return slice(rank * share, (rank + 1) * share)


# --- names ----------------------------------------------------------------------------------------

# Inside a decoder layer, original and Hugging Face; tensors that are split differently are below.
_HF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_du.weight": "self_attn.q_proj.weight",
    "attn.wk_dv.weight": "self_attn.k_proj.weight",
    "attn.wv_dv.weight": "self_attn.v_proj.weight",
    "attn.wr_du.weight": "self_attn.r_proj.weight",
    "attn.wo_ud.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.k_sconv.weight": "self_attn.k_sconv.conv1d.weight",
    "attn.v_sconv.weight": "self_attn.v_sconv.conv1d.weight",
    "attn.rel_logits_proj.proj": "self_attn.rel_logits_proj.proj",
    "attn_sconv.weight": "attn_sconv.conv1d.weight",
    "mlp_sconv.weight": "mlp_sconv.conv1d.weight",
    "mlp.w2_md.weight": "mlp.down_proj.weight",
    "mlp.experts.w2_weight": "mlp.experts.down_proj",
    "mlp.shared_experts.shared_w2_weight": "mlp.shared_experts.down_proj",
    "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
}
_HF_DEPTH = {"hidden_norm": "hnorm", "embed_norm": "enorm", "input_proj": "eh_proj",
             "transformer_block": "mtp_block"}  # fmt: skip
_HF_TOWERS = (
    (r"^model\.visual\.", "model.vision_tower."),
    (r"vision_tower\.layers\.linear_(\d+)\.", r"vision_tower.encoder_layers.\1.projection."),
    (r"vision_tower\.layers\.norm_(\d+)\.", r"vision_tower.encoder_layers.\1.layer_norm."),
    (r"^model\.audio\.encoder\.", "model.audio_tower.embed_audio_tokens.embed_audio_tokens."),
    (r"^model\.audio\.final_norm\.", "model.audio_tower.norm."),
)
_TOWER_PREFIXES = ("model.visual.", "model.audio.", "model.vision_tower.", "model.audio_tower.")
_MTP_PREFIXES = ("model.mtp.", "mtp.", "model.language_model.mtp.")


@dataclass(frozen=True)
class Naming:
    """How one checkpoint spells its names."""

    hf: bool
    root: str  # what stands before "layers.i." of the trunk

    def top(self, name: str) -> str:
        """A tensor outside the layers: embed, embed_norm, norm or unembed."""
        if not self.hf:
            return f"{self.root}{name}.weight"
        return {
            "embed": f"{self.root}embed_tokens.weight",
            "embed_norm": f"{self.root}embed_tokens.embed_norm.weight",
            "norm": f"{self.root}norm.weight",
            "unembed": "lm_head.weight",
        }[name]

    def layer(self, name: str) -> str:
        return _HF_LAYER.get(name, name) if self.hf else name

    def tower(self, name: str) -> str:
        if self.hf:
            for pattern, replacement in _HF_TOWERS:
                name = re.sub(pattern, replacement, name)
        return name


def naming(names: Collection[str]) -> Naming:
    """The naming of a checkpoint, by its tensors' names."""
    for naming_ in (Naming(False, "model.llm."), Naming(True, "model.language_model."),
                    Naming(True, "model.")):  # fmt: skip
        if any(name.startswith(f"{naming_.root}layers.") for name in names):
            return naming_
    raise CheckpointError(
        "the checkpoint has no decoder layers under model.llm.layers (original naming) or "
        "model.language_model.layers (Hugging Face naming); use a checkpoint with one of them"
    )


# --- plans ----------------------------------------------------------------------------------------


def plan(
    config: InklingConfig, found: Mapping[str, Shape], shard: Shard, layers: range,
    first: bool = True, last: bool = True, towers: Mapping[str, Shape] | None = None,
) -> dict[str, Stored]:  # fmt: skip
    """All tensors of a model, with the copies of one rank.

    Args:
        config: the model.
        found: shape of every tensor in the checkpoint.
        shard: this rank's share.
        layers: trunk layers of this pipeline stage.
        first, last: whether the stage owns the embedding, and norm and unembedding.
        towers: shapes of tower parameters under "visual." and "audio."; their tensors go whole.
    """
    text, names = config.text, naming(found)
    hidden = text.hidden_size
    out: dict[str, Stored] = {}

    def top(name: str, shape: Shape, owned: bool, *copies: Copy) -> None:
        out[names.top(name)] = Stored(shape, copies if owned else ())

    padded = (text.padded_vocab_size, hidden)
    top("embed", padded, first, Copy("model.embed_tokens.weight"))
    top("embed_norm", (hidden,), first, Copy("model.embed_norm.weight"))
    for layer in range(text.num_layers):
        where, to = f"{names.root}layers.{layer}.", f"model.layers.{layer}."
        dense = text.layer_is_dense(layer)
        for name, stored in _block(text, text.attention(layer), dense, names, shard, to):
            out[where + name] = stored if layer in layers else Stored(stored.shape)
    top("norm", (hidden,), last, Copy("model.norm.weight"))
    head = names.top("unembed")
    # The table may be stored with or without its padding rows.
    cut = (text.vocab_size, hidden)
    shape = cut if found.get(head) == cut else padded
    top("unembed", shape, last, *_head(shape[0], shard))
    for name, tower_shape in (towers or {}).items():
        out[names.tower(f"model.{name}")] = Stored(tower_shape, (Copy(name),))
    return out


def plan_draft(
    config: InklingConfig, found: Mapping[str, Shape], shard: Shard, depths: int
) -> dict[str, Stored]:
    """The tensors of the first `depths` MTP depths; the rest of the trunk is the target's.

    Parameters are those of `model/mtp.py`: depth k under "model.layers.k.".
    """
    mtp, text = config.require_mtp(), config.text
    prefix = next(
        (p for p in _MTP_PREFIXES if any(name.startswith(f"{p}layers.") for name in found)), None
    )
    if prefix is None:
        raise CheckpointError(
            f"the config names {mtp.num_depths} MTP depths, but no file of the checkpoint has a "
            "tensor under model.mtp.layers; add mtp.safetensors or serve without drafting"
        )
    hf = any(".hnorm." in name for name in found)
    trunk = naming(found)
    names = Naming(hf, trunk.root)
    hidden = text.hidden_size
    out = {trunk.top("embed_norm"): Stored((hidden,), (Copy("model.backbone_embed_norm.weight"),))}
    for depth in range(depths):
        where, to = f"{prefix}layers.{depth}.", f"model.layers.{depth}."

        def spelled(name: str) -> str:
            return _HF_DEPTH[name] if hf else name

        for name, shape in (("hidden_norm", (hidden,)), ("embed_norm", (hidden,)),
                            ("input_proj", (hidden, 2 * hidden))):  # fmt: skip
            out[f"{where}{spelled(name)}.weight"] = Stored(shape, (Copy(f"{to}{name}.weight"),))
        block = f"{spelled('transformer_block')}."
        geometry = config.mtp_attention(depth)
        for name, stored in _block(text, geometry, True, names, shard, f"{to}transformer_block."):
            out[where + block + name] = stored
    if mtp.chain_norm:
        out[f"{prefix}chain_norm.weight"] = Stored((hidden,), (Copy("model.chain_norm.weight"),))
    return out


def _head(rows: int, shard: Shard) -> tuple[Copy, ...]:
    share = shard.head_rows or -(-rows // shard.size)
    start = shard.rank * share
    stop = min(rows, start + share)
    if start >= stop:
        return ()
    return (Copy("lm_head.weight", (slice(0, stop - start),), (slice(start, stop),)),)


def _block(
    text: TextConfig, geometry: AttentionGeometry, dense: bool, names: Naming, shard: Shard, to: str
) -> Iterator[tuple[str, Stored]]:
    """The tensors of one decoder layer; names are relative to the layer."""
    hidden, taps = text.hidden_size, text.conv_taps

    def whole(name: str, shape: Shape) -> tuple[str, Stored]:
        return names.layer(name), Stored(shape, (Copy(to + name),))

    def conv(name: str, channels: int) -> tuple[str, Stored]:
        copy = Copy(f"{to}{name}", (), (shard.part(channels), 0))
        return names.layer(name), Stored((channels, 1, taps), (copy,))

    yield whole("attn_norm.weight", (hidden,))
    yield whole("mlp_norm.weight", (hidden,))
    at = 0
    for part, rows in zip(("wq_du", "wk_dv", "wv_dv", "wr_du"), geometry.qkvr_sizes, strict=True):
        source = shard.part(rows)
        count = source.stop - source.start
        copy = Copy(f"{to}attn.qkvr.weight", (slice(at, at + count),), (source,))
        yield names.layer(f"attn.{part}.weight"), Stored((rows, hidden), (copy,))
        at += count
    copy = Copy(f"{to}attn.wo_ud.weight", (), (slice(None), shard.part(geometry.q_size)))
    yield names.layer("attn.wo_ud.weight"), Stored((hidden, geometry.q_size), (copy,))
    yield whole("attn.q_norm.weight", (geometry.head_dim,))
    yield whole("attn.k_norm.weight", (geometry.head_dim,))
    yield whole("attn.rel_logits_proj.proj", (geometry.rel_dim, geometry.extent))
    yield conv("attn.k_sconv.weight", geometry.kv_size)
    yield conv("attn.v_sconv.weight", geometry.kv_size)
    yield conv("attn_sconv.weight", hidden)
    yield conv("mlp_sconv.weight", hidden)
    yield from _dense(text, names, shard, to) if dense else _moe(text, names, shard, to)


def _dense(text: TextConfig, names: Naming, shard: Shard, to: str) -> Iterator[tuple[str, Stored]]:
    hidden, width = text.hidden_size, text.dense_width
    param = f"{to}mlp.gate_up_proj.weight"
    if names.hf:
        for name, first in (("gate_proj", EVEN), ("up_proj", ODD)):
            copy = Copy(param, (slice(first, None, 2),), (shard.part(width),))
            yield f"mlp.{name}.weight", Stored((width, hidden), (copy,))
    else:
        # A slab of whole pairs.
        copy = Copy(param, (), (shard.part(2 * width),))
        yield "mlp.w13_dn.weight", Stored((2 * width, hidden), (copy,))
    copy = Copy(f"{to}mlp.down_proj.weight", (), (slice(None), shard.part(width)))
    yield names.layer("mlp.w2_md.weight"), Stored((hidden, width), (copy,))
    yield "mlp.global_scale", Stored((1,), (Copy(f"{to}mlp.global_scale"),))


def _moe(text: TextConfig, names: Naming, shard: Shard, to: str) -> Iterator[tuple[str, Stored]]:
    hidden, experts, sinks = text.hidden_size, text.num_experts, text.num_sinks
    yield "mlp.gate.weight", Stored((experts + sinks, hidden), (Copy(f"{to}mlp.gate.weight"),))
    yield names.layer("mlp.gate.bias"), Stored((experts,), (Copy(f"{to}mlp.gate.bias"),))
    yield "mlp.gate.global_scale", Stored((1,), (Copy(f"{to}mlp.gate.global_scale"),))
    yield from _routed(text, names, shard, f"{to}mlp.experts.routed_experts.")
    yield from _sinks(text, names, shard, f"{to}mlp.sink_experts.")


def _sinks(text: TextConfig, names: Naming, shard: Shard, to: str) -> Iterator[tuple[str, Stored]]:
    """Gate and up rows alternate per expert, or lie in two blocks of all experts (sink_linears)."""
    hidden, width, sinks = text.hidden_size, text.expert_width, text.num_sinks
    every, share = slice(None), sinks * width // shard.size
    runs = _sink_runs(sinks, width, shard) if shard.sink_linears else []

    def rows(first: int, step: int) -> tuple[Copy, ...]:
        """Gate (EVEN) or up (ODD) rows, every `step`-th of a tensor, as a block of all sinks."""
        start = first if step == 2 else 0
        return tuple(
            Copy(
                f"{to}w13.weight",
                (slice(first * share + at.start, first * share + at.stop),),
                (sink, slice(step * of.start + start, step * of.stop, step)),
            )
            for sink, of, at in runs
        )

    w13, w2 = f"{to}w13_weight", f"{to}w2_weight"
    if names.hf:
        for name, first in (("gate_proj", EVEN), ("up_proj", ODD)):
            copy = Copy(w13, (every, slice(first, None, 2)), (every, shard.part(width)))
            copies = rows(first, 1) if runs else (copy,)
            yield f"mlp.shared_experts.{name}", Stored((sinks, width, hidden), copies)
    else:
        copy = Copy(w13, (), (every, shard.part(2 * width)))
        copies = (*rows(EVEN, 2), *rows(ODD, 2)) if runs else (copy,)
        yield "mlp.shared_experts.shared_w13_weight", Stored((sinks, 2 * width, hidden), copies)
    copy = Copy(w2, (), (every, every, shard.part(width)))
    copies = tuple(Copy(f"{to}w2.weight", (every, at), (sink, every, of)) for sink, of, at in runs)
    name = names.layer("mlp.shared_experts.shared_w2_weight")
    yield name, Stored((sinks, hidden, width), copies if runs else (copy,))


def _sink_runs(sinks: int, width: int, shard: Shard) -> list[tuple[int, slice, slice]]:
    """A rank's slab of all sinks side by side: (sink, part of its width, place in the slab)."""
    mine = shard.part(sinks * width)
    runs = []
    for sink in range(sinks):
        at = sink * width
        start, stop = max(mine.start, at), min(mine.stop, at + width)
        if start < stop:
            place = slice(start - mine.start, stop - mine.start)
            runs.append((sink, slice(start - at, stop - at), place))
    return runs


def _routed(text: TextConfig, names: Naming, shard: Shard, to: str) -> Iterator[tuple[str, Stored]]:
    """vLLM's fused layout: gate block over up block per expert, each split over ranks."""
    hidden, width, experts = text.hidden_size, text.expert_width, text.num_experts
    mine = _part(width, shard.expert_rank, shard.expert_size)
    count = mine.stop - mine.start
    padded = shard.expert_rows or count
    if names.hf:
        gate, up = mine, slice(width + mine.start, width + mine.stop)
    else:
        gate, up = (slice(2 * mine.start + i, 2 * mine.stop, 2) for i in (EVEN, ODD))
    rows = ((slice(0, count), gate), (slice(padded, padded + count), up))
    w13 = "mlp.experts.gate_up_proj" if names.hf else "mlp.experts.w13_weight"
    columns = slice(0, hidden)
    slots = _slots(shard.expert_ids, experts)
    yield (
        w13,
        Stored(
            (experts, 2 * width, hidden),
            tuple(
                Copy(f"{to}w13_weight", (slot, into, columns), (expert, of))
                for slot, expert in slots
                for into, of in rows
            ),
        ),
    )
    yield (
        names.layer("mlp.experts.w2_weight"),
        Stored(
            (experts, hidden, width),
            tuple(
                Copy(
                    f"{to}w2_weight", (slot, columns, slice(0, count)), (expert, slice(None), mine)
                )
                for slot, expert in slots
            ),
        ),
    )


def _slots(ids: tuple[int, ...] | None, experts: int) -> list[tuple[int | slice, int | slice]]:
    """(local slot, expert) pairs; one pair of slices when a rank holds all of them in order.

    A rank's experts are copied one by one otherwise, so that a whole stack is never in memory.
    """
    if ids is None or ids == tuple(range(experts)):
        return [(slice(0, experts), slice(0, experts))]
    return [(slot, expert) for slot, expert in enumerate(ids) if 0 <= expert < experts]


# --- checking -------------------------------------------------------------------------------------


def check(
    wanted: Mapping[str, Stored], found: Mapping[str, Shape], files: Mapping[str, str],
    draft_depths: int | None = None,
) -> None:  # fmt: skip
    """Compare a plan with what the files hold, before anything is loaded.

    Args:
        wanted: the plan.
        found: shape by tensor name.
        files: file by tensor name, for messages.
        draft_depths: for a draft's plan, the depths that the config names; all tensors outside
            MTP are then the target's business. None for a target's plan, where MTP tensors, and
            towers that no plan entry mentions, are known and left alone.

    Raises:
        CheckpointError: the first missing, unknown or wrongly shaped tensor.
    """
    for name, stored in wanted.items():
        if name not in found:
            raise CheckpointError(
                f"tensor {name} is missing from the checkpoint ({_somewhere(name, files)}); "
                "restore it or correct the config that asks for it"
            )
        if found[name] != stored.shape:
            raise CheckpointError(
                f"tensor {name} in {files[name]} needs shape {list(stored.shape)}; found "
                f"{list(found[name])}; correct the config or the file"
            )
    for name in found:
        if name not in wanted and not _elsewhere(name, wanted, draft_depths):
            raise CheckpointError(
                f"tensor {name} in {files[name]} is not part of this model; remove it or correct "
                "the config that leaves it out"
            )


def _elsewhere(name: str, wanted: Mapping[str, Stored], draft_depths: int | None) -> bool:
    """Whether a tensor outside the plan belongs to another part of the family."""
    mtp = name.startswith(_MTP_PREFIXES)
    if draft_depths is None:
        towers = any(w.startswith(_TOWER_PREFIXES) for w in wanted)
        return mtp or (name.startswith(_TOWER_PREFIXES) and not towers)
    if not mtp:
        return True
    depth = re.search(r"mtp\.layers\.(\d+)\.", name)
    # A depth that exists and is not drafted with: fewer draft tokens than depths were asked for.
    built = {m[1] for w in wanted if (m := re.search(r"mtp\.layers\.(\d+)\.", w))}
    return depth is not None and depth[1] not in built and int(depth[1]) < draft_depths


def _somewhere(name: str, files: Mapping[str, str]) -> str:
    """The files in which a missing tensor should stand: those of its neighbours."""
    parent = name
    while "." in parent:
        parent = parent.rpartition(".")[0]
        near = sorted({file for other, file in files.items() if other.startswith(parent + ".")})
        if near:
            return f"its neighbours are in {', '.join(near[:2])}"
    return "no file has anything near it"
