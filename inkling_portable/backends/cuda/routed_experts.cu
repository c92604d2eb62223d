// Routed experts of few tokens on NVIDIA tensor cores: weights of 4 bits, read once, from sm_90 on.
//
// Compiled for one shape at a time (the macros below). Weights are the left operand of
// mma.m16n8k16 and go from memory to registers without a detour; tokens are the right operand. The
// sum over k may be taken in any order, so a lane keeps whatever codes one 16-byte load gives it and
// takes the activations of just those: a 32-bit word has codes 0..3 in its low half and 4..7 in its
// high half, and pair j of it is (code j, code j + 4), as both halves are decoded at once.
//
// A code's bits moved to bit 6 of a bfloat16 are its value times 2^-126; the product with its block
// scale, kept times 2^SHIFT, is exact in bfloat16. Sums are multiplied by 2^(126 - SHIFT) at the end.
//
// Macros: K columns; W_ROW and S_ROW bytes of a row of codes and of scales; TOP_K; EXPERTS; BLOCK
// codes of a scale (16: E4M3, 32: E8M0); GAIN 1 if there are global scales; UP 1 for the first
// product, of which INTERLEAVED is 1 if gate and up rows alternate, else HALF is the rows of each;
// BY_TOKEN 1 for the second product token by token; WARPS_K warps that share k (BY_TOKEN: TOP_K, one
// for each slot), WARPS_M that share rows, TILES of 16 rows for a warp, NT groups of 8 tokens at a
// time, AHEAD chunks of a step, LISTED pairs at most, RESIDENT blocks of an SM at least. MANY 1 selects
// the kernel for many tokens, with WARPS_K and AHEAD 1.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifndef ON_HOST
#define DEVICE __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, RESIDENT)
#define SHARED __shared__

// Read-only data that is used once: past the L1, so that activations stay there.
DEVICE uint4 load_once(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE u32 load_u16(const void* p) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
DEVICE u32 load_u8(const void* p) {
    u32 v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE uint4 load_row(const void* p) { return *(const uint4*)p; }
DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// Two E4M3 codes -> their values times `by`, each twice in a bfloat16 pair.
DEVICE void e4m3_twice(u32 codes, float by, u32& first, u32& second) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
    float a, b;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(a), "=f"(b) : "r"(halves));
    a *= by;
    b *= by;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(first) : "f"(a));
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(second) : "f"(b));
}
DEVICE void multiply_tiles(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The sum of `x` over the warp's lanes up to this one.
DEVICE int sum_up_to(int x, int lane) {
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, x, step);
        if (lane >= step) x += other;
    }
    return x;
}
DEVICE u32 lanes_with(int x) { return __match_any_sync(0xFFFFFFFFu, x); }
DEVICE int ones(u32 x) { return __popc(x); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE int add_shared(int* p, int x) { return atomicAdd(p, x); }
DEVICE void barrier() { __syncthreads(); }
DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
DEVICE u16 to_bf16(float x) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(v) : "f"(x));
    return v;
}
// Programmatic dependent launch: the next kernel may start; the previous one has finished.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

#define CHUNK 128  // columns that the four lanes of a row take in one step, 32 each
#define SHIFT (BLOCK == 16 ? 119 : 63)
#define UNSHIFT (BLOCK == 16 ? 0x1p7f : 0x1p63f)
#define THREADS (32 * WARPS_K * WARPS_M)

DEVICE float from_bf16(u16 x) {
    union { u32 bits; float value; } both;
    both.bits = (u32)x << 16;
    return both.value;
}

DEVICE u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// What a lane holds of one row and chunk: 32 codes and their scales.
struct Codes {
    uint4 words;
    u32 scales;
};

// Scales of the first and the last 16 codes, each twice in a pair, times 2^SHIFT.
DEVICE void decode_scales(u32 codes, u32& first, u32& second) {
    if (BLOCK == 16) {
        e4m3_twice(codes, 0x1p119f, first, second);
    } else {
        // Codes above 190 would not fit and give NaN, as code 255 is by definition.
        first = codes > 190 ? 0x7FFF7FFFu : (codes + 63) * 0x00800080u;
        second = first;
    }
}

// Eight codes times their scale: pairs (j, j + 4).
DEVICE void decode(u32 word, u32 scale, u32* pairs) {
    u32 next = word >> 8;
    // One multiplication moves the sign of a nibble to bit 15 and its value to bit 6.
    pairs[0] = multiply_pairs(((word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    pairs[1] = multiply_pairs(((word & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, scale);
    pairs[2] = multiply_pairs(((next & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    pairs[3] = multiply_pairs(((next & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, scale);
}

// What a warp reads in one step: AHEAD chunks of TILES times sixteen rows, of which lane 4 g + q
// has row g in `low` and row g + 8 in `high`.
struct Step {
    Codes low[TILES][AHEAD], high[TILES][AHEAD];
};

// Distances in rows: of a tile to the next one, and of a lane's two rows.
#if UP && INTERLEAVED
#define NEXT 16
#define OTHER 1
#elif UP
#define NEXT 8
#define OTHER HALF
#else
#define NEXT 16
#define OTHER 8
#endif

DEVICE Codes load_codes(const u8* row, const u8* scales, int chunk) {
    Codes c;
    c.words = load_once(row + chunk * (CHUNK / 2));
    c.scales = BLOCK == 16 ? load_u16(scales + chunk * 8) : load_u8(scales + chunk * 4);
    return c;
}

DEVICE void load_step(Step& step, const u8* row, const u8* scales) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int c = 0; c < AHEAD; c++) {
            step.low[m][c] = load_codes(row + m * NEXT * W_ROW, scales + m * NEXT * S_ROW, c);
            step.high[m][c] = load_codes(row + (m * NEXT + OTHER) * (i64)W_ROW,
                                         scales + (m * NEXT + OTHER) * (i64)S_ROW, c);
        }
}

#if !MANY
// Adds the step's rows times 8 NT tokens; x points at a lane's columns of each of its tokens.
DEVICE void multiply_step(float (*sums)[NT][4], const Step& step, const u16* const* x) {
#pragma unroll
    for (int c = 0; c < AHEAD; c++) {
        u32 low_scale[TILES][2], high_scale[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            decode_scales(step.low[m][c].scales, low_scale[m][0], low_scale[m][1]);
            decode_scales(step.high[m][c].scales, high_scale[m][0], high_scale[m][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[TILES][4], b[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                decode(word_of(step.low[m][c].words, i), low_scale[m][i / 2], a[m]);
                decode(word_of(step.high[m][c].words, i), high_scale[m][i / 2], b[m]);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 v = load_row(x[n] + c * CHUNK + i * 8);
                const u32 x04 = permute(v.x, v.z, 0x5410), x15 = permute(v.x, v.z, 0x7632);
                const u32 x26 = permute(v.y, v.w, 0x5410), x37 = permute(v.y, v.w, 0x7632);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_tiles(sums[m][n], a[m][0], b[m][0], a[m][1], b[m][1], x04, x15);
                    multiply_tiles(sums[m][n], a[m][2], b[m][2], a[m][3], b[m][3], x26, x37);
                }
            }
        }
    }
}

// Blocks stay and take one item after the other: some rows of an expert for up to 8 NT of its
// tokens, or (BY_TOKEN) some rows of all experts of a token. While a step is computed the next one,
// of the same item or of the next, is on its way.
KERNEL(THREADS)
experts(const u16* x, const int* ids, const u8* w, const u8* scales, const float* gains,
        const float* weights, void* out, int pairs, int experts, int slabs, int first_row,
        i64 x_stride, i64 w_expert, i64 s_expert, i64 g_expert, i64 g_row, i64 out_stride) {
    const int STEPS = K / CHUNK / (BY_TOKEN ? 1 : WARPS_K) / AHEAD;
    SHARED int chosen[LISTED];
    SHARED float parts[2][WARPS_M][WARPS_K][TILES][4 * NT][32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int share = warp % WARPS_K, group = warp / WARPS_K, g = lane >> 2, quarter = lane & 3;
    // The second product waits later, before it reads what the first one wrote: its weights are on
    // their way by then.
    if (UP) wait_for_previous();
#if BY_TOKEN
    for (int i = tid; i < pairs; i += THREADS) chosen[i] = ids[i];
    barrier();
    const int items = pairs / TOP_K * slabs;
#else
    SHARED int starts[EXPERTS + 1], cursors[EXPERTS];
    SHARED int owners[LISTED];  // of each tile: its expert, and its number among the expert's * 2^16
    SHARED int found;
    // Pairs by expert, and tiles of up to 8 NT pairs.
    for (int i = tid; i < EXPERTS; i += THREADS) cursors[i] = 0;
    barrier();
    for (int i = tid; i < pairs; i += THREADS) {
        const int expert = ids[i];
        if (expert >= 0 && expert < experts) add_shared(&cursors[expert], 1);
    }
    barrier();
    if (warp == 0) {
        // Each lane counts neighbouring experts; pairs in the low half, tiles in the high one.
        const int EACH = (EXPERTS + 31) / 32;
        int mine = 0;
        for (int expert = lane * EACH; expert < (lane + 1) * EACH && expert < EXPERTS; expert++)
            mine += cursors[expert] + ((cursors[expert] + 8 * NT - 1) / (8 * NT) << 16);
        int before = sum_up_to(mine, lane) - mine;
        for (int expert = lane * EACH; expert < (lane + 1) * EACH && expert < EXPERTS; expert++) {
            const int count = cursors[expert], tiles = (count + 8 * NT - 1) / (8 * NT);
            starts[expert] = cursors[expert] = before & 0xFFFF;
            for (int i = 0; i < tiles; i++) owners[(before >> 16) + i] = expert | i << 16;
            before += count + (tiles << 16);
        }
        if (lane == 31) {
            starts[EXPERTS] = before & 0xFFFF;
            found = before >> 16;
        }
        warp_barrier();
        // In the order of the pairs, so that all blocks cut an expert's tiles alike.
        for (int first = 0; first < pairs; first += 32) {
            const int pair = first + lane, expert = pair < pairs ? ids[pair] : -1;
            const bool known = expert >= 0 && expert < experts;
            const u32 same = lanes_with(known ? expert : -1);
            const int rank = ones(same & ((1u << lane) - 1));
            if (known) chosen[cursors[expert] + rank] = pair;
            warp_barrier();
            if (known && rank == 0) cursors[expert] += ones(same);
            warp_barrier();
        }
    }
    barrier();
    const int items = found * slabs;
#endif
    let_next_start();

    int item = blockIdx.x, step = 0, buffer = 0;
    if (item >= items) {
        if (!UP) wait_for_previous();
        return;
    }
    const u8 *row, *row_scales;
    // The rows of an item that this lane reads, from its own columns on.
    auto find_rows = [&](int item) {
        const int slab = (item % slabs * WARPS_M + group) * TILES;
        const int first = UP ? slab * 8 + g : first_row + slab * 16 + g;
        const i64 place = UP && INTERLEAVED ? 2 * first : first;
#if BY_TOKEN
        const int asked = chosen[item / slabs * TOP_K + share], k = 0;
        const i64 expert = asked >= 0 && asked < experts ? asked : 0;
#else
        const i64 expert = owners[item / slabs] & 0xFFFF;
        const int k = share * STEPS * AHEAD * CHUNK;
#endif
        row = w + expert * w_expert + place * W_ROW + k / 2 + quarter * 16;
        row_scales = scales + expert * s_expert + place * S_ROW + k / BLOCK + quarter * 32 / BLOCK;
    };
    const u16* rows_of_x[NT];
    float sums[TILES][NT][4];
    auto start_item = [&] {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#if BY_TOKEN
            // One token: all eight columns of the right operand are the same.
            const int pair = item / slabs * TOP_K + share, k = 0;
#else
            const int owner = owners[item / slabs], expert = owner & 0xFFFF;
            const int first = starts[expert] + (owner >> 16) * 8 * NT, at = first + n * 8 + g;
            // Columns of no token repeat one that is there: no column touches another.
            const int pair = chosen[at < starts[expert + 1] ? at : first];
            const int k = share * STEPS * AHEAD * CHUNK;
#endif
            rows_of_x[n] = x + (UP ? pair / TOP_K : pair) * x_stride + k + quarter * 32;
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
        }
    };
    // The sum over warps, always in the same order. Sums 0 and 2 of a lane are rows g and g + 8 of one
    // token, sums 1 and 3 those of the next token.
    auto finish_item = [&] {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    parts[buffer][group][share][m][n * 4 + i][lane] = sums[m][n][i];
        barrier();
#if BY_TOKEN
        const int token = item / slabs, column = item % slabs * TILES * 16 + tid;
        if (tid < TILES * 16) {
            float total = 0;
            for (int s = 0; s < TOP_K; s++) {
                const int expert = chosen[token * TOP_K + s];
                if (expert < 0 || expert >= experts) continue;
                float one = parts[buffer][0][s][tid / 16][tid / 8 % 2 * 2][tid % 8 * 4];
                if (GAIN) one *= gains[expert * g_expert + column * g_row];
                total += one * (weights[token * TOP_K + s] * UNSHIFT);
            }
            ((u16*)out)[token * out_stride + column] = to_bf16(total);
        }
#else
        const int owner = owners[item / slabs], expert = owner & 0xFFFF;
        const int first = starts[expert] + (owner >> 16) * 8 * NT, end = starts[expert + 1];
        for (int j = tid; j < WARPS_M * TILES * NT * 64; j += THREADS) {
            const int from = j & 31, odd = j >> 5 & 1, n = (j >> 6) % NT, tile = (j >> 6) / NT;
            const int at = first + n * 8 + (from & 3) * 2 + odd;
            if (at >= end) continue;
            float a = 0, b = 0;
            for (int s = 0; s < WARPS_K; s++) {
                a += parts[buffer][tile / TILES][s][tile % TILES][n * 4 + odd][from];
                b += parts[buffer][tile / TILES][s][tile % TILES][n * 4 + odd + 2][from];
            }
            a *= UNSHIFT;
            b *= UNSHIFT;
            const int pair = chosen[at], part = item % slabs * WARPS_M * TILES + tile;
            const int row = UP ? part * 8 + (from >> 2) : part * 16 + (from >> 2) + first_row;
            if (GAIN) {
                a *= gains[expert * g_expert + (UP && INTERLEAVED ? 2 * row : row) * g_row];
                b *= gains[expert * g_expert +
                           (UP && INTERLEAVED ? 2 * row + 1 : row + OTHER) * g_row];
            }
            if (UP) {
                // Gate and up are rounded to storage before the activation, as the contract says.
                const float gate = from_bf16(to_bf16(a)), up = from_bf16(to_bf16(b));
                ((u16*)out)[pair * out_stride + row] = to_bf16(silu(gate) * up);
            } else {
                float* place = (float*)out + pair * out_stride + row - first_row;
                place[0] = a * weights[pair];
                place[8] = b * weights[pair];
            }
        }
#endif
        buffer ^= 1;
    };
    // Computes what is in `now` and asks for what follows; false after the last step.
    auto advance = [&](const Step& now, Step& next) {
        const bool last = step == STEPS - 1;
        if (last) {
            if (item + (int)gridDim.x < items) {
                find_rows(item + gridDim.x);
                load_step(next, row, row_scales);
            }
        } else {
            row += AHEAD * (CHUNK / 2);
            row_scales += AHEAD * (CHUNK / BLOCK);
            load_step(next, row, row_scales);
        }
        multiply_step(sums, now, rows_of_x);
        if (!last) {
            step++;
#pragma unroll
            for (int n = 0; n < NT; n++) rows_of_x[n] += AHEAD * CHUNK;
            return true;
        }
        finish_item();
        item += gridDim.x;
        step = 0;
        if (item >= items) return false;
        start_item();
        return true;
    };
    Step one, two;
    find_rows(item);
    load_step(one, row, row_scales);
    if (!UP) wait_for_previous();
    start_item();
#pragma unroll 1
    while (advance(one, two) && advance(two, one)) {
    }
}

#else
// The same for many tokens: blockIdx.y is a tile of a plan (routed_experts_sort.py), up to 8 NT pairs
// of one expert; blockIdx.x takes 16 TILES WARPS_M rows. The activations of a chunk lie in shared
// memory as the right operands of each lane, {(0,4), (1,5), (2,6), (3,7)} of eight columns, while
// those of the next chunk are on their way.
KERNEL(THREADS)
experts(const u16* x, const int* plan, const u8* w, const u8* scales, const float* gains,
        const float* weights, void* out, int tiles, int experts, int first_row, i64 x_stride,
        i64 w_expert, i64 s_expert, i64 g_expert, i64 g_row, i64 out_stride) {
    const int CHUNKS = K / CHUNK, SLOTS = 128 * NT / THREADS, PITCH = 32 * NT + 2;
    SHARED uint4 staged[2][4 * PITCH];
    SHARED int listed[8 * NT];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, quarter = lane & 3;
    const int expert = plan[3 * experts + blockIdx.y];
    if (expert < 0) return;
    int found = plan[expert] - ((int)blockIdx.y - plan[experts + expert]) * 8 * NT;
    if (found > 8 * NT) found = 8 * NT;
    if (tid < 8 * NT)
        listed[tid] = plan[3 * experts + tiles + blockIdx.y * 8 * NT + (tid < found ? tid : 0)];
    barrier();

    // A thread brings 16 columns' quarters of some rows: slot s is row s / 16, part s % 16.
    const u16* sources[SLOTS];
    int places[SLOTS];
    uint4 brought[SLOTS];
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const int slot = j * THREADS + tid, row = slot >> 4, q = slot >> 2 & 3, i = slot & 3;
        const int pair = listed[row];
        sources[j] = x + (UP ? pair / TOP_K : pair) * x_stride + q * 32 + i * 8;
        places[j] = i * PITCH + (row >> 3) * 32 + (row & 7) * 4 + q;
        brought[j] = load_row(sources[j]);
    }
    auto stage = [&](int buffer) {
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const uint4 v = brought[j];
            staged[buffer][places[j]] = {permute(v.x, v.z, 0x5410), permute(v.x, v.z, 0x7632),
                                         permute(v.y, v.w, 0x5410), permute(v.y, v.w, 0x7632)};
        }
    };
    const int slab = (blockIdx.x * WARPS_M + warp) * TILES;
    const int first = UP ? slab * 8 + g : first_row + slab * 16 + g;
    const i64 place = UP && INTERLEAVED ? 2 * first : first;
    const u8* row = w + expert * w_expert + place * W_ROW + quarter * 16;
    const u8* row_scales = scales + expert * s_expert + place * S_ROW + quarter * 32 / BLOCK;
    float sums[TILES][NT][4];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
    Step one, two;
    load_step(one, row, row_scales);
    stage(0);
    barrier();
    auto advance = [&](int chunk, const Step& now, Step& next) {
        const bool more = chunk + 1 < CHUNKS;
        if (more) {
            row += CHUNK / 2;
            row_scales += CHUNK / BLOCK;
            load_step(next, row, row_scales);
#pragma unroll
            for (int j = 0; j < SLOTS; j++) brought[j] = load_row(sources[j] + (chunk + 1) * CHUNK);
        }
        const uint4* const here = staged[chunk & 1];
        u32 low_scale[TILES][2], high_scale[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            decode_scales(now.low[m][0].scales, low_scale[m][0], low_scale[m][1]);
            decode_scales(now.high[m][0].scales, high_scale[m][0], high_scale[m][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[TILES][4], b[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                decode(word_of(now.low[m][0].words, i), low_scale[m][i / 2], a[m]);
                decode(word_of(now.high[m][0].words, i), high_scale[m][i / 2], b[m]);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 v = here[i * PITCH + n * 32 + lane];
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_tiles(sums[m][n], a[m][0], b[m][0], a[m][1], b[m][1], v.x, v.y);
                    multiply_tiles(sums[m][n], a[m][2], b[m][2], a[m][3], b[m][3], v.z, v.w);
                }
            }
        }
        if (more) {
            stage(chunk + 1 & 1);
            barrier();
        }
    };
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
        advance(chunk, one, two);
        if (chunk + 1 < CHUNKS) advance(chunk + 1, two, one);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const int low = UP ? first + m * 8 : first + m * 16, high = low + 8;
        float low_gain = UNSHIFT, high_gain = UNSHIFT;
        if (GAIN) {
            low_gain *= gains[expert * g_expert + (UP && INTERLEAVED ? 2 * low : low) * g_row];
            high_gain *= gains[expert * g_expert +
                               (UP ? INTERLEAVED ? 2 * low + 1 : low + HALF : high) * g_row];
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int at = n * 8 + quarter * 2 + odd;
                if (at >= found) continue;
                const i64 pair = listed[at];
                const float a = sums[m][n][odd] * low_gain, b = sums[m][n][odd + 2] * high_gain;
                if (UP) {
                    const float gate = from_bf16(to_bf16(a)), up = from_bf16(to_bf16(b));
                    ((u16*)out)[pair * out_stride + low] = to_bf16(silu(gate) * up);
                } else {
                    float* to = (float*)out + pair * out_stride + low - first_row;
                    to[0] = a * weights[pair];
                    to[8] = b * weights[pair];
                }
            }
    }
}
#endif
