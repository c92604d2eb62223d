// Products of 2 to 128 rows with a large matrix on Hopper: bound by reading the matrix.
//
// A block has ROWS rows of the matrix and one of PARTS parts of the inner dimension; blocks of the
// same rows are a cluster. Rows of the matrix are the left operand of WGMMA and the rows of x, TOKENS
// of them, the right one; both come by asynchronous copies, in steps of 64 columns, through a ring
// each. The matrix does not wait for the kernel before, which writes x: its ring is as deep as shared
// memory allows, as most of it then comes while that kernel ends. Sums of parts stay in shared memory,
// where each block of the cluster adds some of them in the order of the parts.
//
// In shared memory a step's rows are 128 bytes, whose sixteenths are swapped by the row's number.
//
// A second matrix with as many columns, the gate, has the last blocks; its products are float32.
//
// Macros: ROWS 64, 128 or 192; TOKENS, at least the rows of x, a power of two from 16 to 128; PARTS;
// STAGES of the matrix' ring and X_STAGES of the other.

#include "instructions.cu"
#include "instructions_wgmma.cu"

#define OWN (2 * ROWS)  // threads that multiply, then MORE that bring the matrix, then FEW for x
#define MORE 128
#define FEW 64
#define ALL (OWN + MORE + FEW)
#define X_BYTES (TOKENS * 128)
#define W_BYTES (ROWS * 128)
#define W_AT (X_STAGES * X_BYTES)
#define RINGS (W_AT + STAGES * W_BYTES)
#define PITCH (ROWS + 4)           // floats between the sums of two rows of x
#define SUMS (TOKENS * PITCH * 4)  // which take the place of the rings
#define BARRIERS_AT (RINGS > SUMS ? RINGS : SUMS)

#ifndef ON_HOST
#define KERNEL(threads) \
    extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(threads, 1)
DEVICE void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}
DEVICE void barrier_of_cluster() {
    if (PARTS == 1) return __syncthreads();
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Four floats of a block of the cluster.
DEVICE float4 load_of(int part, u32 at) {
    float4 v;
    asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(part) : "memory");
    return v;
}

// sums [64, TOKENS] += the 64 rows of sixteen columns that `a` describes times the TOKENS rows of `b`.
template <int WIDE>
DEVICE void multiply_shared(float (&d)[WIDE / 2], u64 a, u64 b);

#define SAY(a, b, c, d, e, f, g, h) \
    "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define S16 SAY(0, 1, 2, 3, 4, 5, 6, 7)
#define S32 S16 "," SAY(8, 9, 10, 11, 12, 13, 14, 15)
#define S64 S32 "," SAY(16, 17, 18, 19, 20, 21, 22, 23) "," SAY(24, 25, 26, 27, 28, 29, 30, 31)
#define S128                                            \
    S64 "," SAY(32, 33, 34, 35, 36, 37, 38, 39) "," SAY( \
        40, 41, 42, 43, 44, 45, 46, 47) "," SAY(48, 49, 50, 51, 52, 53, 54, 55) "," SAY(56, 57, 58, 59, 60, 61, 62, 63)
#define R(i) "+f"(d[i])
#define EIGHT(i) R(i), R(i + 1), R(i + 2), R(i + 3), R(i + 4), R(i + 5), R(i + 6), R(i + 7)
#define D16 EIGHT(0)
#define D32 D16, EIGHT(8)
#define D64 D32, EIGHT(16), EIGHT(24)
#define D128 D64, EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
#define MULTIPLY(WIDE, A, B)                                                                       \
    template <>                                                                                    \
    DEVICE void multiply_shared<WIDE>(float (&d)[WIDE / 2], u64 a, u64 b) {                        \
        asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #WIDE "k16.f32.bf16.bf16 {" S##WIDE "}, " \
                     "%" #A ", %" #B ", p, 1, 1, 0, 0;}"                                           \
                     : D##WIDE                                                                     \
                     : "l"(a), "l"(b)                                                              \
                     : "memory");                                                                  \
    }
MULTIPLY(16, 8, 9)
MULTIPLY(32, 16, 17)
MULTIPLY(64, 32, 33)
MULTIPLY(128, 64, 65)
#else
DEVICE float4 load_of(int part, u32 at) {
    return kept_floats(blockIdx.x / PARTS * PARTS + part, at);
}
#endif

struct Place { int stage, turn; };
template <int COUNT>
DEVICE void advance(Place& at) {
    if (++at.stage < COUNT) return;
    at.stage = 0;
    at.turn ^= 1;
}

// Brings a step's 128 bytes of COUNT rows after the other to `to`; eight threads have a row.
template <int COUNT, int EACH>
DEVICE void bring(const u16* const (&from)[COUNT], u32 to, i64 offset, int left) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (i * EACH < left) copy16(to + i * EACH * 128, from[i] + offset);
}

// What is written: sums in bfloat16 or float32; of gate and up rows that alternate, the activation in
// float32, or in bfloat16 times the gammas, each of `group` columns.
enum { PLAIN, FLOAT, GATED, WEIGHED };

// `steps` of 64 columns, `segment` of which lie side by side.
KERNEL(ALL)
few_rows(const u16* x, const u16* w, void* out, const float* gammas, const u16* gate, float* logits,
         int kind, int group, int rows, int columns, int gates, int steps, int segment, i64 x_stride,
         i64 w_stride, i64 segment_stride, i64 gate_stride) {
    const int tid = threadIdx.x, rank = blockIdx.x % PARTS;
    int first_row = blockIdx.x / PARTS * ROWS;
    if (gates && first_row >= columns) {
        first_row -= (columns + ROWS - 1) / ROWS * ROWS;
        w = gate, out = logits, columns = gates, w_stride = gate_stride, kind = FLOAT;
    }
    const int first = steps * rank / PARTS, last = steps * (rank + 1) / PARTS;
    const u32 base = shared_address(memory), barriers = base + BARRIERS_AT;
    let_next_start();
    // Of each stage, two barriers: it is filled, and it is free again.
    const u32 x_barriers = barriers + 16 * STAGES;
    if (tid < STAGES + X_STAGES) {
        make_barrier(barriers + 16 * tid, tid < STAGES ? MORE : FEW);
        make_barrier(barriers + 16 * tid + 8, OWN / 32);
    }
    barrier();
    float sums[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0;
    Place at = {0, 0};
    const int own = tid - OWN, part = tid & 7;
    if (own >= MORE) {
        const int row = (own - MORE) >> 3;
        const u32 to = base + row * 128 + ((part ^ row) << 4);
        const u16* from[TOKENS / 8];
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) from[i] = x + (i64)(row + i * 8) * x_stride + part * 8;
        wait_for_previous();
#pragma unroll 1
        for (int step = first; step < last; step++, advance<X_STAGES>(at)) {
            await_turn(x_barriers + 16 * at.stage + 8, at.turn ^ 1);
            // Rows behind the last keep what they have: no row touches another.
            bring<TOKENS / 8, 8>(from, to + at.stage * X_BYTES, step * 64, rows - row);
            arrive_with_copies(x_barriers + 16 * at.stage);
        }
        finish_copies();
    } else if (own >= 0) {
        const int row = own >> 3;
        const u32 to = base + W_AT + row * 128 + ((part ^ (row & 7)) << 4);
        const u16* from[ROWS / 16];
#pragma unroll
        for (int i = 0; i < ROWS / 16; i++) {
            const int n = first_row + row + i * 16;
            from[i] = w + (n < columns ? n : columns - 1) * w_stride + part * 8;
        }
#pragma unroll 1
        for (int step = first; step < last; step++, advance<STAGES>(at)) {
            await_turn(barriers + 16 * at.stage + 8, at.turn ^ 1);
            bring<ROWS / 16, 16>(from, to + at.stage * W_BYTES,
                                 step / segment * segment_stride + step % segment * 64, ROWS);
            arrive_with_copies(barriers + 16 * at.stage);
        }
        finish_copies();
    } else {
        // Eight rows of 128 bytes, 1,024 bytes apart from the next eight.
        const u64 layout = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16;
        Place x_at = at, before = at, x_before = at;
#pragma unroll 1
        for (int step = first; step < last; step++) {
            await_turn(barriers + 16 * at.stage, at.turn);
            await_turn(x_barriers + 16 * x_at.stage, x_at.turn);
            show_copies();
            const u64 a = layout | (base + W_AT + at.stage * W_BYTES + (tid >> 7) * 8192) >> 4;
            const u64 b = layout | (base + x_at.stage * X_BYTES) >> 4;
            begin_products();
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_shared<TOKENS>(sums, a + 2 * i, b + 2 * i);
            close_products();
            wait_products<1>();
            if (step > first && (tid & 31) == 0) {
                arrive(barriers + 16 * before.stage + 8);
                arrive(x_barriers + 16 * x_before.stage + 8);
            }
            before = at, x_before = x_at;
            advance<STAGES>(at);
            advance<X_STAGES>(x_at);
        }
        wait_products<0>();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) settle(sums[i]);
    }
    barrier();
    float* const kept = (float*)memory;
    if (own < 0) {
        float* const to = kept + (tid & 3) * 2 * PITCH + (tid >> 5) * 16 + (tid >> 2 & 7);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++)
            to[(i / 4 * 8 + (i & 1)) * PITCH + (i >> 1 & 1) * 8] = sums[i];
    }
    barrier_of_cluster();
    wait_for_previous();
    const int all = rows * (ROWS / 4), share = (all + PARTS - 1) / PARTS;
    const int end = (rank + 1) * share < all ? (rank + 1) * share : all;
    for (int four = rank * share + tid; four < end; four += ALL) {
        const int row = four / (ROWS / 4), place = four % (ROWS / 4) * 4, n = first_row + place;
        float4 parts[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++) parts[p] = load_of(p, base + (row * PITCH + place) * 4);
        float4 v = parts[0];
#pragma unroll
        for (int p = 1; p < PARTS; p++)
            v.x += parts[p].x, v.y += parts[p].y, v.z += parts[p].z, v.w += parts[p].w;
        const i64 to = (i64)row * columns + n;
        if (kind == FLOAT) {
            const float four_of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (n + i < columns) ((float*)out)[to + i] = four_of[i];
            continue;
        }
        if (n >= columns) continue;
        // Gate and up are rounded to storage before the activation, as the contract says.
        const u32 low = to_bf16_pair(v.x, v.y), high = to_bf16_pair(v.z, v.w);
        const float one = silu(low_of(low)) * high_of(low), two = silu(low_of(high)) * high_of(high);
        if (kind == PLAIN) {
            *(uint2*)((u16*)out + to) = uint2{low, high};
        } else if (kind == GATED) {
            *(float2*)((float*)out + to / 2) = float2{one, two};
        } else {
            const float gamma = gammas[row * (columns / 2 / group) + n / 2 / group];
            *(u32*)((u16*)out + to / 2) = to_bf16_pair(one * gamma, two * gamma);
        }
    }
    if (PARTS > 1) barrier_of_cluster();
}
