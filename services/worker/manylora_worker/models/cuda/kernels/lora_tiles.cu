// The low-rank products of a batch's tiles (lora.py: formats, words): shrink, expand, and gate with its expand. sm_90;
// compiled at run time (cuda_module.py).
//
// The adapter's matrix stands on the matrix unit's side of 16, the rows of the batch on that of 8: an adapter with a few
// rows fills as much of it as can be. Each warp copies what it multiplies to shared memory, some steps ahead: no
// registers are held meanwhile, so most of what a processor's threads need is under way at once. It copies blocks of up
// to 16 rows of 128 bytes, a row by eight lanes that follow one another, since what they ask for is then one request to
// the L2. Which input (shrink) or output (expand) is the matrix instruction's first or second is free: it is chosen so
// that a lane's operands are 16 bytes that stand side by side.
//
// A grid's last dimension is of the tiles: its programs take every so many-th of those that there are (the first tile
// says how many).
//
// Defined by the compilation: CHUNKS (lora.py's C), and the programs' sizes: SHRINK_STAGES, EXPAND_SPANS, EXPAND_STAGES,
// GATE_SPANS, GATE_STAGES (steps that a warp has under way; spans of 64 outputs that it takes).

struct alignas(16) Tile {
    int first_row, rows, adapter, num_tiles;
};
struct alignas(16) Words4 {
    u32 word[4];
};

constexpr int FIRST_OFFSET = 4, MAX_SLOTS = 4;  // of an adapter's entry in `sites`

__device__ __forceinline__ long a_offset(const long* site, int slot, int chunk) {
    return site[FIRST_OFFSET + slot * CHUNKS + chunk];
}
// Of a chunk: how many ranks stand in it, and the weight of what A makes (lora.py).
__device__ __forceinline__ long part_of(const long* site, int slot, int chunk) {
    return site[FIRST_OFFSET + (2 * MAX_SLOTS + slot) * CHUNKS + chunk];
}
__device__ __forceinline__ long b_offset(const long* site, int slot, int chunk) {
    return site[FIRST_OFFSET + (MAX_SLOTS + slot) * CHUNKS + chunk];
}

// Where 16 bytes of a block stand: its row's pieces are exchanged, so that lanes which read at once read other banks.
__device__ __forceinline__ int place_of(int row, int piece) {
    return row * 128 + (piece ^ (row >> 1 & 3) << 1 ^ (row & 1) << 2) * 16;
}

// Begins to copy 128 bytes from each of `there` rows, `left` of which are there; zeros for the others up to ROWS.
template <int ROWS>
__device__ __forceinline__ void copy_block(u32 to, const u8* from, long stride, int there, int left) {
    const int piece = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const int row = i + threadIdx.x % 32 / 8;
        copy_or_clear(to + place_of(row, piece), from + row * stride + piece * 16, row < there && piece * 16 < left);
    }
}

__device__ __forceinline__ Words4 piece_at(const u8* block, int row, int piece) {
    return *(const Words4*)(block + place_of(row, piece));
}

// ---- shrink: low_rank[split, row, :] = x[row] A^T over the split's inputs
//
// Grid: splits of SHRINK_WARPS * SHRINK_STEPS * 64 inputs, slots, tiles. Each warp takes SHRINK_STEPS * 64 of the inputs;
// their sums are added up in order. A stage: A's 16 rows, and x's.

constexpr int SHRINK_WARPS = 8, SHRINK_STEPS = 2;
constexpr int SPLIT = SHRINK_WARPS * SHRINK_STEPS * 64;
constexpr int SHRINK_STAGE = 32 * 128;

extern "C" __global__ void __launch_bounds__(32 * SHRINK_WARPS, 3)
    lora_shrink(const u8* x, const u8* weights, const long* sites, const Tile* tiles, float* low_rank, int inputs,
                int stride_site, int stride_row, int stride_split) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int split = blockIdx.x, slot = blockIdx.y;
    const int first_input = split * SPLIT + warp * (SHRINK_STEPS * 64);
    u8* stages = shared + warp * (SHRINK_STAGES * SHRINK_STAGE);
    float* sums_of_warps = (float*)(shared + SHRINK_WARPS * SHRINK_STAGES * SHRINK_STAGE);  // [warp][row][rank]

    const int num_tiles = tiles->num_tiles;
    Tile tile = tiles[blockIdx.z];
    bool has_waited = false;
    for (int at = blockIdx.z; at < num_tiles; at += gridDim.z) {
        if (at != blockIdx.z) tile = tiles[at];
        const long* site = sites + (long)tile.adapter * stride_site;
        const long first_chunk = a_offset(site, slot, 0);
        const int rank = (int)site[slot], chunks = (rank + 15) / 16;
        const u8* x_rows = x + 2l * tile.first_row * inputs;
        auto load_a = [&](int step) {
            if (step >= chunks * SHRINK_STEPS) return;
            const int chunk = step / SHRINK_STEPS, input = first_input + step % SHRINK_STEPS * 64;
            const u8* from = weights + 2 * ((chunk ? a_offset(site, slot, chunk) : first_chunk) + input);
            const u32 to = shared_address(stages + step % SHRINK_STAGES * SHRINK_STAGE);
            copy_block<16>(to, from, 2l * inputs, (int)part_of(site, slot, chunk), 2 * (inputs - input));
        };
        auto load_x = [&](int step) {
            if (step < chunks * SHRINK_STEPS) {
                const int input = first_input + step % SHRINK_STEPS * 64;
                const u32 to = shared_address(stages + step % SHRINK_STAGES * SHRINK_STAGE) + 16 * 128;
                const u8* from = x_rows + 2 * input;
                copy_block<8>(to, from, 2l * inputs, tile.rows, 2 * (inputs - input));
                if (tile.rows > 8)
                    copy_block<8>(to + 8 * 128, from + 16l * inputs, 2l * inputs, tile.rows - 8, 2 * (inputs - input));
            }
            end_group_of_copies();
        };
#pragma unroll
        for (int step = 0; step < SHRINK_STAGES; step++) load_a(step);
        if (!has_waited) {
            wait_for_kernel_before();
            let_next_kernel_start();
            has_waited = true;
        }
#pragma unroll
        for (int step = 0; step < SHRINK_STAGES; step++) load_x(step);
        for (int chunk = 0; chunk < chunks; chunk++) {
            float sums[2][4] = {};
#pragma unroll
            for (int i = 0; i < SHRINK_STEPS; i++) {
                const int step = chunk * SHRINK_STEPS + i;
                wait_for_copies<SHRINK_STAGES - 1>();
                __syncwarp();
                const u8* a_block = stages + step % SHRINK_STAGES * SHRINK_STAGE;
                const u8* x_block = a_block + 16 * 128;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int piece = quad + half * 4;
                    const Words4 low = piece_at(a_block, group, piece), high = piece_at(a_block, group + 8, piece);
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        if (n && tile.rows <= 8) continue;
                        const Words4 of_x = piece_at(x_block, n * 8 + group, piece);
#pragma unroll
                        for (int word = 0; word < 4; word += 2) {
                            const u32 a[4] = {low.word[word], high.word[word], low.word[word + 1], high.word[word + 1]};
                            multiply(sums[n], a, of_x.word[word], of_x.word[word + 1]);
                        }
                    }
                }
                __syncwarp();  // all lanes have read the stage that is overwritten
                load_a(step + SHRINK_STAGES);
                load_x(step + SHRINK_STAGES);
            }
            // The instruction's sums: ranks `group` and `group + 8`, rows 2 quad and 2 quad + 1.
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = n * 8 + quad * 2 + i % 2, of_rank = group + i / 2 * 8;
                    sums_of_warps[(warp * 16 + row) * 16 + of_rank] = sums[n][i];
                }
            __syncthreads();
            const int row = threadIdx.x / 16, of_rank = threadIdx.x % 16;
            if (row < tile.rows && chunk * 16 + of_rank < rank) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < SHRINK_WARPS; w++) sum += sums_of_warps[(w * 16 + row) * 16 + of_rank];
                const long to = (long)split * stride_split + (long)(tile.first_row + row) * stride_row;
                const float weight = __uint_as_float((u32)(part_of(site, slot, chunk) >> 32));
                low_rank[to + (slot * CHUNKS + chunk) * 16 + of_rank] = sum * weight;
            }
            __syncthreads();
        }
    }
    if (!has_waited) {
        wait_for_kernel_before();
        let_next_kernel_start();
    }
}

// ---- what expand and gate share
//
// s stands in shared memory as [16 rows][S_STRIDE], rounded as the weights are. A lane multiplies outputs 8 group .. + 7
// of its warp's span of 64, and of each chunk's B ranks 2 quad, 2 quad + 1 and those plus 8: four pieces. Its sums are
// those outputs of rows 2 quad and 2 quad + 1 (and those plus 8, for a tile of more than 8 rows).

constexpr int EXPAND_WARPS = 4;
constexpr int S_STRIDE = CHUNKS * 16 + 8;  // other banks for other rows
constexpr int S_BYTES = 16 * S_STRIDE * 2;

// What a warp loads next: its spans one after the other, and of each all chunks.
struct NextLoad {
    int step, chunk, column;

    __device__ __forceinline__ void advance(int chunks) {
        step++;
        if (++chunk == chunks) {
            chunk = 0;
            column += EXPAND_WARPS * 64;
        }
    }
};

__device__ __forceinline__ void load_s(u8* s, const float* low_rank, const Tile& tile, int slot, int rank, int chunks,
                                       int splits, int stride_row, int stride_split) {
    for (int i = threadIdx.x; i < tile.rows * chunks * 16; i += 32 * EXPAND_WARPS) {
        const int row = i / (chunks * 16), of_rank = i % (chunks * 16);
        float sum = 0;
        if (of_rank < rank) {
            const float* from = low_rank + (long)(tile.first_row + row) * stride_row + slot * CHUNKS * 16 + of_rank;
            for (int first = 0; first < splits; first += 8) {
                float parts[8];
#pragma unroll
                for (int j = 0; j < 8; j++) parts[j] = first + j < splits ? from[(long)(first + j) * stride_split] : 0;
#pragma unroll
                for (int j = 0; j < 8; j++) sum += parts[j];
            }
        }
        *(u16*)(s + (row * S_STRIDE + of_rank) * 2) = (u16)pack(sum, 0);
    }
}

// sums [rows / 8][of 4 pairs of outputs] += s B
__device__ __forceinline__ void add_low_rank(float (&sums)[2][4][4], const u8* block, const u8* s, int chunk, int rows) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const Words4 b[4] = {piece_at(block, quad * 2, group), piece_at(block, quad * 2 + 1, group),
                         piece_at(block, quad * 2 + 8, group), piece_at(block, quad * 2 + 9, group)};
    u32 of_row[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            of_row[n][i] = *(const u32*)(s + ((n * 8 + group) * S_STRIDE + chunk * 16 + quad * 2 + i * 8) * 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 a[4] = {
            __byte_perm(b[0].word[j], b[1].word[j], 0x5410), __byte_perm(b[0].word[j], b[1].word[j], 0x7632),
            __byte_perm(b[2].word[j], b[3].word[j], 0x5410), __byte_perm(b[2].word[j], b[3].word[j], 0x7632)};
        multiply(sums[0][j], a, of_row[0][0], of_row[0][1]);
        if (rows > 8) multiply(sums[1][j], a, of_row[1][0], of_row[1][1]);
    }
}

// ---- expand: out[row] = s[row] B, all slots of a site side by side
//
// Grid: up to EXPAND_WARPS * EXPAND_SPANS * 64 outputs of one slot, tiles. A stage: B's 16 rows.

constexpr int EXPAND_OUTPUTS = EXPAND_WARPS * EXPAND_SPANS * 64;
constexpr int EXPAND_STAGE = 16 * 128;

extern "C" __global__ void __launch_bounds__(32 * EXPAND_WARPS, 6)
    lora_expand(const float* low_rank, const u8* weights, const long* sites, const Tile* tiles, u8* out, int columns_0,
                int columns_1, int columns_2, int columns_3, int splits, int stride_site, int stride_row, int stride_split) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    u8* s = shared + EXPAND_WARPS * EXPAND_STAGES * EXPAND_STAGE;
    u8* stages = shared + warp * (EXPAND_STAGES * EXPAND_STAGE);

    const int widths[MAX_SLOTS] = {columns_0, columns_1, columns_2, columns_3};
    const int width = columns_0 + columns_1 + columns_2 + columns_3;
    int slot = 0, of_slot = blockIdx.x, begin = 0, columns = columns_0;
#pragma unroll
    for (int i = 0; i + 1 < MAX_SLOTS; i++) {
        const int blocks = (widths[i] + EXPAND_OUTPUTS - 1) / EXPAND_OUTPUTS;
        if (slot == i && of_slot >= blocks) {
            of_slot -= blocks;
            begin += widths[i];
            slot = i + 1;
            columns = widths[i + 1];
        }
    }
    const int first_column = of_slot * EXPAND_OUTPUTS + warp * 64;

    const int num_tiles = tiles->num_tiles;
    Tile tile = tiles[blockIdx.y];
    bool has_waited = false;
    for (int at = blockIdx.y; at < num_tiles; at += gridDim.y) {
        if (at != blockIdx.y) tile = tiles[at];
        const long* site = sites + (long)tile.adapter * stride_site;
        const long first_chunk = b_offset(site, slot, 0);
        const int rank = (int)site[slot], chunks = (rank + 15) / 16;
        NextLoad next = {0, 0, first_column};
        auto load = [&]() {
            if (chunks && next.column < first_column + EXPAND_OUTPUTS) {
                const u8* from = weights + 2 * ((next.chunk ? b_offset(site, slot, next.chunk) : first_chunk) + next.column);
                const u32 to = shared_address(stages + next.step % EXPAND_STAGES * EXPAND_STAGE);
                copy_block<16>(to, from, 2l * columns, (int)part_of(site, slot, next.chunk), 2 * (columns - next.column));
                next.advance(chunks);
            }
            end_group_of_copies();
        };
#pragma unroll
        for (int i = 0; i < EXPAND_STAGES; i++) load();
        if (!has_waited) {
            wait_for_kernel_before();
            let_next_kernel_start();
            has_waited = true;
        }
        load_s(s, low_rank, tile, slot, rank, chunks, splits, stride_row, stride_split);
        __syncthreads();
        int step = 0;
        for (int span = 0; span < EXPAND_SPANS; span++) {
            float sums[2][4][4] = {};
            for (int chunk = 0; chunk < chunks; chunk++) {
                wait_for_copies<EXPAND_STAGES - 1>();
                __syncwarp();
                add_low_rank(sums, stages + step++ % EXPAND_STAGES * EXPAND_STAGE, s, chunk, tile.rows);
                __syncwarp();  // all lanes have read the stage that is overwritten
                load();
            }
            const int column = first_column + span * (EXPAND_WARPS * 64) + group * 8;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = i / 2, row = n * 8 + quad * 2 + i % 2;
                if (row >= tile.rows || column >= columns) continue;
                Words4 result;
#pragma unroll
                for (int j = 0; j < 4; j++) result.word[j] = pack(sums[n][j][i % 2], sums[n][j][i % 2 + 2]);
                *(Words4*)(out + 2 * ((long)(tile.first_row + row) * width + begin + column)) = result;
            }
        }
        __syncthreads();  // all have read the s that the next tile overwrites
    }
    if (!has_waited) {
        wait_for_kernel_before();
        let_next_kernel_start();
    }
}

// ---- gate: out[row] = activation(gate) * up, both with their s B
//
// Grid: up to EXPAND_WARPS * GATE_SPANS * 64 outputs, tiles. A stage: 16 rows of both B, and with the first chunk the
// product's first 8 rows of gate and of up.

constexpr int GATE_OUTPUTS = EXPAND_WARPS * GATE_SPANS * 64;
constexpr int GATE_STAGE = 48 * 128;

__device__ __forceinline__ float activated(float z, int gelu) {
    if (!gelu) return __fdividef(z, 1.0f + exponential(-z));
    // tanh(z) = 1 - 2 / (exp(2 z) + 1), which is right at both ends of the range
    const float inner = 0.7978845608028654f * (z + 0.044715f * z * z * z);
    return 0.5f * z * (2.0f - __fdividef(2.0f, exponential(2.0f * inner) + 1.0f));
}

// up_slot, up_column: a family that fuses gate and up itself has one slot with the columns of both.
extern "C" __global__ void __launch_bounds__(32 * EXPAND_WARPS, 4)
    lora_gate(const u8* product, u8* out, const float* low_rank, const u8* weights, const long* sites, const Tile* tiles,
              int width, int up_slot, int up_column, int slot_columns, int gelu, int splits, int stride_site,
              int stride_row, int stride_split) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    u8* s = shared + EXPAND_WARPS * GATE_STAGES * GATE_STAGE;
    u8* stages = shared + warp * (GATE_STAGES * GATE_STAGE);
    const int first_column = blockIdx.x * GATE_OUTPUTS + warp * 64;

    const int num_tiles = tiles->num_tiles;
    Tile tile = tiles[blockIdx.y];
    let_next_kernel_start();
    wait_for_kernel_before();
    for (int at = blockIdx.y; at < num_tiles; at += gridDim.y) {
        if (at != blockIdx.y) tile = tiles[at];
        const long* site = sites + (long)tile.adapter * stride_site;
        const long first_chunks[2] = {b_offset(site, 0, 0), b_offset(site, up_slot, 0)};
        const int ranks[2] = {(int)site[0], (int)site[up_slot]};
        const int chunks = max(1, (max(ranks[0], ranks[1]) + 15) / 16);
        const u8* own_rows = product + 4l * tile.first_row * width;
        NextLoad next = {0, 0, first_column};
        auto load = [&]() {
            if (next.column < first_column + GATE_OUTPUTS) {
                const u32 to = shared_address(stages + next.step % GATE_STAGES * GATE_STAGE);
                const int left = 2 * (width - next.column);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const long offset = next.chunk ? b_offset(site, i ? up_slot : 0, next.chunk) : first_chunks[i];
                    const u8* from = weights + 2 * (offset + i * up_column + next.column);
                    const int there = (int)part_of(site, i ? up_slot : 0, next.chunk);
                    copy_block<16>(to + i * 16 * 128, from, 2l * slot_columns, there, left);
                    if (next.chunk == 0)
                        copy_block<8>(
                            to + (32 + i * 8) * 128, own_rows + 2 * ((long)i * width + next.column), 4l * width,
                            tile.rows, left);
                }
                next.advance(chunks);
            }
            end_group_of_copies();
        };
#pragma unroll
        for (int i = 0; i < GATE_STAGES; i++) load();
        load_s(s, low_rank, tile, 0, ranks[0], chunks, splits, stride_row, stride_split);
        if (up_slot) load_s(s + S_BYTES, low_rank, tile, up_slot, ranks[1], chunks, splits, stride_row, stride_split);
        __syncthreads();
        int step = 0;
        for (int span = 0; span < GATE_SPANS; span++) {
            const int column = first_column + span * (EXPAND_WARPS * 64) + group * 8;
            float sums[2][2][4][4] = {};  // gate, up
            for (int chunk = 0; chunk < chunks; chunk++) {
                wait_for_copies<GATE_STAGES - 1>();
                __syncwarp();
                const u8* stage = stages + step++ % GATE_STAGES * GATE_STAGE;
                if (chunk == 0)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const int n = i / 4, of_two = i / 2 % 2, slot = i % 2;
                        Words4 base = {};
                        if (n == 0)
                            base = piece_at(stage + (32 + slot * 8) * 128, quad * 2 + of_two, group);
                        else if (8 + quad * 2 + of_two < tile.rows && column < width)
                            base = *(const Words4*)(own_rows +
                                                    2 * (((8l + quad * 2 + of_two) * 2 + slot) * width + column));
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            sums[slot][n][j][of_two] = __uint_as_float(base.word[j] << 16);
                            sums[slot][n][j][of_two + 2] = __uint_as_float(base.word[j] & 0xffff0000);
                        }
                    }
                add_low_rank(sums[0], stage, s, chunk, tile.rows);
                add_low_rank(sums[1], stage + 16 * 128, up_slot ? s + S_BYTES : s, chunk, tile.rows);
                __syncwarp();  // all lanes have read the stage that is overwritten
                load();
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = i / 2, row = n * 8 + quad * 2 + i % 2;
                if (row >= tile.rows || column >= width) continue;
                Words4 result;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    result.word[j] =
                        pack(activated(sums[0][n][j][i % 2], gelu) * sums[1][n][j][i % 2],
                             activated(sums[0][n][j][i % 2 + 2], gelu) * sums[1][n][j][i % 2 + 2]);
                *(Words4*)(out + 2 * ((long)(tile.first_row + row) * width + column)) = result;
            }
        }
        __syncthreads();  // all have read the s that the next tile overwrites
    }
}
