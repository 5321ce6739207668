// The pairs of weights of code bytes in shared memory, a copy for each lane: what nf4_product.cu and nf4_tiles.cu share.
// Defined by the compilation: VALUES (of the 16 codes, as bf16 bits).

constexpr int ENTRY_STRIDE = 256;  // a byte of the code word in its place makes the address; the lanes fill half of it
constexpr int TABLE_BYTES = 256 * ENTRY_STRIDE;

#ifndef ON_CPU  // the tests run this file on a CPU, with this in C++

// The word of shared memory 1,024 bytes on from `address`: an offset in the instruction, not an addition.
__device__ __forceinline__ u32 load_behind(u32 address) {
    u32 word;
    asm("ld.shared.b32 %0, [%1+1024];" : "=r"(word) : "r"(address));
    return word;
}

#endif

struct alignas(8) Words2 {
    u32 word[2];
};
struct alignas(16) Words4 {
    u32 word[4];
};

// The pair of weights of a byte of `word`. lane_bytes: the lane's number times 4. The table begins where dynamic shared
// memory does, and that is behind the 1,024 bytes that Hopper keeps.
__device__ __forceinline__ u32 weights_of(u32 word, int byte, u32 lane_bytes) {
    return load_behind(__byte_perm(word, lane_bytes, 0x5504 | byte << 4));
}

__constant__ u16 values[16] = {VALUES};

// By all warps, behind whom a barrier has to stand.
__device__ __forceinline__ void write_table(u8* table, int num_warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int entry = warp; entry < 256; entry += num_warps)
        *(u32*)(table + entry * ENTRY_STRIDE + lane * 4) = values[entry >> 4] | (u32)values[entry & 15] << 16;
    if (shared_address(table) != 1024) __trap();  // see weights_of
}
