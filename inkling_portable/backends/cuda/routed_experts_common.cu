// What the kernels of routed experts share: instructions of NVIDIA chips, from sm_90 on, and codes of
// 4 bits as operands of their tensor cores.
//
// Weights are the left operand of mma.m16n8k16; tokens are the right one. The sum over k may be taken
// in any order, so a lane keeps whatever codes one 16-byte load gives it and takes the activations of
// just those: a 32-bit word has codes 0..3 in its low half and 4..7 in its high half, and pair j of it
// is (code j, code j + 4), as both halves are decoded at once.
//
// A code's bits moved to bit 6 of a bfloat16 are its value times 2^-126; the product with its block
// scale, kept times 2^SHIFT, is exact in bfloat16. Sums are multiplied by 2^(126 - SHIFT) at the end.

#include "instructions.cu"

#ifndef ON_HOST
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, RESIDENT)

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
// Bits 6 to 8 of both halves of `value`, the others of `sign`.
DEVICE u32 signed_pair(u32 value, u32 sign) {
    u32 pair;
    asm("lop3.b32 %0, %1, %2, 0x01C001C0, 0xE4;" : "=r"(pair) : "r"(value), "r"(sign));
    return pair;
}
// In assembler, as a compiler would shift first and mask each result, which costs more.
DEVICE u32 masked(u32 word, u32 mask) {
    u32 some;
    asm("and.b32 %0, %1, %2;" : "=r"(some) : "r"(word), "r"(mask));
    return some;
}
DEVICE u32 without_byte(u32 word) {
    u32 next;
    asm("shr.u32 %0, %1, 8;" : "=r"(next) : "r"(word));
    return next;
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// Two E4M3 codes -> their values times 2^119, each twice in a bfloat16 pair.
DEVICE void e4m3_twice(u32 codes, u32& first, u32& second) {
    asm("{.reg .b16 l, h; .reg .b32 c; .reg .f32 a, b; cvt.rn.f16x2.e4m3x2 c, %2; mov.b32 {l, h}, c;"
        "cvt.f32.f16 a, l; cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 c, b, a;"
        "mul.rn.bf16x2 c, c, %3; mov.b32 {l, h}, c; mov.b32 %0, {l, l}; mov.b32 %1, {h, h};}"
        : "=r"(first), "=r"(second) : "h"((u16)codes), "r"(0x7B007B00u));
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
DEVICE u16 to_bf16(float x) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(v) : "f"(x));
    return v;
}
// A barrier of some threads of a block.
DEVICE void barrier_of(int threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}
// Barriers in shared memory that also count bytes on their way: a phase ends when all have arrived.
DEVICE void start_phases(u64* b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
                 : "memory");
}
DEVICE void phases_started() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void arrive_and_expect(u64* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes) : "memory");
}
DEVICE bool try_phase(u64* b, int parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
    return done;
}
DEVICE void wait_for_phase(u64* b, int parity) {
    while (!try_phase(b, parity)) continue;
}
// For warps that have little else to do: they leave the others' turns alone.
DEVICE void wait_idly(u64* b, int parity) {
    while (!try_phase(b, parity)) __nanosleep(20);
}
// Counts this block in; waits until as many came as the grid has; the last one to leave makes the
// three counters zeros again.
DEVICE void show_writes() { __threadfence(); }
DEVICE void come(int* counter) { atomicAdd(counter, 1); }
DEVICE void wait_for_blocks(const int* counter) {
    int came;
    do {
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(came) : "l"(counter) : "memory");
    } while (came < (int)gridDim.x);
}
DEVICE void leave_blocks(int* counters) {
    if (atomicAdd(counters + 2, 1) != (int)gridDim.x - 1) return;
    counters[0] = counters[1] = counters[2] = 0;
}
// Brings bytes that are used once; addresses and their number are multiples of 16.
DEVICE void bring(void* to, const void* from, int bytes, u64* b) {
    asm volatile("{.reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], p;}" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
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

// Scales of the first and the last 16 codes, each twice in a pair, times 2^SHIFT.
DEVICE void decode_scales(u32 codes, u32& first, u32& second) {
    if (BLOCK == 16) {
        e4m3_twice(codes, first, second);
    } else {
        // Codes above 190 would not fit and give NaN, as code 255 is by definition.
        first = codes > 190 ? 0x7FFF7FFFu : (codes + 63) * 0x00800080u;
        second = first;
    }
}

// Eight codes times their scale: pairs (j, j + 4).
DEVICE void decode(u32 word, u32 scale, u32* pairs) {
#if ARRANGED
    // Bits as `formats.arranged` puts them: one shift, or none, brings both codes of a pair to bits 6
    // to 8 and 15; those of the last pair, which has what the others leave, need two.
    const u32 all = 0x81C081C0u, last = masked(word >> 4, 0x00400040u);
    pairs[0] = multiply_pairs(word * 64 & all, scale);
    pairs[1] = multiply_pairs(word & all, scale);
    pairs[2] = multiply_pairs((word >> 6 | word << 26) & all, scale);
    pairs[3] = multiply_pairs((word * 16 & 0x81808180u) | last, scale);
#else
    const u32 next = without_byte(word), odd = masked(word, 0x80808080u);
    // One multiplication moves the sign of a nibble to bit 15 and its value to bit 6. Odd nibbles take
    // the other way, so that both kinds of units are busy.
    pairs[0] = multiply_pairs(((word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    pairs[1] = multiply_pairs(signed_pair(word * 4, odd * 256), scale);
    pairs[2] = multiply_pairs(((next & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    pairs[3] = multiply_pairs(signed_pair(next * 4, odd), scale);
#endif
}

DEVICE u32 shared_scales(const u8* p) { return BLOCK == 16 ? *(const u16*)p : *p; }
