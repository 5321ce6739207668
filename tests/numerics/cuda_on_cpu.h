// Runs one block of threads of a .cu file after the other on a CPU: a fiber a thread. Copies arrive and a warpgroup's
// products are made as late as the waits allow, and shared memory begins as NaN, so a missing wait or barrier is a
// wrong result and not a lucky one.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define ON_CPU
#define __device__
#define __forceinline__ inline
#define __constant__ static const
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, gridDim;
alignas(1024) unsigned char shared[227 * 1024];

struct Barrier {
    int size = 0, arrived = 0, generation = 0;
};
struct Copy {
    void* to;
    const void* from;
    int bytes;
};
struct Lane {
    uint32_t a[4], b[2];
};
struct Product {
    float* sums;
    int columns;
    const uint32_t* a;
    uint64_t b;
};
struct Fiber {
    ucontext_t context;
    std::vector<unsigned char> stack;
    std::vector<std::vector<Copy>> groups;
    std::vector<std::vector<Product>> products;
    bool done = false;
};

static std::vector<Fiber> fibers;
static std::vector<Barrier> warp_barriers, warpgroup_barriers;
static Barrier block_barrier;
static std::vector<Lane> lanes;
static ucontext_t scheduler;

static Fiber& self() { return fibers[threadIdx.x]; }

static void wait_at(Barrier& barrier) {
    const int generation = barrier.generation;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        barrier.generation++;
        return;
    }
    while (barrier.generation == generation) swapcontext(&self().context, &scheduler);
}

static void __syncthreads() { wait_at(block_barrier); }
static void __syncwarp() { wait_at(warp_barriers[threadIdx.x / 32]); }
static void __threadfence() {}
static int atomicAdd(int* at, int more) { return std::exchange(*at, *at + more); }
static float __ldcg(const float* at) { return *at; }
static void __trap() { abort(); }
static void wait_for_kernel_before() {}
static void let_next_kernel_start() {}

static uint32_t shared_address(const void* at) { return (uint32_t)((const unsigned char*)at - shared) + 1024; }
static unsigned char* at_address(uint32_t address) { return shared + (address - 1024); }

static uint32_t load_behind(uint32_t address) {
    uint32_t word;
    memcpy(&word, shared + address, 4);
    return word;
}

template <int BYTES>
static void copy_in(uint32_t to, const void* from) {
    if (to % BYTES || (uintptr_t)from % BYTES) abort();
    if (self().groups.empty()) self().groups.emplace_back();
    self().groups.back().push_back({at_address(to), from, BYTES});
}

static void copy_or_clear(uint32_t to, const void* from, bool is_there) {
    static const unsigned char zeros alignas(16)[16] = {};
    copy_in<16>(to, is_there ? from : zeros);
}

static void end_group_of_copies() {
    if (self().groups.empty()) self().groups.emplace_back();
    self().groups.emplace_back();
}

// The last, open group is not counted.
template <int PENDING>
static void wait_for_copies() {
    auto& groups = self().groups;
    while ((int)groups.size() - 1 > PENDING) {
        for (const Copy& copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
        groups.erase(groups.begin());
    }
}

static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

static float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static uint32_t to_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static uint32_t pack(float low, float high) { return to_bf16(high) << 16 | to_bf16(low); }
static float exponential(float value) { return std::exp(value); }
static float exponential_2(float value) { return std::exp2(value); }
static float __fdividef(float a, float b) { return a / b; }

static float bf16(uint32_t word, int half) { return __uint_as_float(half ? word & 0xffff0000 : word << 16); }

static float half_at(uint32_t word, int half) {
    const uint16_t bits = half ? word >> 16 : word;
    _Float16 value;
    memcpy(&value, &bits, 2);
    return value;
}

static uint32_t pack_halves(float low, float high) {
    const _Float16 both[2] = {(_Float16)low, (_Float16)high};
    uint32_t word;
    memcpy(&word, both, 4);
    return word;
}

static uint32_t halves_of_bf16(uint32_t pair) { return pack_halves(bf16(pair, 0), bf16(pair, 1)); }

static float of_code(uint32_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
    return (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
}

static void halves_of_codes(uint32_t& low, uint32_t& high, uint32_t codes) {
    low = pack_halves(of_code(codes & 0xff), of_code(codes >> 8 & 0xff));
    high = pack_halves(of_code(codes >> 16 & 0xff), of_code(codes >> 24));
}

static uint32_t load_word(uint32_t address) {
    uint32_t word;
    if (address % 4) abort();
    memcpy(&word, at_address(address), 4);
    return word;
}

// mma.m16n8k16: which lane holds which element is PTX's table of its fragments.
template <float (*OF)(uint32_t, int)>
static void multiply_by(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int first = threadIdx.x / 32 * 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    lanes[threadIdx.x] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row = group + i / 2 * 8, column = 2 * quad + i % 2;
        for (int k = 0; k < 16; k++) {
            const Lane& of_a = lanes[first + row % 8 * 4 + k % 8 / 2];
            const Lane& of_b = lanes[first + column * 4 + k % 8 / 2];
            sums[i] += OF(of_a.a[row / 8 + k / 8 * 2], k % 2) * OF(of_b.b[k / 8], k % 2);
        }
    }
    __syncwarp();
}

static void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_by<bf16>(sums, a, b0, b1);
}

static void multiply_halves(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_by<half_at>(sums, a, b0, b1);
}

static uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    return pack(bf16(a, 0) * bf16(b, 0), bf16(a, 1) * bf16(b, 1));
}

static void show_to_products() {}
static void begin_products() {}

static uint64_t rows_at(uint32_t address, uint32_t numbers_on, uint32_t rows_on) {
    if (address % 16 || numbers_on % 16 || rows_on % 16) abort();
    return (uint64_t)(address >> 4) | (uint64_t)(numbers_on >> 4) << 16 | (uint64_t)(rows_on >> 4) << 32;
}

template <size_t COUNT>
static void multiply_rows(float (&sums)[COUNT], const uint32_t (&a)[4], uint64_t b) {
    if (self().products.empty()) self().products.emplace_back();
    self().products.back().push_back({sums, 2 * COUNT, a, b});
}

static void end_group_of_products() {
    if (self().products.empty()) self().products.emplace_back();
    self().products.emplace_back();
}

// wgmma.m64nNk16 with its first operand in registers: a warp's rows of it and of the sums lie as mma.m16n8k16's.
static void make_product(const Product& own, size_t group, size_t number) {
    const int warp = threadIdx.x / 32 * 32, lane_group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const auto field = [&](int from) { return uint32_t(own.b >> from & 0x3fff) << 4; };
    const uint32_t at = field(0), numbers_on = field(16), rows_on = field(32);
    for (int i = 0; i < own.columns / 2; i++) {
        const int row = i / 2 % 2, column = i / 4 * 8 + 2 * quad + i % 2;
        for (int k = 0; k < 16; k++) {
            const Product& other = fibers[warp + lane_group * 4 + k % 8 / 2].products[group][number];
            uint16_t bits;
            memcpy(&bits, at_address(at + k / 8 * numbers_on + column / 8 * rows_on + column % 8 * 16 + k % 8 * 2), 2);
            own.sums[i] += bf16(other.a[row + k / 8 * 2], k % 2) * bf16(bits, 0);
        }
    }
}

template <int PENDING>
static void wait_for_products() {
    auto& groups = self().products;
    const int waited = max(0, (int)groups.size() - 1 - PENDING);
    Barrier& barrier = warpgroup_barriers[threadIdx.x / 128];
    wait_at(barrier);
    for (int group = 0; group < waited; group++)
        for (size_t number = 0; number < groups[group].size(); number++)
            make_product(groups[group][number], group, number);
    wait_at(barrier);
    groups.erase(groups.begin(), groups.begin() + waited);
}

template <class Values>
static void keep(Values&) {}

// What each lane of the warp gives, for every lane to read until the next call.
static const std::vector<uint32_t>& exchange(uint32_t word) {
    static std::vector<uint32_t> words(1024);
    __syncwarp();
    words[threadIdx.x] = word;
    __syncwarp();
    return words;
}

template <bool TRANSPOSED>
static void load_matrices(uint32_t (&a)[4], uint32_t row) {
    const int first = threadIdx.x / 32 * 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const std::vector<uint32_t>& rows = exchange(row);
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int j = 0; j < 2; j++) {
            const int at = TRANSPOSED ? 2 * quad + j : group, column = TRANSPOSED ? group : 2 * quad + j;
            memcpy(&pair[j], at_address(rows[first + 8 * i + at]) + 2 * column, 2);
        }
        a[i] = (uint32_t)pair[1] << 16 | pair[0];
    }
    __syncwarp();
}

static uint32_t transpose(uint32_t pair) {
    const int first = threadIdx.x / 32 * 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const std::vector<uint32_t>& pairs = exchange(pair);
    uint32_t result = 0;
    for (int j = 0; j < 2; j++)
        result |= (pairs[first + (2 * quad + j) * 4 + group / 2] >> 16 * (group % 2) & 0xffff) << 16 * j;
    return result;
}

static float of_lane_across(float value, int bits) {
    return __uint_as_float(exchange(__float_as_uint(value))[threadIdx.x ^ bits]);
}

static std::function<void()> kernel;

static void run_fiber() {
    kernel();
    self().done = true;
    swapcontext(&self().context, &scheduler);
}

static void run_blocks(Index grid, unsigned threads) {
    gridDim = grid;
    for (unsigned block = 0; block < grid.x * grid.y * grid.z; block++) {
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        memset(shared, 0xff, sizeof(shared));
        fibers.assign(threads, Fiber());
        warp_barriers.assign(threads / 32, Barrier());
        for (Barrier& barrier : warp_barriers) barrier.size = 32;
        warpgroup_barriers.assign(threads / 128, Barrier());
        for (Barrier& barrier : warpgroup_barriers) barrier.size = 128;
        block_barrier = Barrier();
        block_barrier.size = threads;
        lanes.assign(threads, Lane());
        for (Fiber& fiber : fibers) {
            fiber.stack.resize(64 * 1024);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, run_fiber, 0);
        }
        for (int running = threads; running;) {
            running = 0;
            for (unsigned i = 0; i < threads; i++) {
                if (fibers[i].done) continue;
                threadIdx = {i, 0, 0};
                swapcontext(&scheduler, &fibers[i].context);
                running += !fibers[i].done;
            }
        }
    }
}
