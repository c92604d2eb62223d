"""Which tensor of a checkpoint goes where: pure functions of names, shapes, config and rank.

Two namings exist, the original and the Hugging Face one. `plan` and `plan_draft` list every tensor
that must be there, its shape, and for one rank the slices that it copies into which parameters;
`check` compares that with what the files hold. Nothing here reads a file or knows a tensor type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from inkling_portable.model import quant_layouts as quant
from inkling_portable.model.config import AttentionGeometry, InklingConfig, TextConfig
from inkling_portable.model.quant_layouts import CODES, GLOBAL, INPUT, SCALE, Layout

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

EVEN, ODD = 0, 1  # gate and up rows alternate wherever they share a tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: one sentence naming the tensor, its file and a remedy."""


# What a tensor holds: the types that may store it, as safetensors spells them.
PLAIN, PACKED, FP8, BLOCK_SCALE, POWERS, POSITIVE, NOTE = (
    "plain", "packed E2M1", "E4M3", "E4M3 scales", "E8M0 scales", "positive numbers", "a note",
)  # fmt: skip
FLOATS = ("BF16", "F16", "F32", "F64")
TYPES: Mapping[str, tuple[str, ...]] = {
    PLAIN: FLOATS,
    PACKED: ("U8",),
    FP8: ("F8_E4M3",),
    BLOCK_SCALE: ("F8_E4M3",),
    POWERS: ("U8", "F8_E8M0"),
    POSITIVE: FLOATS,
    NOTE: (),
}


@dataclass(frozen=True)
class Copy:
    """`parameter[into] = tensor[of]`, by a rule: "" as it is, or one of `loading.RULES`."""

    param: str
    into: Index = ()
    of: Index = ()
    rule: str = ""


@dataclass(frozen=True)
class Stored:
    """One tensor that a checkpoint must hold. No copies: this rank needs none of it.

    kind: what it holds, a key of TYPES. view: the shape in which copies see it. scale: name of the
    scale with which FP8 numbers are multiplied before they are copied. is_scale: of another tensor.
    """

    shape: Shape
    copies: tuple[Copy, ...] = ()
    kind: str = PLAIN
    view: Shape | None = None
    scale: str | None = None
    is_scale: bool = False


@dataclass(frozen=True)
class Experts:
    """How a rank holds the routed experts of one layer.

    `ids` lists the expert in each local slot (None: all, in order), whose width is split over
    `size` ranks. Our own parameters (`own`) are laid out as the checkpoint stores them, gate and up
    rows alternating; the engine's have a gate block of `rows` rows, which it may pad, over an up
    block. `layout` is that of the stored tensors, None for plain ones.
    """

    ids: tuple[int, ...] | None = None
    rank: int = 0
    size: int = 1
    rows: int | None = None
    own: bool = False
    layout: Layout | None = None


@dataclass(frozen=True)
class Shard:
    """The share of one rank.

    `rank` of `size` splits heads, channels and widths. Routed experts have a split of their own in
    each layer, `experts` where a layer is not in `layers`. `head_rows` is the number of unembedding
    rows per rank, padding included. `sink_linears`: sink experts lie side by side in two plain
    layers, see `model/experts.py`.
    """

    rank: int = 0
    size: int = 1
    experts: Experts = Experts()
    layers: Mapping[int, Experts] = field(default_factory=dict)
    head_rows: int | None = None
    sink_linears: bool = False

    def part(self, width: int) -> slice:
        return _part(width, self.rank, self.size)

    def kv_part(self, geometry: AttentionGeometry) -> slice:
        """Rows of keys or values: those of this rank's heads, which others may hold too."""
        copies = geometry.copies(self.size)
        return _part(geometry.kv_size, self.rank // copies, self.size // copies)


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
        experts = shard.layers.get(layer, shard.experts)
        for name, stored in _block(text, text.attention(layer), dense, names, shard, to):
            out[where + name] = stored
        if not dense:
            out |= _routed(text, names, experts, f"{to}mlp.experts.routed_experts.", where, found)
        if layer not in layers:
            out |= {
                name: replace(stored, copies=())
                for name, stored in out.items()
                if name.startswith(where)
            }
    top("norm", (hidden,), last, Copy("model.norm.weight"))
    head = names.top("unembed")
    # The table may be stored with or without its padding rows.
    cut = (text.vocab_size, hidden)
    shape = cut if found.get(head) == cut else padded
    top("unembed", shape, last, *_head(shape[0], shard))
    for name, tower_shape in (towers or {}).items():
        out[names.tower(f"model.{name}")] = Stored(tower_shape, (Copy(name),))
    return _with_scales(out, found)


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
    return _with_scales(out, found)


def _with_scales(plan: dict[str, Stored], found: Mapping[str, Shape]) -> dict[str, Stored]:
    """The plan with the scales of matrices that the checkpoint holds in FP8.

    A layer of matrices becomes plain numbers while it is loaded, so it matters not which of those
    that share a parameter are quantised.
    """
    out = dict(plan)
    for name, stored in plan.items():
        scale = quant.linear_scale(name)
        if scale not in found or stored.kind != PLAIN or len(stored.shape) < 2:
            continue
        *stack, rows, columns = stored.shape
        tiles = (*stack, *(-(-n // of) for n, of in zip((rows, columns), quant.TILE, strict=True)))
        shape = found[scale] if found[scale] == (*stack, rows, 1) else tiles
        out[name] = replace(stored, kind=FP8, scale=scale)
        out[scale] = Stored(shape, kind=POSITIVE, is_scale=True)
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

    def conv(name: str, channels: int, kv: bool = False) -> tuple[str, Stored]:
        part = shard.kv_part(geometry) if kv else shard.part(channels)
        copy = Copy(f"{to}{name}", (), (part, 0))
        return names.layer(name), Stored((channels, 1, taps), (copy,))

    yield whole("attn_norm.weight", (hidden,))
    yield whole("mlp_norm.weight", (hidden,))
    at = 0
    for part, rows in zip(("wq_du", "wk_dv", "wv_dv", "wr_du"), geometry.qkvr_sizes, strict=True):
        source = shard.kv_part(geometry) if part[1] in "kv" else shard.part(rows)
        count = source.stop - source.start
        copy = Copy(f"{to}attn.qkvr.weight", (slice(at, at + count),), (source,))
        yield names.layer(f"attn.{part}.weight"), Stored((rows, hidden), (copy,))
        at += count
    copy = Copy(f"{to}attn.wo_ud.weight", (), (slice(None), shard.part(geometry.q_size)))
    yield names.layer("attn.wo_ud.weight"), Stored((hidden, geometry.q_size), (copy,))
    yield whole("attn.q_norm.weight", (geometry.head_dim,))
    yield whole("attn.k_norm.weight", (geometry.head_dim,))
    yield whole("attn.rel_logits_proj.proj", (geometry.rel_dim, geometry.extent))
    yield conv("attn.k_sconv.weight", geometry.kv_size, kv=True)
    yield conv("attn.v_sconv.weight", geometry.kv_size, kv=True)
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


def _routed(
    text: TextConfig, names: Naming, experts: Experts, to: str, where: str,
    found: Mapping[str, Shape],
) -> dict[str, Stored]:  # fmt: skip
    """The routed experts of the layer at `where`, plain or with the tensors of their layout."""
    hidden, width = text.hidden_size, text.expert_width
    mine = _part(width, experts.rank, experts.size)
    if experts.layout is not None and names.hf:
        raise CheckpointError(
            f"quantised experts need the original naming; found Hugging Face names at {where}; "
            "convert the checkpoint from its original"
        )
    block = 1 if experts.layout is None else max(1, experts.layout.block)
    if width // experts.size % block:
        raise CheckpointError(
            f"the expert width {width} over {experts.size} ranks gives {width // experts.size} "
            f"columns for each, and the weights at {where} have blocks of {block}, which no rank "
            "may cut; use fewer ranks or --enable-expert-parallel"
        )
    slots = _slots(experts.ids, text.num_experts)
    out: dict[str, Stored] = {}
    for weight, shape in zip(quant.EXPERT_WEIGHTS, ((2 * width, hidden), (hidden, width)),
                             strict=True):  # fmt: skip
        up = weight == "w13_weight"
        rows = _up_rows(names.hf, experts, width, mine) if up else [(slice(0, hidden),) * 2]
        columns = slice(0, hidden) if up else mine
        stack = (text.num_experts, *shape)

        def copies(param: str, step: int = 1, *, rows: list[tuple[slice, slice]] = rows,
                   columns: slice = columns) -> tuple[Copy, ...]:  # fmt: skip
            """Copies of a tensor in which one column stands for `step` of the weight's."""
            of = slice(columns.start // step, columns.stop // step) if step else slice(None)
            into = slice(0, of.stop - of.start) if step else slice(None)
            return tuple(
                Copy(param, (slot, at, into), (expert, taken, of))
                for slot, expert in slots
                for at, taken in rows
            )

        if experts.layout is None:
            name = names.layer(f"mlp.experts.{weight}")
            if names.hf and up:
                name = "mlp.experts.gate_up_proj"
            out[where + name] = Stored(stack, copies(f"{to}{weight}"))
            continue
        base = f"{where}mlp.experts.{weight}"
        out |= _quantised(experts, base, stack, f"{to}{weight}", copies, slots, found)
    return out


def _up_rows(hf: bool, experts: Experts, width: int, mine: slice) -> list[tuple[slice, slice]]:
    """(rows of the parameter, rows of the tensor) of the first matrix, for part `mine` of I."""
    count = mine.stop - mine.start
    if experts.own and not hf:
        return [(slice(0, 2 * count), slice(2 * mine.start, 2 * mine.stop))]
    if hf:
        gate, up = mine, slice(width + mine.start, width + mine.stop)
    else:
        gate, up = (slice(2 * mine.start + i, 2 * mine.stop, 2) for i in (EVEN, ODD))
    if experts.own:
        return [(slice(EVEN, None, 2), gate), (slice(ODD, None, 2), up)]
    padded = experts.rows or count
    return [(slice(0, count), gate), (slice(padded, padded + count), up)]


# Parameters of the engine's methods, as what comes behind "w13" or "w2".
ENGINE_PARAMS: Mapping[str, Mapping[str, str]] = {
    "nvfp4/modelopt": {CODES: "_weight", SCALE: "_weight_scale", GLOBAL: "_weight_scale_2",
                       INPUT: "_input_scale"},
    "nvfp4/compressed-tensors": {CODES: "_weight_packed", SCALE: "_weight_scale",
                                 GLOBAL: "_weight_global_scale", INPUT: "_input_global_scale"},
    "fp8/compressed-tensors": {CODES: "_weight", SCALE: "_weight_scale"},
    "mxfp4/quark": {CODES: "_weight", SCALE: "_weight_scale"},
}  # fmt: skip
OWN_PARAMS = {CODES: "_weight", SCALE: "_scale", GLOBAL: "_global"}


def _quantised(
    experts: Experts, base: str, stack: Shape, to: str, copies: Callable[..., tuple[Copy, ...]],
    slots: list[tuple[int | slice, int | slice]], found: Mapping[str, Shape],
) -> dict[str, Stored]:  # fmt: skip
    """The tensors that stand for one weight [E, rows, columns] of one layer."""
    form, up = experts.layout, base.endswith("w13_weight")
    assert form is not None
    spelled = quant.find(form, base, found)
    if spelled is None:
        raise CheckpointError(
            f"tensor {base} has no {form.format} scale in the checkpoint as {form.name} spells it; "
            "restore the scale or list the layer as not quantised in quantization_config"
        )
    params = OWN_PARAMS if experts.own else ENGINE_PARAMS[form.key]
    stem = to.removesuffix("_weight")
    parts = quant.parts(form, base, stack)
    out: dict[str, Stored] = {}
    for role, name in spelled.items():
        shape, param = parts[role].shape, stem + params.get(role, "")
        if role == CODES:
            packed = parts[role].dtype == "U8"
            out[name] = Stored(shape, copies(param, 2 if packed else 1), PACKED if packed else FP8)
        elif role == SCALE:
            kind = {"nvfp4": BLOCK_SCALE, "mxfp4": POWERS, "fp8": POSITIVE}[form.format]
            view = (*stack[:2], shape[-1]) if form.flat_scale else None
            # Without the flattening, released files have both.
            shape = view if view is not None and found.get(name) == view else shape
            out[name] = Stored(shape, copies(param, form.block), kind, view)
        elif role in params:
            # One number per expert, or one each for gate and up rows, for one or two slots.
            held = found.get(name, shape)
            halves = up and held == (stack[0], 2)
            known = held in (shape, (stack[0], 1)) or halves
            rule = _rule(experts, form, role)
            if shape == (1,):
                some: tuple[Copy, ...] = (Copy(param, rule=rule),)  # for every expert
            else:
                some = tuple(Copy(param, (slot,), (expert,), rule) for slot, expert in slots)
            view = None if shape == (1,) else (stack[0], 2 if halves else 1)
            out[name] = Stored(held if known else shape, some, POSITIVE, view)
        else:
            # Own rows do not round activations, and the shape before packing is known.
            out[name] = Stored(found.get(name, shape), kind=NOTE)
    return out


def _rule(experts: Experts, form: Layout, role: str) -> str:
    """How a global scale or the range of activations becomes what a parameter holds."""
    if role == INPUT and form.key == "nvfp4/modelopt":
        return "range"
    return "reciprocal" if role == GLOBAL and experts.own and form.reciprocal else "spread"


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
    draft_depths: int | None = None, types: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Compare a plan with what the files hold, before anything is loaded.

    Args:
        wanted: the plan.
        found: shape by tensor name.
        files: file by tensor name, for messages.
        draft_depths: for a draft's plan, the depths that the config names; all tensors outside
            MTP are then the target's business. None for a target's plan, where MTP tensors, and
            towers that no plan entry mentions, are known and left alone.
        types: element type by tensor name, as safetensors spells it; None checks no types.

    Raises:
        CheckpointError: the first missing, unknown, wrongly shaped or wrongly typed tensor.
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
        allowed, have = TYPES[stored.kind], (types or {}).get(name)
        if allowed and have is not None and have not in allowed:
            raise CheckpointError(
                f"tensor {name} in {files[name]} is stored as {have}, and {stored.kind} needs "
                f"{' or '.join(allowed)}; check the file and quantization_config in config.json"
            )
    for name in found:
        if name not in wanted and not _elsewhere(name, wanted, draft_depths):
            raise CheckpointError(
                f"tensor {name} in {files[name]} is not part of this model; remove it or correct "
                "the config that leaves it out"
            )


def _elsewhere(name: str, wanted: Mapping[str, Stored], draft_depths: int | None) -> bool:
    """Whether a tensor outside the plan belongs to another part of the family.

    Some releases have the tensors of an adapter mixed in with the weights.
    """
    if ".lora_A." in name or ".lora_B." in name:
        return True
    mtp = name.startswith(_MTP_PREFIXES)
    if draft_depths is None:
        if mtp or not name.startswith(_TOWER_PREFIXES):
            return mtp
        return not any(w.startswith(_TOWER_PREFIXES) for w in wanted)
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
