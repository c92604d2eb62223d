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
// time, of which TOKENS are used, STAGES chunks in the ring, LISTED pairs at most, RESIDENT blocks of
// an SM at least. MANY 1 selects the kernel for many tokens, with WARPS_K 1.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifndef ON_HOST
#define DEVICE __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, RESIDENT)
#define SHARED __shared__

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
DEVICE int from_lane(int x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE int add_shared(int* p, int x) { return atomicAdd(p, x); }
DEVICE void barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
extern __shared__ uint4 dynamic_shared[];
// Sixteen bytes to shared memory behind the caller's back; a group ends with `end_group`, and
// `wait_for_groups<N>` waits until at most N of this thread's groups are under way.
DEVICE void copy_once(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEVICE void copy_again(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_for_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
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

#if !MANY
// Blocks stay and take one item after the other: some rows of an expert for up to TOKENS of its
// tokens, or (BY_TOKEN) some rows of all experts of a token. An item is a chunk of columns after the
// other. Chunks, of the same item or of the next ones, are on their way to a ring of STAGES places of
// each warp in shared memory while one is computed: loads that wait for memory must not stand before
// loads that are needed at once, which the L1 answers in order.
#define CODE_BYTES (TILES * 1024)
#define STAGE_BYTES (CODE_BYTES + TOKENS * 256)
KERNEL(THREADS)
experts(const u16* x, const int* ids, const u8* w, const u8* scales, const float* gains,
        const float* weights, void* out, int pairs, int experts, int slabs, int first_row,
        i64 x_stride, i64 w_expert, i64 s_expert, i64 g_expert, i64 g_row, i64 out_stride) {
    const int CHUNKS = K / CHUNK / (BY_TOKEN ? 1 : WARPS_K);
    SHARED int chosen[LISTED];
    SHARED float parts[2][WARPS_M][WARPS_K][TILES][4 * NT][32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int share = warp % WARPS_K, group = warp / WARPS_K, g = lane >> 2, quarter = lane & 3;
    u8* const ring = (u8*)dynamic_shared + warp * STAGES * STAGE_BYTES;
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
    // Pairs by expert, and tiles of up to TOKENS pairs.
    for (int i = tid; i < EXPERTS; i += THREADS) cursors[i] = 0;
    barrier();
    for (int i = tid; i < pairs; i += THREADS) {
        const int expert = ids[i];
        if (expert >= 0 && expert < experts) add_shared(&cursors[expert], 1);
    }
    barrier();
    if (warp == 0) {
        int pairs_before = 0, tiles_before = 0;
        for (int first = 0; first < EXPERTS; first += 32) {
            const int expert = first + lane, count = expert < EXPERTS ? cursors[expert] : 0;
            const int tiles = (count + TOKENS - 1) / TOKENS;
            const int pairs_end = pairs_before + sum_up_to(count, lane);
            const int tiles_end = tiles_before + sum_up_to(tiles, lane);
            if (expert < EXPERTS) {
                starts[expert] = pairs_end - count;
                cursors[expert] = pairs_end - count;
            }
            for (int i = 0; i < tiles; i++) owners[tiles_end - tiles + i] = expert | i << 16;
            pairs_before = from_lane(pairs_end, 31);
            tiles_before = from_lane(tiles_end, 31);
        }
        if (lane == 0) {
            starts[EXPERTS] = pairs_before;
            found = tiles_before;
        }
    }
    barrier();
    for (int i = tid; i < pairs; i += THREADS) {
        const int expert = ids[i];
        if (expert >= 0 && expert < experts) chosen[add_shared(&cursors[expert], 1)] = i;
    }
    barrier();
    const int items = found * slabs;
#endif
    let_next_start();
    int item = blockIdx.x;
    if (item >= items) {
        if (!UP) wait_for_previous();
        return;
    }
    // First pair of an item's tile in `chosen`, and the end of its tile.
    auto tile_of = [&](int item, int& end) {
#if BY_TOKEN
        end = item / slabs * TOP_K + share + 1;
        return end - 1;
#else
        const int owner = owners[item / slabs], expert = owner & 0xFFFF;
        const int first = starts[expert] + (owner >> 16) * TOKENS, last = starts[expert + 1];
        end = last < first + TOKENS ? last : first + TOKENS;
        return first;
#endif
    };

    // Where loading stands: item, chunk, and this lane's columns of its rows and of its tokens.
    struct Cursor {
        int item, chunk;
        const u8 *row, *scales;
        const u16* x[NT];  // null: this lane brings no token
    };
    u32 scale_ring[STAGES][TILES][2];
    auto find = [&](Cursor& at) {
        const int slab = (at.item % slabs * WARPS_M + group) * TILES;
        const int first_of = UP ? slab * 8 + g : first_row + slab * 16 + g;
        const i64 place = UP && INTERLEAVED ? 2 * first_of : first_of;
        int end;
        const int first = tile_of(at.item, end);
#if BY_TOKEN
        const int asked = chosen[first], k = 0;
        const i64 expert = asked >= 0 && asked < experts ? asked : 0;
#else
        const i64 expert = owners[at.item / slabs] & 0xFFFF;
        const int k = share * CHUNKS * CHUNK;
#endif
        at.row = w + expert * w_expert + place * W_ROW + k / 2 + quarter * 16;
        at.scales = scales + expert * s_expert + place * S_ROW + k / BLOCK + quarter * 32 / BLOCK;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int token = first + n * 8 + g;
            const i64 pair = token < end ? BY_TOKEN ? token : chosen[token] : 0;
            const u16* row = x + (UP ? pair / TOP_K : pair) * x_stride + k + quarter * 32;
            at.x[n] = token < end ? row : nullptr;
        }
    };
    auto load_weights = [&](const Cursor& at, int stage) {
        if (at.item >= items) return;
        u8* const to = ring + stage * STAGE_BYTES + lane * 16;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int high = 0; high < 2; high++) {
                const i64 row = m * NEXT + high * OTHER;
                copy_once(to + (2 * m + high) * 512, at.row + row * W_ROW);
                const u8* from = at.scales + row * S_ROW;
                scale_ring[stage][m][high] = BLOCK == 16 ? load_u16(from) : load_u8(from);
            }
    };
    // A token's chunk lies in four parts of four lanes' sixteen bytes, turned by the token, so that
    // lanes of different tokens read from different banks.
    auto load_tokens = [&](const Cursor& at, int stage) {
        if (at.item >= items) return;
        u8* const to = ring + stage * STAGE_BYTES + CODE_BYTES + quarter * 16;
#pragma unroll
        for (int n = 0; n < NT; n++)
            if (at.x[n])
#pragma unroll
                for (int i = 0; i < 4; i++)
                    copy_again(to + (n * 8 + g) * 256 + (i + g & 3) * 64, at.x[n] + i * 8);
    };
    auto advance = [&](Cursor& at) {
        if (at.item >= items) return;
        if (++at.chunk < CHUNKS) {
            at.row += CHUNK / 2;
            at.scales += CHUNK / BLOCK;
#pragma unroll
            for (int n = 0; n < NT; n++)
                if (at.x[n]) at.x[n] += CHUNK;
            return;
        }
        at.chunk = 0;
        at.item += gridDim.x;
        if (at.item < items) find(at);
    };

    float sums[TILES][NT][4];
    u32 token_places[NT];
    int chunk = 0, buffer = 0;
    auto start_item = [&] {
        int end;
        const int first = tile_of(item, end);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            // Columns of no token repeat one that is there: no column touches another.
            const int token = first + n * 8 + g < end ? n * 8 + g : 0;
            token_places[n] = token * 256 + quarter * 16 + ((token & 3) << 16);
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
        }
    };
    auto multiply = [&](int stage) {
        const u8* const from = ring + stage * STAGE_BYTES;
        uint4 low[TILES], high[TILES];
        u32 low_scale[TILES][2], high_scale[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            low[m] = *(const uint4*)(from + 2 * m * 512 + lane * 16);
            high[m] = *(const uint4*)(from + (2 * m + 1) * 512 + lane * 16);
            decode_scales(scale_ring[stage][m][0], low_scale[m][0], low_scale[m][1]);
            decode_scales(scale_ring[stage][m][1], high_scale[m][0], high_scale[m][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[TILES][4], b[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                decode(word_of(low[m], i), low_scale[m][i / 2], a[m]);
                decode(word_of(high[m], i), high_scale[m][i / 2], b[m]);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u32 turned = i + (token_places[n] >> 16) & 3;
                const uint4 v = *(const uint4*)(from + CODE_BYTES + (token_places[n] & 0xFFFF) +
                                                turned * 64);
                const u32 x04 = permute(v.x, v.z, 0x5410), x15 = permute(v.x, v.z, 0x7632);
                const u32 x26 = permute(v.y, v.w, 0x5410), x37 = permute(v.y, v.w, 0x7632);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_tiles(sums[m][n], a[m][0], b[m][0], a[m][1], b[m][1], x04, x15);
                    multiply_tiles(sums[m][n], a[m][2], b[m][2], a[m][3], b[m][3], x26, x37);
                }
            }
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
        const int expert = owners[item / slabs] & 0xFFFF;
        int end;
        const int first = tile_of(item, end);
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

    Cursor weights_at, tokens_at;
    weights_at.item = item;
    weights_at.chunk = 0;
    find(weights_at);
    tokens_at = weights_at;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        load_weights(weights_at, stage);
        advance(weights_at);
    }
    if (!UP) wait_for_previous();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        load_tokens(tokens_at, stage);
        end_group();
        advance(tokens_at);
    }
    start_item();
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            wait_for_groups<STAGES - 2>();
            // Others' tokens are visible, and nobody reads the place any more that is filled next.
            warp_barrier();
            const int free = (stage + STAGES - 1) % STAGES;
            load_weights(tokens_at, free);
            load_tokens(tokens_at, free);
            end_group();
            advance(tokens_at);
            multiply(stage);
            if (++chunk < CHUNKS) continue;
            finish_item();
            chunk = 0;
            item += gridDim.x;
            if (item >= items) return;
            start_item();
        }
    }
}

#else
// The same for many tokens: tiles of a plan (routed_experts_sort.py), up to TOKENS = 8 NT pairs of one
// expert. Warps share rows only, and the ring of tokens. A block takes neighbouring items, so that it
// looks a tile up once for all its rows.
#define CODE_BYTES (TILES * 1024)
#define TOKEN_BYTES (TOKENS * 256)
KERNEL(THREADS)
experts(const u16* x, const int* plan, const u8* w, const u8* scales, const float* gains,
        const float* weights, void* out, int tiles, int experts, int slabs, int first_row,
        i64 x_stride, i64 w_expert, i64 s_expert, i64 g_expert, i64 g_row, i64 out_stride) {
    const int CHUNKS = K / CHUNK, PIECES = TOKENS * 16 / THREADS;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, quarter = lane & 3;
    u8* const code_ring = (u8*)dynamic_shared + warp * STAGES * CODE_BYTES + lane * 16;
    u8* const token_ring = (u8*)dynamic_shared + WARPS_M * STAGES * CODE_BYTES;
    const int* const listed = plan + 3 * experts + tiles;
    const int used = plan[2 * experts - 1] + (plan[experts - 1] + TOKENS - 1) / TOKENS;
    const i64 all = (i64)used * slabs;
    const int end = all * (blockIdx.x + 1) / gridDim.x;
    int item = all * blockIdx.x / gridDim.x;
    if (item >= end) return;

    struct Cursor {
        int item, chunk, tile, expert;
        const u8 *row, *scales;
        u32 pieces[PIECES];  // where in x this thread's sixteen bytes of some tokens begin
    };
    // Of a token's chunk a thread brings part tid % 16: lane quarter part / 4, eight columns part % 4.
    const int part = tid & 15, first_token = tid >> 4;
    u8* const piece_place =
        token_ring + first_token * 256 + ((part & 3) + first_token & 3) * 64 + (part >> 2) * 16;
    u32 scale_ring[STAGES][TILES][2];
    auto find = [&](Cursor& at) {
        const int tile = at.item / slabs;
        if (tile != at.tile) {
            at.tile = tile;
            at.expert = plan[3 * experts + tile];
            const int found = plan[at.expert] - (tile - plan[experts + at.expert]) * TOKENS;
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                // Columns of no token repeat one that is there: no column touches another.
                const int token = p * (THREADS / 16) + first_token;
                const int pair = listed[tile * TOKENS + (token < found ? token : 0)];
                at.pieces[p] = (UP ? pair / TOP_K : pair) * (u32)x_stride + part * 8;
            }
        }
        const int slab = (at.item % slabs * WARPS_M + warp) * TILES;
        const int first = UP ? slab * 8 + g : first_row + slab * 16 + g;
        const i64 place = UP && INTERLEAVED ? 2 * first : first;
        at.row = w + at.expert * w_expert + place * W_ROW + quarter * 16;
        at.scales = scales + at.expert * s_expert + place * S_ROW + quarter * 32 / BLOCK;
    };
    auto load = [&](Cursor& at, int stage) {
        if (at.item < end) {
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const i64 row = m * NEXT + high * OTHER;
                    copy_once(code_ring + stage * CODE_BYTES + (2 * m + high) * 512,
                              at.row + row * W_ROW);
                    const u8* from = at.scales + row * S_ROW;
                    scale_ring[stage][m][high] = BLOCK == 16 ? load_u16(from) : load_u8(from);
                }
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                copy_once(piece_place + stage * TOKEN_BYTES + p * (THREADS / 16) * 256,
                          x + (at.pieces[p] + at.chunk * CHUNK));
            at.row += CHUNK / 2;
            at.scales += CHUNK / BLOCK;
            if (++at.chunk == CHUNKS) {
                at.chunk = 0;
                if (++at.item < end) find(at);
            }
        }
        end_group();
    };
    float sums[TILES][NT][4];
    auto clear = [&] {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
    };
    auto multiply = [&](int stage) {
        const u8* const from = token_ring + stage * TOKEN_BYTES + g * 256 + quarter * 16;
        uint4 low[TILES], high[TILES];
        u32 low_scale[TILES][2], high_scale[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            low[m] = *(const uint4*)(code_ring + stage * CODE_BYTES + 2 * m * 512);
            high[m] = *(const uint4*)(code_ring + stage * CODE_BYTES + (2 * m + 1) * 512);
            decode_scales(scale_ring[stage][m][0], low_scale[m][0], low_scale[m][1]);
            decode_scales(scale_ring[stage][m][1], high_scale[m][0], high_scale[m][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[TILES][4], b[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                decode(word_of(low[m], i), low_scale[m][i / 2], a[m]);
                decode(word_of(high[m], i), high_scale[m][i / 2], b[m]);
            }
            const u8* const turned = from + (i + g & 3) * 64;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 v = *(const uint4*)(turned + n * 2048);
                const u32 x04 = permute(v.x, v.z, 0x5410), x15 = permute(v.x, v.z, 0x7632);
                const u32 x26 = permute(v.y, v.w, 0x5410), x37 = permute(v.y, v.w, 0x7632);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_tiles(sums[m][n], a[m][0], b[m][0], a[m][1], b[m][1], x04, x15);
                    multiply_tiles(sums[m][n], a[m][2], b[m][2], a[m][3], b[m][3], x26, x37);
                }
            }
        }
    };
    auto finish_item = [&] {
        const int tile = item / slabs, expert = plan[3 * experts + tile];
        const int found = plan[expert] - (tile - plan[experts + expert]) * TOKENS;
        const int slab = (item % slabs * WARPS_M + warp) * TILES;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const int row = UP ? (slab + m) * 8 + g : first_row + (slab + m) * 16 + g;
            float low_gain = UNSHIFT, high_gain = UNSHIFT;
            if (GAIN) {
                low_gain *= gains[expert * g_expert + (UP && INTERLEAVED ? 2 * row : row) * g_row];
                high_gain *= gains[expert * g_expert +
                                   (UP && INTERLEAVED ? 2 * row + 1 : row + OTHER) * g_row];
            }
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const int at = n * 8 + quarter * 2 + odd;
                    if (at >= found) continue;
                    const i64 pair = listed[tile * TOKENS + at];
                    const float a = sums[m][n][odd] * low_gain, b = sums[m][n][odd + 2] * high_gain;
                    if (UP) {
                        // Rounded to storage before the activation, as the contract says.
                        const float gate = from_bf16(to_bf16(a)), up = from_bf16(to_bf16(b));
                        ((u16*)out)[pair * out_stride + row] = to_bf16(silu(gate) * up);
                    } else {
                        float* to = (float*)out + pair * out_stride + row - first_row;
                        to[0] = a * weights[pair];
                        to[8] = b * weights[pair];
                    }
                }
        }
    };

    Cursor ahead;
    ahead.item = item;
    ahead.chunk = 0;
    ahead.tile = -1;
    find(ahead);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) load(ahead, stage);
    clear();
    int chunk = 0;
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            wait_for_groups<STAGES - 2>();
            // Tokens are visible to all, and nobody reads the place any more that is filled next.
            barrier();
            load(ahead, (stage + STAGES - 1) % STAGES);
            multiply(stage);
            if (++chunk < CHUNKS) continue;
            finish_item();
            chunk = 0;
            if (++item >= end) return;
            clear();
        }
    }
}
#endif
