/* Weights from wherever they are into the rows that kernels read: transposed and interleaved storage, any float type.
 *   dst[(first_row + r * row_step) * cols + c] = round(src(r, c), dst_dtype)
 * A copy of a bf16 value to bf16 is bit-exact, NaN payloads aside. Rows of dst that are not named stay untouched.
 * floor: bytes = rows * cols * (source + destination element size). */
#ifndef EPMOEI_REPACK_H
#define EPMOEI_REPACK_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix [rows, cols] somewhere in memory: element (r,c) is data[r*row_stride + c*col_stride], strides in elements.
 * Transposed and interleaved storage is only a matter of strides. data may be unaligned on the host, element-aligned on
 * the device. data NULL = absent. */
typedef struct epmoei_view_t {
    const void *data;
    epmoe_dtype_t dtype; /* F32, BF16, F16 */
    int64_t rows;
    int64_t cols;
    int64_t row_stride;
    int64_t col_stride;
} epmoei_view_t;

typedef struct epmoei_repack_args_t {
    epmoei_view_t src;
    void *dst;
    epmoe_dtype_t dst_dtype; /* F32, BF16, F16 */
    int64_t first_row;
    int64_t row_step;
} epmoei_repack_args_t;

/* Elements from src.data to the end of the last one that the view reads. */
int64_t epmoei_view_span(const epmoei_view_t *view);

void epmoei_repack_ref(const epmoei_repack_args_t *args);
void epmoei_repack_cpu(const epmoei_repack_args_t *args);
/* Both on the device. */
epmoe_status_t epmoei_repack_sm80(const epmoei_repack_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
