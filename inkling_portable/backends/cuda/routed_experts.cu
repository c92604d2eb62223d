// Routed experts of many tokens: one product, weights of 4 bits in registers, activations in shared
// memory.
//
// Compiled for one shape at a time by these macros: K columns; W_ROW and S_ROW bytes of a row of codes
// and of scales; TOP_K; BLOCK codes of a scale (16: E4M3, 32: E8M0); GAIN 1 if there are global
// scales; UP 1 for the first product, of which INTERLEAVED is 1 if gate and up rows alternate, else
// HALF is the rows of each; WARPS_M warps, TILES of 16 rows for a warp, NT groups of 8 tokens at a
// time, RESIDENT blocks of an SM at least.

#include "routed_experts_common.cu"

#define THREADS (32 * WARPS_M)

// What a lane holds of one row and chunk: 32 codes and their scales.
struct Codes {
    uint4 words;
    u32 scales;
};

// What a warp reads in one step of many tokens: a chunk of TILES times sixteen rows, of which lane
// 4 g + q has row g in `low` and row g + 8 in `high`.
struct Step {
    Codes low[TILES], high[TILES];
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

DEVICE Codes load_codes(const u8* row, const u8* scales) {
    Codes c;
    c.words = load_once(row);
    c.scales = BLOCK == 16 ? load_u16(scales) : load_u8(scales);
    return c;
}

DEVICE void load_step(Step& step, const u8* row, const u8* scales) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        step.low[m] = load_codes(row + m * NEXT * W_ROW, scales + m * NEXT * S_ROW);
        step.high[m] = load_codes(row + (m * NEXT + OTHER) * (i64)W_ROW,
                                  scales + (m * NEXT + OTHER) * (i64)S_ROW);
    }
}

// blockIdx.y is a tile of a plan (routed_experts_sort.py), up to 8 NT pairs
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
            decode_scales(now.low[m].scales, low_scale[m][0], low_scale[m][1]);
            decode_scales(now.high[m].scales, high_scale[m][0], high_scale[m][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[TILES][4], b[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                decode(word_of(now.low[m].words, i), low_scale[m][i / 2], a[m]);
                decode(word_of(now.high[m].words, i), high_scale[m][i / 2], b[m]);
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
