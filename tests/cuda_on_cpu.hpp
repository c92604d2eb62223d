// Runs a CUDA block on one CPU thread: its threads are fibers that change at collective operations.
//
// Included before a kernel file that is compiled with ON_HOST. The instructions that kernel files
// name are written here as their manuals define them, one lane at a time, so that a mistake in a
// kernel's indexing shows as on a GPU; misaligned loads trap. Blocks run one after the other.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define DEVICE static inline
#define KERNEL(threads) static void
#define SHARED static

typedef uint32_t u32;
struct uint4 { u32 x, y, z, w; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, gridDim;

namespace fibers {
const int MOST = 1024, STACK = 1 << 16;
static ucontext_t contexts[MOST], scheduler;
static std::unique_ptr<char[]> stacks[MOST];
static bool done[MOST];
static int count, current;
static void (*body)();

static void change() {
    const int me = current;
    swapcontext(&contexts[me], &scheduler);
    current = me;
    threadIdx = {me, 0, 0};
}

struct Gate {
    int arrived = 0, generation = 0;
    // A collective operation needs all threads of its group; one that left would make this hang.
    void meet(int wanted) {
        const int now = generation;
        if (++arrived == wanted) {
            arrived = 0;
            generation++;
        } else {
            while (generation == now) change();
        }
    }
};
static Gate block, warps[MOST / 32];

static void enter() {
    body();
    done[current] = true;
    while (true) change();
}

static void run(int blocks_x, int blocks_y, int threads, void (*kernel)()) {
    body = kernel;
    count = threads;
    gridDim = {blocks_x, blocks_y, 1};
    for (int b = 0; b < blocks_x * blocks_y; b++) {
        blockIdx = {b % blocks_x, b / blocks_x, 0};
        block = Gate();
        for (Gate& warp : warps) warp = Gate();
        for (int i = 0; i < threads; i++) {
            if (!stacks[i]) stacks[i].reset(new char[STACK]);
            done[i] = false;
            getcontext(&contexts[i]);
            contexts[i].uc_stack.ss_sp = stacks[i].get();
            contexts[i].uc_stack.ss_size = STACK;
            contexts[i].uc_link = &scheduler;
            makecontext(&contexts[i], enter, 0);
        }
        for (int left = threads; left;) {
            left = 0;
            for (int turn = 0; turn < threads; turn++) {
                // Forwards in one block and backwards in the next: no order may matter.
                const int i = b % 2 ? threads - 1 - turn : turn;
                if (done[i]) continue;
                current = i;
                threadIdx = {i, 0, 0};
                swapcontext(&scheduler, &contexts[i]);
                left += !done[i];
            }
        }
    }
}
}  // namespace fibers

static void meet_warp() { fibers::warps[threadIdx.x / 32].meet(32); }
DEVICE void barrier() { fibers::block.meet(fibers::count); }

DEVICE uint4 load_once(const void* p) {
    if ((uintptr_t)p % 16) __builtin_trap();
    uint4 v;
    memcpy(&v, p, 16);
    return v;
}
DEVICE uint4 load_row(const void* p) { return load_once(p); }
DEVICE u32 load_u16(const void* p) {
    if ((uintptr_t)p % 2) __builtin_trap();
    return *(const uint16_t*)p;
}
DEVICE u32 load_u8(const void* p) { return *(const uint8_t*)p; }

DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    uint8_t from[8], to[4];
    memcpy(from, &a, 4);
    memcpy(from + 4, &b, 4);
    for (int i = 0; i < 4; i++) to[i] = from[selector >> (4 * i) & 7];
    u32 r;
    memcpy(&r, to, 4);
    return r;
}

static float as_float(u32 bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static float low_of(u32 pair) { return as_float(pair << 16); }
static float high_of(u32 pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE uint16_t to_bf16(float f) {
    u32 b;
    memcpy(&b, &f, 4);
    if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    return to_bf16(low_of(a) * low_of(b)) | (u32)to_bf16(high_of(a) * high_of(b)) << 16;
}
static float e4m3(int code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    float v = exponent ? ldexpf(1 + fraction / 8.0f, exponent - 7) : ldexpf(fraction, -9);
    if ((code & 127) == 127) v = NAN;
    return code & 128 ? -v : v;
}
DEVICE void e4m3_twice(u32 codes, float by, u32& first, u32& second) {
    first = to_bf16(e4m3(codes & 255) * by) * 0x10001u;
    second = to_bf16(e4m3(codes >> 8 & 255) * by) * 0x10001u;
}

// mma.m16n8k16: of a, lane 4 g + t has rows g and g + 8 at k 2 t, 2 t + 1 and 8 more; of b the same k
// of column g; of c, rows g and g + 8 at columns 2 t and 2 t + 1.
DEVICE void multiply_tiles(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    static u32 held[fibers::MOST][6];
    const int me = threadIdx.x, first = me & ~31, g = (me & 31) >> 2, t = me & 3;
    const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(held[me], mine, sizeof mine);
    meet_warp();
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i >> 1), column = 2 * t + (i & 1);
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const int quarter = (k & 7) / 2;
            const u32 a = held[first + (row & 7) * 4 + quarter][(row >> 3) + 2 * (k >> 3)];
            const u32 b = held[first + column * 4 + quarter][4 + (k >> 3)];
            sum += k & 1 ? (double)high_of(a) * high_of(b) : (double)low_of(a) * low_of(b);
        }
        c[i] = sum;
    }
    meet_warp();
}

static int held_ints[fibers::MOST];
DEVICE u32 lanes_with(int x) {
    held_ints[threadIdx.x] = x;
    meet_warp();
    u32 same = 0;
    for (int i = 0; i < 32; i++) same |= (u32)(held_ints[(threadIdx.x & ~31) + i] == x) << i;
    meet_warp();
    return same;
}
DEVICE int ones(u32 x) { return __builtin_popcount(x); }
DEVICE void warp_barrier() { meet_warp(); }
DEVICE int sum_up_to(int x, int lane) {
    held_ints[threadIdx.x] = x;
    meet_warp();
    int sum = 0;
    for (int i = 0; i <= lane; i++) sum += held_ints[(threadIdx.x & ~31) + i];
    meet_warp();
    return sum;
}
// Fibers change at collective operations only.
DEVICE int add_shared(int* p, int x) {
    const int before = *p;
    *p += x;
    return before;
}
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
DEVICE void let_next_start() {}
DEVICE void wait_for_previous() {}

// A kernel's launch as the driver takes it: pointers to its arguments.
template <class... A, size_t... I>
static void unpack(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(A*)args[I]...);
}
template <class... A>
static void call(void (*kernel)(A...), void** args) {
    unpack(kernel, args, std::index_sequence_for<A...>());
}
static void** arguments;

#include SOURCE

extern "C" void launch(int blocks_x, int blocks_y, int threads, void** args) {
    arguments = args;
    fibers::run(blocks_x, blocks_y, threads, [] { call(NAME, arguments); });
}
