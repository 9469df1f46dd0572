#include "kernels/op_check.h"
#include "kernels/row_blocks.h"
#include "kernels/sum.h"

epmoe_status_t epmoei_sum_cpu(const epmoe_sum_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int32_t num_tokens;
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &num_tokens));
    EPMOEI_CHECK(epmoei_sum_check_ids(args, num_tokens));
    int64_t hidden = args->hidden, num_blocks = num_tokens * epmoei_blocks_per_row(hidden);
    int64_t elements = (int64_t)num_tokens * args->top_k * hidden;
#pragma omp parallel for schedule(static) if (elements >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    for (int64_t b = 0; b < num_blocks; b++) {
        epmoei_block_t block = epmoei_block(b, hidden);
        int64_t at = block.row * hidden + block.first;
        float acc[EPMOEI_BLOCK_COLS];
        memset(acc, 0, (size_t)block.cols * sizeof *acc);
        for (int64_t s = block.row * args->top_k; s < (block.row + 1) * args->top_k; s++)
            if (!args->ids || args->ids[s] >= 0)
                epmoei_block_add(acc, args->y, args->y_dtype, s * hidden + block.first, block.cols,
                                 args->weights ? args->weights[s] : 1.0f);
        if (args->addend) epmoei_block_add(acc, args->addend, EPMOE_F32, at, block.cols, 1.0f);
        if (args->residual) epmoei_block_add(acc, args->residual, args->out_dtype, at, block.cols, 1.0f);
        epmoei_from_f32(epmoei_at(args->out, args->out_dtype, at), acc, args->out_dtype, block.cols);
    }
    return EPMOE_OK;
}
