// Routed experts of a few tokens: both products in one launch, weights of 4 bits streamed once.
//
// Compiled for one shape at a time by these macros: HIDDEN and INNER columns of the two products;
// W13_ROW, S13_ROW, W2_ROW, S2_ROW bytes of a row of codes and of scales; TOP_K; EXPERTS; BLOCK codes
// of a scale (16: E4M3, 32: E8M0); GAIN 1 if there are global scales; INTERLEAVED 1 if gate and up
// rows alternate; WARPS that compute, CODE_WARPS that bring codes; UP_WARPS_K warps that share k in
// the first product, UP_TILES and DOWN_TILES of 16 rows of a warp, UP_KS and DOWN_KS columns of a
// stage; STAGES; LISTED pairs at most; RESIDENT blocks of an SM.

#include "routed_experts_common.cu"

#define THREADS (32 * (WARPS + 2 + CODE_WARPS))

// Both products of a few tokens in one launch, with weights on their way through shared memory: two
// warps of a block ask for what the others compute STAGES - 1 stages later, past the ends of items, of
// experts and of the first product. A stage has, for each group of warps, some columns of some rows;
// the warps of a group share its columns. In the first product blocks take neighbouring items, rows of
// an expert for up to 8 of its tokens; in the second, rows of all experts, one for each warp, and sum
// over slots at the end. Between the two each block waits for all others, so they must fit at once.
template <bool UP_>
struct Of {
    static const bool UP = UP_;
    static const int K = UP ? HIDDEN : INNER, KS = UP ? UP_KS : DOWN_KS;
    static const int WARPS_K = UP ? UP_WARPS_K : 1, WARPS_M = WARPS / WARPS_K;
    static const int TILES = UP ? UP_TILES : DOWN_TILES, ROWS = 16 * TILES;
    static const int SLABS = (UP ? 2 * INNER : HIDDEN) / ROWS, PACKS = SLABS / WARPS_M;
    static const int W_ROW = UP ? W13_ROW : W2_ROW, S_ROW = UP ? S13_ROW : S2_ROW;
    static const int SHARE = KS / WARPS_K, CHUNKS = SHARE / CHUNK, PARTS_K = K / KS;
    // Rows that lie in memory without gaps come at once, others with pitches that keep the lanes of
    // a load apart.
    static const int S_BYTES = KS / BLOCK;
    static const bool WHOLE = !UP && KS == K && W_ROW == KS / 2;
    static const bool S_WHOLE = !UP && KS == K && S_ROW == S_BYTES;
    static const int PITCH = WHOLE ? W_ROW : (KS / 128 | 1) * 64;
    static const int S_PITCH = S_WHOLE ? S_ROW : (S_BYTES / 16 | 1) * 16;
    static const int GROUP = ROWS * (PITCH + S_PITCH);
};
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define STAGE (LARGER(Of<true>::WARPS_M * Of<true>::GROUP, WARPS * Of<false>::GROUP))

struct Matrix {
    const u8 *w, *scales;
    const float* gains;
    i64 w_expert, s_expert, g_expert, g_row;
};
// Pairs by expert, an expert's from starts[expert] on; of each tile of up to 8 of them its expert, and
// its number among the expert's tiles times 2^16.
struct Lists {
    int chosen[LISTED], owners[LISTED], starts[EXPERTS + 1], cursors[EXPERTS], found;
};

DEVICE void list_tiles(Lists& lists, const int* ids, int pairs) {
    const int tid = threadIdx.x, lane = tid & 31;
    for (int i = tid; i < EXPERTS; i += THREADS) lists.cursors[i] = 0;
    wait_for_previous();
    barrier();
    for (int i = tid; i < pairs; i += THREADS) {
        const int expert = ids[i];
        if (expert >= 0 && expert < EXPERTS) add_shared(&lists.cursors[expert], 1);
    }
    barrier();
    if (tid >= 32) return;
    // Each lane counts neighbouring experts; pairs in the low half, tiles in the high one.
    const int EACH = (EXPERTS + 31) / 32;
    int counts[EACH], mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        counts[i] = lane * EACH + i < EXPERTS ? lists.cursors[lane * EACH + i] : 0;
        mine += counts[i] + ((counts[i] + 7) / 8 << 16);
    }
    int before = sum_up_to(mine, lane) - mine;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int expert = lane * EACH + i, tiles = (counts[i] + 7) / 8;
        if (expert < EXPERTS) lists.starts[expert] = lists.cursors[expert] = before & 0xFFFF;
        for (int j = 0; j < tiles; j++) lists.owners[(before >> 16) + j] = expert | j << 16;
        before += counts[i] + (tiles << 16);
    }
    if (lane < 31) return;
    lists.starts[EXPERTS] = before & 0xFFFF;
    lists.found = before >> 16;
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

// Calls stage(first tile, first slab, part of k) for all stages of a block, in order.
template <class P, class F>
DEVICE void walk(int found, F stage) {
    const int lists = found > 0 ? (found + WARPS - 1) / WARPS : 1;
    const i64 all = P::UP ? found * P::PACKS : P::SLABS;
    // Blocks of one SM, as they are commonly laid out, are neighbours: their sum comes out even.
    const int units = gridDim.x / RESIDENT, at = blockIdx.x % units * RESIDENT + blockIdx.x / units;
    const int begin = at * all / gridDim.x, end = (at + 1) * all / gridDim.x;
    if (P::UP) {
        int tile = begin / P::PACKS, pack = begin % P::PACKS;
        for (int n = begin; n < end; n++) {
            for (int part = 0; part < P::PARTS_K; part++) stage(tile, pack * P::WARPS_M, part);
            if (++pack < P::PACKS) continue;
            pack = 0;
            tile++;
        }
    } else {
        for (int slab = begin; slab < end; slab++)
            for (int list = 0; list < lists; list++)
                for (int part = 0; part < P::PARTS_K; part++) stage(list * WARPS, slab, part);
    }
}

// CODE_WARPS warps bring codes and one brings scales; `turn` is this one's among its like.
template <class P, bool CODES>
DEVICE void produce(const Lists& lists, const Matrix& m, u8* ring, u64* full, u64* empty,
                    Place& place, int lane, int turn) {
    const int BYTES = CODES ? P::KS / 2 : P::S_BYTES, PITCH = CODES ? P::PITCH : P::S_PITCH;
    const int ROW = CODES ? P::W_ROW : P::S_ROW, COPIES = (CODES ? P::WHOLE : P::S_WHOLE) ? 1 : P::ROWS;
    const int EACH = COPIES == 1 ? P::ROWS * BYTES : BYTES, TURNS = CODES ? CODE_WARPS : 1;
    const u8* const from = CODES ? m.w : m.scales;
    const i64 step = CODES ? m.w_expert : m.s_expert;
    walk<P>(lists.found, [&](int tile, int slab, int part) {
        wait_for_phase(empty + place.slot, place.parity ^ 1);
        const int left = P::UP ? P::WARPS_M : lists.found - tile;
        const int groups = left < P::WARPS_M ? left : P::WARPS_M;
        const int copies = (groups * COPIES - turn + TURNS - 1) / TURNS;
        if (lane == 0) arrive_and_expect(full + place.slot, copies * EACH);
        warp_barrier();
        for (int i = lane * TURNS + turn; i < groups * COPIES; i += 32 * TURNS) {
            const int group = i / COPIES, at = i % COPIES, tall = at >> 4, r = at & 15;
            const i64 expert = lists.owners[P::UP ? tile : tile + group] & 0xFFFF;
            const int block = (P::UP ? slab + group : slab) * P::TILES + tall;
            // Of the first product's rows, gates come first and then their ups.
            const int row = !P::UP        ? block * 16 + r
                            : INTERLEAVED ? block * 16 + 2 * (r & 7) + (r >> 3)
                                          : block * 8 + (r & 7) + (r >> 3) * INNER;
            bring(ring + place.slot * STAGE + group * P::GROUP + (CODES ? 0 : P::ROWS * P::PITCH) +
                      at * PITCH,
                  from + expert * step + (i64)row * ROW + part * BYTES,
                  EACH, full + place.slot);
        }
        advance(place);
    });
}

// What the warps of a group hand to the one that sums over them: two items of each group by turns.
struct Handed {
    float sums[UP_WARPS_K][UP_TILES * 4][32];
    u64 given, taken;
};

// One warp ends items of the first product. Sums 0 and 2 of a lane are gate and up of one token, sums 1
// and 3 those of the next token; the order is always the same.
DEVICE void end_items(const Lists& lists, const Matrix& m, u16* out, Handed* handed, int lane) {
    typedef Of<true> P;
    const int g = lane >> 2;
    int buffer = 0, turn = 0;
    walk<P>(lists.found, [&](int tile, int slab, int part) {
        if (part < P::PARTS_K - 1) return;
        const int owner = lists.owners[tile], expert = owner & 0xFFFF;
        const int first = lists.starts[expert] + (owner >> 16) * 8, last = lists.starts[expert + 1];
        for (int group = 0; group < P::WARPS_M; group++) {
            Handed& h = handed[group * 2 + buffer];
            wait_for_phase(&h.given, turn);
#pragma unroll
            for (int j = 0; j < P::TILES * 2; j++) {
                const int odd = j & 1, tall = j >> 1, at = first + (lane & 3) * 2 + odd;
                if (at >= last) continue;
                const int row = ((slab + group) * P::TILES + tall) * 8 + g;
                float low = UNSHIFT, high = UNSHIFT, a = 0, b = 0;
                if (GAIN) {
                    const float* const gains = m.gains + expert * m.g_expert;
                    low *= gains[(INTERLEAVED ? 2 * row : row) * m.g_row];
                    high *= gains[(INTERLEAVED ? 2 * row + 1 : row + INNER) * m.g_row];
                }
                for (int s = 0; s < P::WARPS_K; s++) {
                    a += h.sums[s][tall * 4 + odd][lane];
                    b += h.sums[s][tall * 4 + odd + 2][lane];
                }
                // Gate and up are rounded to storage before the activation, as the contract says.
                const float gate = from_bf16(to_bf16(a * low)), up = from_bf16(to_bf16(b * high));
                out[lists.chosen[at] * (i64)INNER + (row & ~7) + (row & 3) * 2 + (row >> 2 & 1)] =
                    to_bf16(silu(gate) * up);
            }
            warp_barrier();
            if (lane == 0) arrive(&h.taken);
        }
        buffer ^= 1;
        turn ^= buffer ^ 1;
    });
}

// Adds a stage's rows times up to 8 tokens, whose columns lie at `tokens` or, in pairs (j, j + 4), at
// `kept`; what is in shared memory of the others is read once the stage is ready.
template <class P, bool KEPT>
DEVICE void multiply_stage(float (*sums)[2][4], const u16* tokens, const uint4* kept, const u8* row,
                           const u8* row_scales, u64* ready, int parity) {
    const int TILES = P::TILES;
    uint4 ahead[4];
    auto load_tokens = [&](int chunk) {
        for (int i = 0; i < 4; i++)
            ahead[i] = KEPT ? kept[chunk * 16 + i * 4] : load_row(tokens + chunk * CHUNK + i * 8);
    };
    load_tokens(0);
    wait_for_phase(ready, parity);
#pragma unroll
    for (int c = 0; c < P::CHUNKS; c++) {
        uint4 now[4], low[TILES], high[TILES];
        u32 low_scale[TILES][2], high_scale[TILES][2];
#pragma unroll
        for (int i = 0; i < 4; i++) now[i] = ahead[i];
        if (c + 1 < P::CHUNKS) load_tokens(c + 1);
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
            uint4 v = now[i];  // the second product's come as pairs (j, j + 4)
            if (P::UP && !KEPT)
                v = {permute(v.x, v.z, 0x5410), permute(v.x, v.z, 0x7632),
                     permute(v.y, v.w, 0x5410), permute(v.y, v.w, 0x7632)};
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

template <class P>
DEVICE void consume(const Lists& lists, const Matrix& m, const u16* x, i64 x_stride, u16* out,
                    i64 out_stride, const int* ids, const float* weights, int pairs, u8* ring,
                    u64* full, u64* empty, Place& place, Handed* handed) {
    const int TILES = P::TILES, WARPS_K = P::WARPS_K, ROWS = P::ROWS;
        SHARED uint4 kept[P::UP ? WARPS * P::PARTS_K * P::CHUNKS * 16 : 1];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, quarter = lane & 3;
    const int share = warp % WARPS_K, group = warp / WARPS_K;
    float sums[TILES][2][4], row_gains[TILES * 2];
    const u16 *start = x, *tokens = x;
    int known = -1, expert = 0, first = 0, last = 0, buffer = 0, turn = 0;
    bool one = false;
    walk<P>(lists.found, [&](int tile, int slab, int part) {
        const int own = P::UP ? tile : tile + group;
        const bool mine = P::UP || own < lists.found;
        if (mine && own != known) {
            known = own;
            const int owner = lists.owners[own];
            expert = owner & 0xFFFF;
            first = lists.starts[expert] + (owner >> 16) * 8;
            last = lists.starts[expert + 1];
            // Columns of no token repeat one that is there: no column touches another.
            const int pair = lists.chosen[first + g < last ? first + g : first];
            start = x + (P::UP ? pair / TOP_K : pair) * x_stride + share * P::SHARE + quarter * 32;
            one = P::UP && last - first == 1;
            if (one) {
                // A single token stays in shared memory, each warp's columns in pairs (j, j + 4).
                const u16* const from = start - quarter * 32;
                for (int i = lane; i < P::PARTS_K * P::CHUNKS * 16; i += 32) {
                    const int part = i / (P::CHUNKS * 16), at = i % (P::CHUNKS * 16);
                    const uint4 v = load_row(from + part * P::KS + at * 8);
                    kept[warp * P::PARTS_K * P::CHUNKS * 16 + (i & ~15) + (i & 3) * 4 + (i >> 2 & 3)] =
                        {permute(v.x, v.z, 0x5410), permute(v.x, v.z, 0x7632),
                         permute(v.y, v.w, 0x5410), permute(v.y, v.w, 0x7632)};
                }
                warp_barrier();
            }
        }
        if (part == 0) {
            tokens = start;
            for (int i = 0; i < TILES * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0;
            if (GAIN && !P::UP && mine)
                for (int i = 0; i < TILES * 2; i++)
                    row_gains[i] = m.gains[expert * m.g_expert + (slab * ROWS + i * 8 + g) * m.g_row];
        }
        const u8* const here = ring + place.slot * STAGE + group * P::GROUP;
        const u8* const row = here + g * P::PITCH + share * (P::SHARE / 2) + quarter * 16;
        const u8* const row_scales =
            here + ROWS * P::PITCH + g * P::S_PITCH + (share * P::SHARE + quarter * 32) / BLOCK;
        const uint4* const mine_kept =
            kept + (P::UP ? (warp * P::PARTS_K + part) * P::CHUNKS * 16 + quarter : 0);
        u64* const ready = full + place.slot;
        if (!mine) wait_for_phase(ready, place.parity);
        else if (P::UP && one)
            multiply_stage<P, true>(sums, tokens, mine_kept, row, row_scales, ready, place.parity);
        else
            multiply_stage<P, false>(sums, tokens, mine_kept, row, row_scales, ready, place.parity);
        warp_barrier();
        if (lane == 0) arrive(empty + place.slot);
        advance(place);
        tokens += P::KS;
        if (part < P::PARTS_K - 1) return;
        if (P::UP) {
            Handed& h = handed[group * 2 + buffer];
            wait_for_phase(&h.taken, turn ^ 1);
            for (int i = 0; i < TILES * 4; i++)
                h.sums[share][i][lane] = sums[i / 4][0][i % 4] + sums[i / 4][1][i % 4];
            warp_barrier();
            if (lane == 0) arrive(&h.given);
            buffer ^= 1;
            turn ^= buffer ^ 1;
            return;
        }
        float* const parts = (float*)(ring + STAGES * STAGE);
        for (int i = 0; i < TILES * 4; i++) {
            const int at = first + quarter * 2 + (i & 1), row = i / 4 * 16 + (i / 2 & 1) * 8 + g;
            if (!mine || at >= last) continue;
            float one = (sums[i / 4][0][i % 4] + sums[i / 4][1][i % 4]) * UNSHIFT;
            if (GAIN) one *= row_gains[i / 2];
            parts[lists.chosen[at] * ROWS + row] = one;
        }
        if (tile + WARPS < lists.found) return;
        barrier_of(32 * WARPS);
        for (int j = tid; j < pairs / TOP_K * ROWS; j += 32 * WARPS) {
            float total = 0;
            for (int s = 0; s < TOP_K; s++) {
                const int pair = j / ROWS * TOP_K + s, asked = ids[pair];
                if (asked >= 0 && asked < EXPERTS)
                    total += parts[pair * ROWS + j % ROWS] * weights[pair];
            }
            out[j / ROWS * out_stride + slab * ROWS + j % ROWS] = to_bf16(total);
        }
        barrier_of(32 * WARPS);
    });
}

// `phases` has 1 for the first product and 2 for the second one; `counters` are two zeros, and again
// when the kernel ends.
KERNEL(THREADS)
experts(const u16* x, const int* ids, const float* weights, u16* inner, u16* out, int* counters,
        const u8* w13, const u8* scales13, const float* gains13, const u8* w2, const u8* scales2,
        const float* gains2, int pairs, int phases, i64 x_stride, i64 w_expert13, i64 s_expert13,
        i64 g_expert13, i64 g_row13, i64 w_expert2, i64 s_expert2, i64 g_expert2, i64 g_row2,
        i64 out_stride) {
    SHARED Lists lists;
    SHARED Handed handed[2 * Of<true>::WARPS_M];
    SHARED u64 full[STAGES], empty[STAGES];
    DYNAMIC(ring);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const Matrix up = {w13, scales13, gains13, w_expert13, s_expert13, g_expert13, g_row13};
    const Matrix down = {w2, scales2, gains2, w_expert2, s_expert2, g_expert2, g_row2};
    if (tid == 0) {
        for (int i = 0; i < STAGES; i++) {
            start_phases(full + i, CODE_WARPS + 1);
            start_phases(empty + i, WARPS);
        }
        for (Handed& h : handed) {
            start_phases(&h.given, UP_WARPS_K);
            start_phases(&h.taken, 1);
        }
        phases_started();
    }
    list_tiles(lists, ids, pairs);
    barrier();
    let_next_start();
    Place place = {0, 0};
    if (warp == WARPS) {
        if (phases & 1) produce<Of<true>, false>(lists, up, ring, full, empty, place, lane, 0);
        if (phases & 2) produce<Of<false>, false>(lists, down, ring, full, empty, place, lane, 0);
    } else if (warp > WARPS + 1) {
        const int turn = warp - WARPS - 2;
        if (phases & 1) produce<Of<true>, true>(lists, up, ring, full, empty, place, lane, turn);
        if (phases & 2) produce<Of<false>, true>(lists, down, ring, full, empty, place, lane, turn);
    } else if (warp == WARPS + 1) {
        list_pairs(lists, ids, pairs);
        barrier_of(32 * WARPS + 32);
        if (phases & 1) end_items(lists, up, inner, handed, lane);
        if (phases == 3) {
            show_writes();
            warp_barrier();
            if (lane == 0) wait_for_blocks(counters);
            barrier_of(32 * WARPS + 32);
        }
    } else {
        barrier_of(32 * WARPS + 32);
        if (phases & 1)
            consume<Of<true>>(lists, up, x, x_stride, inner, INNER, ids, weights, pairs, ring, full,
                              empty, place, handed);
        if (phases == 3) barrier_of(32 * WARPS + 32);
        if (phases & 2)
            consume<Of<false>>(lists, down, inner, INNER, out, out_stride, ids, weights, pairs, ring,
                               full, empty, place, handed);
        if (phases == 3 && tid == 0) leave_blocks(counters);
    }
}
