#include "dense_layers/cache_write.h"
#include "kernels/fp8_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"
#include "kernels/rows_cuda.cuh"

/* Tokens of which a thread loads its run before it stores the first. */
static const int kTokensInFlight = 4;

/* Keys or values. Column i of head h at place p of a block lies at element
 *     h * head_step + i / run * run_step + i mod run * column_step + p * place_step                    of the block. */
struct side_t {
    const void *from;
    void *cache;
    const float *scale; /* or NULL */
    int64_t stride;
    int64_t block_stride;
    int64_t head_step;
    int64_t run_step;
    int64_t place_step;
    int32_t column_step;
    int32_t run;
};

struct cache_write_t {
    side_t key;
    side_t value;
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

/* ------------------------------------------------------------------------------------------------- runs of a thread */

/* kRun columns as read: copies go by the size of an element, codes by its type. */
template <typename T, int kRun> struct held_t {
    uint4 part;
};
template <typename T> struct held_t<T, 1> {
    T element;
};

template <typename T, int kRun>
__device__ __forceinline__ void load_run(held_t<T, kRun> &held, const T *from, bool valid, bool shared_lines)
{
    if constexpr (kRun == 1)
        held.element = valid ? *from : T();
    else
        held.part = shared_lines ? ptx_load_16(from, valid) : ptx_load_stream_16(from, valid);
}

template <typename T, int kRun>
__device__ __forceinline__ void store_run(T *to, const held_t<T, kRun> &held, int32_t step, const epmoei_divisor_t &)
{
    if constexpr (kRun == 1)
        *to = held.element;
    else if (step == 1)
        *(uint4 *)to = held.part;
    else {
        T elements[kRun];
        memcpy(elements, &held.part, 16);
#pragma unroll
        for (int i = 0; i < kRun; i++) to[(int64_t)i * step] = elements[i];
    }
}

template <typename T, int kRun>
__device__ __forceinline__ void store_run(uint8_t *to, const held_t<T, kRun> &held, int32_t step,
                                          const epmoei_divisor_t &divisor)
{
    float values[kRun];
    if constexpr (kRun == 1)
        values[0] = epmoei_to_float(held.element);
    else
        epmoei_unpack_part<T>(values, held.part);
    epmoei_divide_run<false>(values, divisor);
    if (step == 1)
        epmoei_store_e4m3(to, values);
    else {
#pragma unroll
        for (int i = 0; i < kRun; i++) to[(int64_t)i * step] = (uint8_t)epmoei_to_e4m3(values[i]);
    }
}

/* ----------------------------------------------------------------------------------------------------------- kernel */

/* The slot, or -1: one thread of each token counts what is outside [-1, num_slots). */
__device__ __forceinline__ int64_t slot_of(const cache_write_t &p, int64_t token, bool counts)
{
    const int64_t slot =
        p.slots_dtype == EPMOE_I64 ? ((const int64_t *)p.slots)[token] : ((const int32_t *)p.slots)[token];
    if (slot >= 0 && slot < p.num_slots) return slot;
    if (slot != -1 && counts) epmoei_count_bad(p.error_word, 1);
    return -1;
}

/* Of a slot or a column. */
__device__ __forceinline__ int64_t quotient(const cache_write_t &p, int64_t dividend, int32_t divisor)
{
    return p.narrow ? (uint32_t)dividend / (uint32_t)divisor : dividend / divisor;
}

/* Where a run goes in place `slot`, `inside` elements into the block's place 0. */
__device__ __forceinline__ int64_t cache_element(const cache_write_t &p, const side_t &side, int64_t slot,
                                                 int64_t inside)
{
    const int64_t block = quotient(p, slot, p.block_size);
    return block * side.block_stride + (slot - block * p.block_size) * side.place_step + inside;
}

/* blockIdx.x and threadIdx.x are the run and, below it, the lane's token in a group; blockIdx.y is the first group. */
template <typename T, typename Stored, int kRun>
static __global__ void __launch_bounds__(256, 4) cache_write_kernel(cache_write_t p)
{
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, all = flat >> p.log2_lanes;
    const int32_t lane = threadIdx.x & ((1 << p.log2_lanes) - 1);
    const bool is_key = all < p.runs;
    const side_t &side = is_key ? p.key : p.value;
    const int64_t column = (is_key ? all : all - p.runs) * kRun, head = quotient(p, column, p.head_dim);
    const int32_t in_head = (int32_t)(column - head * p.head_dim);
    const int64_t inside =
        head * side.head_step + in_head / side.run * side.run_step + in_head % side.run * (int64_t)side.column_step;
    epmoei_begin_dependent();
    if (all >= p.all_runs) return;
    const bool counts = all == 0;
    epmoei_divisor_t divisor = {1.0f, 1.0f, 1.0f};
    if (sizeof(Stored) == 1 && side.scale) divisor = epmoei_divisor(*side.scale);
    const int64_t step = (int64_t)gridDim.y << p.log2_lanes;
    for (int64_t first = ((int64_t)blockIdx.y << p.log2_lanes) + lane; first < p.num_tokens;
         first += kTokensInFlight * step) {
        held_t<T, kRun> held[kTokensInFlight];
        int64_t slots[kTokensInFlight];
#pragma unroll
        for (int i = 0; i < kTokensInFlight; i++)
            slots[i] = first + i * step < p.num_tokens ? slot_of(p, first + i * step, counts) : -1;
#pragma unroll
        for (int i = 0; i < kTokensInFlight; i++)
            load_run<T, kRun>(held[i], (const T *)side.from + (first + i * step) * side.stride + column, slots[i] >= 0,
                              p.log2_lanes > 0);
#pragma unroll
        for (int i = 0; i < kTokensInFlight; i++)
            if (slots[i] >= 0)
                store_run<T, kRun>((Stored *)side.cache + cache_element(p, side, slots[i], inside), held[i],
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
    const epmoei_row_grid_t grid = epmoei_row_grid(epmoei_ceil_div(args->num_tokens, lanes), p.all_runs * lanes);
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

/* Keys and values alike, but for those of V1. */
static side_t make_side(const epmoe_cache_write_args_t *args)
{
    const int64_t d = args->head_dim, s = args->block_size;
    side_t side = {};
    side.run = args->head_dim;
    side.column_step = 1;
    side.head_step = args->layout == EPMOE_CACHE_LAYOUT_NHD ? d : d * s;
    side.place_step = args->layout == EPMOE_CACHE_LAYOUT_NHD ? d * args->num_kv_heads : d;
    return side;
}

static side_t make_key(const epmoe_cache_write_args_t *args)
{
    side_t side = make_side(args);
    side.from = args->key;
    side.cache = args->key_cache;
    side.scale = args->k_scale;
    side.stride = args->key_stride;
    side.block_stride = args->key_block_stride;
    if (args->layout != EPMOE_CACHE_LAYOUT_V1) return side;
    side.run = args->key_pack;
    side.run_step = (int64_t)args->block_size * args->key_pack;
    side.place_step = args->key_pack;
    return side;
}

static side_t make_value(const epmoe_cache_write_args_t *args)
{
    side_t side = make_side(args);
    side.from = args->value;
    side.cache = args->value_cache;
    side.scale = args->v_scale;
    side.stride = args->value_stride;
    side.block_stride = args->value_block_stride;
    if (args->layout != EPMOE_CACHE_LAYOUT_V1) return side;
    side.column_step = args->block_size;
    side.place_step = 1;
    return side;
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
    p.key = make_key(args);
    p.value = make_value(args);
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
