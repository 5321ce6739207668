// y = x W^T for tens of rows, W in 4 bits (NF4; the format: nf4.py). sm_90a; compiled at run time (cuda_module.py).
//
// The weight is the first operand of Hopper's products of a warpgroup (128 threads), 64 outputs of 16 inputs, and never
// leaves registers: a code byte is looked up as in nf4_product.cu, and the pair is multiplied by its scale, in bf16. x
// is the second operand and lies in shared memory, for all warpgroups of a block of threads. Any order of inputs serves
// a product: in a block of 128 inputs a thread holds 32 neighbours, which are 16 bytes of codes, and x is written to
// shared memory in the order that they come to stand in:
//
//     inputs 32 t + 4 s + 2 h, + 1 of the block    places 2 t, + 1 of half h of step s (16 inputs), t in 0 .. 3
//
// Two stages of x: the next block is written while this one is multiplied. Codes are copied to shared memory by the
// thread that reads them, scales by its warp for two blocks of inputs at once, STAGES - 1 blocks ahead; the first ones
// before the kernel before this one ends.
//
// Grid: tiles of TILE outputs; parts of `part_blocks` blocks of inputs. Both that and num_blocks are even. The last
// tile and the last part may be shorter.
//
//     out        float32 [parts, rows, out_features]: the reader adds the parts up
//     rounded    or null: bf16 in its place, where there is one part
//
// Defined by the compilation: COLUMNS (the most rows of x, a multiple of 8), WARPGROUPS, STAGES (of codes; even), and
// VALUES (nf4_table.cuh).

constexpr int NUM_THREADS = 128 * WARPGROUPS;
constexpr int TILE = 64 * WARPGROUPS;
constexpr int BLOCK_STEPS = 8;  // of 128 inputs
constexpr int HALF = BLOCK_STEPS / 2;

// Shared memory, in bytes: the table, two stages of x, the stages of codes and of scales.
constexpr int CHUNK_BYTES = COLUMNS * 16 + 16;  // half a step of all rows, 16 bytes a row; padded, see store_x
constexpr int X_BYTES = 2 * BLOCK_STEPS * CHUNK_BYTES;
constexpr int CODE_BYTES = NUM_THREADS * 32;
constexpr int SCALE_BYTES = NUM_THREADS * 8;  // of two blocks of inputs

// A thread's task: two neighbouring words of a row of x at the four places of t, which are two chunks.
constexpr int ALL_TASKS = COLUMNS * BLOCK_STEPS;
constexpr int TASKS = (ALL_TASKS + NUM_THREADS - 1) / NUM_THREADS;

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    nf4_tiles(const u8* x, const u8* codes, const float* absmax, const u16* bias, float* out, u16* rounded, int rows,
              int out_features, int num_blocks, int part_blocks) {
    extern __shared__ __align__(128) u8 shared[];
    u8* stages_of_x = shared + TABLE_BYTES;
    u8* stages_of_codes = stages_of_x + 2 * X_BYTES;
    u8* stages_of_scales = stages_of_codes + STAGES * CODE_BYTES;

    // The product's lanes: outputs `low` and `high` of a warp's 16, a quarter `quad` of a block's inputs.
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int part = blockIdx.y, first = part * part_blocks, count = min(part_blocks, num_blocks - first);
    const int low = blockIdx.x * TILE + warp * 16 + group, high = low + 8;
    const long low_row = min(low, out_features - 1), high_row = min(high, out_features - 1);

    const u8* low_codes = codes + (low_row * num_blocks + first) * 64 + quad * 16;
    const u8* high_codes = codes + (high_row * num_blocks + first) * 64 + quad * 16;
    const long scale_row = min((int)blockIdx.x * TILE + warp * 16 + lane % 16, out_features - 1);
    const float* scales_from = absmax + (scale_row * num_blocks + first) * 2;
    const u32 codes_to = shared_address(stages_of_codes) + thread * 16;
    const u32 scales_to = shared_address(stages_of_scales) + warp * 256 + lane * 16;
    auto load = [&](int block) {
        if (block < count) {
            const int stage = block % STAGES;
            copy_in<16>(codes_to + stage * CODE_BYTES, low_codes + block * 64);
            copy_in<16>(codes_to + stage * CODE_BYTES + CODE_BYTES / 2, high_codes + block * 64);
            if (block % 2 == 0 && lane < 16) copy_in<16>(scales_to + stage / 2 * SCALE_BYTES, scales_from + block * 2);
        }
        end_group_of_copies();
    };
    for (int block = 0; block < STAGES - 1; block++) load(block);
    write_table(shared, NUM_THREADS / 32);
    wait_for_kernel_before();
    let_next_kernel_start();

    // A warp reads 64 neighbouring bytes of four rows at a time; of eight lanes that write at once none share a bank.
    Words2 own_x[TASKS][4];
    auto row_of = [&](int task) { return (thread + task * NUM_THREADS) / 32 * 4 + lane / 16 * 2 + lane % 2; };
    const int own_step = lane / 2 % 8;
    auto load_x = [&](int block) {
#pragma unroll
        for (int task = 0; task < TASKS; task++) {
            const long row = min(row_of(task), rows - 1);  // what is multiplied behind the last row is not written
            const u8* from = x + (row * num_blocks + first + block) * 256 + own_step * 8;
#pragma unroll
            for (int t = 0; t < 4; t++) own_x[task][t] = *(const Words2*)(from + t * 64);
        }
    };
    auto store_x = [&](int block) {
#pragma unroll
        for (int task = 0; task < TASKS; task++) {
            const int row = row_of(task);
            u8* to = stages_of_x + block % 2 * X_BYTES + own_step * 2 * CHUNK_BYTES + row * 16;
            const Words2* own = own_x[task];
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (row < COLUMNS)
                    *(Words4*)(to + i * CHUNK_BYTES) = {own[0].word[i], own[1].word[i], own[2].word[i], own[3].word[i]};
        }
        show_to_products();
    };

    float sums[COLUMNS / 2] = {};
    u32 weights[BLOCK_STEPS][4];
    Words4 low_words, high_words;
    u32 low_scale, high_scale;
    const u32 lane_bytes = lane * 4;
    auto take_codes = [&](int block) {
        const u8* own_codes = stages_of_codes + block % STAGES * CODE_BYTES + thread * 16;
        low_words = *(const Words4*)own_codes;
        high_words = *(const Words4*)(own_codes + CODE_BYTES / 2);
        const u8* own_scales = stages_of_scales + block % STAGES / 2 * SCALE_BYTES + warp * 256 + group * 16;
        const float* scales = (const float*)own_scales + block % 2 * 2 + quad / 2;
        low_scale = pack(scales[0], scales[0]);
        high_scale = pack(scales[32], scales[32]);
    };
    auto look_up = [&](int from) {
#pragma unroll
        for (int step = from; step < from + HALF; step++) {
            const u32 l = low_words.word[step / 2], h = high_words.word[step / 2];
            weights[step][0] = multiply_pairs(weights_of(l, step % 2 * 2, lane_bytes), low_scale);
            weights[step][1] = multiply_pairs(weights_of(h, step % 2 * 2, lane_bytes), high_scale);
            weights[step][2] = multiply_pairs(weights_of(l, step % 2 * 2 + 1, lane_bytes), low_scale);
            weights[step][3] = multiply_pairs(weights_of(h, step % 2 * 2 + 1, lane_bytes), high_scale);
        }
    };
    auto multiply_half = [&](int from, int block) {
        const u32 x_at = shared_address(stages_of_x) + block % 2 * X_BYTES;
        begin_products();
#pragma unroll
        for (int step = from; step < from + HALF; step++)
            multiply_rows(sums, weights[step], rows_at(x_at + step * 2 * CHUNK_BYTES, CHUNK_BYTES, 128));
        end_group_of_products();
    };
    // Registers that products read and write are not free before.
    auto keep_half = [&](int from) {
#pragma unroll
        for (int step = from; step < from + HALF; step++) keep(weights[step]);
    };

    load_x(0);
    store_x(0);
    load_x(1);
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the table is there, and scales that other lanes have copied
    take_codes(0);
    look_up(0);
    for (int block = 0; block < count; block++) {
        if (block > 0) __syncthreads();  // this block's x is there, and nobody multiplies with the one before
        multiply_half(0, block);
        look_up(HALF);
        multiply_half(HALF, block);
        // Beside the products.
        if (block + 1 < count) store_x(block + 1);
        if (block + 2 < count) load_x(block + 2);
        load(block + STAGES - 1);
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        wait_for_products<1>();
        keep_half(0);
        if (block + 1 < count) {
            take_codes(block + 1);
            look_up(0);
        }
        wait_for_products<0>();
        keep(sums);
        keep_half(HALF);
    }

    auto write = [&](int output, int which) {
        if (output >= out_features) return;
        const float added = bias && part == 0 ? __uint_as_float((u32)bias[output] << 16) : 0;
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) {
            const int row = i / 2 * 8 + 2 * quad + i % 2;
            if (row >= rows) continue;
            const float sum = sums[i / 2 * 4 + which + i % 2] + added;
            const long at = ((long)part * rows + row) * out_features + output;
            if (rounded)
                rounded[at] = (u16)pack(sum, 0);
            else
                out[at] = sum;
        }
    };
    write(low, 0);
    write(high, 2);
}
