// Attention of rows that decode over the paged cache (attention.py: formats, words). sm_90; compiled at run time
// (cuda_module.py).
//
// An item is one row, the heads that share one head of keys and values, and a share of the context. A program takes one
// item, then the next of its own: a grid has as many programs as the processors hold. Each of its warps copies tiles of
// TILE positions to shared memory, STAGES - 1 ahead, on into the next item, so the memory is asked for more while an
// item's last tiles are multiplied. Positions stand on the matrix unit's side of 16 and heads on that of 8: scores =
// K Q^T, then out^T = V^T P^T.
//
// Online softmax as in FlashAttention (Dao et al., 2022), in base 2. Each warp has its own over its tiles; they are
// merged by log-sum-exp at the item's end. A long context is split over up to `splits` items, and the last of them to
// end merges these (Flash-Decoding, Dao et al., 2023).
//
// Codes of FP8 (e4m3) are multiplied as 16-bit floats, which hold each of them exactly, and queries and weights with them.
// No instruction loads their bytes as the matrix unit's operands lie: a lane takes four dims at a time, and which dims a
// step multiplies is another order of them, the same for both operands.
//
// Defined by the compilation: FP8 (0, 1), HEAD_DIM (a multiple of 16, with FP8 of 32), GROUP (heads that share keys and values, at most 8),
// BLOCK_SIZE (a multiple of TILE), WINDOW (0: none), SOFTCAP (0: none), SINKS (0: none), WARPS, STAGES, TILES_OF_SPLIT.

constexpr int TILE = 16, OUT_PIECES = HEAD_DIM / 8;  // a piece: 16 bytes
constexpr int ELEMENT = FP8 ? 1 : 2;  // bytes, of a key or value; those of queries and outputs have 2
constexpr int OUT_BYTES = HEAD_DIM * 2, ROW_BYTES = HEAD_DIM * ELEMENT, PIECES = ROW_BYTES / 16;
constexpr int STAGE = 2 * TILE * ROW_BYTES;
constexpr int EXCHANGED = (PIECES & -PIECES) < 8 ? PIECES & -PIECES : 8;  // pieces that change places with each other
constexpr int MERGE_STRIDE = HEAD_DIM + 4;  // floats; lanes that write at once write other banks
constexpr int MERGE = GROUP * MERGE_STRIDE;
constexpr float NOTHING = -1e30f;  // less than any score; less another it is no infinity

struct Cache {
    const u8* at;
    const int *tables, *table_rows, *positions;
    long stride_table, stride_block, stride_token, stride_values, stride_head;  // the last four in bytes
    int num_kv_heads, splits;
};

// One warp's share of an item: every `step`-th tile from `tile` to before `end`.
struct Share {
    const u8* head;  // the arena, at the item's head
    const int* table;
    int first, length;  // positions that the row sees: from `first` to before `length`
    int tile, step, end;
};

__device__ __forceinline__ Share share_of(const Cache& cache, int item) {
    const int row = item / cache.num_kv_heads / cache.splits, split = item / cache.num_kv_heads % cache.splits;
    Share share;
    share.head = cache.at + item % cache.num_kv_heads * cache.stride_head;
    share.table = cache.tables + cache.table_rows[row] * cache.stride_table;
    share.length = cache.positions[row] + 1;
    share.first = WINDOW > 0 ? max(share.length - WINDOW, 0) : 0;
    share.end = (share.length + TILE - 1) / TILE;
    const int first_tile = share.first / TILE;
    const int needed = (share.end - first_tile + TILES_OF_SPLIT - 1) / TILES_OF_SPLIT;
    const int used = min(needed, cache.splits);
    share.step = used * WARPS;
    share.tile = split < used ? first_tile + split * WARPS + threadIdx.x / 32 : share.end;
    return share;
}

// Where a piece of a position stands in a tile: exchanged, so that lanes which read at once read other banks.
__device__ __forceinline__ int place_of(int position, int piece) {
    return position * ROW_BYTES + (piece ^ position % EXCHANGED) * 16;
}

// Begins to copy one tile's keys and values; zeros for positions that the row does not see.
__device__ __forceinline__ void copy_tile(u32 to, const Cache& cache, const Share& share) {
    const int start = share.tile * TILE;
    const u8* block = share.head + share.table[start / BLOCK_SIZE] * cache.stride_block;
#pragma unroll
    for (int i = 0; i < TILE * PIECES; i += 32) {
        const int position = (i + threadIdx.x % 32) / PIECES, piece = (i + threadIdx.x % 32) % PIECES;
        const u8* from = block + (start % BLOCK_SIZE + position) * cache.stride_token + piece * 16;
        const bool is_seen = start + position >= share.first && start + position < share.length;
        copy_or_clear(to + place_of(position, piece), from, is_seen);
        copy_or_clear(to + TILE * ROW_BYTES + place_of(position, piece), from + cache.stride_values, is_seen);
    }
}

// Products of the tile `at` with operands as they are defined above, and where in a head their results belong.
#if FP8
__device__ __forceinline__ u32 four_of(u32 at, int position, int dim) {
    return load_word(at + place_of(position, dim / 16) + dim % 16);
}

__device__ __forceinline__ u32 query_of(const u8* head, int i, int half, int quad) {
    return halves_of_bf16(*(const u32*)(head + (16 * i + 4 * quad + 2 * half) * 2));
}

__device__ __forceinline__ void add_scores(float (&scores)[4], u32 at, const u32 (&queries)[HEAD_DIM / 16][2]) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        u32 a[4];
        halves_of_codes(a[0], a[2], four_of(at, group, 16 * i + 4 * quad));
        halves_of_codes(a[1], a[3], four_of(at, group + 8, 16 * i + 4 * quad));
        multiply_halves(scores, a, queries[i][0], queries[i][1]);
    }
}

__device__ __forceinline__ void add_values(float (&sums)[HEAD_DIM / 16][4], u32 at, const float (&weights)[4]) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const u32 first_half = transpose(pack_halves(weights[0], weights[1]));
    const u32 second_half = transpose(pack_halves(weights[2], weights[3]));
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i += 2) {
        u32 a[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 even = four_of(at, 2 * quad + 8 * half, 16 * i + 4 * group);
            const u32 odd = four_of(at, 2 * quad + 8 * half + 1, 16 * i + 4 * group);
            halves_of_codes(a[0][2 * half], a[0][2 * half + 1], __byte_perm(even, odd, 0x5140));
            halves_of_codes(a[1][2 * half], a[1][2 * half + 1], __byte_perm(even, odd, 0x7362));
        }
        multiply_halves(sums[i], a[0], first_half, second_half);
        multiply_halves(sums[i + 1], a[1], first_half, second_half);
    }
}

__device__ __forceinline__ int dim_of(int i, int j, int group) { return i / 2 * 32 + 4 * group + i % 2 * 2 + j / 2; }
#else
__device__ __forceinline__ u32 query_of(const u8* head, int i, int half, int quad) {
    return *(const u32*)(head + (16 * i + 8 * half + 2 * quad) * 2);
}

__device__ __forceinline__ void add_scores(float (&scores)[4], u32 at, const u32 (&queries)[HEAD_DIM / 16][2]) {
    const int lane = threadIdx.x % 32;
    u32 a[4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        load_matrices<false>(a, at + place_of(lane % 16, 2 * i + lane / 16));
        multiply(scores, a, queries[i][0], queries[i][1]);
    }
}

__device__ __forceinline__ void add_values(float (&sums)[HEAD_DIM / 16][4], u32 at, const float (&weights)[4]) {
    const int lane = threadIdx.x % 32;
    const u32 first_half = transpose(pack(weights[0], weights[1]));
    const u32 second_half = transpose(pack(weights[2], weights[3]));
    u32 a[4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        load_matrices<true>(a, at + place_of(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
        multiply(sums[i], a, first_half, second_half);
    }
}

__device__ __forceinline__ int dim_of(int i, int j, int group) { return 16 * i + j / 2 * 8 + group; }
#endif

// A piece of a head's output over several shares of the context: weighted sums, not yet over `mass`, in units of
// 2^`best`.
struct Merged {
    float sums[8] = {}, best = NOTHING, mass = 0;
};

// Merges shares by log-sum-exp. Of share i: `stats` + i * `stats_stride` is its largest score and its mass, `sums` +
// i * `sums_stride` its piece. `read` loads a float.
template <class Read>
__device__ __forceinline__ Merged merge_shares(int shares, const float* stats, int stats_stride, const float* sums,
                                               int sums_stride, Read read) {
    Merged merged;
    for (int i = 0; i < shares; i++) merged.best = fmaxf(merged.best, read(stats + i * stats_stride));
#pragma unroll 4
    for (int i = 0; i < shares; i++) {
        const float weight = exponential_2(read(stats + i * stats_stride) - merged.best);
        merged.mass += weight * read(stats + i * stats_stride + 1);
        for (int j = 0; j < 8; j++) merged.sums[j] += weight * read(sums + i * sums_stride + j);
    }
    return merged;
}

__device__ __forceinline__ void store_piece(u8* to, const Merged& merged, float value_scale) {
    for (int i = 0; i < 4; i++)
        ((u32*)to)[i] = pack(value_scale * merged.sums[2 * i] / merged.mass,
                             value_scale * merged.sums[2 * i + 1] / merged.mass);
}

// Grid: programs that take every so many-th of min(num_rows, max_rows) * splits * num_kv_heads items.
//
// partial, stats, counters: attention.py's DecodeScratch. sinks: a logit of each head. scale: of what codes of keys give.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    attend_decode(const u8* q, const u8* cache_at, u8* out, const int* tables, const int* table_rows,
                  const int* positions, const int* num_rows, float* partial, float* stats, int* counters,
                  const float* sinks, float scale, float value_scale, int max_rows, int splits, int num_kv_heads,
                  int stride_table, int stride_block, int stride_token, int stride_values, int stride_head) {
    const long element = ELEMENT;
    const Cache cache = {cache_at,
                         tables,
                         table_rows,
                         positions,
                         stride_table,
                         stride_block * element,
                         stride_token * element,
                         stride_values * element,
                         stride_head * element,
                         num_kv_heads,
                         splits};
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const u32 ring = shared_address(shared) + warp * (STAGES * STAGE);
    float* merge = (float*)(shared + WARPS * STAGES * STAGE);
    float* merge_stats = merge + WARPS * MERGE;  // [warp][head]: largest score, sum of weights
    int* is_last = (int*)(merge_stats + WARPS * GROUP * 2);
    const int num_items = min(*num_rows, max_rows) * splits * num_kv_heads;
    int item = blockIdx.x;
    let_next_kernel_start();
    if (item >= num_items) {
        wait_for_kernel_before();  // what this kernel's end says to others is true of all its programs
        return;
    }

    // What is copied runs ahead of what is multiplied: its own item, and the one after it.
    Share ahead = share_of(cache, item);
    int item_ahead = item, stage_ahead = 0;
    bool has_waited = false;
    const auto copy_next = [&] {
        while (item_ahead < num_items && ahead.tile >= ahead.end) {
            item_ahead += gridDim.x;
            if (item_ahead < num_items) ahead = share_of(cache, item_ahead);
        }
        if (item_ahead < num_items) {
            // Only the row's own position is written by the kernel before.
            if (!has_waited && ahead.tile + 1 == ahead.end) wait_for_kernel_before(), has_waited = true;
            copy_tile(ring + stage_ahead * STAGE, cache, ahead);
            ahead.tile += ahead.step;
        }
        end_group_of_copies();
        stage_ahead = stage_ahead + 1 == STAGES ? 0 : stage_ahead + 1;
    };
    for (int i = 0; i < STAGES - 1; i++) copy_next();
    if (!has_waited) wait_for_kernel_before(), has_waited = true;

    const float log2e = 1.4426950408889634f;
    int stage = 0;
    for (; item < num_items; item += gridDim.x) {
        const Share share = share_of(cache, item);
        const int used = share.step / WARPS, split = item / num_kv_heads % splits;
        if (split >= used) continue;
        const long of_row = item / num_kv_heads / splits * num_kv_heads + item % num_kv_heads;  // and its head
        const u8* of_q = q + of_row * (GROUP * OUT_BYTES);
        u32 queries[HEAD_DIM / 16][2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++)
            for (int half = 0; half < 2; half++)
                queries[i][half] = group < GROUP ? query_of(of_q + group * OUT_BYTES, i, half, quad) : 0;
        float largest[2] = {NOTHING, NOTHING}, total[2] = {0, 0};
        if (SINKS && split == 0 && warp == 0)  // as if a tile before the first had been that logit alone
            for (int head = 0; head < 2; head++)
                if (2 * quad + head < GROUP) {
                    largest[head] = sinks[item % num_kv_heads * GROUP + 2 * quad + head] * log2e;
                    total[head] = group == 0;  // the lanes' are added up at the end
                }
        float sums[HEAD_DIM / 16][4] = {};
        for (int tile = share.tile; tile < share.end; tile += share.step) {
            wait_for_copies<STAGES - 2>();
            __syncwarp();
            copy_next();
            const u32 keys = ring + stage * STAGE, values = keys + TILE * ROW_BYTES;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            float scores[4] = {};
            add_scores(scores, keys, queries);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float score = scores[i] * scale;
                if (SOFTCAP > 0) score = SOFTCAP * (1.0f - 2.0f / (exponential(2.0f * (score / SOFTCAP)) + 1.0f));
                const int position = tile * TILE + group + i / 2 * 8;
                scores[i] = position >= share.first && position < share.length ? score * log2e : NOTHING;
            }
            float rescale[2];
#pragma unroll
            for (int head = 0; head < 2; head++) {
                float best = fmaxf(largest[head], fmaxf(scores[head], scores[head + 2]));
                for (int other = 4; other < 32; other *= 2) best = fmaxf(best, of_lane_across(best, other));
                rescale[head] = exponential_2(largest[head] - best);
                largest[head] = best;
                scores[head] = exponential_2(scores[head] - best);
                scores[head + 2] = exponential_2(scores[head + 2] - best);
                total[head] = total[head] * rescale[head] + scores[head] + scores[head + 2];
            }
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++)
                for (int j = 0; j < 4; j++) sums[i][j] *= rescale[j % 2];
            add_values(sums, values, scores);
        }

        // [warp][head][dim], then each thread merges 8 dims of a head.
#pragma unroll
        for (int head = 0; head < 2; head++)
            for (int other = 4; other < 32; other *= 2) total[head] += of_lane_across(total[head], other);
        for (int j = 0; j < 4; j++) {
            const int head = 2 * quad + j % 2;
            if (head >= GROUP) continue;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++)
                merge[warp * MERGE + head * MERGE_STRIDE + dim_of(i, j, group)] = sums[i][j];
            if (group == 0) {
                merge_stats[(warp * GROUP + head) * 2] = largest[j % 2];
                merge_stats[(warp * GROUP + head) * 2 + 1] = total[j % 2];
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < GROUP * OUT_PIECES; at += 32 * WARPS) {
            const int head = at / OUT_PIECES, piece = at % OUT_PIECES;
            const Merged merged =
                merge_shares(WARPS, merge_stats + head * 2, GROUP * 2, merge + head * MERGE_STRIDE + piece * 8, MERGE,
                             [](const float* from) { return *from; });
            if (used == 1) {
                store_piece(out + (of_row * GROUP + head) * OUT_BYTES + piece * 16, merged, value_scale);
                continue;
            }
            const long slot = (of_row * GROUP + head) * splits + split;
            for (int i = 0; i < 8; i++) partial[slot * HEAD_DIM + piece * 8 + i] = merged.sums[i];
            if (piece == 0) stats[slot * 2] = merged.best, stats[slot * 2 + 1] = merged.mass;
        }
        if (used > 1) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) *is_last = atomicAdd(counters + of_row, 1) == used - 1;
            __syncthreads();
            if (*is_last) {
                __threadfence();
                for (int at = threadIdx.x; at < GROUP * OUT_PIECES; at += 32 * WARPS) {
                    const int head = at / OUT_PIECES, piece = at % OUT_PIECES;
                    const long slot = (of_row * GROUP + head) * splits;
                    // Other processors wrote these: not from this one's own cache.
                    const Merged merged = merge_shares(used, stats + slot * 2, 2, partial + slot * HEAD_DIM + piece * 8,
                                                       HEAD_DIM, [](const float* from) { return __ldcg(from); });
                    store_piece(out + (of_row * GROUP + head) * OUT_BYTES + piece * 16, merged, value_scale);
                }
                if (threadIdx.x == 0) counters[of_row] = 0;
            }
        }
        __syncthreads();
    }
}
