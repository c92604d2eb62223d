// What kernels of NVIDIA chips share: names of types, and instructions from sm_90 on.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

#ifndef ON_HOST
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define DYNAMIC(name) extern __shared__ __align__(128) u8 name[]
DEVICE void barrier() { __syncthreads(); }
// Programmatic dependent launch: the next kernel may start; the previous one has finished.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE float low_of(u32 pair) { return as_float(pair << 16); }
DEVICE float high_of(u32 pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE u32 to_bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif
