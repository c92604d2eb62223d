// Routed experts of a few tokens: both products in one launch, weights of 4 bits streamed once.
//
// Compiled for one shape at a time by these macros: HIDDEN and INNER columns of the two products;
// W13_ROW, S13_ROW, W2_ROW, S2_ROW bytes of a row of codes and of scales; TOP_K; EXPERTS; BLOCK codes
// of a scale (16: E4M3, 32: E8M0); GAIN 1 if there are global scales; INTERLEAVED 1 if gate and up
// rows alternate; WARPS that compute, BRINGERS that bring weights; UP_WARPS_K warps that share k in the
// first product, UP_TILES and DOWN_TILES of 16 rows of a warp, UP_KS and DOWN_KS columns of a stage;
// STAGES; LISTED pairs at most; BUFFERS of sums of a slab; RESIDENT blocks of an SM.

#include "routed_experts_common.cu"

#define THREADS (32 * (WARPS + 1 + BRINGERS))

// Both products of a few tokens in one launch, with weights on their way through shared memory: some
// warps of a block ask for what the others compute STAGES - 1 stages later, past the ends of items, of
// experts and of the first product. A stage has, for each group of warps, some columns of some rows;
// the warps of a group share its columns. In the first product blocks take neighbouring items, rows of
// an expert for up to 8 of its tokens; in the second, rows of all experts, one for each warp, and sum
// over slots at the end, once all blocks have what it multiplies: so they must fit at once.
template <bool UP_>
struct Of {
    static const bool UP = UP_;
    static const int K = UP ? HIDDEN : INNER, KS = UP ? UP_KS : DOWN_KS;
    static const int WARPS_K = UP ? UP_WARPS_K : 1, WARPS_M = WARPS / WARPS_K;
    static const int TILES = UP ? UP_TILES : DOWN_TILES, ROWS = 16 * TILES;
    static const int SLABS = (UP ? 2 * INNER : HIDDEN) / ROWS, PACKS = SLABS / WARPS_M;
    static const int W_ROW = UP ? W13_ROW : W2_ROW, S_ROW = UP ? S13_ROW : S2_ROW;
    static const int SHARE = KS / WARPS_K, CHUNKS = SHARE / CHUNK, PARTS_K = K / KS;
    // Chunks of a stage whose tokens are held at once: of few tokens in the second product too, where
    // each chunk would be waited for as long as all.
    static const int HELD = UP || (CHUNKS <= 4 && LISTED == 64) ? CHUNKS : 1;
    // Rows that lie in memory without gaps come at once, others with pitches that keep the lanes of
    // a load apart.
    static const int S_BYTES = KS / BLOCK;
    static const bool WHOLE = !UP && KS == K && W_ROW == KS / 2;
    static const bool S_WHOLE = !UP && KS == K && S_ROW == S_BYTES;
    static const int PITCH = WHOLE ? W_ROW : (KS / 128 | 1) * 64;
    static const int S_PITCH = S_WHOLE ? S_ROW : (S_BYTES / 16 | 1) * 16;
    static const int GROUP = ROWS * (PITCH + S_PITCH);
    static const int COPIES = WHOLE ? 1 : ROWS, S_COPIES = S_WHOLE ? 1 : ROWS;
};
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define STAGE (LARGER(Of<true>::WARPS_M * Of<true>::GROUP, WARPS * Of<false>::GROUP))

struct Matrix {
    const u8 *w, *scales;
    const float* gains;
    i64 w_expert, s_expert, g_expert, g_row;
};
// Pairs by expert, an expert's from starts[expert] to cursors[expert]; of each tile of up to 8 of them
// its expert, and its number among the expert's tiles times 2^16.
struct Lists {
    u16 chosen[LISTED];
    int owners[LISTED < EXPERTS ? LISTED : EXPERTS + LISTED / 8];
    int starts[EXPERTS], cursors[EXPERTS], found;
    float factors[LISTED];
    bool known[LISTED];
};

// Both lists of up to 32 pairs, by one warp, in the order in which experts come.
DEVICE void list_few(Lists& lists, const int* ids, int pairs) {
    const int lane = threadIdx.x;
    wait_for_previous();
    const int expert = lane < pairs ? ids[lane] : -1;
    const bool known = expert >= 0 && expert < EXPERTS;
    const u32 same = lanes_with(known ? expert : -1);
    const int rank = ones(same & ((1u << lane) - 1)), count = ones(same), tiles = (count + 7) / 8;
    const bool leads = known && rank == 0;
    const int mine = leads ? count + (tiles << 16) : 0, up_to = sum_up_to(mine, lane);
    const int before = up_to - mine;
    if (leads) {
        lists.starts[expert] = before & 0xFFFF;
        lists.cursors[expert] = (before & 0xFFFF) + count;
        for (int j = 0; j < tiles; j++) lists.owners[(before >> 16) + j] = expert | j << 16;
    }
    warp_barrier();
    if (known) lists.chosen[lists.starts[expert] + rank] = lane;
    if (lane == 31) lists.found = up_to >> 16;
}

// Tiles of more pairs, by all warps.
DEVICE void list_tiles(Lists& lists, const int* ids, int pairs) {
    SHARED int totals[THREADS / 32];
    const int tid = threadIdx.x, lane = tid & 31;
    for (int i = tid; i < EXPERTS; i += THREADS) lists.cursors[i] = 0;
    wait_for_previous();
    int expert = tid < pairs ? ids[tid] : -1;
    barrier();
    for (int i = tid; i < pairs; i += THREADS) {
        if (i != tid) expert = ids[i];
        if (expert >= 0 && expert < EXPERTS) add_shared(&lists.cursors[expert], 1);
    }
    barrier();
    // Each thread counts neighbouring experts; pairs in the low half, tiles in the high one.
    const int EACH = (EXPERTS + THREADS - 1) / THREADS;
    int counts[EACH], mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        counts[i] = tid * EACH + i < EXPERTS ? lists.cursors[tid * EACH + i] : 0;
        mine += counts[i] + ((counts[i] + 7) / 8 << 16);
    }
    const int up_to = sum_up_to(mine, lane);
    if (lane == 31) totals[tid >> 5] = up_to;
    barrier();
    int before = up_to - mine;
    for (int warp = 0; warp < tid >> 5; warp++) before += totals[warp];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int expert = tid * EACH + i, tiles = (counts[i] + 7) / 8;
        if (expert < EXPERTS) lists.starts[expert] = lists.cursors[expert] = before & 0xFFFF;
        for (int j = 0; j < tiles; j++) lists.owners[(before >> 16) + j] = expert | j << 16;
        before += counts[i] + (tiles << 16);
    }
    if (tid == THREADS - 1) lists.found = before >> 16;
}

// For one warp. In the order of the pairs, so that all blocks cut an expert's tiles alike.
DEVICE void list_pairs(Lists& lists, const int* ids, int pairs) {
    const int lane = threadIdx.x & 31;
    for (int first = 0; first < pairs; first += 32) {
        const int pair = first + lane, expert = pair < pairs ? ids[pair] : -1;
        const bool known = expert >= 0 && expert < EXPERTS;
        const u32 same = lanes_with(known ? expert : -1);
        const int rank = ones(same & ((1u << lane) - 1));
        if (known) lists.chosen[lists.cursors[expert] + rank] = pair;
        warp_barrier();
        if (known && rank == 0) lists.cursors[expert] += ones(same);
        warp_barrier();
    }
}

// Where in the ring a warp is.
struct Place {
    int slot, parity;
};
DEVICE void advance(Place& place) {
    if (++place.slot < STAGES) return;
    place.slot = 0;
    place.parity ^= 1;
}

// What a block does of the second product: units of 16 rows and a tile's expert, slab by slab, as many
// at a time as there are warps. Slabs follow each other without gaps if sums of BUFFERS of them may be
// open at a time.
struct Share {
    int begin, slabs, found, padded, all;
    float inverse;
};
// Where the share begins of this block, or of the `next` one. In 32 bits, as a division of 64 takes a
// fifth of a microsecond before the first weights are asked for.
DEVICE int start_of(u32 all, int next) {
    // Blocks of one SM, as they are commonly laid out, are neighbours: their sum comes out even.
    const int units = gridDim.x / RESIDENT, at = blockIdx.x % units * RESIDENT + blockIdx.x / units;
    return (u32)(at + next) * all / gridDim.x;
}
DEVICE Share share_of(int found) {
    const int begin = start_of(Of<false>::SLABS, 0), slabs = start_of(Of<false>::SLABS, 1) - begin;
    const int lists = found > 0 ? (found + WARPS - 1) / WARPS : 1;
    const bool gapless = found > 0 && (BUFFERS >= slabs || (BUFFERS > 1 && found >= WARPS));
    const int padded = gapless ? found : lists * WARPS;
    return {begin, slabs, found, padded, slabs * padded, 1.0f / padded};
}
DEVICE int slab_of(const Share& s, int unit) { return (int)((unit + 0.5f) * s.inverse); }
// Units of a stage that have a tile: the first ones.
DEVICE int units_at(const Share& s, int unit) {
    int left = s.all - unit;
    if (s.padded != s.found && left > 0) left = s.found - (unit - slab_of(s, unit) * s.padded);
    return left < WARPS ? left : WARPS;
}

// Tiles of the first half. Each block does its items of one half before those of the other, so that
// the second product begins with tiles which all blocks have left behind.
DEVICE int half_of(int found) {
    return found * Of<true>::PACKS >= 4 * (int)gridDim.x ? found / 2 : found;
}

// Calls stage(first tile or unit, first slab, part of k) for all stages of a block, in order, and of
// the first product ended(half) after those of each half.
template <class P, class F, class G>
DEVICE void walk(int found, F stage, G ended) {
    if (P::UP) {
        const int tiles = half_of(found), items = tiles * P::PACKS;
        const int all = found * P::PACKS;
        for (int half = 0; half < 2; half++) {
            // Blocks with more items in one half have fewer in the other.
            int begin = start_of(items, 0), end = start_of(items, 1);
            if (half) begin = items + start_of(all, 0) - begin, end = items + start_of(all, 1) - end;
            int tile = begin / P::PACKS, pack = begin % P::PACKS;
            for (int n = begin; n < end; n++) {
                for (int part = 0; part < P::PARTS_K; part++) stage(tile, pack * P::WARPS_M, part);
                if (++pack < P::PACKS) continue;
                pack = 0;
                tile++;
            }
            ended(half);
        }
    } else {
        const Share share = share_of(found);
        for (int unit = 0; unit < share.all; unit += WARPS)
            for (int part = 0; part < P::PARTS_K; part++) stage(unit, share.begin, part);
    }
}
template <class P, class F>
DEVICE void walk(int found, F stage) {
    walk<P>(found, stage, [](int) {});
}

// Brings what a stage has of codes or of scales; `turn` is this warp's among those that do.
template <class P, bool CODES>
DEVICE void bring_some(const Lists& lists, const Matrix& m, const Share& share, u8* to, u64* b,
                       int groups, int tile, int slab, int part, int lane, int turn) {
    const int BYTES = CODES ? P::KS / 2 : P::S_BYTES, PITCH = CODES ? P::PITCH : P::S_PITCH;
    const int ROW = CODES ? P::W_ROW : P::S_ROW, COPIES = CODES ? P::COPIES : P::S_COPIES;
    for (int i = lane * BRINGERS + turn; i < groups * COPIES; i += 32 * BRINGERS) {
        const int group = i / COPIES, at = i % COPIES, tall = at >> 4, r = at & 15;
        const int on = P::UP ? group : slab_of(share, tile + group);
        const i64 expert = lists.owners[P::UP ? tile : tile + group - on * share.padded] & 0xFFFF;
        const int block = (slab + on) * P::TILES + tall;
        // Of the first product's rows, gates come first and then their ups.
        const int row = !P::UP        ? block * 16 + r
                        : INTERLEAVED ? block * 16 + 2 * (r & 7) + (r >> 3)
                                      : block * 8 + (r & 7) + (r >> 3) * INNER;
        bring(to + group * P::GROUP + (CODES ? 0 : P::ROWS * P::PITCH) + at * PITCH,
              (CODES ? m.w : m.scales) + expert * (CODES ? m.w_expert : m.s_expert) + (i64)row * ROW +
                  part * BYTES,
              COPIES == 1 ? P::ROWS * BYTES : BYTES, b);
    }
}

template <class P>
DEVICE void produce(const Lists& lists, const Matrix& m, u8* ring, u64* full, u64* empty,
                    Place& place, int lane, int turn) {
    const Share share = share_of(lists.found);
    walk<P>(lists.found, [&](int tile, int slab, int part) {
        wait_idly(empty + place.slot, place.parity ^ 1);
        const int groups = P::UP ? P::WARPS_M : units_at(share, tile);
        // Of copies this warp brings every BRINGERS-th.
        const int copies = (groups * P::COPIES - turn + BRINGERS - 1) / BRINGERS;
        const int s_copies = (groups * P::S_COPIES - turn + BRINGERS - 1) / BRINGERS;
        const int bytes = copies * (P::ROWS / P::COPIES * P::KS / 2) +
                          s_copies * (P::ROWS / P::S_COPIES * P::S_BYTES);
        if (lane == 0) arrive_and_expect(full + place.slot, groups > 0 ? bytes : 0);
        warp_barrier();
        u8* const to = ring + place.slot * STAGE;
        u64* const b = full + place.slot;
        bring_some<P, true>(lists, m, share, to, b, groups, tile, slab, part, lane, turn);
        bring_some<P, false>(lists, m, share, to, b, groups, tile, slab, part, lane, turn);
        advance(place);
    });
}

// What the warps of a group hand to the one that sums over them: two items of each group by turns.
struct Handed {
    float sums[UP_WARPS_K][UP_TILES * 4][32];
};
struct Passed {
    u64 given, taken;
};

// One warp ends items of the first product. Sums 0 and 2 of a lane are gate and up of one token, sums 1
// and 3 those of the next token; the order is always the same. What a lane of the second product loads
// at once lies together, in pairs (j, j + 4), and beside what its row's other lanes load.
DEVICE void end_items(const Lists& lists, const Matrix& m, u16* out, const Handed* handed, Passed* passed,
                      int* counters, int lane) {
    typedef Of<true> P;
    const int g = lane >> 2;
    int buffer = 0, turn = 0;
    walk<P>(lists.found, [&](int tile, int slab, int part) {
        if (part < P::PARTS_K - 1) return;
        const int owner = lists.owners[tile], expert = owner & 0xFFFF;
        const int first = lists.starts[expert] + (owner >> 16) * 8, last = lists.cursors[expert];
        for (int group = 0; group < P::WARPS_M; group++) {
            const Handed& h = handed[group * 2 + buffer];
            Passed& p = passed[group * 2 + buffer];
            float low[P::TILES * 2], high[P::TILES * 2];
#pragma unroll
            for (int j = 0; j < P::TILES * 2; j++) {
                const int row = ((slab + group) * P::TILES + (j >> 1)) * 8 + g;
                const float* const gains = m.gains + expert * m.g_expert;
                low[j] = high[j] = UNSHIFT;
                if (!GAIN) continue;
                low[j] *= gains[(INTERLEAVED ? 2 * row : row) * m.g_row];
                high[j] *= gains[(INTERLEAVED ? 2 * row + 1 : row + INNER) * m.g_row];
            }
            wait_idly(&p.given, turn);
#pragma unroll
            for (int j = 0; j < P::TILES * 2; j++) {
                const int odd = j & 1, tall = j >> 1, at = first + (lane & 3) * 2 + odd;
                if (at >= last) continue;
                const int row = ((slab + group) * P::TILES + tall) * 8 + g;
                float a = 0, b = 0;
                for (int s = 0; s < P::WARPS_K; s++) {
                    a += h.sums[s][tall * 4 + odd][lane];
                    b += h.sums[s][tall * 4 + odd + 2][lane];
                }
                // Gate and up are rounded to storage before the activation, as the contract says.
                const float gate = from_bf16(to_bf16(a * low[j])), up = from_bf16(to_bf16(b * high[j]));
                out[lists.chosen[at] * (i64)INNER + (row & ~127) + (row >> 3 & 3) * 32 +
                    (row >> 5 & 3) * 8 + (row & 3) * 2 + (row >> 2 & 1)] =
                    to_bf16(silu(gate) * up);
            }
            warp_barrier();
            if (lane == 0) arrive(&p.taken);
        }
        buffer ^= 1;
        turn ^= buffer ^ 1;
    }, [&](int half) {
        if (!counters) return;
        show_writes();
        warp_barrier();
        if (lane == 0) come(counters + half);
    });
}

// Chunks of what lies between the products.
template <int CHUNKS>
DEVICE void load_tokens(uint4* held, const u16* from) {
#pragma unroll
    for (int i = 0; i < CHUNKS * 4; i++) held[i] = load_row(from + i * 32);
}

// Adds a stage's rows times up to 8 tokens. They are `held`, or one chunk of them is and the others come
// from `tokens`. What is in shared memory is read once the stage is ready.
template <class P>
DEVICE void multiply_stage(float (*sums)[2][4], const u16* tokens, uint4* held, const u8* row,
                           const u8* row_scales, u64* ready, int parity) {
    const int TILES = P::TILES;
    wait_for_phase(ready, parity);
#pragma unroll
    for (int c = 0; c < P::CHUNKS; c++) {
        uint4 now[4], low[TILES], high[TILES];
        u32 low_scale[TILES][2], high_scale[TILES][2];
#pragma unroll
        for (int i = 0; i < 4; i++) now[i] = held[P::HELD > 1 ? c * 4 + i : i];
        if (P::HELD < P::CHUNKS && c + 1 < P::CHUNKS)
            load_tokens<1>(held, tokens + (c + 1) * CHUNK);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            low[m] = load_row(row + m * 16 * P::PITCH + c * (CHUNK / 2));
            high[m] = load_row(row + (m * 16 + 8) * P::PITCH + c * (CHUNK / 2));
            const u8* const s = row_scales + m * 16 * P::S_PITCH + c * (CHUNK / BLOCK);
            decode_scales(shared_scales(s), low_scale[m][0], low_scale[m][1]);
            decode_scales(shared_scales(s + 8 * P::S_PITCH), high_scale[m][0],
                          high_scale[m][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 v = now[i];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                u32 a[4], b[4];
                decode(word_of(low[m], i), low_scale[m][i / 2], a);
                decode(word_of(high[m], i), high_scale[m][i / 2], b);
                multiply_tiles(sums[m][0], a[0], b[0], a[1], b[1], v.x, v.y);
                multiply_tiles(sums[m][1], a[2], b[2], a[3], b[3], v.z, v.w);
            }
        }
    }
}

DEVICE void consume_up(const Lists& lists, const u16* x, i64 x_stride, u8* ring, u64* full, u64* empty,
                       Place& place, Handed* handed, Passed* passed) {
    typedef Of<true> P;
    const int TILES = P::TILES;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, quarter = lane & 3;
    const int share = warp % P::WARPS_K, group = warp / P::WARPS_K;
    float sums[TILES][2][4];
    const u16* tokens = x;
    uint4 held[P::CHUNKS * 4];
    int known = -1, buffer = 0, turn = 0;
    walk<P>(lists.found, [&](int tile, int slab, int part) {
        if (tile != known) {
            const int owner = lists.owners[tile], expert = owner & 0xFFFF;
            const int first = lists.starts[expert] + (owner >> 16) * 8;
            const int left = lists.cursors[expert] - first;
            // Columns of no token repeat one that is there: no column touches another.
            tokens = x + lists.chosen[first + (g < left ? g : 0)] / TOP_K * x_stride +
                     share * P::SHARE + quarter * 32;
        }
        // As columns lie in a word of codes: in pairs (j, j + 4).
        if (tile != known || P::PARTS_K > 1)
#pragma unroll
            for (int i = 0; i < P::CHUNKS * 4; i++) {
                const uint4 v = load_row(tokens + part * P::KS + i / 4 * CHUNK + i % 4 * 8);
                held[i] = {permute(v.x, v.z, 0x5410), permute(v.x, v.z, 0x7632),
                           permute(v.y, v.w, 0x5410), permute(v.y, v.w, 0x7632)};
            }
        known = tile;
        if (part == 0)
            for (int i = 0; i < TILES * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0;
        const u8* const here = ring + place.slot * STAGE + group * P::GROUP;
        const u8* const row = here + g * P::PITCH + share * (P::SHARE / 2) + quarter * 16;
        const u8* const row_scales =
            here + P::ROWS * P::PITCH + g * P::S_PITCH + (share * P::SHARE + quarter * 32) / BLOCK;
        u64* const ready = full + place.slot;
        multiply_stage<P>(sums, tokens, held, row, row_scales, ready, place.parity);
        warp_barrier();
        if (lane == 0) arrive(empty + place.slot);
        advance(place);
        if (part < P::PARTS_K - 1) return;
        Handed& h = handed[group * 2 + buffer];
        Passed& p = passed[group * 2 + buffer];
        wait_for_phase(&p.taken, turn ^ 1);
        for (int i = 0; i < TILES * 4; i++)
            h.sums[share][i][lane] = sums[i / 4][0][i % 4] + sums[i / 4][1][i % 4];
        warp_barrier();
        if (lane == 0) arrive(&p.given);
        buffer ^= 1;
        turn ^= buffer ^ 1;
    });
}

DEVICE void consume_down(const Lists& lists, const Matrix& m, const u16* inner, u16* out,
                         i64 out_stride, int pairs, u8* ring, u64* full, u64* empty, Place& place,
                         u64* halves) {
    typedef Of<false> P;
    const int TILES = P::TILES, ROWS = P::ROWS;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, quarter = lane & 3;
    const Share own = share_of(lists.found);
    float* const parts = (float*)(ring + STAGES * STAGE);
    float sums[TILES][2][4], row_gains[TILES * 2];
    uint4 held[P::HELD * 4];
    // This warp's unit: a tile and which of the block's slabs; where its two tokens' sums go.
    int tile = warp, local = 0, places[2], seen = -1;
    const int first_half = half_of(lists.found);
    const u16* tokens = inner;
    bool mine = false;
    auto look = [&] {
        while (tile >= own.padded) {
            tile -= own.padded;
            local++;
        }
        mine = local < own.slabs && tile < own.found;
        if (!mine) return;
        if (const int half = tile >= first_half; halves && half > seen) {
            wait_for_phase(halves + half, 0);
            seen = half;
        }
        const int owner = lists.owners[tile], expert = owner & 0xFFFF;
        const int first = lists.starts[expert] + (owner >> 16) * 8, left = lists.cursors[expert] - first;
        tokens = inner + lists.chosen[first + (g < left ? g : 0)] * (i64)INNER + quarter * 8;
        load_tokens<P::HELD>(held, tokens);
        for (int odd = 0; odd < 2; odd++) {
            const int at = quarter * 2 + odd;
            places[odd] = -1;
            if (at < left)
                places[odd] = (local % BUFFERS * pairs + lists.chosen[first + at]) * ROWS + g;
        }
        if (GAIN)
            for (int i = 0; i < TILES * 2; i++)
                row_gains[i] = m.gains[expert * m.g_expert +
                                       ((own.begin + local) * ROWS + i * 8 + g) * m.g_row];
    };
    look();
    int done = 0, end = own.padded;
    const int outputs = pairs / TOP_K * ROWS;
    // Few outputs are summed up at once, as waiting for each other takes longer.
    const bool at_end = BUFFERS >= own.slabs && pairs <= 32;
    for (int unit = 0; unit < own.all; unit += WARPS) {
        for (int i = 0; i < TILES * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0;
        for (int part = 0; part < P::PARTS_K; part++) {
            const u8* const here = ring + place.slot * STAGE + warp * P::GROUP;
            const u8* const row = here + g * P::PITCH + quarter * 16;
            const u8* const row_scales =
                here + ROWS * P::PITCH + g * P::S_PITCH + quarter * 32 / BLOCK;
            u64* const ready = full + place.slot;
            if (mine) multiply_stage<P>(sums, tokens, held, row, row_scales, ready, place.parity);
            else wait_for_phase(ready, place.parity);
            warp_barrier();
            if (lane == 0) arrive(empty + place.slot);
            advance(place);
            if (part == P::PARTS_K - 1) break;
            tokens += P::KS;
            if (mine) load_tokens<P::HELD>(held, tokens);
        }
        for (int odd = 0; odd < 2; odd++)
            if (mine && places[odd] >= 0)
                for (int i = 0; i < TILES * 2; i++) {
                    const int at = i % 2 * 2 + odd;
                    const float one = (sums[i / 2][0][at] + sums[i / 2][1][at]) * UNSHIFT;
                    parts[places[odd] + i * 8] = GAIN ? one * row_gains[i] : one;
                }
        // The next tokens come while others end this stage.
        tile += WARPS;
        look();
        if (unit + WARPS < (at_end ? own.all : end)) continue;
        barrier_of(32 * WARPS);
        int ended = 0;
        for (; end <= unit + WARPS && done + ended < own.slabs; end += own.padded) ended++;
        for (int i = tid; i < ended * outputs; i += 32 * WARPS) {
            const int slab = done + i / outputs, j = i % outputs;
            const float* const these = parts + slab % BUFFERS * pairs * ROWS;
            float total = 0;
            for (int s = 0; s < TOP_K; s++) {
                const int at = j / ROWS * TOP_K + s;
                if (lists.known[at]) total += these[at * ROWS + j % ROWS] * lists.factors[at];
            }
            out[j / ROWS * out_stride + (own.begin + slab) * ROWS + j % ROWS] = to_bf16(total);
        }
        done += ended;
        if (BUFFERS < own.slabs) barrier_of(32 * WARPS);
    }
}

// `phases` has 1 for the first product and 2 for the second one; `counters` are three zeros, and again
// when the kernel ends.
KERNEL(THREADS)
experts(const u16* x, const int* ids, const float* weights, u16* inner, u16* out, int* counters,
        const u8* w13, const u8* scales13, const float* gains13, const u8* w2, const u8* scales2,
        const float* gains2, int pairs, int phases, i64 x_stride, i64 w_expert13, i64 s_expert13,
        i64 g_expert13, i64 g_row13, i64 w_expert2, i64 s_expert2, i64 g_expert2, i64 g_row2,
        i64 out_stride) {
    SHARED Lists lists;
    SHARED Passed passed[2 * Of<true>::WARPS_M];
    SHARED u64 full[STAGES], empty[STAGES], halves[2];
    DYNAMIC(ring);
    // Beyond the ring: what the first product hands on, then what pairs add to the second one's sums.
    Handed* const handed = (Handed*)(ring + STAGES * STAGE);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const Matrix up = {w13, scales13, gains13, w_expert13, s_expert13, g_expert13, g_row13};
    const Matrix down = {w2, scales2, gains2, w_expert2, s_expert2, g_expert2, g_row2};
    if (tid == 0) {
        for (int i = 0; i < STAGES; i++) {
            start_phases(full + i, BRINGERS);
            start_phases(empty + i, WARPS);
        }
        for (u64& half : halves) start_phases(&half, 1);
        for (Passed& p : passed) {
            start_phases(&p.given, UP_WARPS_K);
            start_phases(&p.taken, 1);
        }
        phases_started();
    }
    const bool few = pairs <= 32;
    if (!few) list_tiles(lists, ids, pairs);
    else if (warp == 0) list_few(lists, ids, pairs);
    barrier();
    let_next_start();
    Place place = {0, 0};
    if (warp > WARPS) {
        const int turn = warp - WARPS - 1;
        if (phases & 1) produce<Of<true>>(lists, up, ring, full, empty, place, lane, turn);
        if (phases & 2) produce<Of<false>>(lists, down, ring, full, empty, place, lane, turn);
    } else if (warp == WARPS) {
        if (!few) list_pairs(lists, ids, pairs);
        auto keep_factors = [&] {
            for (int i = lane; i < pairs; i += 32) {
                lists.known[i] = ids[i] >= 0 && ids[i] < EXPERTS;
                lists.factors[i] = weights[i];
            }
        };
        if (phases != 3) keep_factors();
        barrier_of(32 * WARPS + 32);
        if (phases == 3) keep_factors();  // consumers wait for this warp again before they are read
        if (phases & 1) end_items(lists, up, inner, handed, passed, phases == 3 ? counters : 0, lane);
        if (phases == 3 && lane == 0) {
            for (int half = 0; half < 2; half++) {
                wait_for_blocks(counters + half);
                arrive(halves + half);
            }
            leave_blocks(counters);
        }
    } else {
        barrier_of(32 * WARPS + 32);
        if (phases & 1)
            consume_up(lists, x, x_stride, ring, full, empty, place, handed, passed);
        if (phases & 2)
            consume_down(lists, down, inner, out, out_stride, pairs, ring, full, empty, place,
                         phases == 3 ? halves : 0);
    }
}
