/* Rows of tokens to the places of their slots: to[places[t*k + j]] = x[t] for each of a token's k slots, as they are or
 * quantised. What kernels/sort_rows_sm80.cu and kernels/quantize_rows_sm90.cu do from the other side, for callers that
 * know where each slot goes: a token is read, and quantised, once and not k times.
 *
 * Contract of the kernel:
 *   bits        a copy; quantised: those of epmoe_quantize_fp8, BLOCK128
 *   rows        places of tokens below the actual count are 0..T*k-1, each once; other rows are left as they are
 *   alignment   x and rows 16 bytes
 *   aliasing    none
 * Floor: bytes = T*K*b + T*k*(K*bw + 4) with bw the bytes of what is written, and 4*T*k*ceil(K/128) of scales. */
#ifndef EPMOEI_SCATTER_ROWS_H
#define EPMOEI_SCATTER_ROWS_H

#include "kernels/grouped_gemm_fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most tokens of a call: blocks of two, as many as a grid has in its second dimension. */
enum { EPMOEI_SCATTER_MOST_TOKENS = 2 * 65535 };

typedef struct epmoei_scatter_rows_args_t {
    int32_t num_tokens;
    const int32_t *num_tokens_dev; /* NULL = num_tokens */
    int32_t top_k;
    int32_t columns; /* K, a multiple of 8 */
    epmoe_dtype_t dtype;
    const void *x;               /* [T,K] of dtype: BF16 or F16 */
    const int32_t *places;       /* [T,k] */
    int32_t *dealt;              /* out [2] or NULL: with `rows` zeroed, for the two products behind
                                  * (kernels/deal_tiles_sm90.cuh); `quantised` has a word of its own */
    void *rows;                  /* out [T*k,K] of dtype; NULL = quantised instead */
    epmoei_fp8_rows_t quantised; /* out, T*k rows, where `rows` is NULL */
} epmoei_scatter_rows_args_t;

epmoe_status_t epmoei_scatter_rows_sm90(const epmoei_scatter_rows_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
