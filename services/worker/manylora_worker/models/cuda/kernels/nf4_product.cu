// y = x W^T for few rows, W in 4 bits (NF4; the format: nf4.py). sm_90; compiled at run time (cuda_module.py).
//
// A code byte is two weights. It is looked up whole: a table of 256 pairs of bf16 stands in shared memory once for each
// lane, in that lane's own bank, so no lookup waits for another; the entry's address is one byte permute of the code
// word and the lane's number. A pair is one register of the matrix unit's operand, and codes need no other order than
// bitsandbytes': any order of the inputs serves a product, as long as x is taken in the same one. A scale is applied to
// the sum of its 64 products, in float32.
//
// One block of threads on a processor; it takes tiles of TILE outputs. Its warps share a tile's inputs: WARP_BLOCKS
// blocks of 64 each, whose x stays in registers. They run freely for ROUND tiles and then add up what each has of them,
// always in the same order. Each warp copies its own codes and scales to shared memory, STAGES - 1 tiles ahead, and the
// first of them before the kernel before this one ends (programmatic dependent launch). Inputs that are more than one
// block of threads takes are cut into parts:
//
//     part p    blocks [p * PART_BLOCKS, (p + 1) * PART_BLOCKS) of 64 inputs
//     out       float32 [parts, rows, out_features]: the reader adds the parts up
//
// Grid: parts * members; the members of a part take its tiles in turn. Outputs are whole tiles, and inputs blocks of 256.
//
// Defined by the compilation: COLUMNS (the most rows of x: 1, or a multiple of 8), WARP_BLOCKS (2 or 4), STAGES,
// ROUND, and VALUES (nf4_table.cuh).

constexpr int TILE = 16;
constexpr int WARPS = 16;
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int PART_BLOCKS = WARPS * WARP_BLOCKS;
constexpr int GROUPS = (COLUMNS + 7) / 8;  // of 8 rows of x: what one matrix instruction takes

// Shared memory, in bytes: the table, two sets of sums, the stages of each warp. Rows of a stage are padded so that a
// warp's reads fall into different banks.
constexpr int PIECE_BYTES = 128;  // sums of two rows of x
constexpr int PIECES = (COLUMNS + 1) / 2;
constexpr int SUMS_BYTES = 2 * ROUND * WARPS * PIECES * PIECE_BYTES;
constexpr int CODE_STRIDE = WARP_BLOCKS * 32 + 32;
constexpr int SCALE_STRIDE = WARP_BLOCKS * 4;
constexpr int STAGE_BYTES = TILE * (CODE_STRIDE + SCALE_STRIDE);

// Where the sum of a warp, a row of x and an output stands, for a tile of the round, in set 0 or 1. Neighbouring pieces
// are rotated against each other, since lanes of four of them write at once.
__device__ __forceinline__ float* sum_at(u8* shared, int set, int of_round, int warp, int column, int within) {
    const int piece = column / 2;
    const int place = (column % 2 * TILE + within + 8 * piece) % 32;
    const int at = ((set * ROUND + of_round) * WARPS + warp) * PIECES + piece;
    return (float*)(shared + TABLE_BYTES + at * PIECE_BYTES) + place;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    nf4_product(const u8* x, const u8* codes, const float* absmax, const u16* bias, float* out, int rows,
                int out_features, int num_blocks, int parts) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % parts, member = blockIdx.x / parts, members = gridDim.x / parts;
    const int tiles = out_features / TILE;
    const int own_block = part * PART_BLOCKS + warp * WARP_BLOCKS;
    const bool has_work = own_block < num_blocks;  // the last part may be shorter
    u8* stages = shared + TABLE_BYTES + SUMS_BYTES + warp * (STAGES * STAGE_BYTES);

    // Each lane copies a piece of 16 bytes of every ROWS_A_COPY-th output's codes; of the scales, one output's.
    constexpr int ROW_PIECES = WARP_BLOCKS * 2, ROWS_A_COPY = 32 / ROW_PIECES;
    const long first = (long)member * TILE * num_blocks + own_block;
    const u8* codes_from = codes + (first + (long)(lane / ROW_PIECES) * num_blocks) * 32 + lane % ROW_PIECES * 16;
    const float* scales_from = absmax + first + (long)(lane % TILE) * num_blocks;
    const long rows_on = (long)ROWS_A_COPY * num_blocks * 32, tile_on = (long)members * TILE * num_blocks;
    const u32 codes_to = shared_address(stages) + lane / ROW_PIECES * CODE_STRIDE + lane % ROW_PIECES * 16;
    const u32 scales_to = shared_address(stages) + TILE * CODE_STRIDE + lane * SCALE_STRIDE;
    int load_tile = member, load_at = 0;
    auto load = [&]() {
        if (load_tile < tiles && has_work) {
#pragma unroll
            for (int i = 0; i < TILE / ROWS_A_COPY; i++)
                copy_in<16>(codes_to + load_at + i * ROWS_A_COPY * CODE_STRIDE, codes_from + i * rows_on);
            if (lane < TILE) copy_in<SCALE_STRIDE>(scales_to + load_at, scales_from);
        }
        end_group_of_copies();
        load_at = load_at == (STAGES - 1) * STAGE_BYTES ? 0 : load_at + STAGE_BYTES;
        load_tile += members;
        codes_from += tile_on * 32;
        scales_from += tile_on;
    };
    for (int i = 0; i < STAGES - 1; i++) load();
    write_table(shared, WARPS);
    wait_for_kernel_before();
    let_next_kernel_start();

    // The matrix instruction's lanes: output `group` and `group + 8` of the tile, a quarter `quad` of 64 inputs; row
    // `group` of x. Its sums: those outputs, rows 2 quad and 2 quad + 1.
    const int group = lane / 4, quad = lane % 4;
    const u32 lane_bytes = lane * 4;
    Words4 own_x[GROUPS][WARP_BLOCKS][2] = {};
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        if (has_work && (COLUMNS == 1 || n * 8 + group < rows)) {
            const long row = COLUMNS == 1 ? 0 : n * 8 + group;  // one row stands in for all eight
            const u8* at = x + (row * num_blocks + own_block) * 128 + quad * 32;
#pragma unroll
            for (int b = 0; b < WARP_BLOCKS; b++) {
                own_x[n][b][0] = *(const Words4*)(at + b * 128);
                own_x[n][b][1] = *(const Words4*)(at + b * 128 + 16);
            }
        }
    __syncthreads();

    int slot = 0, set = 0, of_round = 0, round_tile = member;
    for (int tile = member; tile < tiles; tile += members) {
        float total[GROUPS][4] = {};
        load();
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        if (has_work) {
            const u8* stage = stages + slot * STAGE_BYTES;
            const float* low_scales = (const float*)(stage + TILE * CODE_STRIDE + group * SCALE_STRIDE);
            const float* high_scales = low_scales + 8 * WARP_BLOCKS;
#pragma unroll
            for (int b = 0; b < WARP_BLOCKS; b++) {
                const u8* code_at = stage + group * CODE_STRIDE + b * 32 + quad * 8;
                const Words2 low = *(const Words2*)code_at, high = *(const Words2*)(code_at + 8 * CODE_STRIDE);
                u32 a[4][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 l = low.word[half], h = high.word[half];
                    a[2 * half][0] = weights_of(l, 0, lane_bytes);
                    a[2 * half][1] = weights_of(h, 0, lane_bytes);
                    a[2 * half][2] = weights_of(l, 1, lane_bytes);
                    a[2 * half][3] = weights_of(h, 1, lane_bytes);
                    a[2 * half + 1][0] = weights_of(l, 2, lane_bytes);
                    a[2 * half + 1][1] = weights_of(h, 2, lane_bytes);
                    a[2 * half + 1][2] = weights_of(l, 3, lane_bytes);
                    a[2 * half + 1][3] = weights_of(h, 3, lane_bytes);
                }
                const float low_scale = low_scales[b], high_scale = high_scales[b];
#pragma unroll
                for (int n = 0; n < GROUPS; n++) {
                    const Words4 front = own_x[n][b][0], back = own_x[n][b][1];
                    float part_sums[4] = {};
                    multiply(part_sums, a[0], front.word[0], front.word[1]);
                    multiply(part_sums, a[1], front.word[2], front.word[3]);
                    multiply(part_sums, a[2], back.word[0], back.word[1]);
                    multiply(part_sums, a[3], back.word[2], back.word[3]);
                    total[n][0] += low_scale * part_sums[0];
                    total[n][1] += low_scale * part_sums[1];
                    total[n][2] += high_scale * part_sums[2];
                    total[n][3] += high_scale * part_sums[3];
                }
            }
        }
        __syncwarp();  // all lanes have read the slot that the next load overwrites
        if (++slot == STAGES) slot = 0;

        if (COLUMNS > 1 || quad == 0) {
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                const int column = n * 8 + 2 * quad;
                *sum_at(shared, set, of_round, warp, column, group) = total[n][0];
                *sum_at(shared, set, of_round, warp, column, group + 8) = total[n][2];
                if (COLUMNS > 1) {
                    *sum_at(shared, set, of_round, warp, column + 1, group) = total[n][1];
                    *sum_at(shared, set, of_round, warp, column + 1, group + 8) = total[n][3];
                }
            }
        }
        if (++of_round < ROUND && tile + members < tiles) continue;

        // Two sets: this round's sums are read while the next round's are written.
        __syncthreads();
        for (int i = threadIdx.x; i < of_round * COLUMNS * TILE; i += NUM_THREADS) {
            const int within = i % TILE, column = i / TILE % COLUMNS, of = i / (TILE * COLUMNS);
            const int output = (round_tile + of * members) * TILE + within;
            if (column < rows) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += *sum_at(shared, set, of, w, column, within);
                if (bias && part == 0) sum += __uint_as_float((u32)bias[output] << 16);
                out[((long)part * rows + column) * out_features + output] = sum;
            }
        }
        set ^= 1;
        of_round = 0;
        round_tile = tile + members;
    }
}
