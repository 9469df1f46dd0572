#include "kernels/repack.h"

#include "base/dtype.h"

enum { kBlock = 64 };

static void repack_row(const epmoei_repack_args_t *args, int64_t r)
{
    const epmoei_view_t *src = &args->src;
    char *to =
        (char *)args->dst + (args->first_row + r * args->row_step) * src->cols * epmoe_dtype_size(args->dst_dtype);
    const char *from = (const char *)src->data + r * src->row_stride * epmoe_dtype_size(src->dtype);
    if (args->dst_dtype == src->dtype)
        memcpy(to, from, (size_t)(src->cols * epmoe_dtype_size(src->dtype)));
    else if (args->dst_dtype == EPMOE_F32)
        epmoei_to_f32((float *)(void *)to, from, src->dtype, src->cols);
    else
        for (int64_t c = 0; c < src->cols; c++) epmoei_store(to, args->dst_dtype, c, epmoei_load(from, src->dtype, c));
}

void epmoei_repack_cpu(const epmoei_repack_args_t *args)
{
    const epmoei_view_t *src = &args->src;
    if (src->col_stride == 1) {
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < src->rows; r++) repack_row(args, r);
        return;
    }
    /* Blocks, so that each line of the source is fetched once. */
#pragma omp parallel for schedule(static)
    for (int64_t r0 = 0; r0 < src->rows; r0 += kBlock)
        for (int64_t c0 = 0; c0 < src->cols; c0 += kBlock)
            for (int64_t c = c0; c < epmoei_min64(c0 + kBlock, src->cols); c++)
                for (int64_t r = r0; r < epmoei_min64(r0 + kBlock, src->rows); r++)
                    epmoei_store(args->dst, args->dst_dtype, (args->first_row + r * args->row_step) * src->cols + c,
                                 epmoei_load(src->data, src->dtype, r * src->row_stride + c * src->col_stride));
}
