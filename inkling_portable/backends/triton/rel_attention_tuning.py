"""Which kernels serve a step of relative attention, and with which tiles: data in, data out.

Everything here is a function of a Target and of host integers that are fixed within a captured
graph. Lengths enter only as upper bounds: any plan is right for every shorter length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from inkling_portable.target import Target


@dataclass(frozen=True)
class Shape:
    """One call: head counts of this rank, widths in elements, bounds in tokens."""

    rows: int  # T, padding included
    batch: int
    heads: int
    kv_heads: int
    width: int
    extent: int
    window: int
    page: int
    max_q: int
    max_kv: int
    element: int = 2  # bytes
    stored: int = 2  # bytes of a cached number
    descriptors: bool = False  # the caches' strides allow two-dimensional tensor descriptors

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Split:
    """Keys split over a persistent grid, then combined (rel_attention_decode)."""

    m: int  # packed rows of a tile
    n: int  # keys of a tile
    warps: int
    stages: int
    programs: int  # of the persistent grid
    least: int = 1  # key tiles that a program takes at least
    part: int = 32  # columns of one combining program
    pieces: int = 64  # pieces that a combining program reads at a time
    tma: bool = False  # keys and values through tensor descriptors
    pdl: bool = False
    registers: int = 0  # of a thread at most, on NVIDIA; 0: as the compiler likes


@dataclass(frozen=True)
class Whole:
    """One program per row tile (rel_attention_prefill)."""

    m: int
    n: int
    warps: int
    stages: int
    tma: bool = False
    pdl: bool = False
    registers: int = 0


@dataclass(frozen=True)
class Plan:
    """Requests with at most `few_tokens` new tokens go to `few`, the others to `many`."""

    few: Split | None
    many: Whole | None
    few_tokens: int = 0


# A request of up to this many packed rows is served by splitting its keys.
FEW_ROWS = 128
# Beside prefills, decoding requests share one tile height; nine tokens (MTP) take few tiles of it.
MIXED_ROWS, MIXED_TOKENS = 64, 16


def plan(target: Target, shape: Shape) -> Plan:
    """The kernels of one call."""
    max_q = max(1, min(shape.max_q, shape.rows))
    packed = max_q * shape.group
    if shape.window:
        tiles = shape.batch * shape.kv_heads * -(-packed // FEW_ROWS)
        # On AMD the split kernel with a window spills scalar registers from 64 rows on.
        most = 16 if target.vendor == "rocm" else FEW_ROWS
        if packed <= most and 8 * tiles <= _units(target):
            return Plan(split(target, shape, packed), None, max_q)
        return Plan(None, whole(target, shape, packed))
    if packed <= FEW_ROWS or _few_tiles(target, shape, max_q):
        return Plan(split(target, shape, packed), None, max_q)
    many = whole(target, shape, packed)
    if shape.batch == 1:
        return Plan(None, many)
    return Plan(split(target, shape, MIXED_ROWS), many, MIXED_TOKENS)


def near_plan(target: Target, shape: Shape) -> Plan:
    """The kernels beside one that serves the far keys of requests with many new tokens."""
    near = whole(target, replace(shape, window=shape.extent), FEW_ROWS)
    if shape.batch == 1:
        return Plan(None, near)
    return Plan(split(target, shape, MIXED_ROWS), near, MIXED_TOKENS)


def row_tiles(shape: Shape, m: int) -> int:
    """How many tiles of m packed rows the requests can have at most, for one KV head."""
    each = -(-max(1, min(shape.max_q, shape.rows)) * shape.group // m)
    return min(shape.batch * each, shape.rows * shape.group // m + shape.batch)


def _few_tiles(target: Target, shape: Shape, max_q: int) -> bool:
    """A short chunk after a long context: its row tiles alone would not fill the chip."""
    tiles = row_tiles(shape, FEW_ROWS) * shape.kv_heads
    return 2 * tiles <= _units(target) and shape.max_kv >= 4 * max_q + 2048


def _units(target: Target) -> int:
    return target.compute_units if target.vendor != "cpu" else 3


def split(target: Target, shape: Shape, packed: int) -> Split:
    """Tiles of the split kernel for requests of `packed` rows."""
    # Numbers of 8 bits are widened in registers, which taller tiles do not leave.
    tallest = 64 if shape.stored == 1 and target.vendor == "cuda" else FEW_ROWS
    m = min(tallest, max(16, power_of_two(packed)))
    units, pdl = _units(target), _has_pdl(target)
    if target.vendor == "cpu":
        return Split(m, 64, 4, 1, units)
    if shape.element > 2:
        return Split(min(m, 32), 32, 4, 1, units, pdl=pdl)
    if target.vendor == "rocm":
        return _split_amd(target, shape, min(m, 64), 2 * units)
    if m <= 32 and target.shared_kib >= 200:
        return _split_few_rows(target, shape, m, units, -(-packed // m), pdl)
    if m <= 32:
        return Split(m, 64, 4, _stages(target, shape, m, 64, 2, 3), 2 * units, pdl=pdl)
    if _tma(target, shape, 128):
        return _split_some_rows(target, shape, units, -(-packed // 64), pdl)
    warps, tma = (4 if m == 64 else 8), _tma(target, shape, 64)
    n = 64 if tma else 32
    return Split(m, n, warps, _stages(target, shape, m, n, 1, 3), units, tma=tma, pdl=pdl)


def _split_amd(target: Target, shape: Shape, m: int, programs: int) -> Split:
    """Estimated, not measured: `ci/cdna_cost.py`, where it says more than 20 %.

    Two programs are to share a compute unit, whatever LDS and registers a second stage or a longer
    tile would take: at assumed latencies that hides more than either does.
    """
    eight, whole_tiles, two = shape.stored == 1, shape.page % 64 == 0, _amd_stages(target)
    n, stages = 64, 1
    if m > 32:
        # With short pages an address per key takes the registers that a second stage would need.
        n, stages = (32, two) if whole_tiles or two == 1 else (64, 1)
    elif m > 16:
        n, stages = (64, two) if eight else (32, 1)
    elif two > 1 and shape.window:
        stages = two if eight else 1
    elif two > 1 and (eight or not whole_tiles):
        n = 32
    return Split(m, n, 4, stages, programs)


def _split_few_rows(
    target: Target, shape: Shape, m: int, units: int, tiles: int, pdl: bool
) -> Split:
    """The best of a sweep on an H200 (benchmarks/attention.py), by how much there is to read."""
    sequences = shape.batch * shape.kv_heads * tiles
    if shape.window:
        # A window of 512 keys mostly has 17 pieces; where that was timed, they are read at once.
        pieces = 32 if target.arch == "sm90" else 16
        return Split(m, 32, 4, 4, 2 * units, pieces=pieces, pdl=pdl)
    if sequences >= 16:
        # Requests that are cut into few pieces are joined by fewer, wider programs.
        pieces, part = (16, 64) if shape.max_kv <= 16384 else (64, 32)
        return Split(m, 128, 4, 2, 2 * units, part=part, pieces=pieces, pdl=pdl)
    # By descriptors, which leave registers for twice the keys of a tile.
    tma = m == 16 and shape.stored == 2 and _tma(target, shape, 128)
    if sequences * shape.max_kv > 524288:
        return Split(m, 64, 4, 2, 3 * units, least=4, pieces=256, pdl=pdl, registers=160)
    if sequences * shape.max_kv <= 16384:
        if tma:
            return Split(m, 128, 4, 2, units, tma=True, pdl=pdl)
        return Split(m, 64, 4, 3, units, pieces=256, pdl=pdl)
    if tma and sequences * shape.max_kv > 131072:
        return Split(m, 128, 4, 3, 2 * units, least=2, pieces=256, tma=True, pdl=pdl)
    # Up to here four programs share a multiprocessor; with more to read, two keep it as busy.
    several = 4 if sequences * shape.max_kv <= 131072 else 2
    return Split(m, 64, 4, 2, several * units, least=4, pieces=256, tma=tma, pdl=pdl)


def _split_some_rows(target: Target, shape: Shape, units: int, tiles: int, pdl: bool) -> Split:
    """For more than 32 rows (MTP verification), from the same sweep: two programs of 64 rows."""
    sequences = shape.batch * shape.kv_heads * tiles
    if not shape.window and sequences * shape.max_kv <= 32768:
        return Split(64, 128, 4, _stages(target, shape, 64, 128, 1, 2), 2 * units, pieces=128,
                     tma=True, pdl=pdl)  # fmt: skip
    least, pieces = (4, 256) if sequences < 16 and not shape.window else (1, 64)
    pieces = 16 if sequences >= 16 and shape.max_kv <= 16384 else pieces
    return Split(64, 64, 4, _stages(target, shape, 64, 64, 2, 2), 2 * units, least,
                 pieces=pieces, tma=True, pdl=pdl)  # fmt: skip


def whole(target: Target, shape: Shape, packed: int) -> Whole:
    """Tiles of the kernel without splits for requests of up to `packed` rows."""
    m = min(128, max(16, power_of_two(packed)))
    pdl = _has_pdl(target)
    if target.vendor == "cpu":
        return Whole(m, 64, 4, 1)
    if shape.element > 2:
        return Whole(min(m, 32), 32, 4, 1, pdl=pdl)
    if target.vendor == "rocm":
        n = 64 if m <= 32 or (m == 64 and shape.page % 64 == 0) else 32
        return Whole(m, n, 4, _amd_stages(target))
    if m <= 32 and shape.window and target.shared_kib >= 200 and _tma(target, shape, 128):
        return Whole(m, 128, 4, 2, tma=True, pdl=pdl)
    if m <= 32:
        return Whole(m, 64, 4, _stages(target, shape, m, 64, 2, 3), pdl=pdl)
    # Two programs of 64 rows hide each other's softmax better than one of 128.
    tma = _tma(target, shape, 64)
    n = 64 if tma else 32
    return Whole(64, n, 4, _stages(target, shape, 64, n, 2, 2), tma=tma, pdl=pdl)


def _tma(target: Target, shape: Shape, n: int) -> bool:
    """A tensor descriptor reads whole key tiles, each within one page."""
    return shape.descriptors and _has_pdl(target) and shape.page % n == 0


def _stages(target: Target, shape: Shape, m: int, n: int, share: int, wanted: int) -> int:
    """As many stages of K and V as `share` programs per multiprocessor leave room for."""
    room = (target.shared_kib << 10) // share - m * shape.width * shape.element - (8 << 10)
    stage = 2 * n * shape.width * shape.element
    return max(1, min(wanted, room // stage)) if target.shared_kib else 2


def _amd_stages(target: Target) -> int:
    # Pipelined attention loops have been miscompiled for gfx950 by public Triton releases.
    return 1 if target.arch == "gfx950" else 2


def _has_pdl(target: Target) -> bool:
    return target.vendor == "cuda" and _cuda(target) >= 90


def _cuda(target: Target) -> int:
    return int(target.arch[2:]) if target.arch.startswith("sm") else 0


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
