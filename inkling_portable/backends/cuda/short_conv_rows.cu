// The end of a branch for many whole rows: sum, short convolution of four taps, residual, next norm.
//
// A thread has eight channels of every row that its block takes, one row after the other: it keeps
// their weights and the last three inputs, so that rows that follow each other in a request are read
// once. Rows come through shared memory, STAGES of them on their way; a thread reads there only what
// it has asked for itself.

#include "instructions.cu"

#define THREADS (H / 8)
#define WARPS (THREADS / 32)

#ifndef ON_HOST
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
// Past the L1, which has no second use for it.
DEVICE uint4 load_once(const void* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE void copy_own(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEVICE void close_own() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the last LEFT groups of this thread.
template <int LEFT>
DEVICE void await_own() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
// What is kept from row to row is kept in pairs, or registers would not suffice.
DEVICE void keep(u32& pair) { asm volatile("" : "+r"(pair)); }
DEVICE float sum_of_warp(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}
#endif

struct alignas(16) Eight { u32 pairs[4]; };

DEVICE Eight load_eight(const u16* p) {
    const uint4 v = load_once(p);
    return {v.x, v.y, v.z, v.w};
}
DEVICE void store_eight(u16* p, const Eight& v) {
    *(uint4*)p = uint4{v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]};
}
DEVICE Eight sum(const Eight& a, const Eight& b) {
    Eight c;
    for (int i = 0; i < 4; i++)
        c.pairs[i] = to_bf16_pair(low_of(a.pairs[i]) + low_of(b.pairs[i]),
                                  high_of(a.pairs[i]) + high_of(b.pairs[i]));
    return c;
}
// Adds a tap's products. A channel's weights are two words, of taps 0, 1 and of 2, 3.
template <int TAP>
DEVICE void add_tap(float* total, const Eight& z, const u32* weights) {
    for (int i = 0; i < 8; i++) {
        const u32 two = weights[2 * i + TAP / 2];
        const float factor = TAP % 2 ? high_of(two) : low_of(two);
        total[i] += (i % 2 ? high_of(z.pairs[i / 2]) : low_of(z.pairs[i / 2])) * factor;
    }
}

KERNEL(THREADS) conv_rows(
    const u16* partial, const u16* extra, const u16* residual, const u32* weight, const u16* gain,
    u16* normed, u16* summed, u16* state, const i64* slots, const i64* sources, int rows,
    int page, int eps, i64 partial_stride, i64 extra_stride, i64 residual_stride, i64 state_block,
    i64 state_token, i64 state_group) {
    DYNAMIC(ring);
    Eight* const coming = (Eight*)ring + threadIdx.x;
    SHARED float sums[2][WARPS];
    // Twice where a row's state goes, negative for nowhere; odd where the rows before it are its taps.
    SHARED i64 places[MOST_ROWS];
    const int channel = threadIdx.x * 8;
    state += channel / W * state_group + channel % W;
    u32 weights[16];
    for (int i = 0; i < 4; i++) {
        const uint4 v = load_once(weight + 2 * channel + 4 * i);
        weights[4 * i] = v.x, weights[4 * i + 1] = v.y;
        weights[4 * i + 2] = v.z, weights[4 * i + 3] = v.w;
    }
    Eight gains = load_eight(gain + channel);
    int row = 0, end = 0;
    wait_for_previous();
    const auto place_of = [&](i64 slot) {
        return slot / page * state_block + slot % page * state_token;
    };
    const auto input = [&](i64 row) {
        const Eight z = load_eight(partial + row * partial_stride + channel);
        return EXTRA ? sum(z, load_eight(extra + row * extra_stride + channel)) : z;
    };
    const auto fetch = [&](int ahead) {
        const i64 row = ahead;
        if (ahead < end) {
            Eight* const to = coming + ahead % STAGES * (2 + EXTRA) * THREADS;
            copy_own(to, residual + row * residual_stride + channel);
            copy_own(to + THREADS, partial + row * partial_stride + channel);
            if (EXTRA) copy_own(to + 2 * THREADS, extra + row * extra_stride + channel);
        }
        close_own();
    };
    const auto tap = [&](i64 source) {
        if (source >= 0) return input(source);
        if (source == -1) return Eight{};
        return load_eight(state + place_of(-2 - source));
    };
    // Rows of decoding requests stand in front, and all taps of theirs lie in the state: as what waits
    // for them one row after the other, they are dealt out to all blocks first.
    const float mine = sum_of_warp((int)threadIdx.x < rows && sources[3ll * threadIdx.x + 2] < 0);
    if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = mine;
    barrier();
    float found = 0;
    for (int i = 0; i < WARPS; i++) found += sums[0][i];
    const int apart = found > 1 ? (int)found : 0;
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        const int most = part ? rows : apart;
        const int each = (most - part * apart + gridDim.x - 1) / gridDim.x;
        const int first = part * apart + blockIdx.x * each;
        end = first + each < most ? first + each : most;
        row = first;
        if (row >= end) continue;
        for (int i = 0; i < STAGES - 1; i++) fetch(row + i);
        for (int i = row + threadIdx.x; i < end; i += THREADS) {
            const i64* const taps = sources + 3ll * i;
            const bool near = taps[0] == i - 3 && taps[1] == i - 2 && taps[2] == i - 1;
            places[i - row] = slots[i] < 0 ? -1 : 2 * place_of(slots[i]) + near;
        }
        barrier();
        Eight three = {}, two = {}, one = {};
        if (row > 0) one = input(row - 1);
        if (row > 1) two = input(row - 2);
        if (row > 2) three = input(row - 3);
        for (; row < end; row++) {
            await_own<STAGES - 2>();
            for (int i = 0; i < 16; i++) keep(weights[i]);
            for (Eight* kept : {&gains, &one, &two, &three})
                for (int i = 0; i < 4; i++) keep(kept->pairs[i]);
            const Eight* const now = coming + row % STAGES * (2 + EXTRA) * THREADS;
            const Eight carried = now[0];
            const Eight z = EXTRA ? sum(now[THREADS], now[2 * THREADS]) : now[THREADS];
            fetch(row + STAGES - 1);
            float total[8];
            for (int i = 0; i < 4; i++)
                total[2 * i] = low_of(z.pairs[i]), total[2 * i + 1] = high_of(z.pairs[i]);
            const i64 place = places[row - first];
            if (place >= 0) {
                add_tap<3>(total, z, weights);
                if (place & 1) {
                    add_tap<2>(total, one, weights);
                    add_tap<1>(total, two, weights);
                    add_tap<0>(total, three, weights);
                } else {
                    add_tap<2>(total, tap(sources[3ll * row + 2]), weights);
                    add_tap<1>(total, tap(sources[3ll * row + 1]), weights);
                    add_tap<0>(total, tap(sources[3ll * row]), weights);
                }
                store_eight(state + (place >> 1), z);
            }
            Eight y;
            float squares = 0;
            for (int i = 0; i < 4; i++) y.pairs[i] = to_bf16_pair(total[2 * i], total[2 * i + 1]);
            y = sum(carried, y);
            store_eight(summed + (i64)row * H + channel, y);
            for (int i = 0; i < 4; i++) {
                total[2 * i] = low_of(y.pairs[i]), total[2 * i + 1] = high_of(y.pairs[i]);
                squares += total[2 * i] * total[2 * i] + total[2 * i + 1] * total[2 * i + 1];
            }
            // In turns, so that one barrier a row is enough.
            float* const shares = sums[row & 1];
            squares = sum_of_warp(squares);
            if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = squares;
            barrier();
            squares = 0;
            for (int i = 0; i < WARPS; i++) squares += shares[i];
            const float scale = inverse_root(squares / H + as_float(eps));
            for (int i = 0; i < 4; i++)
                y.pairs[i] = to_bf16_pair(total[2 * i] * scale * low_of(gains.pairs[i]),
                                          total[2 * i + 1] * scale * high_of(gains.pairs[i]));
            store_eight(normed + (i64)row * H + channel, y);
            three = two, two = one, one = z;
        }
    }
}
