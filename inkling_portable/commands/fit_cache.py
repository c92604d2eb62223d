"""How vLLM would page the caches of a model: groups, pages, blocks per request, concurrency.

Pure arithmetic that follows vLLM's planner (0.26 to 0.33); a test compares the two. What matters
for Inkling:

- Every layer has two caches: attention, and the convolution state, which is a sliding window as
  long as the taps.
- All pages get one size: caches with smaller pages get longer blocks. Layers of one kind are cut
  into groups of equal length, each with a block table of its own, and one block of the pool holds
  one page for each layer of a group.
- A window keeps its own tokens and those of every step in flight. The reserve of one request
  therefore grows with the batch: a convolution of 4 taps reserves blocks for thousands of tokens.
  While a request decodes it holds far fewer, which is what limits how many are served at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inkling_portable.model.config import AttentionGeometry, InklingConfig

CONV_BYTES = 2
"""The convolution state keeps the model's bfloat16, whatever `--kv-cache-dtype` says."""


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer on one GPU. Equal layers can share a group."""

    kind: str
    """"global", "local" or "conv"."""
    block: int
    """Tokens per block."""
    heads: int
    cell: int
    """Elements for one head and token, keys and values together."""
    element_bytes: int
    window: int
    """Tokens that must stay readable, the current one included; 0 = all."""
    padded_page: int = 0
    """Page size where the block could not be made long enough; 0 = no padding."""

    @property
    def page(self) -> int:
        """Bytes of one block of one layer."""
        return self.padded_page or self.block * self.heads * self.cell * self.element_bytes


@dataclass(frozen=True)
class Group:
    """Layers that share a block table."""

    cache: LayerCache
    layers: int


@dataclass(frozen=True)
class Demand:
    """What is served, as far as the cache planner cares. All in tokens but `mtp`, in drafts."""

    context: int
    batch_tokens: int
    steps_in_flight: int = 2
    """Scheduled steps that may overlap: 2 with asynchronous scheduling, the default on GPUs."""
    mtp: int = 0

    @property
    def in_flight(self) -> int:
        return self.steps_in_flight * self.batch_tokens

    @property
    def retained(self) -> int:
        """Tokens kept below each window: chained draft depths run the last ones again."""
        return max(0, self.mtp - 1)


@dataclass(frozen=True)
class CachePlan:
    """Groups after page unification."""

    groups: tuple[Group, ...]

    @property
    def page(self) -> int:
        """Bytes of a page, equal for all layers."""
        return self.groups[0].cache.page

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool: a page for each layer of the longest group."""
        return max(group.layers for group in self.groups) * self.page

    def reserve(self, demand: Demand) -> int:
        """Blocks that vLLM reckons with for one request: at start-up and when admitting it."""
        return sum(reserved_blocks(group.cache, demand) for group in self.groups)

    def held(self, demand: Demand) -> int:
        """Blocks that a request with a full context holds while it decodes."""
        return sum(held_blocks(group.cache, demand) for group in self.groups)

    def blocks(self, memory: int) -> int:
        """Blocks in `memory` bytes, the one that vLLM keeps to itself included."""
        return max(0, memory) // self.block_bytes

    def engine_concurrency(self, memory: int, demand: Demand) -> float:
        """The "maximum concurrency" that vLLM prints: blocks over the reserve of one request."""
        return self.blocks(memory) / self.reserve(demand)

    def resident(self, memory: int, demand: Demand) -> int:
        """Requests with a full context that decode at once, one of them being admitted.

        Steps in flight share one batch, so only one reserve is needed beside what the others hold.
        """
        free = self.blocks(memory) - 1 - self.reserve(demand)
        return 0 if free < 0 else 1 + free // self.held(demand)

    def memory_for(self, requests: int, demand: Demand) -> int:
        """Bytes in which `requests` fit by the count of `resident`."""
        blocks = 1 + self.reserve(demand) + (requests - 1) * self.held(demand)
        return blocks * self.block_bytes


def reserved_blocks(cache: LayerCache, demand: Demand) -> int:
    """The planner's upper bound for one request in one group."""
    if not cache.window:
        return -(-demand.context // cache.block)
    kept = cache.window - 1 + demand.retained + demand.in_flight
    # A window need not start at a block's first token, hence one more.
    return -(-min(kept, demand.context) // cache.block) + 1


def held_blocks(cache: LayerCache, demand: Demand) -> int:
    """Blocks of one decoding request in one group: its steps carry one token and the drafts."""
    return reserved_blocks(cache, replace(demand, batch_tokens=1 + demand.mtp))


def plan(layers: Sequence[LayerCache]) -> CachePlan:
    """Unify pages and cut the layers into groups, in the order in which kinds first appear."""
    counts: dict[LayerCache, int] = {}
    for layer in unified(layers):
        counts[layer] = counts.get(layer, 0) + 1
    fewest, most = min(counts.values()), max(counts.values())
    # Nearly equal counts are padded to the larger one; otherwise the smaller one is the pattern.
    length = most if most < 1.5 * fewest else fewest
    groups: list[Group] = []
    for cache, count in counts.items():
        parts = -(-count // length)
        groups += [Group(cache, len(range(part, count, parts))) for part in range(parts)]
    return CachePlan(tuple(groups))


def unified(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """The layers with equal pages: longer blocks, or padding where the sizes do not divide."""
    page = max(layer.page for layer in layers)
    return [
        replace(layer, block=layer.block * (page // layer.page))
        if page % layer.page == 0
        else replace(layer, padded_page=page)
        for layer in layers
    ]


def layer_caches(
    config: InklingConfig, *, tp: int, block: int, kv_bytes: int, mtp: int = 0
) -> list[LayerCache]:
    """The caches of all layers and of the first `mtp` draft depths, as the model declares them.

    tp: GPUs that share the heads; block: `--block-size`; kv_bytes: bytes of a key or value.
    """
    geometries = [config.text.attention(layer) for layer in range(config.text.num_layers)]
    geometries += [config.mtp_attention(depth) for depth in range(mtp)]
    found = []
    for geometry in geometries:
        found.append(_conv_cache(config, geometry, tp))
        kind = "local" if geometry.window else "global"
        heads = geometry.rank_kv_heads(tp)
        found.append(
            LayerCache(kind, block, heads, 2 * geometry.head_dim, kv_bytes, geometry.window)
        )
    return found


def _conv_cache(config: InklingConfig, geometry: AttentionGeometry, tp: int) -> LayerCache:
    """Four streams (K, V, attention, MLP) packed for each KV head, up to a power of two."""
    heads, taps = geometry.rank_kv_heads(tp), config.text.conv_taps
    width = 2 * geometry.head_dim + 2 * (config.text.hidden_size // tp // heads)
    return LayerCache("conv", taps, heads, 1 << (width - 1).bit_length(), CONV_BYTES, taps)
