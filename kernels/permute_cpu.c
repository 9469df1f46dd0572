#include "kernels/permute.h"
#include "kernels/row_blocks.h"

epmoe_status_t epmoei_permute_cpu(const epmoe_permute_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_permute_check_indices(args));
    int64_t hidden = args->hidden, size = epmoe_dtype_size(args->dtype);
    int32_t num_slots = args->num_tokens * args->top_k;
    int64_t num_blocks = *args->num_rows * epmoei_blocks_per_row(hidden);
#pragma omp parallel for schedule(static) if (*args->num_rows * hidden >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    for (int64_t b = 0; b < num_blocks; b++) {
        epmoei_block_t block = epmoei_block(b, hidden);
        void *y = epmoei_at(args->y, args->dtype, block.row * hidden + block.first);
        int32_t slot = args->sorted_ids[block.row];
        size_t bytes = (size_t)(block.cols * size);
        if (slot < num_slots)
            memcpy(y, epmoei_at(args->x, args->dtype, slot / args->top_k * hidden + block.first), bytes);
        else
            memset(y, 0, bytes);
    }
    epmoei_permute_invert(args);
    return EPMOE_OK;
}

epmoe_status_t epmoei_unpermute_cpu(const epmoe_unpermute_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_unpermute_check_indices(args));
    int64_t hidden = args->hidden, num_blocks = args->num_tokens * epmoei_blocks_per_row(hidden);
    int64_t elements = (int64_t)args->num_tokens * args->top_k * hidden;
#pragma omp parallel for schedule(static) if (elements >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    for (int64_t b = 0; b < num_blocks; b++) {
        epmoei_block_t block = epmoei_block(b, hidden);
        float acc[EPMOEI_BLOCK_COLS];
        memset(acc, 0, (size_t)block.cols * sizeof *acc);
        for (int64_t s = block.row * args->top_k; s < (block.row + 1) * args->top_k; s++)
            if (args->inverse[s] >= 0)
                epmoei_block_add(acc, args->y, args->dtype, args->inverse[s] * hidden + block.first, block.cols,
                                 args->weights ? args->weights[s] : 1.0f);
        epmoei_from_f32(epmoei_at(args->out, args->dtype, block.row * hidden + block.first), acc, args->dtype,
                        block.cols);
    }
    return EPMOE_OK;
}
