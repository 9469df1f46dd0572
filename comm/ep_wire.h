/* Rows of x in FP8 on their way to other ranks: to codes before, to x behind, and both at once for rows that stay. One
 * signature for both backends.
 *
 * Contract of every implementation:
 *   codes       those of epmoe_quantize_fp8, BLOCK128, with its NaN, infinities and saturation
 *   rounding    a code times its scale in fp32, rounded to dtype: the same bits on every backend and transport, NaNs
 *               aside, wherever the row has come from
 *   memory      all pointers are the backend's; CUDA: x and coded rows on 16 bytes
 *   sizes       any hidden >= 1, the last block of a row may be narrow; no rows are a no-op with any pointers
 *   aliasing    none
 *   CUDA        enqueues on the stream, nothing else
 * Floor: bytes = R*d*(b + 1) + 4*R*ceil(d/128), for rows that stay 2*R*d*b. */
#ifndef EPMOEI_EP_WIRE_H
#define EPMOEI_EP_WIRE_H

#include "kernels/coded_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* dst row i = src row index[i + (i < gap_at ? 0 : gap)] in codes, for i < num_rows. Padding is 0. */
typedef struct epmoei_encode_rows_t {
    epmoei_coded_rows_t dst;
    const void *src;
    epmoe_dtype_t dtype;
    int32_t hidden;
    const int32_t *index;
    int64_t num_rows;
    int64_t gap_at, gap;
} epmoei_encode_rows_t;

/* dst row i = what src row i says, for i < num_rows outside [gap_at, gap_at + gap), whose rows are left alone. */
typedef struct epmoei_decode_rows_t {
    void *dst;
    epmoe_dtype_t dtype;
    int32_t hidden;
    epmoei_coded_rows_t src;
    int64_t num_rows;
    int64_t gap_at, gap;
    const int32_t *num_rows_dev; /* CUDA: the actual number, at most num_rows; NULL = num_rows */
    const int32_t *gap_dev;      /* CUDA: [2] gap_at and gap in place of those above; NULL = those */
} epmoei_decode_rows_t;

/* dst row i = what coding src row index[i], or i without an index, and decoding it leaves, for i < num_rows. */
typedef struct epmoei_round_rows_t {
    void *dst;
    const void *src;
    epmoe_dtype_t dtype;
    int32_t hidden;
    const int32_t *index;
    int64_t num_rows;
    const int32_t *num_rows_dev; /* as above */
} epmoei_round_rows_t;

epmoe_status_t epmoei_encode_rows_cpu(const epmoei_encode_rows_t *args);
epmoe_status_t epmoei_decode_rows_cpu(const epmoei_decode_rows_t *args);
epmoe_status_t epmoei_round_rows_cpu(const epmoei_round_rows_t *args);

epmoe_status_t epmoei_encode_rows_sm80(const epmoei_encode_rows_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_decode_rows_sm80(const epmoei_decode_rows_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_round_rows_sm80(const epmoei_round_rows_t *args, epmoe_stream_t stream);

/* By backend. */
epmoe_status_t epmoei_encode_rows(epmoe_backend_t backend, const epmoei_encode_rows_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_decode_rows(epmoe_backend_t backend, const epmoei_decode_rows_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_round_rows(epmoe_backend_t backend, const epmoei_round_rows_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
