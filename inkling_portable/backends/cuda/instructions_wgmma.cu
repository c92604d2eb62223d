// Hopper's products of matrices in shared memory, and the barriers of those who bring them there.

#ifndef ON_HOST
extern __shared__ __align__(1024) u8 memory[];

// Barriers in shared memory: they turn as often as `count` threads have arrived, or the copies that
// those had asked for. A thread waits for an even or odd turn; turn -1 was before the first.
DEVICE void make_barrier(u32 at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
DEVICE void arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
DEVICE void arrive_with_copies(u32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
DEVICE void await_turn(u32 at, int odd) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;}" ::"r"(at), "r"(odd) : "memory");
}
DEVICE void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Shows what was copied to WGMMA.
DEVICE void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Products run on while the warp goes on: `begin` before them, `close` after, `wait` for all but the
// last LEFT closed groups.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// What reads `x` from here on stays behind the wait before.
DEVICE void settle(float& x) { asm volatile("" : "+f"(x)::"memory"); }
// What is made of `x` is made here, not kept from before.
DEVICE void settle(u32& x) { asm volatile("" : "+r"(x)); }
#endif
