"""conv_residual_norm over ranks whose memories are mapped into one another, without barriers.

Every rank stores its partial sums straight into the memory of the rank that owns the channels; the
owner sums, convolves and stores its channels into the memory of all. The data are their own flags:
memory is filled with a word that no published word equals, and a reader polls its own memory until
none is left (the idea of NCCL's LL protocols, and of the exchanges of FlashInfer and TensorRT-LLM).

**Words.** A 32-bit word holds two bfloat16 or one float32; the empty one is all ones, NaN in both.
A published word of all ones becomes another NaN, so every value arrives as what it is, negative
zeros among them, and nothing that occurs in data can make a reader wait.

**Memory order.** No word's meaning depends on another, so words need no order among themselves:
each is stored whole (aligned, relaxed at system scope, four by one instruction, which need not
arrive together) and read by volatile loads, past the L1. Reuse of memory stands on links "a kernel
reads a word and ends" and "a later kernel of the stream stores", which the end of a kernel orders
(with dependent launch, `gdc_wait`, before which nothing of ours is touched).

**Copies.** Where a program has more threads than words, Triton gives several threads the same one.
NVIDIA's threads each wait for their own copies, in a loop of PTX without a barrier. Elsewhere one
says for all whether a word is there, and another may have looked too early: so such a program reads
once more, after the barrier in the reduction that ended the wait. Such threads also store twice; a
store that comes late finds its word not yet emptied, since no thread empties before its program has
seen words of the next call from every rank, which a barrier says.

**Reuse.** Call n uses generation n mod 3 of the memory; the count lies in device memory, advanced
by the last program of a call, so replayed graphs go on where any call stopped. While rank R is in
call n, no rank P is beyond n + 1, which P ends with words that R publishes in its own n + 1. So
words arrive in the generations of n and n + 1 only, and R may empty that of n - 1, in as many rows
as it used. P stores there in n + 2, after reading words of R's n + 1, before which R's call n ended
with its emptying. Two generations would not do: n - 1 and n + 1 would be one.

**Liveness.** All programs run at once, whatever the rows, since the chip has room for them, see
`PER_UNIT`; a program publishes its parts of all its rows before it waits for any. Sums wait for
such parts only, and gathers, which a program begins when it has published all its sums, for such
sums. Ranks make the same calls on one stream each.

**A rank that is gone.** After `PATIENCE` polls (minutes) a program notes it in `control` and traps:
the server ends with a CUDA error and not with wrong numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import (
    check_rows,
    compute_units,
    is_rocm,
    next_power_of_2,
    options,
    pdl,
    row_block,
)
from inkling_portable.backends.triton.norm import scaled
from inkling_portable.backends.triton.short_conv import conv_residual_norm as portable
from inkling_portable.backends.triton.short_conv import load_weight, packed_taps, tap_weight
from inkling_portable.registry import Facts, Gather
from inkling_portable.target import Target

HAND_OVER = 8192
"""Rows beyond which all ranks take the portable exchange: 604 MB a rank at Inkling's width, less
where no step has so many. Between two H200 that one took 753 us for so many rows and this one 436,
of a prompt 673 and 465; more were not measured."""
PATIENCE, TRIAL_PATIENCE = 1 << 29, 1 << 26
"""Polls before a rank is given up, while serving and when the exchange is tried at start: each is a
load of at least a third of a microsecond, so minutes."""
GENERATIONS = 3
SENDS = ("plain", "relaxed at system scope", "the same, four words at once")
"""How words are stored; the last needs pieces of whole fours."""
MOST_PIECES = 4  # programs that share a row of a short step
WARPS, PER_UNIT = 4, 2
"""Programs that an NVIDIA compute unit surely holds: with four warps each, all 65,536 registers are
enough for two of the most that a thread can have, and neither needs a tenth of the memory. Four
warps also have a thread for every four words of a quarter of half a row of Inkling's."""
ARRIVED, GAVE_UP, USED = 1, 2, 4
"""Words of `control` behind the generation of the next call: programs of this call that have ended,
whether a reader lost patience, and the rows that each generation holds."""
_GAVE_UP, _ARRIVED, _USED = (tl.constexpr(n) for n in (GAVE_UP, ARRIVED, USED))


@triton.jit
def _words(values):
    """Published words of values [n, m]: [n, m / 2] of two bfloat16 each, [n, m] of float32."""
    if values.dtype == tl.float32:
        words = values.to(tl.int32, bitcast=True)
    else:
        pairs: tl.constexpr = [values.shape[0], values.shape[1] // 2, 2]
        low, high = tl.split(tl.reshape(values.to(tl.int16, bitcast=True), pairs))
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return tl.where(words == -1, 0x7FFF7FFF, words)


@triton.jit
def _low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _send(place, words, mask, SEND: tl.constexpr):
    """Store words [n, m] at `place`, which may be another GPU's memory; see SENDS."""
    if SEND == 0:
        tl.store(place, words, mask=mask)
    elif SEND == 1:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; "
            "@p st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [place.to(tl.int64), words, mask.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip
    else:
        at, _, _, _ = _quads(place.to(tl.int64))
        some, _, _, _ = _quads(mask.to(tl.int32))
        first, second, third, fourth = _quads(words)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; "
            "@p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r", [at, first, second, third, fourth, some], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def _quads(values):
    """[n, m] -> four of [n, m / 4]: the first, second, third and fourth of each four."""
    size: tl.constexpr = values.shape[1] // 4
    even, odd = tl.split(tl.reshape(values, [values.shape[0], size, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.constexpr_function
def _polling(ranks, pack, trap):
    """PTX by which a thread reads `pack` fours of words of each of `ranks` until none is empty.

    Operands, `pack` of each: the words (4 * ranks), zeros where they are not wanted; their
    addresses (ranks); whether they are wanted; how often to look; where to note a vain wait.
    """
    count, words = ranks * pack, 4 * ranks * pack
    wanted, patience, lost = words + count, words + count + pack, words + count + 2 * pack
    lines = [f".reg .pred any, late, m<{count}>;", ".reg .s32 polls;", "mov.s32 polls, 0;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(words)]
    lines += [f"setp.ne.s32 m{i}, ${wanted + i % pack}, 0;" for i in range(count)]
    loads, tests = [], []
    for i in range(count):
        four = [f"${(4 * (i // pack) + k) * pack + i % pack}" for k in range(4)]
        loads.append(f"@m{i} ld.volatile.global.v4.b32 {{{', '.join(four)}}}, [${words + i}];")
        tests.append(f"setp.eq.s32 m{i}, {four[0]}, -1;")
        tests += [f"setp.eq.or.s32 m{i}, {one}, -1, m{i};" for one in four[1:]]
    lines += ["AGAIN:", *loads, *tests, "mov.pred any, m0;"]
    lines += [f"or.pred any, any, m{i};" for i in range(1, count)]
    lines += ["@!any bra DONE;", f"setp.ge.s32 late, polls, ${patience};"]
    lines += ["add.s32 polls, polls, 1;", "@!late bra AGAIN;"]
    lines += [f"st.global.b32 [${lost}], 1;", "trap;" if trap else "", "DONE:"]
    return f"{{ {' '.join(lines)} }}"


@triton.constexpr_function
def _operands(ranks, pack):
    """Constraints of `_polling`."""
    kinds = ["=&r"] * 4 * ranks + ["l"] * ranks + ["r", "r", "l"]
    return ",".join(kind for kind in kinds for _ in range(pack))


@triton.constexpr_function
def _kinds(ranks):
    return (tl.int32,) * (4 * ranks)


@triton.jit
def _look(place, size, APART: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] words of every rank, zeros from `size` on, and whether any is empty."""
    word = tl.arange(0, BLOCK)
    words = ()
    missing = tl.zeros((BLOCK,), tl.int1)
    for rank in tl.static_range(RANKS):
        words += (tl.load(place + rank * APART + word, mask=word < size, other=0, volatile=True),)  # type: ignore[assignment]
        missing = missing | (words[rank] == -1)
    return words, tl.max(missing.to(tl.int32)) != 0


@triton.jit
def _arrived(
    place, size, control, patience, APART: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    FOURS: tl.constexpr, TRAP: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """What `_look` finds once nothing is empty. With FOURS each thread waits for its own words."""
    if FOURS:
        PACK: tl.constexpr = BLOCK // 4 // THREADS if BLOCK // 4 > THREADS else 1
        word = 4 * tl.arange(0, BLOCK // 4)
        at = ()
        for rank in tl.static_range(RANKS):
            at += ((place + rank * APART + word).to(tl.int64),)  # type: ignore[assignment]
        at += ((word < size).to(tl.int32), patience, (control + _GAVE_UP).to(tl.int64))  # type: ignore[assignment]
        fours = tl.inline_asm_elementwise(_polling(RANKS, PACK, TRAP), _operands(RANKS, PACK), at,
                                          _kinds(RANKS), False, PACK)  # fmt: skip
        words = ()
        for rank in tl.static_range(RANKS):
            even = tl.join(fours[4 * rank], fours[4 * rank + 2])
            odd = tl.join(fours[4 * rank + 1], fours[4 * rank + 3])
            words += (tl.reshape(tl.join(even, odd), [BLOCK]),)  # type: ignore[assignment]
    else:
        words, missing = _look(place, size, APART, RANKS, BLOCK)
        polls = 0
        while missing & (polls < patience):
            words, missing = _look(place, size, APART, RANKS, BLOCK)
            polls += 1
        if polls >= patience:
            tl.store(control + _GAVE_UP, 1)
            if TRAP:
                tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [polls], tl.int32, False,
                                          1)  # fmt: skip
        if BLOCK < THREADS:  # see Copies
            words, _ = _look(place, size, APART, RANKS, BLOCK)
    return words


@triton.jit
def _total(
    place, size, control, patience, SHARE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    FOURS: tl.constexpr, TRAP: tl.constexpr, THREADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Sum over ranks of the channels in `size` words of parts of this rank's share, float32."""
    words = _arrived(place, size, control, patience, SHARE, RANKS, BLOCK, FOURS, TRAP, THREADS)
    if PAIRS:
        low, high = _low(words[0]), _high(words[0])
        for rank in tl.static_range(1, RANKS):
            low += _low(words[rank])
            high += _high(words[rank])
        total = tl.interleave(low, high)
    else:
        total = words[0].to(tl.float32, bitcast=True)
        for rank in tl.static_range(1, RANKS):
            total += words[rank].to(tl.float32, bitcast=True)
    return total


@triton.jit(do_not_specialize=["rows", "patience", "me"])
def _exchange_kernel(
    partial, extra, residual, conv_weight, norm_weight, normed, summed, state, slots, sources,
    peers, control, me, rows, patience, limit, page, partial_stride, extra_stride, residual_stride,
    weight_stride_c, weight_stride_k, state_stride_b, state_stride_t, state_stride_g,
    state_stride_w, eps, H: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr,
    RANKS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
    GENERATIONS: tl.constexpr, PAIRS: tl.constexpr, HAS_EXTRA: tl.constexpr,
    HAS_NORM: tl.constexpr, PACKED: tl.constexpr, SEND: tl.constexpr, FOURS: tl.constexpr,
    TRAP: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, piece) has rows i, i + programs, ... and a piece of this rank's share of each.

    A rank's memory, in words: for each generation parts [limit, RANKS, H / RANKS] and then rows
    [limit, H], a word being a channel or a pair of them.
    """
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    LINE: tl.constexpr = H // PER_WORD
    SHARE: tl.constexpr = LINE // RANKS
    PIECE: tl.constexpr = SHARE // PIECES
    WORDS: tl.constexpr = BLOCK // PER_WORD
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    piece = tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < PIECE * PER_WORD
    channel += piece * PIECE * PER_WORD  # in this rank's share
    word = tl.arange(0, WORDS)
    rank = tl.arange(0, RANKS)
    whole = (rank >= 0)[:, None] & (word < PIECE)[None, :]
    word += piece * PIECE
    column = tl.arange(0, ROW_BLOCK)
    present = column < H
    everyone = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int32)), 16)
    own = tl.multiple_of(tl.load(peers + me).to(tl.pointer_type(tl.int32)), 16)
    newest = load_weight(conv_weight, channel, inside, weight_stride_c, weight_stride_k, TAPS - 1,
                         PACKED)  # fmt: skip
    if HAS_NORM:
        gain = tl.load(norm_weight + column, mask=present, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    generation = tl.load(control, volatile=True)
    size = limit.to(tl.int64) * LINE
    start = generation * 2 * size
    for index in range(first, rows, programs):
        row = start * 0 + index
        at = (rank * SHARE * PER_WORD)[:, None] + channel[None, :]
        some = (rank >= 0)[:, None] & inside[None, :]
        z = tl.load(partial + row * partial_stride + at, mask=some, other=0.0)
        if HAS_EXTRA:
            more = tl.load(extra + row * extra_stride + at, mask=some, other=0.0)
            z = (z.to(tl.float32) + more.to(tl.float32)).to(z.dtype)
        place = everyone[:, None] + (start + (row * RANKS + me) * SHARE + word)[None, :]
        _send(place, _words(z), whole, SEND)
    parts = own + start + piece * PIECE
    kind: tl.constexpr = summed.dtype.element_ty
    in_state = (channel // W) * state_stride_g + (channel % W) * state_stride_w
    before = (generation + GENERATIONS - 1) % GENERATIONS
    used = tl.load(control + _USED + before, volatile=True)
    tl.debug_barrier()  # no compiler may sink a store below it
    for index in range(first, rows, programs):
        row = start * 0 + index
        slot = tl.load(slots + row)
        real = slot >= 0
        # The state's taps are on their way while this waits for the others.
        origins = ()
        for back in tl.static_range(1, TAPS):
            origins += (tl.load(sources + row * (TAPS - 1) + TAPS - 1 - back),)  # type: ignore[assignment]
        older = ()
        for back in tl.static_range(1, TAPS):
            from_slot = tl.maximum(-2 - origins[back - 1], 0)
            cell = state + (from_slot // page) * state_stride_b
            cell += (from_slot % page) * state_stride_t
            kept = inside & (channel < tl.where(real & (origins[back - 1] < -1), H, 0))
            older += (tl.load(cell + in_state, mask=kept, other=0.0).to(kind),)  # type: ignore[assignment]
        z = _total(parts + row * LINE, PIECE, control, patience, SHARE, RANKS, WORDS, FOURS, TRAP,
                   THREADS, PAIRS).to(kind)  # fmt: skip
        total = z.to(tl.float32)
        total += tl.where(real, total * tap_weight(newest, PACKED, TAPS - 1), 0.0)
        for back in tl.static_range(1, TAPS):
            value = older[back - 1]  # type: ignore[var-annotated]
            source = origins[back - 1]  # type: ignore[var-annotated]
            if real & (source >= 0):
                value = _total(parts + source * LINE, PIECE, control, patience, SHARE, RANKS, WORDS,
                               FOURS, TRAP, THREADS, PAIRS).to(kind)  # fmt: skip
            if PACKED:
                weight = newest
            else:
                weight = load_weight(conv_weight, channel, inside, weight_stride_c,
                                     weight_stride_k, TAPS - 1 - back, False)  # fmt: skip
            total += value.to(tl.float32) * tap_weight(weight, PACKED, TAPS - 1 - back)
        words = tl.broadcast_to(_words(total.to(kind)[None, :]), [RANKS, WORDS])
        place = everyone[:, None] + (start + size + row * LINE + me * SHARE + word)[None, :]
        _send(place, words, whole, SEND)
        write = tl.maximum(slot, 0)
        cell = state + (write // page) * state_stride_b + (write % page) * state_stride_t
        tl.store(cell + in_state, z, mask=inside & (channel < tl.where(real, H, 0)))
    tl.debug_barrier()  # see Copies
    # What the call before used is empty again before the call after is published.
    for stale in range(first, used, programs):
        line = own + before * 2 * size + (start * 0 + stale) * LINE
        place = line + (rank * SHARE)[:, None] + word[None, :]
        empty = tl.full((RANKS, WORDS), -1, tl.int32)
        tl.store(place, empty, mask=whole)
        tl.store(place + size, empty, mask=whole)
    tl.debug_barrier()  # nor read the generation after it
    # Relaxed, since an ordering one would first wait for the peers to have what was stored.
    if tl.atomic_add(control + _ARRIVED, 1, sem="relaxed") == programs * PIECES - 1:
        tl.store(control + _ARRIVED, 0)  # all programs of this call have read the generation
        tl.store(control + _USED + generation, rows)
        tl.store(control, (generation + 1) % GENERATIONS)
    for index in range(first, rows, programs):
        row = start * 0 + index
        carried = tl.load(residual + row * residual_stride + column, mask=present, other=0.0)
        branch = _total(own + start + size + row * LINE, LINE, control, patience, 0, 1,
                        ROW_BLOCK // PER_WORD, FOURS, TRAP, THREADS, PAIRS)  # fmt: skip
        y = (carried.to(tl.float32) + branch).to(carried.dtype)
        mine = (column >= piece * (H // PIECES)) & (column < (piece + 1) * (H // PIECES))
        tl.store(summed + row * H + column, y, mask=mine)
        if HAS_NORM:
            out = scaled(y.to(tl.float32), gain.to(tl.float32), H, eps)
            tl.store(normed + row * H + column, out, mask=mine)


@dataclass
class Workspace:
    """One rank's view of the memory that a group shares.

    peers [ranks] int64: addresses of the ranks' memories, `words_of` words each, all -1; control
    [8] int32, zeros. `send` is one of SENDS. `keep` owns the memory.
    """

    peers: Tensor
    control: Tensor
    rank: int
    ranks: int
    hidden: int
    limit: int = HAND_OVER
    send: int = 2
    patience: int = PATIENCE
    trap: bool = True
    generations: int = GENERATIONS
    keep: Any = field(default=None, repr=False)

    def run(
        self, partial: Tensor, extra: Tensor | None, residual: Tensor, conv_weight: Tensor,
        norm_weight: Tensor | None, eps: float, state: Tensor, slots: Tensor, sources: Tensor,
        programs: int, pieces: int, warps: int = WARPS,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The op by `programs` times `pieces` programs that share rows and a row; see `plan`."""
        check_rows("conv_residual_norm", partial=partial, extra=extra, residual=residual,
                   slots=slots, sources=sources, norm_weight=norm_weight)  # fmt: skip
        rows, width = partial.shape
        pairs = partial.dtype == torch.bfloat16
        piece = width // self.ranks // pieces
        uneven = width % (self.ranks * pieces * (2 if pairs else 1))
        if rows > self.limit or width != self.hidden or uneven:
            raise ValueError(
                f"conv_residual_norm: {rows} rows of {width} channels in {pieces} pieces do not "
                f"fit memory for {self.limit} rows of {self.hidden} on {self.ranks} ranks; use "
                "provider triton"
            )
        summed = torch.empty(rows, width, dtype=partial.dtype, device=partial.device)
        normed = summed[:0] if norm_weight is None else torch.empty_like(summed)
        block, _ = row_block("conv_residual_norm", width)
        packed = packed_taps(conv_weight)
        weight = conv_weight.view(torch.int64) if packed else conv_weight
        send = self.send if self.send != 2 or piece % (8 if pairs else 4) == 0 else 1
        _exchange_kernel[(min(programs, rows), pieces)](
            partial, extra, residual, weight, norm_weight, normed, summed, state, slots, sources,
            self.peers, self.control, self.rank, rows, self.patience, self.limit, state.shape[1],
            partial.stride(0), 0 if extra is None else extra.stride(0), residual.stride(0),
            *conv_weight.stride(), *state.stride(), eps, H=width, W=state.shape[3],
            TAPS=conv_weight.shape[1], RANKS=self.ranks, PIECES=pieces,
            BLOCK=next_power_of_2(piece), ROW_BLOCK=block, GENERATIONS=self.generations,
            PAIRS=pairs, HAS_EXTRA=extra is not None, HAS_NORM=norm_weight is not None,
            PACKED=packed, SEND=send, FOURS=send == 2, TRAP=self.trap,
            THREADS=warps * (64 if is_rocm() else 32), PDL=pdl(), **options(num_warps=warps),
        )  # fmt: skip
        return normed, summed


def words_of(limit: int, hidden: int, bfloat16: bool, generations: int = GENERATIONS) -> int:
    """Words of one rank's memory."""
    return generations * 2 * limit * hidden // (2 if bfloat16 else 1)


def plan(rows: int, share: int) -> tuple[int, int, int]:
    """(programs, pieces of a row, warps) of a step; all programs run at once."""
    units = compute_units()
    pieces = MOST_PIECES
    while pieces > 1 and (pieces * rows > units or share % (2 * pieces)):
        pieces //= 2
    return units * (1 if is_rocm() else PER_UNIT) // pieces, pieces, WARPS


_prepared: dict[str, Workspace] = {}


def conv_residual_norm(
    partial: Tensor, extra: Tensor | None, residual: Tensor, conv_weight: Tensor,
    norm_weight: Tensor | None, eps: float, state: Tensor, slots: Tensor, sources: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See the contract. Raises ValueError for a group that has not been prepared."""
    work, rows = _prepared.get(group), partial.shape[0]
    if group and work is None:
        raise ValueError(f"conv_residual_norm: the ranks of group {group} need shared memory; they "
                         "have prepared none; use provider triton")  # fmt: skip
    if work is None or not 0 < rows <= work.limit:
        return portable(partial, extra, residual, conv_weight, norm_weight, eps, state, slots,
                        sources, group)  # fmt: skip
    return work.run(partial, extra, residual, conv_weight, norm_weight, eps, state, slots, sources,
                    *plan(rows, partial.shape[1] // work.ranks))  # fmt: skip


def prepare(target: Target, facts: Facts, group: str, gather: Gather) -> str | None:
    """Map the ranks' memories into one another and try the exchange; all ranks call it.

    None, or this rank's reason to refuse. Every rank gathers as often, whatever happens to it.
    """
    import platform

    if group in _prepared:
        return None
    hosts = gather(platform.node())
    if len(set(hosts)) > 1:
        return f"needs all ranks on one host; found {', '.join(sorted(set(hosts)))}"
    found: list[Workspace] = []
    for step in (_allocate, _map, _try):
        reason = None
        try:
            reason = step(facts, group, found)
        except Exception as error:  # whatever it is, the portable exchange serves
            text = " ".join(str(error).split())[:200]
            reason = f"cannot share memory between ranks ({type(error).__name__}: {text})"
        if any(gather(reason)):
            return reason
    _prepared[group] = found[0]
    return None


def _allocate(facts: Facts, group: str, found: list[Workspace]) -> str | None:
    """By itself, since mapping waits for all ranks and one may have no memory left."""
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    limit = min(HAND_OVER, max(facts.step_rows, 16))  # the trial has some rows
    words = words_of(limit, facts.hidden, facts.dtype == "bfloat16")
    memory = symmetric.empty(words, dtype=torch.int32, device=device)
    memory.fill_(-1)
    torch.cuda.synchronize()
    found.append(Workspace(
        torch.empty(0), torch.zeros(8, dtype=torch.int32, device=device), 0, 0, facts.hidden,
        limit, 0 if torch.version.hip else 2, TRIAL_PATIENCE, trap=False, keep=memory,
    ))  # fmt: skip
    return None


def _map(facts: Facts, group: str, found: list[Workspace]) -> str | None:
    import torch.distributed._symmetric_memory as symmetric

    work, memory = found[0], found[0].keep
    handle = symmetric.rendezvous(memory, cast(Any, group))
    # Addresses are those of allocations, of which the memory may be a later part.
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    addresses = [address + offset for address in handle.buffer_ptrs]
    work.peers = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
    work.rank, work.ranks, work.keep = handle.rank, handle.world_size, (memory, handle)
    return None


def _try(facts: Facts, group: str, found: list[Workspace]) -> str | None:
    """Sums that need no rounding, beside the portable exchange: every word has to be right."""
    work, rows = found[0], 5
    device, share = work.control.device, facts.hidden // work.ranks
    draw = torch.Generator().manual_seed(7)

    def grid(*shape: int) -> Tensor:
        # A server's default device, while it builds the model, is not the generator's.
        values = torch.randint(-2, 3, shape, generator=draw, device="cpu") / 4
        return values.to(device=device, dtype=getattr(torch, facts.dtype))

    zeros = torch.full((rows, facts.conv_taps - 1), -1, device=device)
    arguments = (
        (work.rank + 1) * grid(rows, facts.hidden), None, grid(rows, facts.hidden),
        grid(share, facts.conv_taps), None, 1e-6, grid(2, 8, 1, share),
        torch.arange(rows, device=device), zeros,
    )  # fmt: skip
    wanted = portable(*arguments, group)[1]
    for programs in (rows, 1, 2, rows):
        got = work.run(*arguments, programs, 1)[1]
        if int(work.control[GAVE_UP]):
            return "waited in vain for words of another rank"
        if not torch.equal(got, wanted):
            return "got other words than the portable exchange"
    work.patience, work.trap = PATIENCE, True
    return None
