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
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, gridDim;

// Dynamic shared memory, full of NaN as a block starts; its addresses are offsets.
alignas(1024) static uint8_t memory[227 << 10];
static void clear_shared() { memset(memory, 0xFF, sizeof memory); }

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
static Gate block, warps[MOST / 32], groups[MOST / 128];

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
        for (Gate& group : groups) group = Gate();
        clear_shared();
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

DEVICE u32 signed_pair(u32 value, u32 sign) { return (value & 0x01C001C0u) | (sign & ~0x01C001C0u); }
DEVICE u32 masked(u32 word, u32 mask) { return word & mask; }
DEVICE u32 without_byte(u32 word) { return word >> 8; }
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
DEVICE u32 to_bf16_pair(float low, float high) {
    return to_bf16(low) | (u32)to_bf16(high) << 16;
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
DEVICE void e4m3_twice(u32 codes, u32& first, u32& second) {
    first = to_bf16(e4m3(codes & 255) * 0x1p119f) * 0x10001u;
    second = to_bf16(e4m3(codes >> 8 & 255) * 0x1p119f) * 0x10001u;
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

// Asynchronous copies and products happen at once in even blocks, and in odd ones when they are
// waited for: a wait that is missing, and a place that is used again too early, both show.
static bool late() { return blockIdx.x + blockIdx.y & 1; }
struct Copy { u32 to; const void* from; int bytes; };
struct Copies { std::vector<Copy> all; u32 at; };
static std::vector<Copies> copies[fibers::MOST];
static std::vector<Copy> open_copies[fibers::MOST];
DEVICE u32 shared_address(const void* p) { return (const uint8_t*)p - memory; }
template <int BYTES>
DEVICE void copy_few(u32 to, const void* from) {
    if (to % BYTES || (uintptr_t)from % BYTES || to + BYTES > sizeof memory) __builtin_trap();
    open_copies[threadIdx.x].push_back({to, from, BYTES});
}
DEVICE void copy16(u32 to, const void* from) { copy_few<16>(to, from); }
struct Turns { int count, arrived, turns; };
static Turns turns[sizeof memory / 8];
DEVICE void make_barrier(u32 at, int count) { turns[at / 8] = {count, 0, 0}; }
DEVICE void arrive(u32 at) {
    Turns& t = turns[at / 8];
    if (++t.arrived < t.count) return;
    t.arrived = 0;
    t.turns++;
}
static void copy_oldest() {
    auto& mine = copies[threadIdx.x];
    for (const Copy& c : mine[0].all) memcpy(memory + c.to, c.from, c.bytes);
    arrive(mine[0].at);
    mine.erase(mine.begin());
}
DEVICE void arrive_with_copies(u32 at) {
    copies[threadIdx.x].push_back({std::move(open_copies[threadIdx.x]), at});
    open_copies[threadIdx.x].clear();
    if (!late()) copy_oldest();
}
DEVICE void await_turn(u32 at, int odd) {
    while ((turns[at / 8].turns & 1) == odd)
        if (copies[threadIdx.x].empty()) fibers::change();
        else copy_oldest();
}
DEVICE void finish_copies() {
    while (!copies[threadIdx.x].empty()) copy_oldest();
}
template <int COUNT>
DEVICE void take_registers() {}
template <int COUNT>
DEVICE void give_registers() {}
DEVICE void show_copies() {}

// wgmma.m64nNk16 with the left operand in registers: its warps have 16 rows each, as mma.m16n8k16
// has them. Of the right operand, a matrix descriptor tells where rows of 128 bytes stand whose
// sixteenths are swapped by bits 7..9 of their address.
// A left operand in shared memory is described alike; `a` is then its descriptor's halves.
struct Product { float* d; u32 a[4]; u64 b; int n, group; bool shared; };
static std::vector<Product> products[fibers::MOST];
static int closed[fibers::MOST];
static void meet_group() { fibers::groups[threadIdx.x / 128].meet(128); }
static u32 described(u64 matrix, int row, int k) {
    if (matrix >> 62 != 1) __builtin_trap();
    u32 at = (matrix & 0x3FFF) * 16 + row / 8 * (matrix >> 32 & 0x3FFF) * 16 + row % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    return *(const uint16_t*)(memory + at);
}
static void compute(size_t i) {
    const int me = threadIdx.x, first = me & ~31, g = (me & 31) >> 2, t = me & 3;
    const Product& p = products[me][i];
    for (int j = 0; j < p.n / 2; j++) {
        const int column = j / 4 * 8 + 2 * t + (j & 1), high = j >> 1 & 1;
        double sum = p.d[j];
        for (int k = 0; k < 16; k++) {
            u32 a = products[first + g * 4 + (k & 7) / 2][i].a[high + 2 * (k >> 3)];
            if (p.shared)
                a = described(p.a[0] | (u64)p.a[1] << 32, first % 128 / 2 + g + 8 * high, k) << 16 * (k & 1);
            sum += (double)(k & 1 ? high_of(a) : low_of(a)) * low_of(described(p.b, column, k));
        }
        p.d[j] = sum;
    }
}
template <int N, bool SHARED_LEFT = false>
DEVICE void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b) {
    auto& mine = products[threadIdx.x];
    mine.push_back({d, {a[0], a[1], a[2], a[3]}, b, N, closed[threadIdx.x], SHARED_LEFT});
    meet_group();
    if (!late()) compute(mine.size() - 1);
    meet_group();
}
template <int N>
DEVICE void multiply_shared(float (&d)[N / 2], u64 a, u64 b) {
    multiply<N, true>(d, {(u32)a, (u32)(a >> 32), 0, 0}, b);
}
DEVICE void begin_products() {}
DEVICE void close_products() { closed[threadIdx.x]++; }
template <int LEFT>
DEVICE void wait_products() {
    auto& mine = products[threadIdx.x];
    size_t n = 0;
    meet_group();
    for (; n < mine.size() && mine[n].group + LEFT < closed[threadIdx.x]; n++)
        if (late()) compute(n);
    meet_group();
    mine.erase(mine.begin(), mine.begin() + n);
}
DEVICE void settle(float& x) {}
DEVICE void settle(u32& x) {}

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
DEVICE void keep(u32& pair) {}
// A thread's own copies, at once in even blocks and when they are waited for in odd ones.
struct Own { void* to; const void* from; int group; };
static std::vector<Own> own_copies[fibers::MOST];
static int own_groups[fibers::MOST];
DEVICE void copy_own(void* to, const void* from) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) __builtin_trap();
    if (blockIdx.x & 1) own_copies[threadIdx.x].push_back({to, from, own_groups[threadIdx.x]});
    else memcpy(to, from, 16);
}
DEVICE void close_own() { own_groups[threadIdx.x]++; }
template <int LEFT>
DEVICE void await_own() {
    auto& mine = own_copies[threadIdx.x];
    while (!mine.empty() && mine[0].group < own_groups[threadIdx.x] - LEFT) {
        memcpy(mine[0].to, mine[0].from, 16);
        mine.erase(mine.begin());
    }
}
DEVICE float inverse_root(float x) { return 1 / sqrtf(x); }
DEVICE float sum_of_warp(float x) {
    static float held[fibers::MOST];
    held[threadIdx.x] = x;
    meet_warp();
    float sum = 0;
    for (int i = 0; i < 32; i++) sum += held[(threadIdx.x & ~31) + i];
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
DEVICE void barrier_of(int threads) {
    static fibers::Gate some;
    some.meet(threads);
}
// Shared memory of a launch's size, and barriers that count bytes: arrivals wanted and missing in the
// low bytes, then the parity of the phase, and bytes on their way in the upper half.
#define DYNAMIC(name) alignas(128) static uint8_t name[1 << 18]
static void try_phase(u64* b) {
    uint8_t* const fields = (uint8_t*)b;
    if (fields[1] || *b >> 32) return;
    fields[1] = fields[0];
    fields[2] ^= 1;
}
DEVICE void start_phases(u64* b, int arrivals) { *b = arrivals * 0x101; }
DEVICE void phases_started() {}
DEVICE void arrive_and_expect(u64* b, int bytes) {
    if (!((uint8_t*)b)[1]) __builtin_trap();
    *b += (u64)(u32)bytes << 32;
    ((uint8_t*)b)[1]--;
    try_phase(b);
}
DEVICE void arrive(u64* b) { arrive_and_expect(b, 0); }
// In odd blocks bytes come as late as they may: a wait that is missing shows, as does in even blocks a
// place that is used again too early.
struct Coming { void* to; const void* from; int bytes; u64* b; };
static std::vector<Coming> coming;
static void land(const Coming& c) {
    memcpy(c.to, c.from, c.bytes);
    *c.b -= (u64)c.bytes << 32;
    try_phase(c.b);
}
DEVICE void bring(void* to, const void* from, int bytes, u64* b) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16 || !bytes) __builtin_trap();
    if (blockIdx.x % 2) coming.push_back({to, from, bytes, b});
    else land({to, from, bytes, b});
}
DEVICE void wait_for_phase(u64* b, int parity) {
    while (((uint8_t*)b)[2] == parity) {
        std::vector<Coming> rest;
        for (const Coming& c : coming) c.b == b ? land(c) : rest.push_back(c);
        coming.swap(rest);
        if (((uint8_t*)b)[2] == parity) fibers::change();
    }
}
DEVICE void show_writes() {}
DEVICE void wait_idly(u64* b, int parity) { wait_for_phase(b, parity); }
DEVICE void come(int*) { __builtin_trap(); }
DEVICE void wait_for_blocks(const int*) { __builtin_trap(); }
DEVICE void leave_blocks(int*) {}
DEVICE void let_next_start() {}
DEVICE void wait_for_previous() {}

// Blocks of a cluster do not run together: all run once to keep their shared memory as it is where they
// meet, and once more to read each other's.
static std::vector<std::vector<uint8_t>> kept;
DEVICE void barrier_of_cluster() {
    barrier();
    kept.resize(gridDim.x);
    if (threadIdx.x == 0) kept[blockIdx.x].assign(memory, memory + sizeof memory);
    barrier();
}
DEVICE float4 kept_floats(int block, u32 at) {
    float4 v = {NAN, NAN, NAN, NAN};
    if (at % 16) __builtin_trap();
    if (!kept[block].empty()) memcpy(&v, &kept[block][at], 16);
    return v;
}

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
    kept.clear();
    fibers::run(blocks_x, blocks_y, threads, [] { call(NAME, arguments); });
    if (!kept.empty()) fibers::run(blocks_x, blocks_y, threads, [] { call(NAME, arguments); });
}
