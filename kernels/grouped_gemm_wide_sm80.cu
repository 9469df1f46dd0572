/* Grouped GEMM on mma.sync and cp.async for many rows per expert: 128 columns and up to 256 rows a block.
 *
 * One persistent block of eight warps an SM. What bounds the narrow tiles (kernels/grouped_gemm_sm80.cu) at many rows
 * is what an SM reads from the L2 cache, 1/64 byte a flop; here it is 1/85. An expert's rows are cut evenly over its
 * tiles, and a tile costs as many blocks of 16 rows as its rows need: the four warps that share its columns take every
 * fourth, by a loop of its own for every number of them. Fragments of the next 16 elements of K come while the tensor
 * cores multiply the ones before, also across stages. Outputs go from registers to y while the first stages of the next
 * tile arrive. Sums run over K in steps of 16, as in the narrow tiles: a row has the same bits in both. */
#include "kernels/grouped_gemm_wide_sm80.h"

#include "kernels/grouped_gemm_cuda.cuh"
#include "kernels/grouped_gemm_tile.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"
#include "kernels/ptx.cuh"

namespace
{

constexpr int kThreads = 256;
constexpr int kBlockM = 256, kBlockN = 128;
constexpr int kBlockK = 64; /* 128 bytes: one row of the swizzle */
constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK * 2;
constexpr int kWarpsM = 4, kWarpN = 64;
constexpr int kFragsM = kBlockM / kWarpsM / 16, kFragsN = kWarpN / 8;
constexpr int kRowsPerCopy = kThreads * 16 / (kBlockK * 2); /* 32 */
constexpr int kCopiesX = kBlockM / kRowsPerCopy, kCopiesW = kBlockN / kRowsPerCopy;
constexpr int kGroup = 16; /* row tiles of an expert that walk its columns together: what they read stays in the L2 */

/* Where the rows of a tile come from and go to. */
struct rows_t {
    gemm_tile_t tile;
    uint32_t from[kBlockM]; /* in 16 bytes from x on */
    int32_t slot[kBlockM];  /* -1 = no row */
    float weight[kBlockM];
};
/* A tile's outputs leave while the next one's rows are known and those of the one after it are looked up. */
constexpr int kRowsAhead = 3;

template <int kStages> constexpr int shared_bytes(int32_t num_experts)
{
    return kStages * kStageBytes + kRowsAhead * (int)sizeof(rows_t) + (num_experts + 1) * 4;
}

/* The block's tile number `turn`; one of no rows where there is none. An expert's row tiles are equal but for the last,
 * and multiples of 16 rows. Tiles are fewer than 2^31: y would have 2^44 elements. */
__device__ __forceinline__ gemm_tile_t find_tile(const gemm_params_t &p, const int32_t *cumulative, int32_t turn)
{
    gemm_tile_t t = {};
    const int32_t col_tiles = (p.n + kBlockN - 1) / kBlockN, index = blockIdx.x + turn * gridDim.x;
    if (index >= cumulative[p.num_experts] * col_tiles) return t;
    t.expert = gemm_find_expert(p, cumulative, index, col_tiles);
    const int32_t first = gemm_expert_offset(p, t.expert), rows = gemm_expert_offset(p, t.expert + 1) - first;
    const int32_t row_tiles = cumulative[t.expert + 1] - cumulative[t.expert];
    const int32_t groups = (row_tiles + kGroup - 1) / kGroup, in_group = (row_tiles + groups - 1) / groups;
    int32_t local = index - cumulative[t.expert] * col_tiles;
    const int32_t group = local / (in_group * col_tiles);
    local -= group * in_group * col_tiles;
    const int32_t here = min(in_group, row_tiles - group * in_group);
    const int32_t height = ((rows + row_tiles - 1) / row_tiles + 15) / 16 * 16;
    const int32_t row = (group * in_group + local % here) * height;
    t.row = first + row;
    t.rows = min(height, rows - row);
    t.col = local / here * kBlockN;
    return t;
}

/* How many blocks of 16 rows warp_m, warp_m + kWarpsM, ... the tile has. */
__device__ __forceinline__ int32_t row_blocks(const gemm_tile_t &tile, int32_t warp_m)
{
    return ((tile.rows + 15) / 16 + kWarpsM - 1 - warp_m) / kWarpsM;
}

/* The slot of this thread's row of `tile`, which becomes that of `rows`. */
__device__ __forceinline__ int32_t find_slot(const gemm_params_t &p, rows_t *rows, const gemm_tile_t &tile)
{
    const int32_t row = threadIdx.x;
    if (row == 0) rows->tile = tile;
    if (row >= tile.rows) return -1;
    if (p.x_sorted) rows->from[row] = (uint32_t)(tile.row + row) * (uint32_t)(p.k / 8);
    const int32_t slot = p.row_index ? p.row_index[tile.row + row] : tile.row + row;
    return slot < 0 || slot >= p.num_slots ? -1 : slot;
}

/* A row without a slot reads some row of x, for nothing. The weight arrives with the next group of copies. */
__device__ __forceinline__ void put_row(const gemm_params_t &p, rows_t *rows, int32_t slot)
{
    const int32_t row = threadIdx.x;
    if (!p.x_sorted) rows->from[row] = slot < 0 ? 0 : (uint32_t)(slot / p.x_row_divisor) * (uint32_t)(p.k / 8);
    rows->slot[row] = slot;
    if (p.row_weights && slot >= 0) ptx_cp_async_4(ptx_shared_address(&rows->weight[row]), p.row_weights + slot);
}

/* What a thread copies of each stage: one chunk of 16 bytes of every 32nd row of x and of w. */
struct copies_t {
    const char *x;
    const char *w;
    uint32_t x_from[kCopiesX]; /* in 16 bytes */
    uint32_t w_step;           /* in 16 bytes */
    int32_t x_count, w_count;
    int32_t k_left; /* elements of K from this thread's chunk of the next stage on */
    uint32_t to;    /* the thread's place in the first stage */
};

__device__ __forceinline__ copies_t begin_copies(const gemm_params_t &p, const rows_t *rows, uint32_t stages)
{
    const int row = threadIdx.x / (kBlockK / 8), chunk = threadIdx.x % (kBlockK / 8);
    const gemm_tile_t tile = rows->tile;
    copies_t c;
    c.x = (const char *)p.x + chunk * 16;
    c.w = (const char *)p.w + ((int64_t)tile.expert * p.n + gemm_weight_row(p, tile.col + row)) * p.k * 2 + chunk * 16;
#pragma unroll
    for (int i = 0; i < kCopiesX; i++) c.x_from[i] = rows->from[row + i * kRowsPerCopy];
    c.w_step = (uint32_t)(p.interleaved ? kRowsPerCopy : kRowsPerCopy / 2) * (uint32_t)(p.k / 8);
    c.x_count = (tile.rows - row + kRowsPerCopy - 1) / kRowsPerCopy;
    c.w_count = (p.n - tile.col - row + kRowsPerCopy - 1) / kRowsPerCopy;
    c.k_left = p.k - chunk * 8;
    c.to = stages + row * 128 + ((chunk ^ (row & 7)) << 4);
    return c;
}

/* One stage of them. Beyond K zeros arrive, which nothing is read for. Rows and columns that are not there keep what
 * the stage held before: it reaches no other row or column. */
struct stage_copies_t {
    const char *x;
    const char *w;
    uint32_t bytes, to;
    int32_t x_count, w_count;
};

__device__ __forceinline__ stage_copies_t next_stage(copies_t &c, uint32_t stage, bool really)
{
    /* Back to the row's first chunk of the stage, which is there. */
    const int back = c.k_left > 0 ? 0 : threadIdx.x % (kBlockK / 8) * 16;
    const stage_copies_t s = {
        c.x - back, c.w - back, c.k_left > 0 ? 16u : 0u, c.to + stage, really ? c.x_count : 0, really ? c.w_count : 0};
    c.x += kBlockK * 2;
    c.w += kBlockK * 2;
    c.k_left -= kBlockK;
    return s;
}

/* Part kPart of kParts; all rows of w belong to one. */
template <int kPart, int kParts> __device__ __forceinline__ void copy_part(const copies_t &c, const stage_copies_t &s)
{
    constexpr int kAll = kCopiesX + kCopiesW, kFirst = kAll * kPart / kParts, kEnd = kAll * (kPart + 1) / kParts;
    static_assert(kFirst <= kCopiesX && (kEnd <= kCopiesX || kEnd == kAll), "rows of w in two parts");
    const void *w = s.w;
#pragma unroll
    for (int i = kFirst; i < kEnd; i++)
        if (i < kCopiesX)
            ptx_cp_async_16_if(s.to + i * kRowsPerCopy * 128, ptx_address_of_16(s.x, c.x_from[i]), s.bytes,
                               i < s.x_count);
        else {
            ptx_cp_async_16_if(s.to + i * kRowsPerCopy * 128, w, s.bytes, i - kCopiesX < s.w_count);
            w = ptx_address_of_16(w, c.w_step);
        }
}

/* The first kStages - 1 stages of a tile. */
template <int kStages> __device__ __forceinline__ void copy_first(copies_t &c, int32_t k_steps)
{
#pragma unroll
    for (int s = 0; s < kStages - 1; s++) {
        copy_part<0, 1>(c, next_stage(c, s * kStageBytes, s < k_steps));
        ptx_cp_async_commit();
    }
}

/* Fragments for 16 elements of K: kFrags times 16 rows, 64 columns. */
template <int kFrags> struct frags_t {
    uint32_t a[kFrags ? kFrags : 1][4], b[kFragsN / 2][4];
};

template <int kFrags> __device__ __forceinline__ void load_16(frags_t<kFrags> &f, uint32_t a_at, uint32_t b_at)
{
#pragma unroll
    for (int i = 0; i < kFrags; i++) {
        if (i == 0)
#pragma unroll
            for (int j = 0; j < kFragsN / 2; j++) ptx_ldmatrix_x4(f.b[j], b_at + (kBlockM + j * 16) * 128);
        ptx_ldmatrix_x4(f.a[i], a_at + i * kWarpsM * 16 * 128);
    }
}

template <typename T, int kFrags>
__device__ __forceinline__ void multiply_16(float (&acc)[kFragsM][kFragsN][4], const frags_t<kFrags> &f)
{
#pragma unroll
    for (int i = 0; i < kFrags; i++)
#pragma unroll
        for (int n = 0; n < kFragsN; n++) {
            const int j = i % 2 ? kFragsN - 1 - n : n;
            ptx_mma_16816(acc[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1], T());
        }
}

/* The product of a tile whose first kStages - 1 stages are under way, in a warp with kFrags blocks of 16 rows. a_lane
 * and b_lane are this lane's rows of a stage for ldmatrix. Once every warp has come back all stages are free, and
 * the last one is already. */
template <typename T, int kStages, int kFrags>
__device__ __forceinline__ void multiply(float (&acc)[kFragsM][kFragsN][4], copies_t &c, int32_t k_steps,
                                         uint32_t a_lane, uint32_t b_lane)
{
    constexpr uint32_t kLast = (kStages - 1) * kStageBytes;
#pragma unroll
    for (int i = 0; i < kFrags; i++)
#pragma unroll
        for (int j = 0; j < kFragsN; j++)
#pragma unroll
            for (int n = 0; n < 4; n++) acc[i][j][n] = 0.0f;
    frags_t<kFrags> even, odd;
    load_16<kFrags>(even, a_lane, b_lane);
    uint32_t read = 0, write = kLast;
#pragma unroll 1
    for (int32_t step = 0; step < k_steps; step++) {
        const stage_copies_t s = next_stage(c, write, step + kStages - 1 < k_steps);
        const uint32_t a = a_lane + read, b = b_lane + read;
        load_16<kFrags>(odd, a ^ 32, b ^ 32);
        copy_part<0, 3>(c, s);
        multiply_16<T, kFrags>(acc, even);
        load_16<kFrags>(even, a ^ 64, b ^ 64);
        copy_part<1, 3>(c, s);
        multiply_16<T, kFrags>(acc, odd);
        load_16<kFrags>(odd, a ^ 96, b ^ 96);
        copy_part<2, 3>(c, s);
        ptx_cp_async_commit();
        multiply_16<T, kFrags>(acc, even);

        /* The next stage is there and nobody reads this one any more. After the last step fragments are loaded for
         * nothing, from the one stage that the next tile's first copies leave alone. */
        ptx_cp_async_wait<kStages - 2>();
        ptx_barrier(1, kThreads);
        write = read;
        read = read == kLast ? 0 : read + kStageBytes;
        const uint32_t next = step + 1 == k_steps ? kLast : read;
        load_16<kFrags>(even, a_lane + next, b_lane + next);
        multiply_16<T, kFrags>(acc, odd);
    }
}

/* Word i of lane j of four to word j of lane i. */
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t first = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[0] : w[1], 1);
    uint32_t second = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[2] : w[3], 1);
    if (odd)
        w[0] = first, w[2] = second;
    else
        w[1] = first, w[3] = second;
    first = __shfl_xor_sync(0xFFFFFFFFu, high ? w[0] : w[2], 2);
    second = __shfl_xor_sync(0xFFFFFFFFu, high ? w[1] : w[3], 2);
    if (high)
        w[0] = first, w[1] = second;
    else
        w[2] = first, w[3] = second;
}

__device__ __forceinline__ uint32_t pack(epmoe_dtype_t dtype, float low, float high)
{
    return dtype == EPMOE_BF16 ? epmoei_pack_pair(low, high, __nv_bfloat16()) : epmoei_pack_pair(low, high, __half());
}

/* This thread's columns of one row: 8*j + 2*(lane%4) and the one after it, j = 0..7, from `col` on. */
struct outputs_t {
    float value[2 * kFragsN];
};

/* The steps of gemm_finish, in its order. Gated, output j is left in value[j]. */
__device__ __forceinline__ void finish(const gemm_params_t &p, outputs_t &o, const float (&bias)[2 * kFragsN],
                                       float weight)
{
    if (p.row_weights && p.weight_on_input)
#pragma unroll
        for (int i = 0; i < 2 * kFragsN; i++) o.value[i] *= weight;
    if (p.bias)
#pragma unroll
        for (int i = 0; i < 2 * kFragsN; i++) o.value[i] += bias[i];
    if (p.gated) {
        if (p.activation == EPMOE_ACTIVATION_SILU && p.limit <= 0.0f)
#pragma unroll
            for (int j = 0; j < kFragsN; j++)
                o.value[j] =
                    epmoei_activate_device(EPMOE_ACTIVATION_SILU, o.value[2 * j], o.value[2 * j + 1], 0.0f, 0.0f);
        else
#pragma unroll
            for (int j = 0; j < kFragsN; j++)
                o.value[j] = epmoei_activate_device(p.activation, o.value[2 * j], o.value[2 * j + 1], p.alpha, p.limit);
    } else if (p.activation == EPMOE_ACTIVATION_SIGMOID)
#pragma unroll
        for (int i = 0; i < 2 * kFragsN; i++) o.value[i] = epmoei_sigmoid_device(o.value[i]);
    if (p.row_weights && !p.weight_on_input)
#pragma unroll
        for (int i = 0; i < 2 * kFragsN; i++) o.value[i] *= weight;
}

/* A row's outputs from its element `first` on, of which column `col` is one, to y: 16 bytes a lane where rows allow it.
 * Every lane of the quad comes here, with really = false where there is no row. */
__device__ __forceinline__ void store_row(const gemm_params_t &p, const outputs_t &o, int64_t row, int32_t col,
                                          bool really)
{
    const int lane = threadIdx.x % 4;
    if (p.y_dtype != EPMOE_F32 && p.n_out % 8 == 0) {
        uint32_t w[4];
        uint4 *y = (uint4 *)((uint16_t *)p.y + row * p.n_out + col);
        if (p.gated) {
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = pack(p.y_dtype, o.value[2 * i], o.value[2 * i + 1]);
            transpose_quad(w);
            if (really && col + lane * 8 < p.n_out)
                y[lane] = make_uint4(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                                     __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632));
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = pack(p.y_dtype, o.value[half * 8 + 2 * i], o.value[half * 8 + 2 * i + 1]);
            transpose_quad(w);
            if (really && col + half * 32 + lane * 8 < p.n_out) y[half * 4 + lane] = make_uint4(w[0], w[1], w[2], w[3]);
        }
        return;
    }
    if (!really) return;
    const int64_t element = row * p.n_out + col;
    const int32_t count = p.n_out - col;
    if (p.y_dtype == EPMOE_F32 && p.n_out % 2 == 0 && !p.gated) {
#pragma unroll
        for (int j = 0; j < kFragsN; j++)
            if (j * 8 + lane * 2 < count)
                *(float2 *)((float *)p.y + element + j * 8 + lane * 2) =
                    make_float2(o.value[2 * j], o.value[2 * j + 1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2 * kFragsN; i++) {
        const int32_t at = p.gated ? i * 4 + lane : i / 2 * 8 + lane * 2 + i % 2;
        const float one[1] = {o.value[i]};
        if (at < count && (i < kFragsN || !p.gated)) gemm_store<1>(p, element + at, one);
    }
}

/* The 8 x 2 accumulators of one of this thread's rows. */
template <int kRow> __device__ __forceinline__ void take_row(const float (&acc)[kFragsM][kFragsN][4], outputs_t &o)
{
#pragma unroll
    for (int i = 0; i < 2 * kFragsN; i++) o.value[i] = acc[kRow / 2][i / 2][kRow % 2 * 2 + i % 2];
}

__device__ __forceinline__ void store_tile(const gemm_params_t &p, const rows_t *rows,
                                           const float (&acc)[kFragsM][kFragsN][4], int32_t warp_m, int32_t warp_n)
{
    const int lane = threadIdx.x % 32;
    const gemm_tile_t tile = rows->tile;
    const int32_t col = tile.col + warp_n;
    float bias[2 * kFragsN];
    if (p.bias) {
        const float *from = p.bias + (int64_t)tile.expert * p.n;
#pragma unroll
        for (int i = 0; i < 2 * kFragsN; i++) {
            const int32_t at = col + i / 2 * 8 + lane % 4 * 2 + i % 2;
            bias[i] = at < p.n ? from[gemm_weight_row(p, at)] : 0.0f;
        }
    }
    /* A loop: unrolled, its code is more than the instruction cache holds. */
#pragma unroll 1
    for (int32_t r = 0; r < 2 * row_blocks(tile, warp_m); r++) {
        outputs_t o;
        switch (r) {
        case 0: take_row<0>(acc, o); break;
        case 1: take_row<1>(acc, o); break;
        case 2: take_row<2>(acc, o); break;
        case 3: take_row<3>(acc, o); break;
        case 4: take_row<4>(acc, o); break;
        case 5: take_row<5>(acc, o); break;
        case 6: take_row<6>(acc, o); break;
        default: take_row<7>(acc, o); break;
        }
        const int32_t row = (r / 2 * kWarpsM + warp_m) * 16 + r % 2 * 8 + lane / 4;
        const int32_t slot = rows->slot[row];
        finish(p, o, bias, rows->weight[row]);
        store_row(p, o, p.y_sorted ? tile.row + row : slot, p.gated ? col / 2 : col, slot >= 0);
    }
}

template <typename T, int kStages>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm_wide_kernel(const gemm_params_t p, const int32_t tile_rows)
{
    extern __shared__ __align__(1024) char shared[];
    rows_t *const ring = (rows_t *)(shared + kStages * kStageBytes);
    int32_t *const cumulative = (int32_t *)(ring + kRowsAhead);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    /* Warps w and w + 4 share a quarter of the SM: the first one's blocks of rows are the most where the other's are
     * the fewest. */
    const int warp_m = warp < kWarpsM ? warp : 2 * kWarpsM - 1 - warp, warp_n = warp / kWarpsM * kWarpN;
    const uint32_t stages = ptx_shared_address(shared);
    const uint32_t a_lane = stages + (warp_m * 16 + lane % 16) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    const uint32_t b_lane = stages + (warp_n + lane % 8 + lane / 16 * 8) * 128 + (((lane >> 3 & 1) ^ (lane & 7)) << 4);

    const int32_t col_tiles = (p.n + kBlockN - 1) / kBlockN, k_steps = (p.k + kBlockK - 1) / kBlockK;
    if ((int32_t)blockIdx.x >= gemm_count_tiles<kThreads>(p, tile_rows, cumulative, (int32_t *)ring) * col_tiles)
        return;
    for (int32_t turn = 0; turn < 2; turn++)
        put_row(p, ring + turn, find_slot(p, ring + turn, find_tile(p, cumulative, turn)));
    __syncthreads();
    copies_t copies = begin_copies(p, ring, stages);
    copy_first<kStages>(copies, k_steps);

    for (int32_t turn = 0;; turn++) {
        rows_t *const now = ring + turn % kRowsAhead;
        ptx_cp_async_wait<kStages - 2>();
        /* Also: every warp is past the last tile's outputs and has put its row of the next one. */
        __syncthreads();
        float acc[kFragsM][kFragsN][4];
        switch (row_blocks(now->tile, warp_m)) {
        case 0: multiply<T, kStages, 0>(acc, copies, k_steps, a_lane, b_lane); break;
        case 1: multiply<T, kStages, 1>(acc, copies, k_steps, a_lane, b_lane); break;
        case 2: multiply<T, kStages, 2>(acc, copies, k_steps, a_lane, b_lane); break;
        case 3: multiply<T, kStages, 3>(acc, copies, k_steps, a_lane, b_lane); break;
        default: multiply<T, kStages, 4>(acc, copies, k_steps, a_lane, b_lane); break;
        }

        rows_t *const next = ring + (turn + 1) % kRowsAhead, *const ahead = ring + (turn + 2) % kRowsAhead;
        const bool has_next = next->tile.rows > 0;
        if (has_next) {
            copies = begin_copies(p, next, stages);
            copy_first<kStages>(copies, k_steps);
        }
        const int32_t slot = find_slot(p, ahead, find_tile(p, cumulative, turn + 2));
        store_tile(p, now, acc, warp_m, warp_n);
        if (!has_next) break;
        put_row(p, ahead, slot);
    }
}

template <typename T, int kStages>
epmoe_status_t launch(const epmoe_grouped_gemm_args_t *args, int32_t tile_rows, const epmoei_device_info_t *device,
                      epmoe_stream_t stream)
{
    const int bytes = shared_bytes<kStages>(args->num_experts);
    const auto kernel = grouped_gemm_wide_kernel<T, kStages>;
    EPMOEI_CHECK(epmoei_allow_shared(kernel, (size_t)bytes, "grouped_gemm_wide_sm80"));
    int64_t tiles = gemm_max_row_tiles(args, tile_rows) * epmoei_ceil_div(args->n, kBlockN);
    kernel<<<(unsigned)epmoei_min64(tiles, device->num_sms), kThreads, bytes, stream>>>(gemm_params(args), tile_rows);
    return EPMOEI_LAUNCH_CHECK("grouped_gemm_wide_sm80");
}

/* Fewer stages hide less of the memory's latency, and are what devices with 163 KB of shared memory hold. */
template <typename T>
epmoe_status_t launch_stages(const epmoe_grouped_gemm_args_t *args, const epmoei_device_info_t *device,
                             epmoe_stream_t stream)
{
    const int32_t tile_rows =
        epmoei_grouped_gemm_rows_sm80(args->num_experts, args->max_rows, args->n, device->num_sms);
    return shared_bytes<4>(args->num_experts) <= device->shared_bytes_per_block
               ? launch<T, 4>(args, tile_rows, device, stream)
               : launch<T, 3>(args, tile_rows, device, stream);
}

} // namespace

extern "C" bool epmoei_grouped_gemm_wide_fits_sm80(const epmoe_grouped_gemm_args_t *args,
                                                   const epmoei_device_info_t *device)
{
    /* Offsets within x and within an expert's weights are 32 bits of 16 bytes. */
    const int64_t rows = epmoei_max64(epmoei_max64(args->max_rows, args->num_slots), args->n + (int64_t)kBlockN);
    return shared_bytes<3>(args->num_experts) <= device->shared_bytes_per_block && rows * (args->k / 8) <= UINT32_MAX;
}

extern "C" epmoe_status_t epmoei_grouped_gemm_wide_sm80(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    const epmoei_device_info_t *device = epmoei_device_current();
    if (args->num_slots == 0) return EPMOE_OK; /* no row of x that rows without a slot could read */
    return args->x_dtype == EPMOE_BF16 ? launch_stages<__nv_bfloat16>(args, device, stream)
                                       : launch_stages<__half>(args, device, stream);
}
