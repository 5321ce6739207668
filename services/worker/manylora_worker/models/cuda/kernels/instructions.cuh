// Instructions that the .cu files of this folder share: asynchronous copies, programmatic dependent launch, the matrix
// unit. Stands before each of them in what is compiled (cuda_module.py: with_instructions).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef ON_CPU  // the tests run this file on a CPU, with these in C++

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Copies BYTES (8 or 16) to shared memory; done when `wait_for_copies` says so.
template <int BYTES>
__device__ __forceinline__ void copy_in(u32 to, const void* from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

// Copies 16 bytes, or writes as many zeros where there is nothing to copy.
__device__ __forceinline__ void copy_or_clear(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All groups but the last PENDING of this thread are there.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// sums [16 x 8] += a [16 x 16] b [16 x 8]
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of 16-bit floats with five bits of exponent.
__device__ __forceinline__ void multiply_halves(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Products of a warpgroup, which run beside it (sm_90a): begin, multiply, end the group, wait for groups.

// What this thread has written to shared memory may be read by products after the next barrier.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_group_of_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Rows of 16 numbers in shared memory, as `multiply_rows` takes them: 8 rows of 8 numbers stand together, the next 8
// numbers of a row `numbers_on` bytes on, the next 8 rows `rows_on`.
__device__ __forceinline__ u64 rows_at(u32 address, u32 numbers_on, u32 rows_on) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(numbers_on >> 4) << 16 | (u64)(rows_on >> 4) << 32;
}

// Before here no register of them is taken for another value.
template <int COUNT>
__device__ __forceinline__ void keep(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void keep(u32 (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(values[i])::"memory");
}

#define SUMS_8(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), \
                     "+f"(s[i + 6]), "+f"(s[i + 7])
#define SUMS_32(s, i) SUMS_8(s, i), SUMS_8(s, i + 8), SUMS_8(s, i + 16), SUMS_8(s, i + 24)
#define PRODUCT(rows, sums, a0, a1, a2, a3, b) \
    "wgmma.mma_async.sync.aligned.m64n" rows "k16.f32.bf16.bf16 {" sums "}, {" a0 "," a1 "," a2 "," a3 "}, " b \
    ", 1, 1, 1, 0;"
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
                 "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// sums [64 x rows] += a [64 x 16] b [16 x rows]. Each of the four warps has 16 rows of `a`, as multiply has them, and
// their sums: those of 8 columns, as multiply's, then those of the next 8.
__device__ __forceinline__ void multiply_rows(float (&s)[16], const u32 (&a)[4], u64 b) {
    asm volatile(PRODUCT("32", NAMES_16, "%16", "%17", "%18", "%19", "%20")
                 : SUMS_8(s, 0), SUMS_8(s, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}
__device__ __forceinline__ void multiply_rows(float (&s)[32], const u32 (&a)[4], u64 b) {
    asm volatile(PRODUCT("64", NAMES_32, "%32", "%33", "%34", "%35", "%36")
                 : SUMS_32(s, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}
__device__ __forceinline__ void multiply_rows(float (&s)[64], const u32 (&a)[4], u64 b) {
    asm volatile(PRODUCT("128", NAMES_64, "%64", "%65", "%66", "%67", "%68")
                 : SUMS_32(s, 0), SUMS_32(s, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}

// Of two bf16 in a word each.
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Four codes of e4m3 as such floats: the lower two, and the upper two.
__device__ __forceinline__ void halves_of_codes(u32& low, u32& high, u32 codes) {
    asm("{ .reg .b16 first, second; mov.b32 {first, second}, %2; cvt.rn.f16x2.e4m3x2 %0, first;"
        " cvt.rn.f16x2.e4m3x2 %1, second; }"
        : "=r"(low), "=r"(high) : "r"(codes));
}

// Of shared memory, 4 bytes.
__device__ __forceinline__ u32 load_word(u32 at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}

// Four 8 x 8 matrices of 16 bits as multiply's `a`: lane 8 i + j names the address of row j of matrix i, 16 bytes.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row) : "memory");
}

// An 8 x 8 matrix of 16 bits that the warp holds as multiply's sums lie, as its `b` lies.
__device__ __forceinline__ u32 transpose(u32 pair) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// The value of the lane whose number differs in these bits.
__device__ __forceinline__ float of_lane_across(float value, int bits) { return __shfl_xor_sync(~0u, value, bits); }

// Two floats as bf16, `low` in the lower half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// As halves.
__device__ __forceinline__ u32 pack_halves(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 halves_of_bf16(u32 pair) {
    return pack_halves(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ float exponential(float value) { return __expf(value); }
__device__ __forceinline__ float exponential_2(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

#endif
