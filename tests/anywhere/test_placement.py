"""Every number of every released checkpoint is placed once per rank that needs it, on any split.

Tensor parallelism up to twice the KV heads, experts by width or as wholes, data-parallel attention
with spread experts, and pipelines cut anywhere; from the published names and shapes alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_portable.commands.released_configs import released
from inkling_portable.commands.released_index import index
from inkling_portable.model import checkpoint
from inkling_portable.model.checkpoint import Copy, Experts, Shard, Stored
from inkling_portable.model.config import InklingConfig, parse

Box = tuple[range, ...]
MODELS = ("Inkling", "Inkling-Small")
LAYER = re.compile(r"\.layers\.\d+\.")
CONFIGS = {name: parse(released(name)) for name in MODELS}
SHAPES = {name: {n: part.shape for n, part in index(name).items()} for name in MODELS}


def box(index_: tuple[int | slice, ...], shape: tuple[int, ...]) -> Box:
    """What an index selects of a tensor, as one range per axis."""
    full = (*index_, *(slice(None),) * (len(shape) - len(index_)))
    return tuple(
        range(n)[i] if isinstance(i, slice) else range(i, i + 1)
        for i, n in zip(full, shape, strict=True)
    )


def volume(part: Box) -> int:
    return math.prod(map(len, part))


def disjoint(a: Box, b: Box) -> bool:
    apart = any(x[-1] < y[0] or y[-1] < x[0] for x, y in zip(a, b, strict=True))
    return apart or any(not set(x).intersection(y) for x, y in zip(a, b, strict=True))


def plans(model: str, shards: list[Shard]) -> list[dict[str, Stored]]:
    config, shapes = CONFIGS[model], SHAPES[model]
    layers = range(config.text.num_layers)
    return [
        checkpoint.plan(config, shapes, shard, layers) | checkpoint.plan_draft(
            config, shapes, shard, 8)
        for shard in shards
    ]  # fmt: skip


def distinct(of_ranks: list[dict[str, Stored]]) -> Iterator[tuple[str, list[Stored]]]:
    """One tensor of each kind: layers that are placed alike are looked at once."""
    seen = set()
    for name in of_ranks[0]:
        stored = [plan[name] for plan in of_ranks]
        alike = tuple(
            (s.shape, tuple((LAYER.sub(".", c.param), str(c.into), str(c.of)) for c in s.copies))
            for s in stored
        )
        key = (LAYER.sub(".", name), alike)
        if key not in seen:
            seen.add(key)
            yield name, stored


def copies_wanted(config: InklingConfig, name: str, size: int, spread: int) -> int:
    """How often all ranks together hold each number of a tensor."""
    if ".mlp.experts." in name:
        return size // spread if spread > 1 else 1
    if any(part in name for part in (".wk_dv.", ".wv_dv.", ".k_sconv.", ".v_sconv.")):
        depth = re.search(r"layers\.(\d+)\.", name)
        assert depth is not None
        at = int(depth[1])
        draft = name.startswith("model.mtp.")
        geometry = config.mtp_attention(at) if draft else config.text.attention(at)
        return max(1, size // geometry.kv_heads)
    split = (".wq_du.", ".wr_du.", ".wo_ud.", "attn_sconv", "mlp_sconv", ".w13_dn.", ".w2_md.",
             "shared_w", "unembed")  # fmt: skip
    return 1 if any(part in name for part in split) else size


def check_placed(model: str, of_ranks: list[dict[str, Stored]], spread: int = 1) -> int:
    """Assert it for every kind of tensor; returns how many kinds there are."""
    kinds = 0
    for name, stored in distinct(of_ranks):
        kinds += 1
        size = len(of_ranks)
        held: dict[Box, int] = defaultdict(int)
        for one in stored:
            mine = [box(copy.of, one.shape) for copy in one.copies]
            for part in mine:
                held[part] += 1
            assert all(disjoint(a, b) for a, b in itertools.combinations(mine, 2)), name
        wanted = copies_wanted(CONFIGS[model], name, size, spread)
        assert set(held.values()) == {wanted}, (name, held)
        assert sum(map(volume, held)) == math.prod(stored[0].shape), name
        assert all(disjoint(a, b) for a, b in itertools.combinations(held, 2)), name
    return kinds


def check_filled(plan: dict[str, Stored]) -> None:
    """Every parameter of one rank is filled without a gap, from its first to its last row."""
    parts: dict[str, list[tuple[Copy, Box]]] = defaultdict(list)
    for stored in plan.values():
        for copy in stored.copies:
            parts[copy.param].append((copy, box(copy.of, stored.shape)))
    for param, copies in parts.items():
        if not param.endswith("attn.qkvr.weight"):
            continue
        at = 0
        for copy, source in copies:
            (rows,) = copy.into
            assert isinstance(rows, slice)
            assert rows.start == at and rows.stop == at + len(source[0]), param
            at = rows.stop


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_slices_of_all_ranks_sum_to_the_whole(model: str, size: int) -> None:
    """Experts by width; with 16 ranks, KV heads that two ranks hold each."""
    shards = [Shard(rank, size, Experts(rank=rank, size=size)) for rank in range(size)]
    of_ranks = plans(model, shards)
    assert check_placed(model, of_ranks) > 30
    for plan in of_ranks:
        check_filled(plan)


@pytest.mark.parametrize("size", [2, 8, 16])
def test_whole_experts_stand_on_one_rank_each(size: int) -> None:
    share = 256 // size
    ids = [tuple(range(r * share, (r + 1) * share)) for r in range(size)]
    of_ranks = plans("Inkling", [Shard(rank, size, Experts(ids[rank])) for rank in range(size)])
    assert check_placed("Inkling", of_ranks) > 30


@pytest.mark.parametrize("size", [2, 8])
def test_data_parallel_attention_holds_all_but_the_experts(size: int) -> None:
    """Each rank has heads, sinks and the unembedding for itself; experts are spread over all."""
    share = 256 // size
    ids = [tuple(range(r * share, (r + 1) * share)) for r in range(size)]
    for name, stored in distinct(plans("Inkling", [Shard(0, 1, Experts(own)) for own in ids])):
        taken = [sum(volume(box(c.of, s.shape)) for c in s.copies) for s in stored]
        whole = math.prod(stored[0].shape)
        if ".mlp.experts." in name:
            assert sum(taken) == whole, name
        else:
            assert taken == [whole] * size, name


@given(cuts=st.sets(st.integers(1, 65), max_size=3))
@settings(max_examples=12)
def test_a_pipeline_may_be_cut_anywhere(cuts: set[int]) -> None:
    config, shapes = CONFIGS["Inkling"], SHAPES["Inkling"]
    edges = [0, *sorted(cuts), config.text.num_layers]
    owners: dict[str, int] = defaultdict(int)
    for start, stop in itertools.pairwise(edges):
        plan = checkpoint.plan(config, shapes, Shard(), range(start, stop), start == 0,
                               stop == config.text.num_layers)  # fmt: skip
        for name, stored in plan.items():
            owners[name] += bool(stored.copies)
            layer = re.search(r"layers\.(\d+)\.", name)
            assert not layer or bool(stored.copies) == (start <= int(layer[1]) < stop)
    assert set(owners.values()) == {1}
