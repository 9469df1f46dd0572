#include "kernels/permute.h"
#include "kernels/row_sum_cuda.h"
#include "kernels/rows_cuda.cuh"

struct permute_t {
    const void *x;
    void *y;
    const int32_t *sorted_ids;
    const int32_t *num_rows;
    int32_t *inverse;
    int32_t *error_word;
    int64_t units; /* of a row */
    int32_t max_rows;
    int32_t num_slots;
    int32_t top_k;
};

/* Rows of which a thread loads its unit before it stores the first. */
static const int kRowsInFlight = 4;

__device__ __forceinline__ void note_position(const permute_t &p, int32_t slot, int32_t row)
{
    if (slot < 0)
        epmoei_count_bad(p.error_word, 1);
    else if (slot < p.num_slots && p.inverse)
        atomicMax(&p.inverse[slot], row); /* the last of several positions stays, in whatever order the blocks run */
}

/* Unit: the largest type that divides a row. inverse holds -1 everywhere before. */
template <typename Unit> static __global__ void __launch_bounds__(256) permute_kernel(permute_t p)
{
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= p.units) return;
    int32_t given = *p.num_rows;
    int32_t num_rows = given < 0 ? 0 : given < p.max_rows ? given : p.max_rows;
    if (given != num_rows && col == 0 && blockIdx.y == 0) epmoei_count_bad(p.error_word, 1);
    for (int64_t first = blockIdx.y; first < num_rows; first += (int64_t)kRowsInFlight * gridDim.y) {
        int32_t slots[kRowsInFlight];
        Unit units[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            int64_t row = first + (int64_t)i * gridDim.y;
            slots[i] = row < num_rows ? p.sorted_ids[row] : p.num_slots;
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            units[i] = Unit();
            if (slots[i] >= 0 && slots[i] < p.num_slots)
                units[i] = ((const Unit *)p.x)[(int64_t)(slots[i] / p.top_k) * p.units + col];
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            int64_t row = first + (int64_t)i * gridDim.y;
            if (row >= num_rows) break;
            ((Unit *)p.y)[row * p.units + col] = units[i];
            if (col == 0) note_position(p, slots[i], (int32_t)row);
        }
    }
}

template <typename Unit> static epmoe_status_t launch(permute_t p, int64_t row_bytes, epmoe_stream_t stream)
{
    p.units = row_bytes / (int64_t)sizeof(Unit);
    epmoei_row_grid_t grid = epmoei_row_grid(p.max_rows, p.units);
    permute_kernel<Unit><<<grid.blocks, grid.threads, 0, stream>>>(p);
    return EPMOEI_LAUNCH_CHECK("epmoe_permute");
}

extern "C" epmoe_status_t epmoei_permute_sm80(const epmoe_permute_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    EPMOEI_CHECK_ALIGNED(args->sorted_ids, 4);
    EPMOEI_CHECK_ALIGNED(args->num_rows, 4);
    EPMOEI_CHECK_ALIGNED(args->inverse, 4);
    permute_t p = {};
    p.x = args->x;
    p.y = args->y;
    p.sorted_ids = args->sorted_ids;
    p.num_rows = args->num_rows;
    p.inverse = args->inverse;
    p.error_word = epmoei_error_word();
    p.max_rows = args->max_rows;
    p.num_slots = args->num_tokens * args->top_k;
    p.top_k = args->top_k;
    if (p.inverse)
        EPMOEI_CHECK(
            epmoei_memory_set(EPMOE_BACKEND_CUDA, p.inverse, 0xFF, p.num_slots * (int64_t)sizeof(int32_t), stream));
    if (p.max_rows == 0) return EPMOE_OK;
    int64_t row_bytes = (int64_t)args->hidden * epmoe_dtype_size(args->dtype);
    if (row_bytes % 16 == 0) return launch<uint4>(p, row_bytes, stream);
    if (row_bytes % 8 == 0) return launch<uint2>(p, row_bytes, stream);
    if (row_bytes % 4 == 0) return launch<uint32_t>(p, row_bytes, stream);
    if (row_bytes % 2 == 0) return launch<uint16_t>(p, row_bytes, stream);
    return launch<uint8_t>(p, row_bytes, stream);
}

extern "C" epmoe_status_t epmoei_unpermute_sm80(const epmoe_unpermute_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    EPMOEI_CHECK_ALIGNED(args->out, 16);
    EPMOEI_CHECK_ALIGNED(args->inverse, 4);
    EPMOEI_CHECK_ALIGNED(args->weights, 4);
    epmoei_row_sum_t sum = {};
    sum.y = args->y;
    sum.select = args->inverse;
    sum.weights = args->weights;
    sum.out = args->out;
    sum.error_word = epmoei_error_word();
    sum.gather = 1;
    sum.bound = args->max_rows;
    sum.num_tokens = args->num_tokens;
    sum.top_k = args->top_k;
    sum.hidden = args->hidden;
    sum.y_dtype = args->dtype;
    sum.out_dtype = args->dtype;
    return epmoei_row_sum(&sum, "epmoe_unpermute", stream);
}
