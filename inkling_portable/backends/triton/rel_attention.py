"""rel_attention in Triton: checks, planning and launches; the kernels are in the files beside.

The grid, the tiles and the scratch depend on host integers and tensor shapes only, and no length
is read back, so a captured graph stays right for any lengths within its bounds.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton._common import check_table, is_rocm
from inkling_portable.backends.triton.rel_attention_decode import attend_split, combine_split
from inkling_portable.backends.triton.rel_attention_prefill import attend_whole
from inkling_portable.backends.triton.rel_attention_tuning import Plan, Shape, Split, Whole
from inkling_portable.target import Target

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@functools.cache
def _this_machine() -> Target:
    return Target.detect()


@functools.cache
def _plan(target: Target, shape: Shape) -> Plan:
    return tuning.plan(target, shape)


def rel_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """The contract of the same name (backends/reference/attention.py).

    Raises ValueError, naming the argument, for shapes and types that the kernels do not serve.
    """
    attend(
        None, q, k_cache, v_cache, rel, pages, q_starts, kv_lens, max_q, max_kv, window, scale, out,
        k_scale, v_scale,
    )  # fmt: skip


def attend(
    plan: Plan | Target | None, q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor,
    pages: Tensor, q_starts: Tensor, kv_lens: Tensor, max_q: int, max_kv: int, window: int,
    scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0, far_lse: Tensor | None = None,
) -> None:  # fmt: skip
    """rel_attention with a given plan, or with the plan of a given machine; None: of this one.

    With far_lse [heads, T] (float32, natural logarithm) the rows of requests that `plan.many`
    serves have their keys at distances from the extent on already in `out`: only the nearer ones
    are visited. Rows without such keys may hold anything there.
    """
    _check(q, k_cache, v_cache, rel, pages, q_starts, kv_lens, window, out)
    if not q.shape[0]:
        return
    if not kv_lens.shape[0]:
        out.zero_()
        return
    shape = describe(q, k_cache, v_cache, rel, kv_lens, max_q, max_kv, window)
    if not isinstance(plan, Plan):
        plan = _plan(plan or _this_machine(), shape)
    shared = (pages, q_starts, kv_lens, shape, scale * k_scale, v_scale, plan)
    if plan.few is not None:
        _launch_split(plan.few, q, k_cache, v_cache, rel, out, *shared)
    if plan.many is not None:
        _launch_whole(plan.many, q, k_cache, v_cache, rel, out, *shared, far_lse)


def describe(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, kv_lens: Tensor, max_q: int,
    max_kv: int, window: int,
) -> Shape:  # fmt: skip
    """The host facts of a call that planning may look at."""
    fits = _rows(k_cache) is not None and _rows(v_cache) is not None
    return Shape(
        rows=q.shape[0], batch=kv_lens.shape[0], heads=q.shape[1], kv_heads=k_cache.shape[2],
        width=q.shape[2], extent=rel.shape[2], window=window, page=k_cache.shape[1],
        max_q=max_q, max_kv=max_kv, element=q.element_size(),
        stored=k_cache.element_size(), descriptors=fits,
    )  # fmt: skip


def _launch_split(
    tiles: Split, q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, out: Tensor,
    pages: Tensor, q_starts: Tensor, kv_lens: Tensor, shape: Shape, scale: float, gain: float,
    plan: Plan,
) -> None:  # fmt: skip
    part = torch.empty(
        (2 * tiles.programs, tiles.m, shape.width), dtype=torch.float32, device=q.device
    )
    stat = torch.empty((2, 2 * tiles.programs, tiles.m), dtype=torch.float32, device=q.device)
    batch = max(16, tuning.power_of_two(shape.batch))
    k_tiles, v_tiles, steps = _matrices(tiles, k_cache, v_cache)
    options: dict[str, Any] = {"launch_pdl": True} if tiles.pdl else {}
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    attend_split[(tiles.programs,)](
        q, k_cache, v_cache, k_tiles, v_tiles, rel, pages, q_starts, kv_lens, out, part, stat,
        shape.rows, shape.batch, plan.few_tokens, tiles.programs, tiles.least, scale, gain,
        *q.stride(), *k_cache.stride(), *v_cache.stride(), *steps, *rel.stride(), pages.stride(0),
        *out.stride(),
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.width, EXTENT=shape.extent,
        WINDOW=shape.window, PAGE=shape.page, BATCH=batch, M=tiles.m, N=tiles.n,
        CLEAR=plan.many is None,
        TMA=tiles.tma, PRECISION=_precision(q), STAGES=tiles.stages, PDL=tiles.pdl,
        num_warps=tiles.warps, num_stages=tiles.stages, **options, **limit,
    )  # fmt: skip
    _launch_combine(tiles, part, stat, out, q_starts, kv_lens, shape, gain, plan, batch, options, q)


def _launch_combine(
    tiles: Split, part: Tensor, stat: Tensor, out: Tensor, q_starts: Tensor, kv_lens: Tensor,
    shape: Shape, gain: float, plan: Plan, batch: int, options: dict[str, Any], q: Tensor,
) -> None:  # fmt: skip
    tokens = max(1, min(plan.few_tokens, shape.max_q, shape.rows))
    part_width = min(tiles.part, shape.width)
    combine_split[(shape.batch * tokens, shape.heads, shape.width // part_width)](
        q_starts, kv_lens, part, stat, out, shape.batch, plan.few_tokens, tokens, tiles.programs,
        tiles.least, gain, *out.stride(),
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.width, WINDOW=shape.window,
        BATCH=batch, M=tiles.m, N=tiles.n,
        PART=part_width, PIECES=tiles.pieces, PRECISION=_precision(q), PDL=tiles.pdl,
        num_warps=4, **options,
    )  # fmt: skip


def _launch_whole(
    tiles: Whole, q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, out: Tensor,
    pages: Tensor, q_starts: Tensor, kv_lens: Tensor, shape: Shape, scale: float, gain: float,
    plan: Plan, far_lse: Tensor | None,
) -> None:  # fmt: skip
    k_tiles, v_tiles, steps = _matrices(tiles, k_cache, v_cache)
    options: dict[str, Any] = {"launch_pdl": True} if tiles.pdl else {}
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    attend_whole[(tuning.row_tiles(shape, tiles.m) * shape.kv_heads,)](
        q, k_cache, v_cache, k_tiles, v_tiles, rel, pages, q_starts, kv_lens, out,
        far_lse, shape.rows, shape.batch, plan.few_tokens if plan.few else 0, scale, gain,
        *q.stride(), *k_cache.stride(), *v_cache.stride(), *steps,
        *rel.stride(), pages.stride(0), *out.stride(),
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.width, EXTENT=shape.extent,
        WINDOW=shape.window if far_lse is None else shape.extent, PAGE=shape.page,
        BATCH=max(16, tuning.power_of_two(shape.batch)),
        M=tiles.m, N=tiles.n, CLEAR=True, TMA=tiles.tma, PRECISION=_precision(q),
        STAGES=tiles.stages, PDL=tiles.pdl, FAR=far_lse is not None,
        num_warps=tiles.warps, num_stages=tiles.stages, **options, **limit,
    )  # fmt: skip


def _precision(q: Tensor) -> str:
    # The contract's float32 is IEEE; tensor cores would round the inputs to 10 bits. On AMD a bias
    # that is added last would take registers which are not there.
    if q.dtype == torch.float32:
        return "ieee" if is_rocm() else "last"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "wide" if interpreted and q.dtype == torch.bfloat16 else "native"


def _rows(cache: Tensor) -> tuple[int, int, int] | None:
    """A cache [pages, page, Hkv, D] as a matrix: rows per page, rows and columns per head.

    None where its strides or its address do not allow it, or where TMA could not read it.
    """
    page, row, head, column = cache.stride()
    item = cache.element_size()
    if column != 1 or row <= 0 or page % row or row * item % 16 or cache.data_ptr() % 16:
        return None
    if head < row:
        rows_per_head, columns_per_head = 0, head
    elif head % row == 0:
        rows_per_head, columns_per_head = head // row, 0
    else:
        return None
    count = (cache.shape[0] - 1) * (page // row) + cache.shape[1] * max(1, rows_per_head)
    return (page // row, rows_per_head, columns_per_head) if count < 1 << 31 else None


def _matrices(
    tiles: Split | Whole, k_cache: Tensor, v_cache: Tensor
) -> tuple[Any, Any, tuple[int, ...]]:
    """Tensor descriptors of both caches and their six steps; nothing for tiles without."""
    if not tiles.tma:
        return None, None, (0,) * 6
    k_tiles, k_steps = _descriptor(k_cache, tiles.n, "k_cache")
    v_tiles, v_steps = _descriptor(v_cache, tiles.n, "v_cache")
    return k_tiles, v_tiles, k_steps + v_steps


def _descriptor(cache: Tensor, n: int, name: str) -> tuple[Any, tuple[int, int, int]]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    steps = _rows(cache)
    if steps is None or cache.shape[1] % n:
        raise ValueError(f"{name} needs rows that one tensor descriptor can address and pages of "
                         f"a multiple of {n}; found strides {cache.stride()} and pages of "
                         f"{cache.shape[1]}; plan without descriptors")  # fmt: skip
    pages, page, heads, width = cache.shape
    rows = (pages - 1) * steps[0] + (heads - 1) * steps[1] + page
    columns = (heads - 1) * steps[2] + width
    matrix = TensorDescriptor(cache, [rows, columns], [cache.stride(1), 1], [n, width])
    return matrix, steps


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, window: int, out: Tensor,
) -> None:  # fmt: skip
    """Refuse what the kernels would read wrongly. Shapes as in the contract."""
    if q.dim() != 3 or q.shape[2] not in WIDTHS or q.dtype not in DTYPES:
        raise ValueError(f"q needs to be [T, heads, {'|'.join(map(str, WIDTHS))}] in bfloat16, "
                         f"float16 or float32; found {tuple(q.shape)} in {q.dtype}")  # fmt: skip
    rows, heads, width = q.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in (q.dtype, *FP8) or cache.dtype != k_cache.dtype:
            raise ValueError(f"{name} needs the type of q, {q.dtype}, or an 8-bit e4m3, like "
                             f"k_cache; found {cache.dtype}")  # fmt: skip
        if cache.dim() != 4 or cache.shape[3] != width or cache.shape[:3] != k_cache.shape[:3]:
            raise ValueError(f"{name} needs to be [pages, page, kv heads, {width}], like k_cache; "
                             f"found {tuple(cache.shape)}")  # fmt: skip
        if cache.shape[1] * cache.stride(1) >= 1 << 31:
            raise ValueError(f"{name} needs pages within 2**31 elements; found {cache.shape[1]} "
                             f"tokens {cache.stride(1)} elements apart")  # fmt: skip
        if cache.shape[1] < 16:
            raise ValueError(f"{name} needs pages of at least 16 tokens; found {cache.shape[1]}")
    if heads % k_cache.shape[2]:
        raise ValueError(f"k_cache needs a number of heads that divides q's {heads}; "
                         f"found {k_cache.shape[2]}")  # fmt: skip
    if rel.dim() != 3 or rel.shape[:2] != q.shape[:2] or rel.dtype != q.dtype:
        raise ValueError(f"rel needs to be [{rows}, {heads}, extent] in {q.dtype}; "
                         f"found {tuple(rel.shape)} in {rel.dtype}")  # fmt: skip
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out needs the shape and type of q, {tuple(q.shape)} in {q.dtype}; "
                         f"found {tuple(out.shape)} in {out.dtype}")  # fmt: skip
    for name, x in (("q", q), ("rel", rel), ("out", out)):
        if 128 * (x.stride(0) + x.stride(2)) + heads * x.stride(1) >= 1 << 31:
            raise ValueError(f"{name} needs strides below 2**24 elements; found {x.stride()}")
    batch = kv_lens.shape[0]
    for name, x, size in (("kv_lens", kv_lens, batch), ("q_starts", q_starts, batch + 1)):
        if x.dtype != torch.int32 or x.shape != (size,) or x.stride(0) != 1:
            raise ValueError(f"{name} needs to be contiguous int32 [{size}]; "
                             f"found {tuple(x.shape)} in {x.dtype}")  # fmt: skip
    if pages.dtype != torch.int32 or pages.dim() != 2 or pages.shape[0] < batch:
        raise ValueError(f"pages needs to be int32 [{batch}, P]; "
                         f"found {tuple(pages.shape)} in {pages.dtype}")  # fmt: skip
    if pages.shape[1] > 1 and pages.stride(1) != 1:
        raise ValueError(f"pages needs rows without gaps; found stride {pages.stride(1)}")
    check_table(pages, kv_lens, k_cache.shape[1])
    if window < 0:
        raise ValueError(f"window needs to be 0 (none) or a number of keys; found {window}")
