// Routed experts of many tokens on Hopper: 4-bit weights decoded into the registers of WGMMA.
//
// An item is the tokens of a plan's tile (routed_experts_sort.py), all of one expert, times some rows
// of that expert. Rows are the left operand: each of a block's warpgroups has 64 of them and decodes
// their codes straight into the fragments of wgmma.m64nNk16, so nothing decoded is written. Tokens are
// the right operand, in shared memory as WGMMA wants them (rows of 64 columns, 128 bytes, whose
// sixteenths are swapped by the row's number), N of them, as few as hold the tile.
//
// Blocks stay and take one item after the other. A warpgroup of its own asks for everything by
// asynchronous copies, in steps of 128 columns, through a ring of STAGES that runs on into the next
// item; the others wait for copies, and it for places that all have read, so that while one warpgroup
// decodes, or writes its results, others multiply.
//
// A lane takes 32 neighbouring codes of a row and step: a 32-bit word has codes 0..3 in its low half
// and 4..7 in its high half, and pair j of it is (code j, code j + 4), as both halves are decoded at
// once. Of what the tensor cores call columns 32 i + 8 c + 2 q + e, lane 4 g + q holds those of its q,
// and finds there code 8 i + c + 4 e of its own. So the tokens' columns are arranged alike beforehand:
// of each 128, column 32 q + 8 i + 4 e + c stands at 32 i + 8 c + 2 q + e. The first product writes
// for the second one in that order.
//
// Wide tiles are two halves of tokens, each with sums of its own, so that a decoded fragment serves
// both. Where all columns of a tile's tokens fit, a block keeps them (RUN slabs of rows one after the
// other), and only codes come through the ring.
//
// Macros: K columns; W_ROW and S_ROW bytes of a row of codes and of scales; TOP_K; BLOCK codes of a
// scale (16: E4M3, 32: E8M0); GAIN 1 if there are global scales; UP 1 for the first product, of which
// INTERLEAVED is 1 if gate and up rows alternate, else HALF is the rows of each; GROUPS 2 to 4
// warpgroups; NT tokens of a tile in HALVES 1 or 2; N of the last half is the next one of its most, that
// less GRAIN, .. LEAST; STAGES; RUN slabs of an item, 1 where tokens go through the ring; RESIDENT
// blocks of an SM at least; SORTED 1 to take large tiles first. With COMBINE 1, only TOP_K, BLOCK and
// RESIDENT.

#include "routed_experts_common.cu"
#include "instructions_wgmma.cu"

#ifndef ON_HOST
DEVICE void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}
template <int BYTES>
DEVICE void copy_few(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                 : "memory");
}
// A warpgroup's registers for each thread, from and to what the block has.
template <int COUNT>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// sums [64, N] += a [64, 16] in fragments times the N rows of sixteen columns that `b` describes.
template <int N>
DEVICE void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b);

#define SAY(a, b, c, d, e, f, g, h) \
    "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define S0 SAY(0, 1, 2, 3, 4, 5, 6, 7)
#define S1 S0 "," SAY(8, 9, 10, 11, 12, 13, 14, 15)
#define S2 S1 "," SAY(16, 17, 18, 19, 20, 21, 22, 23)
#define S3 S2 "," SAY(24, 25, 26, 27, 28, 29, 30, 31)
#define S4 S3 "," SAY(32, 33, 34, 35, 36, 37, 38, 39)
#define S5 S4 "," SAY(40, 41, 42, 43, 44, 45, 46, 47)
#define S6 S5 "," SAY(48, 49, 50, 51, 52, 53, 54, 55)
#define S7 S6 "," SAY(56, 57, 58, 59, 60, 61, 62, 63)
#define S8 S7 "," SAY(64, 65, 66, 67, 68, 69, 70, 71)
#define S9 S8 "," SAY(72, 73, 74, 75, 76, 77, 78, 79)
#define S10 S9 "," SAY(80, 81, 82, 83, 84, 85, 86, 87)
#define S11 S10 "," SAY(88, 89, 90, 91, 92, 93, 94, 95)
#define S12 S11 "," SAY(96, 97, 98, 99, 100, 101, 102, 103)
#define S13 S12 "," SAY(104, 105, 106, 107, 108, 109, 110, 111)
#define S14 S13 "," SAY(112, 113, 114, 115, 116, 117, 118, 119)
#define S15 S14 "," SAY(120, 121, 122, 123, 124, 125, 126, 127)
#define R(i) "+f"(d[i])
#define EIGHT(i) R(i), R(i + 1), R(i + 2), R(i + 3), R(i + 4), R(i + 5), R(i + 6), R(i + 7)
#define D0 EIGHT(0)
#define D1 D0, EIGHT(8)
#define D2 D1, EIGHT(16)
#define D3 D2, EIGHT(24)
#define D4 D3, EIGHT(32)
#define D5 D4, EIGHT(40)
#define D6 D5, EIGHT(48)
#define D7 D6, EIGHT(56)
#define D8 D7, EIGHT(64)
#define D9 D8, EIGHT(72)
#define D10 D9, EIGHT(80)
#define D11 D10, EIGHT(88)
#define D12 D11, EIGHT(96)
#define D13 D12, EIGHT(104)
#define D14 D13, EIGHT(112)
#define D15 D14, EIGHT(120)
#define MULTIPLY(N, LAST, A0, A1, A2, A3, B)                                                    \
    template <>                                                                                 \
    DEVICE void multiply<N>(float (&d)[N / 2], const u32 (&a)[4], u64 b) {                      \
        asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0;\n"                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" S##LAST "}, " \
                     "{%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, 0;}"             \
                     : D##LAST                                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                       \
                     : "memory");                                                               \
    }
MULTIPLY(16, 0, 8, 9, 10, 11, 12)
MULTIPLY(32, 1, 16, 17, 18, 19, 20)
MULTIPLY(48, 2, 24, 25, 26, 27, 28)
MULTIPLY(64, 3, 32, 33, 34, 35, 36)
MULTIPLY(80, 4, 40, 41, 42, 43, 44)
MULTIPLY(96, 5, 48, 49, 50, 51, 52)
MULTIPLY(112, 6, 56, 57, 58, 59, 60)
MULTIPLY(128, 7, 64, 65, 66, 67, 68)
MULTIPLY(144, 8, 72, 73, 74, 75, 76)
MULTIPLY(160, 9, 80, 81, 82, 83, 84)
MULTIPLY(176, 10, 88, 89, 90, 91, 92)
MULTIPLY(192, 11, 96, 97, 98, 99, 100)
MULTIPLY(208, 12, 104, 105, 106, 107, 108)
MULTIPLY(224, 13, 112, 113, 114, 115, 116)
MULTIPLY(240, 14, 120, 121, 122, 123, 124)
MULTIPLY(256, 15, 128, 129, 130, 131, 132)
#endif

#if COMBINE
// out[t] = the sum over slots s in order of weights[t, s] * parts[t * TOP_K + s]; eight columns a thread.
KERNEL(256)
combine(const u16* parts, const int* ids, const float* weights, u16* out, int tokens, int experts,
        int columns, i64 parts_stride, i64 out_stride) {
    const int i = blockIdx.x * 256 + threadIdx.x, token = i / (columns / 8);
    const int column = i % (columns / 8) * 8;
    let_next_start();
    wait_for_previous();
    if (token >= tokens) return;
    const u16* const from = parts + token * TOP_K * parts_stride + column;
    uint4 slots[TOP_K];
    float sums[8] = {};
#pragma unroll
    for (int s = 0; s < TOP_K; s++) {
        // Nothing was written for a pair whose expert is not one of ours.
        const int expert = ids[token * TOP_K + s];
        slots[s] = {0, 0, 0, 0};
        if (expert >= 0 && expert < experts) slots[s] = *(const uint4*)(from + s * parts_stride);
    }
#pragma unroll
    for (int s = 0; s < TOP_K; s++) {
        const float weight = weights[token * TOP_K + s];
#pragma unroll
        for (int j = 0; j < 8; j++)
            sums[j] += weight * from_bf16(word_of(slots[s], j / 2) >> j % 2 * 16);
    }
    const uint4 packed = {to_bf16_pair(sums[0], sums[1]), to_bf16_pair(sums[2], sums[3]),
                          to_bf16_pair(sums[4], sums[5]), to_bf16_pair(sums[6], sums[7])};
    *(uint4*)(out + token * out_stride + column) = packed;
}
#else

#define STEPS (K / CHUNK)
#define THREADS (128 * GROUPS)  // that multiply
#define MORE 128                // that copy
#define ROWS (64 * GROUPS)  // of a slab
#define SCALE_BYTES (CHUNK / BLOCK)
#if BLOCK == 16
typedef u16 Scale;  // of 32 columns
#else
typedef u8 Scale;
#endif

// Registers of a thread at first, of one that copies, and of one that multiplies.
#define EVEN (65536 / (RESIDENT * (THREADS + MORE)) / 8 * 8)
#define FEW (GROUPS == 4 ? 64 : GROUPS == 3 ? 56 : RESIDENT == 1 ? 72 : 48)
#define OWN (EVEN + (EVEN - FEW) / GROUPS / 8 * 8)
static_assert(FEW <= EVEN && GROUPS * (OWN - EVEN) <= EVEN - FEW, "what a block has must suffice");
static_assert(STAGES <= 3 * STEPS * RUN, "four lists are as many as the ring runs into");

// Shared memory: tokens' columns, codes, scales, pairs of four items, two barriers of each stage and one
// of each step whose tokens stay, and a word for each tile: its pairs, its number, its expert.
#define TOKEN_BYTES (NT * CHUNK * 2)
#define KEPT (RUN > 1)
#define CODES_AT ((KEPT ? STEPS : STAGES) * TOKEN_BYTES)
#define SCALES_AT (CODES_AT + STAGES * ROWS * CHUNK / 2)
#define LISTS_AT (SCALES_AT + STAGES * ROWS * SCALE_BYTES)
#define BARRIERS_AT (LISTS_AT + 4 * NT * 4)
#define KEPT_AT (BARRIERS_AT + 16 * STAGES)
#define TABLE_AT (KEPT_AT + KEPT * 8 * STEPS)
#define WIDE (NT / HALVES)  // tokens of a half
static_assert(!SORTED || LISTS_AT >= 4096, "tiles are sorted in memory that copies fill later");

// Whether rows of any slab are as far apart as those of the first; else those of its groups are.
#define EVENLY (GROUPS != 3 || !UP)

// Row of the matrix that is fragment row `row` of slab `slab`. Rows g and g + 8 of a warp are those of
// its lanes: neighbours; or gate and up of what stands at place 8 * warp + g of the arranged output.
DEVICE int matrix_row(int slab, int row) {
    const int within = row & 7, high = row >> 3 & 1, warp = slab * (4 * GROUPS) + (row >> 4);
    if (!UP) return warp * 16 + 2 * within + high;
    const int i = (warp >> 4) * 128 + (within >> 1) * 32 + (within & 1) * 4 + (warp >> 2 & 3) * 8 +
                  (warp & 3);
    return INTERLEAVED ? 2 * i + high : i + high * HALF;
}

struct Arguments {
    const u8* x;
    const int* plan;
    const u8 *w, *scales;
    const float* gains;
    u16* out;
    int tiles, experts, runs, items;
    i64 x_stride, w_expert, s_expert, g_expert, g_row, out_stride;
};

// A block's item of each round. Where large tiles come first, rounds go to and fro, so that blocks come
// to about as many tokens each: experts differ, and an item is much of what a block does.
DEVICE int item_of(int round) {
    const bool back = SORTED && round % 2;
    return back ? (round + 1) * gridDim.x - 1 - blockIdx.x : round * gridDim.x + blockIdx.x;
}

DEVICE u32 entry_of(const Arguments& t, int item) {
    return ((const u32*)(memory + TABLE_AT))[item / t.runs];
}
DEVICE int pairs_of(u32 entry) { return entry >> 22; }
DEVICE int tile_of(u32 entry) { return entry >> 12 & 1023; }
DEVICE int expert_of(u32 entry) { return entry & 4095; }

// Writes the table of tiles, and says how many there are.
DEVICE int list_tiles(const int* plan, int tiles, int experts, int tid) {
    u32* const table = (u32*)(memory + TABLE_AT);
    u32* const found = SORTED ? (u32*)memory : table;  // where nothing is copied to yet
    for (int tile = tid; tile < (tiles + 3 & ~3); tile += THREADS + MORE) {
        const int expert = tile < tiles ? plan[3 * experts + tile] : -1;
        const int left = expert < 0 ? 0 : plan[expert] - (tile - plan[experts + expert]) * NT;
        found[tile] = expert < 0 ? 0 : (left < NT ? left : NT) << 22 | tile << 12 | expert;
    }
    const int used = plan[2 * experts - 1] + (plan[experts - 1] + NT - 1) / NT;
    if (SORTED) {
        barrier();
        for (int tile = tid; tile < used; tile += THREADS + MORE) {
            const u32 own = found[tile];
            int before = 0;
            for (int i = 0; i < used; i += 4) {
                const uint4 some = *(const uint4*)(found + i);
                before += (some.x > own) + (some.y > own) + (some.z > own) + (some.w > own);
            }
            table[before] = own;
        }
    }
    return used;
}

// Asks for one step after the other, of one item after the other. Of 128 threads each copies a
// sixteenth of some tokens' columns, a quarter of some rows' codes, and a row's scales or two.
DEVICE void copy_all(const Arguments& t, int tid) {
    const int part = tid & 15, first = tid >> 4;
    const u32 base = shared_address(memory);
    const u32 to_tokens = base + (part >> 3) * (NT * 128) + first * 128 + (((part ^ first) & 7) << 4);
    int stage = 0, turn = 1;
#pragma unroll 1
    for (int count = 0, item = blockIdx.x; item < t.items; item = item_of(++count)) {
        const u32 entry = entry_of(t, item);
        const int found = pairs_of(entry), start = item % t.runs * RUN;
        const i64 expert = expert_of(entry);
        const int* const pairs = t.plan + 3 * t.experts + t.tiles + tile_of(entry) * NT;
        // Where rows of x begin, in units of sixteen bytes, or which rows, two in a word.
        u32 places[NT / 8 / HALVES];
        const u32 stride = t.x_stride / 8;
#pragma unroll
        for (int n = 0; n < NT / 8; n++) {
            const int token = first + n * 8, pair = token < found ? pairs[token] : 0;
            const u32 place = (UP ? pair / TOP_K : pair) * (HALVES == 1 ? stride : 1);
            places[n / HALVES] = n % HALVES ? places[n / HALVES] | place << 16 : place;
        }
        const u8* x = t.x + part * 16;
        const u8 *codes[EVENLY ? 1 : GROUPS], *scales[EVENLY ? 1 : (ROWS + MORE - 1) / MORE];
#pragma unroll 1
        for (int i = 0, step = 0; i < RUN * STEPS; i++, step++) {
            if (step == STEPS) step = 0;
            if (step == 0) {
                const int slab = start + i / STEPS;
#pragma unroll
                for (int j = 0; j < (EVENLY ? 1 : GROUPS); j++)
                    codes[j] = t.w + expert * t.w_expert + (tid & 3) * 16 +
                               (i64)matrix_row(slab, j * 64 + (tid >> 2)) * W_ROW;
#pragma unroll
                for (int row = 0; row < (EVENLY ? 1 : ROWS); row += MORE)
                    scales[row / MORE] = t.scales + expert * t.s_expert +
                                         (i64)matrix_row(slab, row + tid % (ROWS - row)) * S_ROW;
            }
            const bool fresh = i < STEPS;
            const u32 filled = base + BARRIERS_AT + 8 * stage;
            await_turn(filled + 8 * STAGES, turn);
            if (i == 0)
                for (int pair = tid; pair < found; pair += MORE)
                    copy_few<4>(base + LISTS_AT + ((count & 3) * NT + pair) * 4, pairs + pair);
            const u32 to_codes = base + CODES_AT + stage * (ROWS * 64) + tid * 16;
#pragma unroll
            for (int row = 0; row < ROWS; row += 32)
                copy16(to_codes + row * 64,
                       codes[EVENLY ? 0 : row / 64] + step * (CHUNK / 2) +
                           matrix_row(0, EVENLY ? row : row % 64) * W_ROW);
            const u32 to_scales = base + SCALES_AT + (stage * ROWS + tid) * SCALE_BYTES;
#pragma unroll
            for (int row = 0; row < ROWS; row += MORE)
                if (ROWS - row >= MORE || tid < ROWS - row)
                    copy_few<SCALE_BYTES>(to_scales + row * SCALE_BYTES,
                                          scales[EVENLY ? 0 : row / MORE] + step * SCALE_BYTES +
                                              (EVENLY ? matrix_row(0, row) * S_ROW : 0));
            // Columns of no token keep what they have: no column touches another.
            if (fresh) {
                if (KEPT) await_turn(base + KEPT_AT + 8 * step, ~count & 1);
                const u32 to = to_tokens + (KEPT ? step : stage) * TOKEN_BYTES;
#pragma unroll
                for (int n = 0; n < NT / 8; n++) {
                    u32 place = places[n / HALVES];
                    if (HALVES == 2) {
                        settle(place);
                        place = (n % 2 ? place >> 16 : place & 0xFFFF) * stride;
                    }
                    if (first + n * 8 < found) copy16(to + n * 1024, x + (u64)place * 16);
                }
                x += CHUNK * 2;
            }
            arrive_with_copies(filled);
            if (++stage == STAGES) {
                stage = 0;
                turn ^= 1;
            }
        }
    }
    finish_copies();
}

// Writes the sums of N tokens, of which `found` exist; a lane has two rows, `out` is their place.
template <int N>
DEVICE void write(const Arguments& t, const float (&sums)[N / 2], const int* listed, int found, u8* out,
                  float low_gain, float high_gain) {
    const int quarter = threadIdx.x & 3;
    const u32 stride = t.out_stride * 2;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = n * 8 + quarter * 2 + odd;
            // Gate and up are rounded to storage before the activation, as the contract says.
            u32 both = to_bf16_pair(sums[n * 4 + odd] * low_gain, sums[n * 4 + odd + 2] * high_gain);
            if (UP) both = to_bf16_pair(silu(from_bf16(both)) * from_bf16(both >> 16), 0);
            u8* const to = out + (u64)(u32)listed[token] * stride;
            if (token < found) {
                if (UP) *(u16*)to = both;
                else *(u32*)to = both;
            }
        }
}

// Computes one slab of an item whose pairs are in list `count`: the first FULL of its tokens, a half or
// none, and at most N others. After the `last` slab kept tokens may go.
template <int FULL, int N>
DEVICE void run(const Arguments& t, u32 entry, int slab, bool last, int count, int& stage, int& turn) {
    const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, quarter = lane & 3;
    const int warp = tid >> 5, low = (warp >> 2) * 64 + (warp & 3) * 16 + g;
    const u32 base = shared_address(memory);
    // Rows of 128 bytes, eight of them 1,024 bytes apart from the next eight.
    const u64 layout = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16;
    float full[FULL ? FULL / 2 : 8], sums[N / 2];
#pragma unroll
    for (int i = 0; i < FULL / 2; i++) full[i] = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] = 0;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        const u32 filled = base + BARRIERS_AT + 8 * stage;
        await_turn(filled, turn);
        show_copies();
        const u32 tokens = base + (KEPT ? step : stage) * TOKEN_BYTES;
        const u8* const codes = memory + CODES_AT + (stage * ROWS + low) * 64 + quarter * 16;
        const u8* const scales = memory + SCALES_AT + (stage * ROWS + low) * SCALE_BYTES +
                                 quarter * sizeof(Scale);
        const uint4 few = *(const uint4*)codes, more = *(const uint4*)(codes + 8 * 64);
        u32 low_scale[2], high_scale[2];
        decode_scales(*(const Scale*)scales, low_scale[0], low_scale[1]);
        decode_scales(*(const Scale*)(scales + 8 * SCALE_BYTES), high_scale[0], high_scale[1]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u64 b = layout | (tokens + (i >> 1) * (NT * 128) + (i & 1) * 64) >> 4;
            u32 near[4], far[4];
            decode(word_of(few, i), low_scale[i / 2], near);
            decode(word_of(more, i), high_scale[i / 2], far);
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                const u32 a[4] = {near[k], far[k], near[k + 1], far[k + 1]};
                if constexpr (FULL > 0) multiply<FULL>(full, a, b + k);
                multiply<N>(sums, a, b + k + FULL * 8);
            }
            close_products();
            if (i < 3) wait_products<1>();
            else wait_products<0>();
        }
        if (lane == 0) {
            arrive(filled + 8 * STAGES);
            if (KEPT && last) arrive(base + KEPT_AT + 8 * step);
        }
        if (++stage == STAGES) {
            stage = 0;
            turn ^= 1;
        }
    }
#pragma unroll
    for (int i = 0; i < FULL / 2; i++) settle(full[i]);
#pragma unroll
    for (int i = 0; i < N / 2; i++) settle(sums[i]);
    const int at_low = matrix_row(slab, low), at_high = matrix_row(slab, low + 8);
    float low_gain = UNSHIFT, high_gain = UNSHIFT;
    if (GAIN) {
        const float* const gains = t.gains + expert_of(entry) * t.g_expert;
        low_gain *= gains[at_low * t.g_row];
        high_gain *= gains[at_high * t.g_row];
    }
    const int* const listed = (const int*)(memory + LISTS_AT) + (count & 3) * NT;
    u8* const out = (u8*)(t.out + (UP ? slab * (ROWS / 2) + warp * 8 + g : at_low));
    const int found = pairs_of(entry);
    if constexpr (FULL > 0) write<FULL>(t, full, listed, found, out, low_gain, high_gain);
    write<N>(t, sums, listed + FULL, found - FULL, out, low_gain, high_gain);
}

template <int FULL, int N>
DEVICE void choose(const Arguments& t, u32 entry, int slab, bool last, int count, int& stage,
                   int& turn) {
    if constexpr (N - GRAIN >= LEAST) {
        if (pairs_of(entry) <= FULL + N - GRAIN)
            return choose<FULL, N - GRAIN>(t, entry, slab, last, count, stage, turn);
    }
    run<FULL, N>(t, entry, slab, last, count, stage, turn);
}

KERNEL(THREADS + MORE)
experts(const u8* x, const int* plan, const u8* w, const u8* scales, const float* gains, u16* out,
        int tiles, int experts, int slabs, i64 x_stride, i64 w_expert, i64 s_expert, i64 g_expert,
        i64 g_row, i64 out_stride) {
    const int tid = threadIdx.x;
    let_next_start();
    const int used = list_tiles(plan, tiles, experts, tid), runs = slabs / RUN;
    const Arguments t = {x, plan, w, scales, gains, out, tiles, experts, runs,
                         used * runs, x_stride, w_expert, s_expert, g_expert, g_row, out_stride};
    if ((int)blockIdx.x >= t.items) return;
    if (tid < STAGES) {
        const u32 filled = shared_address(memory + BARRIERS_AT) + 8 * tid;
        make_barrier(filled, MORE);
        make_barrier(filled + 8 * STAGES, THREADS / 32);
    }
    if (KEPT && tid < STEPS)
        make_barrier(shared_address(memory + KEPT_AT) + 8 * tid, THREADS / 32);
    barrier();
    if (tid >= THREADS) {
        give_registers<FEW>();
        copy_all(t, tid - THREADS);
        return;
    }
    take_registers<OWN>();
    int stage = 0, turn = 0;
#pragma unroll 1
    for (int count = 0, item = blockIdx.x; item < t.items; item = item_of(++count)) {
        const u32 entry = entry_of(t, item);
#pragma unroll 1
        for (int i = 0, slab = item % t.runs * RUN; i < RUN; i++, slab++) {
            if (HALVES == 2 && pairs_of(entry) > WIDE)
                choose<(HALVES - 1) * WIDE, WIDE>(t, entry, slab, i == RUN - 1, count, stage, turn);
            else
                choose<0, WIDE>(t, entry, slab, i == RUN - 1, count, stage, turn);
        }
    }
}
#endif
