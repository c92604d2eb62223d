// Routed experts of few tokens on NVIDIA tensor cores: weights of 4 bits, read once, from sm_90 on.
//
// Two kernels, compiled for one shape at a time (the macros below). Weights are the left operand of
// mma.m16n8k16 and go from memory to registers without a detour; tokens are the right operand. The
// sum over k may be taken in any order, so a lane keeps whatever codes one 16-byte load gives it and
// takes the activations of just those: a 32-bit word has codes 0..3 in its low half and 4..7 in its
// high half, and pair j of it is (code j, code j + 4), as both halves are decoded at once.
//
// A code's bits moved to bit 6 of a bfloat16 are its value times 2^-126; the product with its block
// scale, kept times 2^SHIFT, is exact in bfloat16. Sums are multiplied by 2^(126 - SHIFT) at the end.
//
// Macros: K columns, TOP_K, BLOCK codes of a scale (16: E4M3, 32: E8M0), GAIN 1 if there are global
// scales, TILES of 16 rows for a warp, AHEAD chunks loaded before they are used, RESIDENT blocks of
// an SM at least. BY_TOKEN selects that kernel; `by_expert` takes besides: UP 1 for the first product,
// INTERLEAVED 1 if gate and up rows alternate, WARPS_K warps that share k and WARPS_M that share rows,
// NT groups of 8 tokens at a time, PLANNED 1 if tiles come from a plan, LISTED tokens at most.

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
DEVICE u32 votes(bool mine) { return __ballot_sync(0xFFFFFFFFu, mine); }
DEVICE int ones(u32 x) { return __popc(x); }
DEVICE bool any_thread(bool mine) { return __syncthreads_or(mine); }
DEVICE void barrier() { __syncthreads(); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE u16 to_bf16(float x) {
    u16 v;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(x));
    return v;
}
// Programmatic dependent launch: the next kernel may start; the previous one has finished.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

#define CHUNK 128  // columns that the four lanes of a row take in one step, 32 each
#define SHIFT (BLOCK == 16 ? 119 : 63)
#define UNSHIFT (BLOCK == 16 ? 0x1p7f : 0x1p63f)

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

DEVICE Codes load_codes(const u8* row, const u8* scale_row, int chunk, int quarter) {
    Codes c;
    c.words = load_once(row + chunk * (CHUNK / 2) + quarter * 16);
    if (BLOCK == 16)
        c.scales = load_u16(scale_row + chunk * 8 + quarter * 2);
    else
        c.scales = load_u8(scale_row + chunk * 4 + quarter);
    return c;
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

// TILES times sixteen rows (`low` has row g, `high` row g + 8 of lane 4 g + quarter) by 8 N tokens.
template <int M, int N>
DEVICE void multiply_chunk(float (*sums)[N][4], const Codes* low, const Codes* high, int stride,
                           const u16* x, const u32* rows, int chunk) {
    u32 low_scale[M][2], high_scale[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        decode_scales(low[m * stride].scales, low_scale[m][0], low_scale[m][1]);
        decode_scales(high[m * stride].scales, high_scale[m][0], high_scale[m][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 a[M][4], b[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            decode(word_of(low[m * stride].words, i), low_scale[m][i / 2], a[m]);
            decode(word_of(high[m * stride].words, i), high_scale[m][i / 2], b[m]);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint4 v = load_row(x + (rows[n] + chunk * CHUNK + i * 8));
            const u32 x04 = permute(v.x, v.z, 0x5410), x15 = permute(v.x, v.z, 0x7632);
            const u32 x26 = permute(v.y, v.w, 0x5410), x37 = permute(v.y, v.w, 0x7632);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_tiles(sums[m][n], a[m][0], b[m][0], a[m][1], b[m][1], x04, x15);
                multiply_tiles(sums[m][n], a[m][2], b[m][2], a[m][3], b[m][3], x26, x37);
            }
        }
    }
}

// Codes of M tiles and AHEAD chunks from `start` on; `next` is the distance of two tiles in rows.
template <int M>
DEVICE void load_tiles(Codes (*low)[AHEAD], Codes (*high)[AHEAD], const u8* low_row,
                       const u8* high_row, const u8* low_scales, const u8* high_scales, i64 next,
                       i64 next_scales, int start, int quarter) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int c = 0; c < AHEAD; c++) {
            low[m][c] = load_codes(low_row + m * next, low_scales + m * next_scales, start + c,
                                   quarter);
            high[m][c] = load_codes(high_row + m * next, high_scales + m * next_scales, start + c,
                                    quarter);
        }
}

#ifndef BY_TOKEN
// Pairs of one expert. Without a plan blockIdx.y is the expert, or (by_pair) a pair, of which only
// the first one that chose its expert works; with a plan (routed_experts_sort.py), a tile of up to
// 8 NT pairs. UP: rows of x are tokens and silu(gate) * up goes to the bfloat16 out[pair, i]. Else
// rows of x are pairs and weights[pair] times the product goes to the float32
// out[pair, n - first_row], n from first_row on.
KERNEL(32 * WARPS_K * WARPS_M)
by_expert(const u16* x, const int* ids, const int* plan, const u8* w, const u8* scales,
          const float* gains, const float* weights, void* out, int pairs, int by_pair, int tiles,
          int experts, int rows, int first_row, i64 x_stride, i64 w_expert, i64 w_row, i64 s_expert,
          i64 s_row, i64 g_expert, i64 g_row, i64 out_stride) {
    const int THREADS = 32 * WARPS_K * WARPS_M, CHUNKS = K / CHUNK / WARPS_K;
    SHARED int listed[LISTED];
    SHARED int counts[WARPS_K * WARPS_M];
    SHARED float parts[WARPS_M][WARPS_K][TILES][4 * NT][32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int share = warp % WARPS_K, group = warp / WARPS_K, g = lane >> 2, quarter = lane & 3;

    int expert, found = 0;
    if (PLANNED) {
        const int tile = blockIdx.y;
        expert = plan[3 * experts + tile];
        if (expert < 0) return;
        found = plan[expert] - (tile - plan[experts + expert]) * 8 * NT;
        if (found > 8 * NT) found = 8 * NT;
        if (tid < found) listed[tid] = plan[3 * experts + tiles + tile * 8 * NT + tid];
        barrier();
    } else {
        expert = by_pair ? ids[blockIdx.y] : (int)blockIdx.y;
        if (expert < 0 || expert >= experts) return;
        for (int start = 0; start < pairs; start += THREADS) {
            const int pair = start + tid;
            const bool mine = pair < pairs && ids[pair] == expert;
            const u32 which = votes(mine);
            if (lane == 0) counts[warp] = ones(which);
            if (any_thread(by_pair && mine && pair < (int)blockIdx.y)) return;
            int place = found + ones(which & ((1u << lane) - 1));
            for (int i = 0; i < WARPS_K * WARPS_M; i++) {
                if (i < warp) place += counts[i];
                found += counts[i];
            }
            if (mine && place < LISTED) listed[place] = pair;
            barrier();
        }
        if (found == 0) return;
    }
    let_next_start();

    const int slab = (blockIdx.x * WARPS_M + group) * TILES;
    int low_row, high_row, step;
    if (UP) {
        const int i = slab * 8 + g;
        low_row = INTERLEAVED ? 2 * i : i;
        high_row = INTERLEAVED ? 2 * i + 1 : rows / 2 + i;
        step = INTERLEAVED ? 16 : 8;
    } else {
        low_row = first_row + slab * 16 + g;
        high_row = low_row + 8;
        step = 16;
    }
    const int k = share * CHUNKS * CHUNK;
    const u8* codes = w + expert * w_expert + k / 2;
    const u8* block_scales = scales + expert * s_expert + k / BLOCK;
    const u8 *low = codes + low_row * w_row, *high = codes + high_row * w_row;
    const u8 *low_scales = block_scales + low_row * s_row;
    const u8 *high_scales = block_scales + high_row * s_row;

    for (int first = 0; first < found; first += 8 * NT) {
        u32 rows_of_x[NT];
        float sums[TILES][NT][4];
        Codes low_codes[TILES][AHEAD], high_codes[TILES][AHEAD];
        load_tiles<TILES>(low_codes, high_codes, low, high, low_scales, high_scales, step * w_row,
                          step * s_row, 0, quarter);
        if (!UP && first == 0) wait_for_previous();
#pragma unroll
        for (int n = 0; n < NT; n++) {
            // Columns of no token repeat one that is there: no column touches another.
            const int token = first + n * 8 + g, pair = listed[token < found ? token : first];
            rows_of_x[n] = (UP ? pair / TOP_K : pair) * (u32)x_stride + k + quarter * 32;
#pragma unroll
            for (int m = 0; m < TILES; m++)
                for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
        }
#pragma unroll 1
        for (int start = 0; start < CHUNKS; start += AHEAD) {
            Codes low_next[TILES][AHEAD], high_next[TILES][AHEAD];
            if (start + AHEAD < CHUNKS)
                load_tiles<TILES>(low_next, high_next, low, high, low_scales, high_scales,
                                  step * w_row, step * s_row, start + AHEAD, quarter);
#pragma unroll
            for (int c = 0; c < AHEAD; c++)
                multiply_chunk<TILES, NT>(sums, &low_codes[0][c], &high_codes[0][c], AHEAD,
                                          x, rows_of_x, start + c);
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int c = 0; c < AHEAD; c++) {
                    low_codes[m][c] = low_next[m][c];
                    high_codes[m][c] = high_next[m][c];
                }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) parts[group][share][m][n * 4 + i][lane] = sums[m][n][i];
        barrier();
        // Sums over the warps that shared k, always in the same order: sums 0 and 2 of a lane are
        // rows g and g + 8 of one token, sums 1 and 3 those of the next token.
        for (int j = tid; j < WARPS_M * TILES * NT * 64; j += THREADS) {
            const int from = j & 31, odd = j >> 5 & 1, n = (j >> 6) % NT, tile = (j >> 6) / NT;
            const int token = first + n * 8 + (from & 3) * 2 + odd;
            if (token >= found) continue;
            float a = 0, b = 0;
            for (int s = 0; s < WARPS_K; s++) {
                a += parts[tile / TILES][s][tile % TILES][n * 4 + odd][from];
                b += parts[tile / TILES][s][tile % TILES][n * 4 + odd + 2][from];
            }
            a *= UNSHIFT;
            b *= UNSHIFT;
            const int pair = listed[token], part = blockIdx.x * WARPS_M * TILES + tile;
            if (UP) {
                const int i = part * 8 + (from >> 2);
                if (GAIN) {
                    a *= gains[expert * g_expert + (INTERLEAVED ? 2 * i : i) * g_row];
                    b *= gains[expert * g_expert + (INTERLEAVED ? 2 * i + 1 : rows / 2 + i) * g_row];
                }
                // Gate and up are rounded to storage before the activation, as the contract says.
                const float gate = from_bf16(to_bf16(a)), up = from_bf16(to_bf16(b));
                ((u16*)out)[pair * out_stride + i] = to_bf16(gate / (1.0f + exponential(-gate)) * up);
            } else {
                const int column = part * 16 + (from >> 2), row = first_row + column;
                const float weight = weights[pair];
                if (GAIN) {
                    a *= gains[expert * g_expert + row * g_row];
                    b *= gains[expert * g_expert + (row + 8) * g_row];
                }
                float* place = (float*)out + pair * out_stride + column;
                place[0] = a * weight;
                place[8] = b * weight;
            }
        }
        barrier();
    }
}

#else
// The second product of one token, blockIdx.y, with all its experts: a warp for each slot, and their
// sum in the order of the slots goes to the bfloat16 out[token, row].
KERNEL(32 * TOP_K)
by_token(const u16* inner, const int* ids, const u8* w, const u8* scales, const float* gains,
         const float* weights, u16* out, int experts, i64 inner_stride, i64 w_expert, i64 w_row,
         i64 s_expert, i64 s_row, i64 g_expert, i64 g_row, i64 out_stride) {
    const int CHUNKS = K / CHUNK;
    SHARED float parts[TOP_K][TILES * 16];
    const int tid = threadIdx.x, lane = tid & 31, slot = tid >> 5, g = lane >> 2, quarter = lane & 3;
    const int pair = blockIdx.y * TOP_K + slot, expert = ids[pair];
    const int first_row = blockIdx.x * TILES * 16;
    let_next_start();
    float sums[TILES][1][4];
#pragma unroll
    for (int m = 0; m < TILES; m++)
        for (int i = 0; i < 4; i++) sums[m][0][i] = 0;
    const bool known = expert >= 0 && expert < experts;
    if (!known) wait_for_previous();
    if (known) {
        const u8* low = w + expert * w_expert + (first_row + g) * w_row;
        const u8* low_scales = scales + expert * s_expert + (first_row + g) * s_row;
        const u8 *high = low + 8 * w_row, *high_scales = low_scales + 8 * s_row;
        // One token: all eight columns of the right operand are the same.
        const u32 row = pair * (u32)inner_stride + quarter * 32;
        Codes low_codes[TILES][AHEAD], high_codes[TILES][AHEAD];
        load_tiles<TILES>(low_codes, high_codes, low, high, low_scales, high_scales, 16 * w_row,
                          16 * s_row, 0, quarter);
        wait_for_previous();
#pragma unroll 1
        for (int start = 0; start < CHUNKS; start += AHEAD) {
            Codes low_next[TILES][AHEAD], high_next[TILES][AHEAD];
            if (start + AHEAD < CHUNKS)
                load_tiles<TILES>(low_next, high_next, low, high, low_scales, high_scales,
                                  16 * w_row, 16 * s_row, start + AHEAD, quarter);
#pragma unroll
            for (int c = 0; c < AHEAD; c++)
                multiply_chunk<TILES, 1>(sums, &low_codes[0][c], &high_codes[0][c], AHEAD,
                                         inner, &row, start + c);
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int c = 0; c < AHEAD; c++) {
                    low_codes[m][c] = low_next[m][c];
                    high_codes[m][c] = high_next[m][c];
                }
        }
    }
    if (quarter == 0) {
        const float weight = known ? weights[pair] * UNSHIFT : 0.0f;
        for (int m = 0; m < TILES; m++)
            for (int half = 0; half < 2; half++) {
                const int row = m * 16 + half * 8 + g;
                float value = sums[m][0][half * 2] * weight;
                if (GAIN && known) value *= gains[expert * g_expert + (first_row + row) * g_row];
                parts[slot][row] = value;
            }
    }
    barrier();
    if (tid < TILES * 16) {
        float total = 0;
        for (int s = 0; s < TOP_K; s++) total += parts[s][tid];
        out[blockIdx.y * out_stride + first_row + tid] = to_bf16(total);
    }
}
#endif
