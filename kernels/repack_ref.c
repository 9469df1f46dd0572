#include "kernels/repack.h"

#include "base/dtype.h"

int64_t epmoei_view_span(const epmoei_view_t *view)
{
    if (view->rows == 0 || view->cols == 0) return 0;
    return (view->rows - 1) * view->row_stride + (view->cols - 1) * view->col_stride + 1;
}

void epmoei_repack_ref(const epmoei_repack_args_t *args)
{
    const epmoei_view_t *src = &args->src;
    for (int64_t r = 0; r < src->rows; r++)
        for (int64_t c = 0; c < src->cols; c++)
            epmoei_store(args->dst, args->dst_dtype, (args->first_row + r * args->row_step) * src->cols + c,
                         epmoei_load(src->data, src->dtype, r * src->row_stride + c * src->col_stride));
}
