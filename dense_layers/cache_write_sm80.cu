#include "dense_layers/cache_write_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

/* Tokens of which a thread loads its run before it stores the first. */
static const int kTokensInFlight = 4;

struct cache_write_t {
    epmoei_cache_side_t key;
    epmoei_cache_side_t value;
    const void *slots;
    int32_t *error_word;
    int64_t num_slots;
    int64_t runs;     /* of kRun columns, of a token's keys, and as many of its values */
    int64_t all_runs; /* of both, or of the keys alone */
    int32_t num_tokens;
    int32_t head_dim;
    int32_t block_size;
    int32_t log2_lanes; /* lanes: neighbouring threads that take neighbouring tokens, at most a warp */
    epmoe_dtype_t slots_dtype;
    bool narrow; /* slots and columns fit into 32 bits */
};

/* ----------------------------------------------------------------------------------------------------------- kernel */

/* The slots of the next tokens of a thread as they lie in memory, all asked for before the first is looked at. */
struct raw_slots_t {
    int32_t low[kTokensInFlight];
    int32_t high[kTokensInFlight]; /* of I64 */
};

/* -1 behind the last token. */
__device__ __forceinline__ void load_slots(const cache_write_t &p, raw_slots_t &raw, int64_t token, int64_t step)
{
    const int32_t wide = p.slots_dtype == EPMOE_I64;
#pragma unroll
    for (int i = 0; i < kTokensInFlight; i++) {
        raw.low[i] = raw.high[i] = -1;
        if (token + i * step >= p.num_tokens) continue;
        const int32_t *word = (const int32_t *)p.slots + ((token + i * step) << wide);
        raw.low[i] = word[0];
        if (wide) raw.high[i] = word[1];
    }
}

/* -1 for what is outside [-1, num_slots), which one thread of each token counts. */
__device__ __forceinline__ void check_slots(const cache_write_t &p, int64_t (&slots)[kTokensInFlight],
                                            const raw_slots_t &raw, bool counts)
{
    int32_t bad = 0;
#pragma unroll
    for (int i = 0; i < kTokensInFlight; i++) {
        const int64_t wide = (int64_t)((uint64_t)(uint32_t)raw.high[i] << 32 | (uint32_t)raw.low[i]);
        slots[i] = p.slots_dtype == EPMOE_I64 ? wide : raw.low[i];
        if (slots[i] >= -1 && slots[i] < p.num_slots) continue;
        slots[i] = -1;
        bad++;
    }
    if (bad && counts) epmoei_count_bad(p.error_word, bad);
}

/* Of a slot or a column. */
__device__ __forceinline__ int64_t quotient(const cache_write_t &p, int64_t dividend, int32_t divisor)
{
    return p.narrow ? (uint32_t)dividend / (uint32_t)divisor : dividend / divisor;
}

/* Where a run goes in place `slot`, `inside` elements into the block's place 0. */
__device__ __forceinline__ int64_t cache_element(const cache_write_t &p, const epmoei_cache_side_t &side, int64_t slot,
                                                 int64_t inside)
{
    const int64_t block = quotient(p, slot, p.block_size);
    return block * side.block_stride + (slot - block * p.block_size) * side.place_step + inside;
}

/* Blocks of 256 threads that an SM holds: E4M3 takes more registers. */
template <typename Stored> static constexpr int blocks_per_sm = sizeof(Stored) == 1 ? 3 : 4;

/* blockIdx.x and threadIdx.x are the run and, below it, the lane's token in a group; blockIdx.y is the first group. */
template <typename T, typename Stored, int kRun>
static __global__ void __launch_bounds__(256, blocks_per_sm<Stored>) cache_write_kernel(cache_write_t p)
{
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, all = flat >> p.log2_lanes;
    const int32_t lane = threadIdx.x & ((1 << p.log2_lanes) - 1);
    const bool is_key = all < p.runs;
    const epmoei_cache_side_t &side = is_key ? p.key : p.value;
    const int64_t column = (is_key ? all : all - p.runs) * kRun, head = quotient(p, column, p.head_dim);
    const int32_t in_head = (int32_t)(column - head * p.head_dim);
    const int64_t inside = epmoei_cache_inside(side, head, in_head);
    epmoei_begin_dependent();
    if (all >= p.all_runs) return;
    const bool counts = all == 0;
    epmoei_divisor_t divisor = {1.0f, 1.0f, 1.0f};
    if (sizeof(Stored) == 1 && side.scale) divisor = epmoei_divisor(*side.scale);
    const int64_t step = (int64_t)gridDim.y << p.log2_lanes;
    int64_t token = ((int64_t)blockIdx.y << p.log2_lanes) + lane;
    raw_slots_t raw;
    load_slots(p, raw, token, step);
    for (; token < p.num_tokens; token += kTokensInFlight * step) {
        epmoei_cache_run_t<T, kRun> held[kTokensInFlight];
        int64_t slots[kTokensInFlight];
        check_slots(p, slots, raw, counts);
#pragma unroll
        for (int i = 0; i < kTokensInFlight; i++)
            epmoei_cache_load<T, kRun>(held[i], (const T *)side.from + (token + i * step) * side.stride + column,
                                       slots[i] >= 0, p.log2_lanes > 0);
        load_slots(p, raw, token + kTokensInFlight * step, step);
#pragma unroll
        for (int i = 0; i < kTokensInFlight; i++)
            if (slots[i] >= 0)
                epmoei_cache_store<T, kRun>((Stored *)side.cache + cache_element(p, side, slots[i], inside), held[i],
                                            side.column_step, divisor);
    }
}

/* -------------------------------------------------------------------------------------------------------- launchers */

template <typename T, typename Stored, int kRun>
static epmoe_status_t launch_runs(cache_write_t p, const epmoe_cache_write_args_t *args, epmoe_stream_t stream)
{
    p.runs = (int64_t)args->num_kv_heads * args->head_dim / kRun;
    p.all_runs = args->value ? 2 * p.runs : p.runs;
    /* In V1 the places of a block are neighbours, so neighbouring threads take neighbouring tokens. */
    int32_t lanes = 1;
    for (; args->layout == EPMOE_CACHE_LAYOUT_V1 && lanes < 32 && lanes < args->num_tokens; lanes *= 2) p.log2_lanes++;
    epmoei_row_grid_t grid = epmoei_row_grid(epmoei_ceil_div(args->num_tokens, lanes), p.all_runs * lanes);
    /* No more blocks than the SMs hold at once, which then end together. */
    const epmoei_device_info_t *device = epmoei_device_current();
    const int64_t threads = (device ? device->num_sms : 1) * (int64_t)blocks_per_sm<Stored> * 256;
    const int64_t most = epmoei_max64(1, threads / ((int64_t)grid.blocks.x * grid.threads.x));
    grid.blocks.y = (unsigned)epmoei_min64(grid.blocks.y, most);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(cache_write_kernel<T, Stored, kRun>, grid.blocks, grid.threads, 0, stream, p),
        "epmoe_cache_write");
}

template <typename T, typename Stored>
static epmoe_status_t launch(const cache_write_t &p, const epmoe_cache_write_args_t *args, epmoe_stream_t stream)
{
    constexpr int kRun = epmoei_part_size<T>;
    bool whole = args->head_dim % kRun == 0 && args->key_stride % kRun == 0 && args->key_block_stride % kRun == 0;
    whole = whole && (!args->value || (args->value_stride % kRun == 0 && args->value_block_stride % kRun == 0));
    whole = whole && (args->layout != EPMOE_CACHE_LAYOUT_V1 || args->key_pack % kRun == 0);
    return whole ? launch_runs<T, Stored, kRun>(p, args, stream) : launch_runs<T, Stored, 1>(p, args, stream);
}

extern "C" epmoe_status_t epmoei_cache_write_sm80(const epmoe_cache_write_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->key, 16);
    EPMOEI_CHECK_ALIGNED(args->value, 16);
    EPMOEI_CHECK_ALIGNED(args->slots, epmoe_dtype_size(args->slots_dtype));
    EPMOEI_CHECK_ALIGNED(args->key_cache, 16);
    EPMOEI_CHECK_ALIGNED(args->value_cache, 16);
    EPMOEI_CHECK_ALIGNED(args->k_scale, 4);
    EPMOEI_CHECK_ALIGNED(args->v_scale, 4);
    cache_write_t p = {};
    p.key = epmoei_cache_key_side(args);
    p.value = epmoei_cache_value_side(args);
    p.slots = args->slots;
    p.error_word = epmoei_error_word();
    p.num_slots = (int64_t)args->num_blocks * args->block_size;
    p.narrow = p.num_slots <= UINT32_MAX && (int64_t)args->num_kv_heads * args->head_dim <= UINT32_MAX;
    p.num_tokens = args->num_tokens;
    p.head_dim = args->head_dim;
    p.block_size = args->block_size;
    p.slots_dtype = args->slots_dtype;
    if (args->cache_dtype != EPMOE_F8_E4M3)
        return args->dtype == EPMOE_F32 ? launch<uint32_t, uint32_t>(p, args, stream)
                                        : launch<uint16_t, uint16_t>(p, args, stream);
    switch (args->dtype) {
    case EPMOE_BF16: return launch<__nv_bfloat16, uint8_t>(p, args, stream);
    case EPMOE_F16: return launch<__half, uint8_t>(p, args, stream);
    default: return launch<float, uint8_t>(p, args, stream);
    }
}
